"""Definitions: the forms of all server versions, and errors for invalid ones."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.definitions import (
    DefinitionError,
    FieldDefinition,
    IndexDefinition,
    IndexPart,
    SpaceDefinition,
    field_type,
    read_index,
    read_space,
    with_indexes,
)


def test_space_definition_with_all_options_is_read() -> None:
    format = (
        {"name": "id", "type": "unsigned"},
        {"name": "text", "type": "STR", "is_nullable": True, "collation": 2, "comment": "user data"},
        {"name": "rest"},
    )
    flags = {"group_id": 1, "temporary": True, "is_sync": False, "newer": 1}
    assert read_space((512, 3, "orders", "vinyl", 4, flags, format)) == SpaceDefinition(
        id=512,
        owner=3,
        name="orders",
        engine="vinyl",
        field_count=4,
        is_local=True,
        is_temporary=True,
        fields=(
            FieldDefinition("id", "unsigned"),
            FieldDefinition("text", "string", is_nullable=True, collation=2),
            FieldDefinition("rest", "any"),
        ),
    )


def test_flags_of_synchronous_view_and_temporary_spaces_are_read() -> None:
    assert read_space((512, 1, "s", "memtx", 0, {"is_sync": True}, ())).is_sync
    assert read_space((512, 1, "s", "memtx", 0, {"view": True, "sql": "…"}, ())).is_view
    assert read_space((512, 1, "s", "memtx", 0, {"type": "data-temporary"}, ())).is_temporary
    assert not read_space((512, 1, "s", "memtx", 0, {"type": "normal"}, ())).is_temporary


def test_short_tuples_and_text_flags_of_older_servers_are_read() -> None:
    assert read_space((512, 1, "old")) == SpaceDefinition(512, "old")
    assert read_space((512, 1, "old", "memtx", 0, "temporary")).is_temporary
    assert not read_space((512, 1, "old", "memtx", 0, "")).is_temporary


@pytest.mark.parametrize(
    ("name", "meaning"),
    [("num", "unsigned"), ("STR", "string"), ("UNSIGNED", "unsigned"), ("*", "any"), ("int32", "int32")],
)
def test_type_names_of_all_releases_are_read(name: str, meaning: str) -> None:
    assert field_type(name) == meaning


FIELDS = (FieldDefinition("id", "unsigned"), FieldDefinition("text", "string", is_nullable=True))


def test_index_parts_as_pairs_take_nullability_from_the_format() -> None:
    index = read_index((512, 1, "by_text", "TREE", {"unique": False}, ((1, "STR"), (0, "num"))), FIELDS)
    parts = (IndexPart(1, "string", is_nullable=True), IndexPart(0, "unsigned"))
    assert index == IndexDefinition(512, 1, "by_text", "tree", False, parts)


def test_index_parts_as_maps_do_not_depend_on_the_format() -> None:
    row = (
        {"field": 1, "type": "string", "collation": 1, "is_nullable": True, "sort_order": "desc"},
        {"field": 0, "type": "unsigned", "path": "a.b[*]"},
    )
    assert read_index((512, 0, "pk", "tree", {}, row), FIELDS).parts == (
        IndexPart(1, "string", is_nullable=True, collation=1),
        IndexPart(0, "unsigned", path="a.b[*]"),
    )


def test_index_rows_of_1_6_are_read() -> None:
    index = read_index((512, 0, "pk", "tree", 1, 2, 0, "num", 3, "str"))
    assert index == IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"), IndexPart(3, "string")))


def test_primary_key_is_index_0_regardless_of_order() -> None:
    primary = IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),))
    other = IndexDefinition(512, 1, "sk", "tree", False, (IndexPart(1, "string"),))
    assert with_indexes(SpaceDefinition(512, "s"), [other, primary]).primary_key == primary
    assert with_indexes(SpaceDefinition(512, "s"), [other]).primary_key is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((), "space id is None"),
        ((512, 1, 5), "space name is 5"),
        ((512, 1, "s", "memtx", 0, 7, ()), "flags of the space are 7"),
        ((512, 1, "s", "memtx", 0, {}, {}), "format is {}"),
        ((512, 1, "s", "memtx", 0, {}, ("id",)), "field 1 of the format is 'id', not a map"),
        ((512, 1, "s", "memtx", 0, {}, ({"type": "string"},)), "field 1 of the format has no name"),
        ((512, 1, "s", "memtx", 0, {}, ({"name": "a"}, {"name": "a"})), "duplicate field name 'a'"),
        ((512, 1, "s", "memtx", 0, {}, ({"name": "a", "type": 5},)), "field type is 5"),
        ((512, 1, "s", "memtx", 0, {}, ({"name": "a", "collation": "x"},)), "collation is 'x'"),
    ],
)
def test_invalid_space_definition_states_the_reason(row: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DefinitionError, match=re.escape(message)):
        read_space(row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((512, 0, "pk", "tree", {}), "parts of the index are None"),
        ((512, 0, "pk", "tree", {}, ()), "parts of the index are ()"),
        ((512, 0, "pk", "tree", "x", ()), "options of the index are 'x'"),
        ((512, 0, "pk", "tree", {"unique": 1}, ((0, "num"),)), "option unique of the index is 1"),
        ((512, 0, "pk", "tree", {}, ((0,),)), "index part is (0,)"),
        ((512, 0, "pk", "tree", {}, ((-1, "num"),)), "invalid field number -1 in an index part"),
        ((512, 0, "pk", "tree", {}, ({"field": 0},)), "field type is None"),
        ((512, 0, "pk", "tree", {}, ({"field": 0, "type": "num", "path": 1},)), "path of an index part is 1"),
    ],
)
def test_invalid_index_definition_states_the_reason(row: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DefinitionError, match=re.escape(message)):
        read_index(row)


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary(max_size=2), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(["name", "type", "field", "unique", "flags"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(st.lists(ANYTHING, max_size=8).map(tuple), st.integers(0, 6))
def test_any_tuple_yields_a_definition_or_a_definition_error(row: tuple[Any, ...], damaged: int) -> None:
    space = [512, 1, "s", "memtx", 0, {}, ({"name": "id"},)]
    index = [512, 0, "pk", "tree", {"unique": True}, ((0, "unsigned"),)]
    for whole in (space, index):
        if row and damaged < len(whole):
            whole[damaged] = row[0]
    for candidate in (row, tuple(space), tuple(index)):
        with contextlib.suppress(DefinitionError):
            read_space(candidate)
        with contextlib.suppress(DefinitionError):
            read_index(candidate, FIELDS)


@pytest.mark.parametrize(("options", "dimension"), [({}, 2), ({"dimension": 3}, 3), ({"dimension": "x"}, 2)])
def test_rtree_has_two_dimensions_by_default(options: dict[str, Any], dimension: int) -> None:
    row = (512, 1, "place", "RTREE", {"unique": False, **options}, ((1, "array"),))
    assert read_index(row).dimension == dimension


def test_shape_depends_only_on_id_fields_and_indexes() -> None:
    fields = (FieldDefinition("id", "unsigned"), FieldDefinition("name", "string"))
    indexes = (IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),)),)
    orders = SpaceDefinition(512, "orders", fields=fields, indexes=indexes)
    assert orders.shape == SpaceDefinition(512, "bestellungen", is_sync=True, fields=fields, indexes=indexes).shape
    assert orders.shape != SpaceDefinition(512, "orders", fields=fields).shape
    assert orders.shape != SpaceDefinition(513, "orders", fields=fields, indexes=indexes).shape
