"""The compiled checks of tuples and keys: accepted tuples pass the plain rules, with the same key."""

from __future__ import annotations

import struct
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.engine import bulk
from flowstone.box.engine.bulk import Lane
from flowstone.box.engine.keys import Key
from flowstone.box.engine.tuple_kernels import STACK_SIZE
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


def lane_of(number: int) -> Lane:
    lane = bulk.lane_of(box_with(FORMATS[number]).space(512))
    assert lane is not None
    return lane


LANES = [lane_of(number) for number in range(len(FORMATS))]
SOME_LANE = st.sampled_from(LANES)

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
def fitting(draw: st.DrawFn, lane: Lane) -> bytes:
    """Return a tuple that fits the lane's format, in the usual encodings."""
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
    space = lane.space.definition
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


def keys_by_kernel(lane: Lane, raws: list[bytes], *, of_requests: bool = False) -> list[Key] | None:
    """Return the keys of tuples that are surrounded by bytes that would change the result of an out-of-bounds read."""
    data, ats, ends = b"\xc1", [], []
    for raw in raws:
        ats.append(len(data))
        data += raw
        ends.append(len(data))
        data += b"\xc1"
    find = bulk.request_keys if of_requests else bulk.tuple_keys
    return find(lane, data, np.frombuffer(data, np.uint8), np.array(ats, np.int64), np.array(ends, np.int64))


def key_by_rules(lane: Lane, raw: bytes) -> Key | None:
    """Return the result of the plain rules; None if they reject the tuple."""
    try:
        values = unpack(raw)
        if not isinstance(values, tuple):
            return None
        lane.space.format.check(raw, values)
    except FlowstoneError:
        return None
    return lane.primary.key.entries(values)[0]


@given(SOME_LANE, st.data())
def test_tuples_accepted_by_the_kernel_pass_the_plain_rules_with_the_same_key(lane: Lane, data: st.DataObject) -> None:
    raws = data.draw(st.lists(fitting(lane) | ARRAYS | WIDE_ARRAYS | VALUES | st.binary(max_size=9), max_size=3))
    found = keys_by_kernel(lane, raws)
    if found is not None:
        assert found == [key_by_rules(lane, raw) for raw in raws]
        assert None not in found


@given(SOME_LANE, st.data())
def test_common_tuples_need_no_full_check(lane: Lane, data: st.DataObject) -> None:
    raws = data.draw(st.lists(fitting(lane), min_size=1, max_size=4))
    assert keys_by_kernel(lane, raws) == [key_by_rules(lane, raw) for raw in raws]


@given(SOME_LANE, st.data())
def test_corrupted_bytes_are_rejected_or_decoded_correctly(lane: Lane, data: st.DataObject) -> None:
    raw = bytearray(data.draw(fitting(lane)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    found = keys_by_kernel(lane, [bytes(raw)])
    assert found is None or found == [key_by_rules(lane, bytes(raw))]


@given(SOME_LANE, st.data())
def test_truncated_tuple_is_never_accepted(lane: Lane, data: st.DataObject) -> None:
    raw = data.draw(fitting(lane))
    for size in range(len(raw)):
        assert keys_by_kernel(lane, [raw[:size]]) is None
    assert keys_by_kernel(lane, [raw + b"\xc0"]) is None


@given(SOME_LANE, st.lists(ARRAYS | WIDE_ARRAYS, max_size=3))
def test_keys_of_requests_equal_those_of_the_plain_rules(lane: Lane, raws: list[bytes]) -> None:
    """The request scanner has checked that keys are complete."""
    found = keys_by_kernel(lane, raws, of_requests=True)
    if found is not None:
        assert found == [lane.primary.key.exact(unpack(raw)) for raw in raws]


@given(SOME_LANE, st.data())
def test_common_keys_need_no_full_check(lane: Lane, data: st.DataObject) -> None:
    part = lane.primary.definition.parts[0]
    values = st.text(max_size=40) if part.type == "string" else st.integers(0, 2**63 - 1)
    keys = data.draw(st.lists(values, min_size=1, max_size=4))
    found = keys_by_kernel(lane, [pack((key,)) for key in keys], of_requests=True)
    assert found == [lane.primary.key.exact((key,)) for key in keys]


def test_batch_with_one_tuple_that_needs_full_checks_is_left_to_the_caller() -> None:
    lane = LANES[0]
    good = [pack((number,)) for number in range(5)]
    for place in range(6):
        assert keys_by_kernel(lane, [*good[:place], pack(("x",)), *good[place:]]) is None
    assert keys_by_kernel(lane, good) == list(range(5))
    assert keys_by_kernel(lane, []) == []


@pytest.mark.parametrize("open", [b"\x91", b"\x81\xc0", b"\x81\xa1a"])
def test_nesting_is_accepted_up_to_the_depth_of_the_decoder(open: bytes) -> None:
    lane = LANES[0]
    for depth in (1, NESTING_MAX - 2, NESTING_MAX - 1, NESTING_MAX, NESTING_MAX + 1, STACK_SIZE + 5, 5000):
        raw = b"\x92\x05" + open * depth + b"\xc0"
        if keys_by_kernel(lane, [raw]) is not None:
            assert key_by_rules(lane, raw) == 5
    assert keys_by_kernel(lane, [b"\x92\x05" + open * 20 + b"\xc0"]) == [5]


def test_count_beyond_the_data_is_rejected() -> None:
    for raw in (b"\xdd\xff\xff\xff\xff\x05", b"\x92\x05\xdf\xff\xff\xff\xff", b"\x92\x05\xdb\xff\xff\xff\xff"):
        assert keys_by_kernel(LANES[0], [raw]) is None
