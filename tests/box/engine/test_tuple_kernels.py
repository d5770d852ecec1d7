"""The compiled check of a tuple: accepted tuples pass the plain rules, and have the same primary key."""

from __future__ import annotations

import struct
import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.engine.keys import Key
from flowstone.box.engine.tuple_kernels import STACK_SIZE
from flowstone.box.lane.table import Table, table_of
from flowstone.errors import FlowstoneError
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.msgpack import pack, unpack
from tests.box.spaces import box_with, definition, on

FORMATS = (
    definition(512, on("0:unsigned")),
    definition(512, on("0:integer"), fields="id:integer a:string? b:unsigned c:number"),
    definition(512, on("1:string"), fields="a:any name:string b:double? c:boolean"),
    definition(512, on("2:string"), fields="a:map b:array c:string d:varbinary?", field_count=4),
    definition(512, on("0:unsigned"), fields="a:scalar b:decimal? c:uuid? d:datetime?"),
    definition(512, on("3:unsigned"), on("1:integer", unique=False), fields="a:any"),
)


def made(number: int) -> Table:
    table = table_of(box_with(FORMATS[number]).space(512))
    assert table is not None
    return table


TABLES = [made(number) for number in range(len(FORMATS))]
SOME_TABLE = st.sampled_from(TABLES)

INTEGERS = st.sampled_from((0, 1, 127, 128, 255, 2**16, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -32, -33, -(2**63)))
WIDE_INTEGERS = st.builds(
    lambda width, bits: bytes((width,)) + bits[: 1 << (width & 3)],
    st.sampled_from((0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3)),
    st.binary(min_size=8, max_size=8),
)
WIDE_TEXTS = st.builds(
    lambda width, text: bytes((0xD9 + width,)) + len(text).to_bytes(1 << width, "big") + text,
    st.integers(0, 2),
    st.binary(max_size=6),
)
EXTENSIONS = st.sampled_from((Decimal("1.5"), uuid.UUID(int=7))).map(pack) | st.builds(
    lambda code, data: bytes((0xC7, len(data), code)) + data, st.integers(0, 255), st.binary(max_size=9)
)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
).map(pack)
ODD_MAPS = st.builds(lambda key, value: b"\x81" + key + value, PLAIN, PLAIN)
FLOATS = st.floats(width=32).map(lambda value: b"\xca" + struct.pack(">f", value))
VALUES = st.one_of(PLAIN, WIDE_INTEGERS, WIDE_TEXTS, EXTENSIONS, ODD_MAPS, FLOATS)
ARRAYS = st.lists(VALUES, max_size=6).map(lambda values: bytes((0x90 + len(values),)) + b"".join(values))
WIDE_ARRAYS = st.builds(
    lambda values, wide: (b"\xdd\0\0" if wide else b"\xdc") + len(values).to_bytes(2, "big") + b"".join(values),
    st.lists(VALUES, max_size=5),
    st.booleans(),
)


@st.composite
def fitting(draw: st.DrawFn, table: Table) -> bytes:
    """Return a tuple that fits the table's format, in the usual encodings."""
    typical: dict[str, st.SearchStrategy[Any]] = {
        "unsigned": st.integers(0, 2**63 - 1),
        "integer": st.integers(-(2**63), 2**63 - 1),
        "string": st.text(max_size=9),
        "number": st.floats() | st.integers(-9, 9),
        "double": st.floats(),
        "boolean": st.booleans(),
        "scalar": st.integers(0, 9),
        "map": st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=2),
        "array": st.lists(st.integers(0, 9), max_size=3),
        "any": st.none() | st.lists(st.none(), max_size=2),
        "varbinary": st.binary(max_size=5),
    }
    space = table.space.definition
    types = {number: field.type for number, field in enumerate(space.fields)}
    nullable = {number for number, field in enumerate(space.fields) if field.is_nullable}
    for index in space.indexes:
        types |= {part.field: part.type for part in index.parts}
    return pack(
        tuple(
            None if number in nullable else draw(typical[types.get(number, "any")])
            for number in range(max(types, default=0) + 1)
        )
    )


def key_by_kernel(table: Table, raw: bytes) -> Key | list[Key] | None:
    """Return the primary key of a tuple; None if the kernel does not accept it."""
    return table.keys_of(table.primary, raw, table.starts) if table.fits(raw) else None


def as_key(found: Key | list[Key]) -> Key:
    """Return the only key: a number that is too large for the kernel is in a list."""
    return found[0] if isinstance(found, list) else found


def key_by_rules(table: Table, raw: bytes) -> Key | None:
    """Return the result of the plain rules; None if they reject the tuple."""
    try:
        values = unpack(raw)
        if not isinstance(values, tuple):
            return None
        table.space.format.check(raw, values)
    except FlowstoneError:
        return None
    return table.primary.index.key.entries(values)[0]


@given(SOME_TABLE, st.data())
def test_accepted_tuples_pass_the_plain_rules_with_the_same_key(table: Table, data: st.DataObject) -> None:
    raw = data.draw(fitting(table) | ARRAYS | WIDE_ARRAYS | VALUES | st.binary(max_size=9))
    found = key_by_kernel(table, raw)
    assert found is None or as_key(found) == key_by_rules(table, raw)


@given(SOME_TABLE, st.data())
def test_common_tuples_need_no_full_check(table: Table, data: st.DataObject) -> None:
    raw = data.draw(fitting(table))
    assert key_by_kernel(table, raw) == key_by_rules(table, raw)


@given(SOME_TABLE, st.data())
def test_corrupted_bytes_are_rejected_or_decoded_correctly(table: Table, data: st.DataObject) -> None:
    raw = bytearray(data.draw(fitting(table)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found = key_by_kernel(table, bytes(raw))
    assert found is None or as_key(found) == key_by_rules(table, bytes(raw))


@given(SOME_TABLE, st.data())
def test_truncated_tuple_is_never_accepted(table: Table, data: st.DataObject) -> None:
    raw = data.draw(fitting(table))
    for size in range(len(raw)):
        assert key_by_kernel(table, raw[:size]) is None
    assert key_by_kernel(table, raw + b"\xc0") is None


@pytest.mark.parametrize("open", [b"\x91", b"\x81\xc0", b"\x81\xa1a"])
def test_nesting_is_accepted_up_to_the_depth_of_the_decoder(open: bytes) -> None:
    table = TABLES[0]
    for depth in (1, NESTING_MAX - 2, NESTING_MAX - 1, NESTING_MAX, NESTING_MAX + 1, STACK_SIZE + 5, 5000):
        raw = b"\x92\x05" + open * depth + b"\xc0"
        if key_by_kernel(table, raw) is not None:
            assert key_by_rules(table, raw) == 5
    assert key_by_kernel(table, b"\x92\x05" + open * 20 + b"\xc0") == 5


def test_count_beyond_the_data_is_rejected() -> None:
    for raw in (b"\xdd\xff\xff\xff\xff\x05", b"\x92\x05\xdf\xff\xff\xff\xff", b"\x92\x05\xdb\xff\xff\xff\xff"):
        assert key_by_kernel(TABLES[0], raw) is None
