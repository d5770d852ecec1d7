"""Sort keys of many tuples: equal to those of the engine, compiled and interpreted, in index order."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine import key_encoding
from flowstone.box.engine.collation import Collation
from flowstone.box.engine.keys import KeyDefinition
from flowstone.columns.sort_keys import WrongKey, sort_keys, sort_keys_of_keys
from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import pack


def space_of(*parts: IndexPart) -> SpaceDefinition:
    return SpaceDefinition(512, "s", indexes=(IndexDefinition(512, 0, "pk", "tree", True, parts),))


def packed(values: Sequence[Any]) -> pa.Array:
    return pa.array([None if value is None else pack(value) for value in values], pa.binary())


INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-40, 300)
DOUBLES = (
    st.floats() | st.floats(-100, 100) | st.integers(-(1 << 53), 1 << 53).map(float) | st.sampled_from((-0.0, 2.0**63))
)
DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**20), max_value=10**20)
TEXTS = st.text(max_size=40) | st.text("\x00a\xff", max_size=5)
BINARIES = st.binary(max_size=40) | st.binary(max_size=300)
MOMENTS = st.builds(Datetime, st.integers(-(1 << 40), 1 << 40), st.integers(0, 999_999_999))
NUMBERS = INTEGERS | DOUBLES | DECIMALS
SCALARS = NUMBERS | TEXTS | BINARIES | st.booleans() | st.uuids() | MOMENTS
VALUES = {
    "unsigned": st.integers(0, (1 << 64) - 1) | st.integers(0, 300),
    "integer": INTEGERS,
    "number": NUMBERS,
    "double": DOUBLES,
    "decimal": DECIMALS,
    "string": TEXTS,
    "varbinary": BINARIES,
    "boolean": st.booleans(),
    "uuid": st.uuids(),
    "datetime": MOMENTS,
    "scalar": SCALARS,
}
FILLING = (
    st.none()
    | INTEGERS
    | TEXTS
    | st.lists(st.integers(0, 9) | st.dictionaries(TEXTS, st.none(), max_size=2), max_size=3)
)


@st.composite
def keyed(draw: st.DrawFn) -> tuple[SpaceDefinition, list[tuple[Any, ...]]]:
    """Draw a space and tuples that fit its key, whose parts are in any order among other fields."""
    count = draw(st.integers(1, 4))
    fields = draw(st.permutations(range(5)))[:count]
    parts = tuple(IndexPart(field, draw(st.sampled_from(sorted(VALUES)))) for field in fields)
    types = {part.field: part.type for part in parts}
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        length = max(fields) + 1 + draw(st.integers(0, 2))
        rows.append(tuple(draw(VALUES[types[field]] if field in types else FILLING) for field in range(length)))
    return space_of(*parts), rows


def engine_key(space: SpaceDefinition, values: tuple[Any, ...]) -> bytes:
    """Return the key of an index with another part in front, which the engine encodes for all types of parts."""
    assert space.primary_key is not None
    front = IndexPart(len(values), "boolean")
    index = IndexDefinition(512, 0, "pk", "tree", True, (front, *space.primary_key.parts))
    (key,) = KeyDefinition(index, None, {}, dialect=Dialect.V2_11).entries((*values, True))
    assert isinstance(key, bytes)
    return key.removeprefix(key_encoding.encode_boolean(True))


@given(keyed())
@settings(max_examples=300, deadline=None)
def test_sort_keys_equal_those_of_the_engine(case: tuple[SpaceDefinition, list[tuple[Any, ...]]]) -> None:
    space, rows = case
    assert space.primary_key is not None
    expected = [engine_key(space, row) for row in rows]
    assert sort_keys(space, packed(rows)).to_pylist() == expected
    keys = [tuple(row[part.field] for part in space.primary_key.parts) for row in rows]
    assert sort_keys_of_keys(space, packed(keys)).to_pylist() == expected


@given(st.lists(DOUBLES.filter(lambda value: value == value), min_size=2, max_size=8))
def test_doubles_sort_as_in_an_index_of_doubles(values: list[float]) -> None:
    keys = sort_keys(space_of(IndexPart(0, "double")), packed([(value,) for value in values])).to_pylist()
    alone = [key_encoding.encode_double(value) for value in values]
    for a, a_alone in zip(keys, alone, strict=True):
        for b, b_alone in zip(keys, alone, strict=True):
            assert (a < b, a == b) == (a_alone < b_alone, a_alone == b_alone)


def test_equal_numbers_of_all_types_have_equal_keys() -> None:
    space = space_of(IndexPart(0, "number"))
    single = b"\x91\xca" + struct.pack(">f", 5.0)
    signed = b"\x91\xd3" + (5).to_bytes(8, "big")
    values = [pack((5,)), pack((5.0,)), pack((Decimal("5.0"),)), single, signed]
    assert len({*sort_keys(space, pa.array(values, pa.binary())).to_pylist()}) == 1


def test_collation_decides_equality() -> None:
    space = space_of(IndexPart(0, "string", collation=2))
    a, b, c = sort_keys(space, packed([("Straße",), ("STRASSE",), ("strasz",)])).to_pylist()
    assert a == b < c
    assert a == b"\x80" + Collation(2, "unicode_ci", options={"strength": "primary"}).sort_key("strasse")


def test_user_collation_must_be_passed() -> None:
    space = space_of(IndexPart(0, "string", collation=300))
    values = packed([("a",), ("A",)])
    with pytest.raises(WrongKey, match="unknown collation 300"):
        sort_keys(space, values)
    own = {300: Collation(300, "own", options={"strength": "primary"})}
    a, b = sort_keys(space, values, own).to_pylist()
    assert a == b


def test_binary_collation_yields_the_keys_without_a_collation() -> None:
    plain, none = space_of(IndexPart(0, "string")), space_of(IndexPart(0, "string", collation=0))
    values = packed([("a\x00b",), ("",)])
    assert (
        sort_keys(plain, values).to_pylist()
        == sort_keys(none, values).to_pylist()
        == [b"\x80a\x00\xffb\x00\x00", b"\x80\x00\x00"]
    )


def test_path_applies_to_tuples_but_not_to_keys() -> None:
    space = space_of(IndexPart(1, "unsigned", path="a.b"))
    expected = [key_encoding.encode_integer(7)]
    assert sort_keys(space, packed([(1, {"a": {"b": 7}})])).to_pylist() == expected
    assert sort_keys_of_keys(space, packed([(7,)])).to_pylist() == expected


def test_sort_keys_of_slices_nulls_and_large_arrays() -> None:
    space = space_of(IndexPart(0, "unsigned"))
    whole = packed([(1,), (2,), None, (4,), None])
    expected = [None if value is None else key_encoding.encode_integer(value) for value in (1, 2, None, 4, None)]
    assert sort_keys(space, whole).to_pylist() == expected
    assert sort_keys(space, whole[1:4]).to_pylist() == expected[1:4]
    assert sort_keys(space, whole.cast(pa.large_binary())[2:]).to_pylist() == expected[2:]
    assert sort_keys(space, whole[:0]).to_pylist() == []
    assert sort_keys(space, whole).type == pa.binary()


def test_space_without_a_primary_key_has_no_keys() -> None:
    assert sort_keys(SpaceDefinition(512, "s"), packed([(1,)])).to_pylist() == [None]


@pytest.mark.parametrize("raw", [pack(("text",)), pack(()), b"\x91", b"\xc1", pack(5)])
def test_error_names_the_space_of_a_value_that_does_not_fit(raw: bytes) -> None:
    with pytest.raises(WrongKey, match="space 's'"):
        sort_keys(space_of(IndexPart(0, "unsigned")), pa.array([raw]))


def test_uuid_with_a_long_extension_header_has_the_same_key() -> None:
    value = uuid.UUID(int=5)
    raw = b"\x91\xc7\x10\x02" + value.bytes
    assert sort_keys(space_of(IndexPart(0, "uuid")), pa.array([raw])).to_pylist() == [key_encoding.encode_uuid(value)]


def test_parts_on_one_field_each_encode_it() -> None:
    """A server rejects an index with two parts on one field, but a file may define one."""
    space = space_of(*(IndexPart(0, "string") for _ in range(5)))
    tuples = packed([("\0" * 5000,), ("x" * 5000,)])
    assert sort_keys(space, tuples).to_pylist() == [
        5 * (b"\x80" + b"\0\xff" * 5000 + b"\0\0"),
        5 * (b"\x80" + b"x" * 5000 + b"\0\0"),
    ]
