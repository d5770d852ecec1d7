"""End offsets of values, compiled and interpreted, and the readers of numbers and container headers."""

from __future__ import annotations

import msgpack as reference
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.iproto.scan_kernels import skip_value
from flowstone.native import msgpack
from tests.native.twins import twin

ROOM = 40


@pytest.mark.parametrize("marker", range(256))
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_value_end_agrees_between_both_forms_for_every_first_byte(marker: int, count: int) -> None:
    """The tables of lengths exist twice: in C and in Python."""
    for width in (1, 2, 4):
        data = bytes([marker]) + count.to_bytes(width, "big") + b"\x01" * ROOM
        buf = np.frombuffer(data, np.uint8)
        for end in (0, 1, 2, 5, len(data)):
            assert skip_value(buf, 0, end) == twin(skip_value)(buf, 0, end)


@given(st.binary(max_size=60))
def test_value_end_agrees_between_both_forms_for_any_bytes(data: bytes) -> None:
    buf = np.frombuffer(data, np.uint8)
    assert skip_value(buf, 0, len(data)) == twin(skip_value)(buf, 0, len(data))


@given(st.integers(0, 2**64 - 1))
def test_put_uint_writes_the_shortest_form(value: int) -> None:
    out = np.zeros(16, np.uint8)
    end = msgpack.put_uint(out, 1, value - 2**64 if value >> 63 else value)
    assert out[1:end].tobytes() == reference.packb(value)
    read, after = msgpack.read_unsigned(out, 1, end)
    assert (read % 2**64, after) == (value, end)
    assert msgpack.read_length(out, 1, end) == ((value, end) if value < 2**63 else (-1, 1))
    assert msgpack.read_length(out, 1, end - 1)[0] == -2


@pytest.mark.parametrize("value", [[], [1] * 15, [1] * 16, [1] * 70_000, {}, {1: 2}, {n: n for n in range(20)}])
def test_container_headers_are_read(value: list[int] | dict[int, int]) -> None:
    buf = np.frombuffer(reference.packb(value), np.uint8)
    if isinstance(value, list):
        assert msgpack.read_array(buf, 0, len(buf))[0] == len(value)
    else:
        assert msgpack.read_map(buf, 0, buf.size)[0] == len(value)
        assert msgpack.read_map(buf, 0, 0) == (0, -1)


def test_readers_reject_values_of_other_types() -> None:
    buf = np.frombuffer(b"\xc0\xc0", np.uint8)
    assert msgpack.read_array(buf, 0, len(buf))[0] == -1
    assert msgpack.read_map(buf, 0, 1) == (0, -1)
    assert msgpack.read_unsigned(buf, 0, 1)[1] == -1
    assert msgpack.read_uint(buf, 1, 1)[1] == -1
