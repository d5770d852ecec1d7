"""Filters to ranges of keys: which parts of a key they name, and what cannot be translated exactly."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
)

from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.spark.key_filters import KEYS_MAX, KeyRange, can_walk, key_ranges
from flowstone.xlog.columns import ColumnOptions

PLAIN = ColumnOptions()


def space(*fields: tuple[str, str], key: tuple[Any, ...] = (0,), type: str = "tree") -> SpaceDefinition:
    parts = tuple(part if isinstance(part, IndexPart) else IndexPart(part, fields[part][1]) for part in key)
    index = IndexDefinition(512, 0, "pk", type, True, parts)
    return SpaceDefinition(512, "t", fields=tuple(FieldDefinition(*each) for each in fields), indexes=(index,))


PAIR = space(("a", "unsigned"), ("b", "string"), ("c", "integer"), key=(0, 1))
A, B, C = ("a",), ("b",), ("c",)


@pytest.mark.parametrize(
    ("filters", "ranges"),
    [
        ([], None),
        ([EqualTo(C, 1)], None),
        ([EqualTo(B, "x")], None),
        ([Not(EqualTo(A, 1))], None),
        ([EqualTo(A, 1)], (KeyRange((1,)),)),
        ([EqualTo(A, 1), EqualTo(B, "x")], (KeyRange((1, "x")),)),
        ([In(A, (1, 2, 1)), EqualTo(B, "x")], (KeyRange((1, "x")), KeyRange((2, "x")))),
        ([In(A, (1, None)), LessThan(B, "x")], (KeyRange((1,), None, ("x", False)),)),
        ([GreaterThan(A, 5), LessThanOrEqual(A, 9)], (KeyRange((), (5, False), (9, True)),)),
        ([GreaterThan(A, 5), GreaterThanOrEqual(A, 7)], (KeyRange((), (7, True)),)),
        ([LessThan(A, 5), LessThan(A, 7)], (KeyRange((), None, (5, False)),)),
        ([GreaterThan(A, 5), EqualTo(B, "x")], (KeyRange((), (5, False)),)),
        ([GreaterThan(A, -5)], None),
        ([EqualTo(A, -5)], ()),
        ([LessThan(A, -5)], ()),
        ([EqualTo(A, 1), EqualTo(A, 2)], ()),
        ([EqualTo(A, "1")], None),
        ([EqualTo(A, True)], None),
        ([EqualTo(A, 1.0)], None),
        ([EqualTo(A, Decimal(7))], (KeyRange((7,)),)),
        ([EqualTo(A, Decimal("7.5"))], None),
        ([EqualTo(("a", "b"), 1)], None),
        ([In(A, tuple(range(KEYS_MAX + 1)))], (KeyRange((), (0, True), (KEYS_MAX, True)),)),
    ],
)
def test_a_prefix_of_the_key_and_a_range_behind_it(filters: list[Filter], ranges: Any) -> None:
    assert key_ranges(PAIR, PLAIN, filters) == ranges


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        ("string", "ä", "ä"),
        ("varbinary", b"\x00", b"\x00"),
        ("boolean", True, True),
        ("integer", -(2**63), -(2**63)),
        ("uuid", "00000000-0000-0000-0000-000000000005", UUID(int=5)),
        ("uuid", "00000000-0000-0000-0000-00000000000A", None),
        ("number", 1, None),
        ("double", 1.5, None),
        ("decimal", Decimal(1), None),
        ("scalar", "x", None),
        ("datetime", 1, None),
    ],
)
def test_types_that_both_compare_alike(kind: str, value: Any, wanted: Any) -> None:
    found = key_ranges(space(("a", kind)), PLAIN, [EqualTo(A, value)])
    assert found == (None if wanted is None else (KeyRange((wanted,)),))


def test_what_is_compared_otherwise_there_stays_with_spark() -> None:
    collated = space(("a", "string"), key=(IndexPart(0, "string", collation=2),))
    assert key_ranges(collated, PLAIN, [EqualTo(A, "x")]) is None
    inside = space(("a", "map"), key=(IndexPart(0, "unsigned", path=".id"),))
    assert key_ranges(inside, PLAIN, [EqualTo(A, 1)]) is None
    assert not can_walk(inside.primary_key)
    assert key_ranges(space(("a", "uuid")), PLAIN, [GreaterThan(A, str(UUID(int=5)))]) is None
    assert key_ranges(PAIR, ColumnOptions(unsigned_as="double"), [EqualTo(A, 1)]) is None


def test_a_hash_has_whole_keys_only() -> None:
    hashed = space(("a", "unsigned"), ("b", "string"), key=(0, 1), type="hash")
    assert key_ranges(hashed, PLAIN, [EqualTo(A, 1)]) is None
    assert key_ranges(hashed, PLAIN, [EqualTo(A, 1), In(B, ("x", "y"))]) == (KeyRange((1, "x")), KeyRange((1, "y")))
    assert not can_walk(hashed.primary_key)


def test_texts_as_bytes_are_keys_where_they_are_texts() -> None:
    texts = space(("a", "string"))
    as_bytes = ColumnOptions(strings_as="binary")
    assert key_ranges(texts, as_bytes, [EqualTo(A, b"x")]) == (KeyRange(("x",)),)
    assert key_ranges(texts, as_bytes, [EqualTo(A, b"\xff")]) is None
