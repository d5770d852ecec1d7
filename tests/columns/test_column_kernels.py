"""The column kernels one by one: the bytes they read and write, and the row at which they stop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.columns import column_kernels as kernels
from flowstone.columns.column_kernels import COPY_ROOM, FITS, TOO_LARGE, WRONG_TYPE
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from tests.xlog.slabs import array, body, insert, slab_of

GUARD = 0xEE


def places(values: list[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated values, and the start of each; -1 for None."""
    starts, data = [], b""
    for value in values:
        starts.append(-1 if value is None else len(data))
        data += value or b""
    return np.frombuffer(data, np.uint8), np.array(starts, np.int32)


@given(st.lists(st.none() | st.text(max_size=70) | st.binary(max_size=70), max_size=12))
def test_strings_are_copied_up_to_the_last_byte_of_the_buffer(values: list[str | bytes | None]) -> None:
    buf, starts = places([None if value is None else pack(value) for value in values])
    offsets, valid = np.empty(len(values) + 1, np.int32), np.empty(len(values), np.uint8)
    assert kernels.bytes_lengths(buf, starts, offsets, valid) == (-1, FITS, values.count(None))
    expected = [value.encode() if isinstance(value, str) else value or b"" for value in values]
    size = sum(map(len, expected))
    out = np.full(size + COPY_ROOM + 8, GUARD, np.uint8)
    kernels.bytes_copy(buf, starts, offsets, out[: size + COPY_ROOM])
    assert out[:size].tobytes() == b"".join(expected)
    assert (out[size + COPY_ROOM :] == GUARD).all()


@given(st.lists(st.binary(max_size=70), max_size=12))
def test_spans_are_copied_up_to_the_last_byte_of_the_buffer(values: list[bytes]) -> None:
    buf, starts = places(list(values))
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    out = np.full(int(offsets[-1]) + COPY_ROOM, GUARD, np.uint8)
    kernels.span_copy(buf, starts.astype(np.int64), offsets, out)
    assert out[: offsets[-1]].tobytes() == b"".join(values)


@pytest.mark.parametrize("bad_at", [0, 1, 4])
def test_the_first_value_that_does_not_fit_is_named(bad_at: int) -> None:
    for bad, what in ((pack("x"), WRONG_TYPE), (pack(2**63), TOO_LARGE)):
        values: list[bytes | None] = [b"\x01"] * 5
        values[bad_at] = bad
        values[-1] = bad
        buf, starts = places(values)
        out, valid = np.empty(5, np.int64), np.empty(5, np.uint8)
        assert kernels.int_column(buf, starts, out, valid)[:2] == (bad_at, what)


def starts_of(rows: list[bytes], fields: int, key_fields: list[int]) -> tuple[int, list[list[int]], np.ndarray]:
    slab = slab_of(rows)
    starts = np.full((fields + 1, len(rows)), 77, np.int32)
    numbers = np.arange(len(rows), dtype=np.int64)
    bad = kernels.split_tuples(slab.buf, slab.cells, numbers, np.array(key_fields, np.int64), starts)
    return bad, starts.T.tolist(), slab.buf


def test_fields_are_located_and_missing_ones_marked() -> None:
    bad, starts, buf = starts_of([insert([b"\x05", b"\xa1x", b"\x06"]), insert([b"\x07"], lsn=2, tsn=2)], 2, [])
    assert bad == -1
    assert [int(buf[at]) for at in starts[0]] == [0x05, 0xA1, 0x06]  # the third is the first extra one
    assert (int(buf[starts[1][0]]), starts[1][1:]) == (0x07, [-1, -1])


def test_key_fills_its_fields() -> None:
    pairs = {0x10: b"\x05", 0x20: array([b"\x0a", b"\x0b", b"\x0c"])}
    rows = [Row(5, 1, lsn=1, tsn=1, body=body(pairs)).encode()]
    bad, ((first, second, third, extra),), buf = starts_of(rows, 3, [2, 0])
    assert bad == -1
    assert (int(buf[third]), int(buf[first])) == (0x0A, 0x0B)
    assert (second, extra) == (-1, -1)


def test_key_of_another_index_fills_no_field() -> None:
    pairs = {0x10: b"\x05", 0x11: b"\x01", 0x20: array([b"\x0a"])}
    assert starts_of([Row(5, 1, lsn=1, tsn=1, body=body(pairs)).encode()], 1, [0])[:2] == (-1, [[-1, -1]])


def test_error_names_the_row_with_an_invalid_tuple() -> None:
    rows = [insert([b"\x01"]), Row(2, 1, lsn=2, tsn=2, body=body({0x21: b"\x80"})).encode()]
    assert starts_of(rows, 1, [])[0] == 1


@given(st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=5))
def test_extra_fields_become_one_array_per_row(rows: list[list[int]]) -> None:
    packed = [b"".join(map(pack, values)) for values in rows]
    buf, starts = places([data or None for data in packed])
    ends = np.array([start + len(data) for start, data in zip(starts.tolist(), packed, strict=True)], np.int64)
    size = sum(len(data) + kernels.ARRAY_HEADER_SIZE for data in packed if data)
    out, (begins, finishes) = np.empty(size, np.uint8), np.empty((2, len(rows)), np.int64)
    kernels.gather_extra(buf, starts, ends, out, begins, finishes)
    for values, data, begin, finish in zip(rows, packed, begins.tolist(), finishes.tolist(), strict=True):
        if values:
            assert out[begin:finish].tobytes() == b"\xdd" + len(values).to_bytes(4, "big") + data
        else:
            assert (begin, finish) == (-1, -1)
