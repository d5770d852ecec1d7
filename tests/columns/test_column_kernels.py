"""Each column kernel, compiled and interpreted: memory access, and the row at which it stops."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.columns import column_kernels
from flowstone.columns.column_limits import ARRAY_HEADER_SIZE, COPY_ROOM, FITS, TOO_LARGE, WRONG_TYPE
from flowstone.columns.tuple_slabs import slab_of_tuples
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from tests.native.twins import interpreted_module
from tests.places import ROOT
from tests.xlog.slabs import array, body, insert, slab_of

GUARD = 0xEE


@pytest.fixture(scope="module", params=["compiled", "interpreted"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    """Return the kernels; interpreted ones raise an error for each access outside an array."""
    return column_kernels if request.param == "compiled" else interpreted_module(column_kernels.__name__)


def test_decoding_never_accesses_memory_outside_the_arrays() -> None:
    """Run the tests of arrow_columns.py interpreted: each access outside an array raises an error."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=ci"]
    done = subprocess.run(
        [*command, "tests/columns/test_arrow_columns.py"],
        cwd=ROOT,
        env=os.environ | {"FLOWSTONE_INTERPRETED": "1", "FLOWSTONE_SCALE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def places(values: list[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated values, and the start of each; -1 for None."""
    starts, data = [], b""
    for value in values:
        starts.append(-1 if value is None else len(data))
        data += value or b""
    return np.frombuffer(data, np.uint8), np.array(starts, np.int32)


@given(st.lists(st.none() | st.text(max_size=70) | st.binary(max_size=70), max_size=12))
def test_strings_are_copied_up_to_the_last_byte_of_the_buffer(
    kernels: ModuleType, values: list[str | bytes | None]
) -> None:
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
def test_spans_are_copied_up_to_the_last_byte_of_the_buffer(kernels: ModuleType, values: list[bytes]) -> None:
    buf, starts = places(list(values))
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    out = np.full(int(offsets[-1]) + COPY_ROOM, GUARD, np.uint8)
    kernels.span_copy(buf, starts.astype(np.int64), offsets, out)
    assert out[: offsets[-1]].tobytes() == b"".join(values)


@pytest.mark.parametrize("bad_at", [0, 1, 4])
def test_kernel_returns_the_first_value_that_does_not_fit(kernels: ModuleType, bad_at: int) -> None:
    for bad, what in ((pack("x"), WRONG_TYPE), (pack(2**63), TOO_LARGE)):
        values: list[bytes | None] = [b"\x01"] * 5
        values[bad_at] = bad
        values[-1] = bad
        buf, starts = places(values)
        out, valid = np.empty(5, np.int64), np.empty(5, np.uint8)
        assert kernels.int_column(buf, starts, out, valid)[:2] == (bad_at, what)


def starts_of(
    kernels: ModuleType, rows: list[bytes], fields: int, key_fields: list[int]
) -> tuple[int, list[list[int]], np.ndarray]:
    slab = slab_of(rows)
    starts = np.full((fields + 1, len(rows)), 77, np.int32)
    numbers = np.arange(len(rows), dtype=np.int64)
    bad = kernels.split_tuples(slab.buf, slab.cells, numbers, np.array(key_fields, np.int64), starts)
    return bad, starts.T.tolist(), slab.buf


def test_split_tuples_locates_fields_and_marks_missing_ones(kernels: ModuleType) -> None:
    bad, starts, buf = starts_of(
        kernels, [insert([b"\x05", b"\xa1x", b"\x06"]), insert([b"\x07"], lsn=2, tsn=2)], 2, []
    )
    assert bad == -1
    assert [int(buf[at]) for at in starts[0]] == [0x05, 0xA1, 0x06]  # field 3 is the first extra one
    assert (int(buf[starts[1][0]]), starts[1][1:]) == (0x07, [-1, -1])


def test_key_of_the_primary_index_fills_its_fields(kernels: ModuleType) -> None:
    pairs = {0x10: b"\x05", 0x20: array([b"\x0a", b"\x0b", b"\x0c"])}
    rows = [Row(5, 1, lsn=1, tsn=1, body=body(pairs)).encode()]
    bad, ((first, second, third, extra),), buf = starts_of(kernels, rows, 3, [2, 0])
    assert bad == -1
    assert (int(buf[third]), int(buf[first])) == (0x0A, 0x0B)
    assert (second, extra) == (-1, -1)


def test_key_of_another_index_fills_no_fields(kernels: ModuleType) -> None:
    pairs = {0x10: b"\x05", 0x11: b"\x01", 0x20: array([b"\x0a"])}
    assert starts_of(kernels, [Row(5, 1, lsn=1, tsn=1, body=body(pairs)).encode()], 1, [0])[:2] == (-1, [[-1, -1]])


def test_split_tuples_returns_the_row_with_an_invalid_tuple(kernels: ModuleType) -> None:
    rows = [insert([b"\x01"]), Row(2, 1, lsn=2, tsn=2, body=body({0x21: b"\x80"})).encode()]
    assert starts_of(kernels, rows, 1, [])[0] == 1


@pytest.mark.parametrize(
    "raw", [b"", b"\x92\x01", b"\x93\x01\x02", b"\x92\x01\xa5x", b"\xdc\x00", b"\xc1", b"\x92\x01\xc1"]
)
def test_tuple_that_no_scanner_has_checked_is_an_error_unless_whole(kernels: ModuleType, raw: bytes) -> None:
    """Tuples of lakes and of servers are not rows of a scanned log. The values behind them are no part of them."""
    slab = slab_of_tuples(pa.array([b"\x91\x01", raw, b"\x92\x01\x02"], pa.binary()), 512, "orders")
    starts = np.full((4, 3), 77, np.int32)
    rows = np.arange(3, dtype=np.int64)
    assert kernels.split_tuples(slab.buf, slab.cells, rows, np.zeros(0, np.int64), starts) == 1


@pytest.mark.parametrize("raw", [b"\x92\x01\xa5x", b"\x91\x01\xc1", b"\x92\x01\xdd\xff\xff\xff\xff"])
def test_extra_fields_that_are_not_whole_are_an_error(kernels: ModuleType, raw: bytes) -> None:
    buf, starts = np.frombuffer(raw, np.uint8), np.array([1], np.int32)
    ends, out = np.array([len(raw)], np.int64), np.empty(len(raw) + ARRAY_HEADER_SIZE, np.uint8)
    begins, finishes = np.empty((2, 1), np.int64)
    assert kernels.gather_extra(buf, starts, ends, out, begins, finishes) == 0


@given(st.lists(st.lists(st.integers(0, 300), max_size=5), max_size=5))
def test_extra_fields_become_one_array_per_row(kernels: ModuleType, rows: list[list[int]]) -> None:
    packed = [b"".join(map(pack, values)) for values in rows]
    buf, starts = places([data or None for data in packed])
    ends = np.array([start + len(data) for start, data in zip(starts.tolist(), packed, strict=True)], np.int64)
    size = sum(len(data) + ARRAY_HEADER_SIZE for data in packed if data)
    out, (begins, finishes) = np.empty(size, np.uint8), np.empty((2, len(rows)), np.int64)
    assert kernels.gather_extra(buf, starts, ends, out, begins, finishes) == -1
    for values, data, begin, finish in zip(rows, packed, begins.tolist(), finishes.tolist(), strict=True):
        if values:
            assert out[begin:finish].tobytes() == b"\xdd" + len(values).to_bytes(4, "big") + data
        else:
            assert (begin, finish) == (-1, -1)
