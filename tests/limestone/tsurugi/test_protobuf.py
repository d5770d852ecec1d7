"""Protobuf messages: their fields, and damaged bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.errors import BadMetadata
from flowstone.limestone.tsurugi.protobuf import as_int64, message_fields, packed_numbers
from tests.limestone.tsurugi.encoder import block, varint

FIELD = st.one_of(
    st.tuples(st.integers(1, 2000), st.integers(0, 2**64 - 1)),
    st.tuples(st.integers(1, 2000), st.binary(max_size=300)),
)


@given(st.lists(FIELD, max_size=8))
def test_fields_are_those_that_were_encoded(fields: list[tuple[int, int | bytes]]) -> None:
    data = b"".join(
        varint(number << 3) + varint(value) if isinstance(value, int) else block(number, value)
        for number, value in fields
    )
    assert list(message_fields(data)) == fields


def test_fields_of_a_fixed_size_are_bytes() -> None:
    data = varint(3 << 3 | 1) + bytes(range(8)) + varint(4 << 3 | 5) + b"abcd"
    assert list(message_fields(data)) == [(3, bytes(range(8))), (4, b"abcd")]


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_numbers_are_those_that_were_encoded(numbers: list[int]) -> None:
    assert list(packed_numbers(b"".join(map(varint, numbers)))) == numbers


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_of_type_int64_keep_their_sign(number: int) -> None:
    assert as_int64(number & (2**64 - 1)) == number


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x80", "ends inside a number"),
        (b"\x08", "ends inside a number"),
        (b"\x08" + b"\xff" * 10, "more than 64 bits"),
        (b"\x08" + b"\x80" * 11, "more than 64 bits"),
        (b"\x00\x01", "field 0"),
        (b"\x0a\x05abc", "has 5 bytes, but 3 are left"),
        (b"\x09abc", "has 8 bytes, but 3 are left"),
        (b"\x0b", "unknown wire type 3"),
    ],
)
def test_damaged_messages_are_rejected(data: bytes, problem: str) -> None:
    with pytest.raises(BadMetadata, match=problem):
        list(message_fields(data))
