"""Formats and index parts in all user forms."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.ddl.stored_forms import check_options, resolve_field, stored_format, stored_parts
from flowstone.iproto import errors

FORMAT = (
    {"name": "id", "type": "unsigned"},
    {"name": "note", "type": "string", "is_nullable": True},
    {"name": "document", "type": "map"},
    {"name": "a.b", "type": "string"},
)


def collation_id(name: str) -> int | None:
    return {"unicode": 1, "unicode_ci": 2}.get(name)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("a", {"name": "a", "type": "any"}),
        (("a",), {"name": "a", "type": "any"}),
        (("a", "string"), {"name": "a", "type": "string"}),
        ({1: "a", 2: "string", "is_nullable": True}, {"name": "a", "type": "string", "is_nullable": True}),
        ({"name": "a", 1: "string"}, {"name": "a", "type": "string"}),
        ({"name": "a", "type": "string", "collation": "unicode"}, {"name": "a", "type": "string", "collation": 1}),
        ({"name": "a", "more": "of it"}, {"name": "a", "type": "any", "more": "of it"}),
    ],
)
def test_field_is_stored_as_a_map(given: Any, stored: dict[str, Any]) -> None:
    assert stored_format([given], collation_id) == [stored]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (5, "format[1]: name (string) is expected"),
        ({"type": "string"}, "format[1]: name (string) is expected"),
        (("a", 5), "format[1]: type must be a string"),
        ({"name": "a", "collation": "elvish"}, "format[1]: collation was not found by name 'elvish'"),
    ],
)
def test_invalid_field_is_rejected(given: Any, problem: str) -> None:
    with pytest.raises(errors.IllegalParams) as caught:
        stored_format([given], collation_id)
    assert caught.value.message == f"Illegal parameters, {problem}"


@pytest.mark.parametrize(
    ("parts", "stored"),
    [
        (((1, "unsigned"),), [[0, "unsigned"]]),
        ((1, "unsigned"), [[0, "unsigned"]]),
        ((1, "unsigned", 2, "STR"), [[0, "unsigned"], [1, "string"]]),
        ((1,), [[0, "unsigned"]]),
        (("id",), [[0, "unsigned"]]),
        (("note",), [{"field": 1, "type": "string", "is_nullable": True}]),
        ((("note", "scalar"),), [{"field": 1, "type": "scalar", "is_nullable": True}]),
        (({"field": "note", "is_nullable": False},), [{"field": 1, "type": "string", "is_nullable": False}]),
        ((9,), [[8, "scalar"]]),
        (("a.b",), [[3, "string"]]),
        (({"field": "document.x", "type": "string"},), [{"field": 2, "type": "string", "path": ".x"}]),
        ((("[3].x", "string"),), [{"field": 2, "type": "string", "path": ".x"}]),
        (({1: 1, 2: "str", "collation": "Unicode"},), [{"field": 0, "type": "string", "collation": 1}]),
        (
            ({"field": 1, "type": "unsigned", "exclude_null": True},),
            [{"field": 0, "type": "unsigned", "exclude_null": True, "is_nullable": True}],
        ),
    ],
)
def test_parts_without_options_are_stored_as_pairs(parts: Any, stored: list[Any]) -> None:
    assert stored_parts(FORMAT, parts, collation_id) == stored


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ("id", "options.parts parameter should be a table"),
        ((), "options.parts must have at least one part"),
        ((1, "unsigned", 2), "options.parts: expected field_no (number), type (string) pairs"),
        ((0, "unsigned"), "invalid index parts: field_no must be one-based"),
        (((0, "unsigned"),), "options.parts[1]: field (number) must be one-based"),
        ((("nobody", "unsigned"),), "options.parts[1]: field was not found by name 'nobody'"),
        ((1, {"type": "string"}), "options.parts[2]: field (name or number) is expected"),
        (((1, 2),), "options.parts[1]: type (string) is expected"),
        (({"field": 1, "is_nullable": 1},), "options.parts[1]: type (boolean) is expected"),
        (({"field": 1, "collation": "elvish"},), "options.parts[1]: collation was not found by name 'elvish'"),
    ],
)
def test_invalid_parts_are_rejected(parts: Any, problem: str) -> None:
    with pytest.raises(errors.IllegalParams) as caught:
        stored_parts(FORMAT, parts, collation_id)
    assert caught.value.message == f"Illegal parameters, {problem}"


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        (3, (2, None)),
        ("id", (0, None)),
        ("[3]", (2, "")),
        ('["document"].x[1]', (2, ".x[1]")),
        ("['document'][1]", (2, "[1]")),
        ("document[1]", (2, "[1]")),
    ],
)
def test_field_is_found_by_number_name_or_path(path: Any, resolved: Any) -> None:
    assert resolve_field(FORMAT, path, "here") == resolved


def test_lua_table_ends_at_its_first_gap() -> None:
    assert stored_format({1: "a", 2: ("b", "string"), 4: "d"}, collation_id) == [
        {"name": "a", "type": "any"},
        {"name": "b", "type": "string"},
    ]
    assert stored_format({}, collation_id) == []
    assert stored_parts(FORMAT, {1: "id"}, collation_id) == [[0, "unsigned"]]


def test_options_are_checked_by_their_lua_types() -> None:
    check_options({"id": 1, "user": "x"}, {"id": "number", "user": "string, number"})
    for options, problem in (
        ({"colour": 1}, "unexpected option 'colour'"),
        ({"id": True}, "options parameter 'id' should be of type number"),
        ({"user": ()}, "options parameter 'user' should be one of types: string, number"),
    ):
        with pytest.raises(errors.IllegalParams) as caught:
            check_options(options, {"id": "number", "user": "string, number"})
        assert caught.value.message == f"Illegal parameters, {problem}"
