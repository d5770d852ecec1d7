"""Entries packed together have the same bytes as entries packed one by one; entries that do not fit are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.limestone.format.entries import WriteVersion, encode, put
from flowstone.limestone.format.packing import packed_puts
from flowstone.limestone.format.packing_kernels import pack_puts
from tests.limestone import recorded
from tests.native.twins import twin

PAIRS = st.lists(st.tuples(recorded.texts, recorded.texts), max_size=30)


@given(PAIRS, recorded.ids, recorded.ids, st.integers(0, 2**64 - 31), st.integers(1, 400))
def test_packed_parts_equal_the_entries(
    pairs: list[tuple[bytes, bytes]], storage_id: int, major: int, minor: int, part_size: int
) -> None:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    parts = [bytes(part) for part in packed_puts(storage_id, keys, values, WriteVersion(major, minor), part_size)]
    entries = [
        encode(put(storage_id, key, value, WriteVersion(major, minor + index)))
        for index, (key, value) in enumerate(pairs)
    ]
    assert b"".join(parts) == b"".join(entries)
    assert all(len(part) >= part_size for part in parts[:-1])
    assert all(len(part) < part_size + 73 for part in parts)


def test_kernel_writes_nothing_after_its_buffer() -> None:
    """Interpreted, every move checks its bounds."""
    keys, values = (np.frombuffer(data, np.uint8) for data in (b"abc", b"vw"))
    sizes = (np.array([1, 2], np.int64), np.array([2, 0], np.int64))
    out = np.empty(2 * 33 + 5, np.uint8)
    assert twin(pack_puts)(out, keys, sizes[0], values, sizes[1], 7, 8, 9) == out.size
    expected = [put(7, b"a", b"vw", WriteVersion(8, 9)), put(7, b"bc", b"", WriteVersion(8, 10))]
    assert out.tobytes() == b"".join(map(encode, expected))


@pytest.mark.parametrize(
    ("storage_id", "keys", "values", "version", "message"),
    [
        (1, [b"k"], [], (1, 1), "1 keys, 0 values"),
        (1, ["k"], [b"v"], (1, 1), "must be bytes"),
        (1, [memoryview(b"abcd").cast("I")], [b"v"], (1, 1), "must be bytes"),
        (1 << 64, [b"k"], [b"v"], (1, 1), "64-bit number"),
        (1, [b"k", b"l"], [b"v", b"w"], (1, (1 << 64) - 1), "64-bit number"),
        (1, [b"k"], [b"v"], (-1, 1), "64-bit number"),
    ],
)
def test_value_out_of_range_is_rejected(
    storage_id: int, keys: Any, values: Any, version: tuple[int, int], message: str
) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        packed_puts(storage_id, keys, values, WriteVersion(*version), 100)
