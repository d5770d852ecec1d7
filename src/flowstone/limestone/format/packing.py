"""Encoding of many keys and values as log entries, by a compiled kernel.

Pure. Used by `add_entries`: does for thousands of entries at a time what `entries.encode` does for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.errors import LocalProtocolError
from flowstone.limestone.format.entries import LENGTH_MAX, WriteVersion
from flowstone.limestone.format.entry_table import Bytes
from flowstone.limestone.format.packing_kernels import pack_puts

PUT_SIZE: Final = 33
"""Size of an entry without key and value."""

_ID_MAX: Final = (1 << 64) - 1

Sizes = NDArray[np.int64]


def packed_puts(
    storage_id: int, keys: Sequence[bytes], values: Sequence[bytes], version: WriteVersion, part_size: int
) -> Iterator[memoryview]:
    """Return the encoded entries that set these keys, in parts of whole entries of about `part_size` bytes.

    The minor version increases by one with each entry. Raise LocalProtocolError, before the first part, if a value does
    not fit the format."""
    count = len(keys)
    if len(values) != count:
        raise LocalProtocolError(f"numbers of keys and values differ: {count} keys, {len(values)} values")
    largest = max(version.minor + count - 1, version.major, storage_id)
    if largest > _ID_MAX or min(version.minor, version.major, storage_id) < 0:
        raise LocalProtocolError("storage id or version is not a 64-bit number")
    key_bytes, key_sizes = _joined(keys)
    value_bytes, value_sizes = _joined(values)
    ids = (storage_id, version.major, version.minor)
    size = PUT_SIZE * count + len(key_bytes) + len(value_bytes)
    if size <= part_size:
        return iter((_packed(size, key_bytes, key_sizes, value_bytes, value_sizes, ids),) if count else ())
    return _parts(ids, key_bytes, key_sizes, value_bytes, value_sizes, part_size)


def _joined(texts: Sequence[bytes]) -> tuple[Bytes, Sizes]:
    try:
        joined = b"".join(texts)
    except TypeError as error:
        raise LocalProtocolError(f"keys and values must be bytes: {error}") from None
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    if int(sizes.sum()) != len(joined):
        raise LocalProtocolError("keys and values must be bytes")
    if len(joined) > LENGTH_MAX and int(sizes.max()) > LENGTH_MAX:
        raise LocalProtocolError(f"key or value exceeds the limit of {LENGTH_MAX} bytes")
    return np.frombuffer(joined, np.uint8), sizes


def _packed(
    size: int, keys: Bytes, key_sizes: Sizes, values: Bytes, value_sizes: Sizes, ids: tuple[int, int, int]
) -> memoryview:
    out = np.empty(size, np.uint8)
    written = pack_puts(out, keys, key_sizes, values, value_sizes, *ids)
    assert written == size
    return out.data


def _parts(
    ids: tuple[int, int, int], keys: Bytes, key_sizes: Sizes, values: Bytes, value_sizes: Sizes, part_size: int
) -> Iterator[memoryview]:
    storage_id, major, minor = ids
    ends = np.cumsum(key_sizes + value_sizes + PUT_SIZE)
    first = key_at = value_at = done = 0
    while first < len(ends):
        end = max(int(np.searchsorted(ends, done + part_size)), first) + 1
        end = min(end, len(ends))
        size, part = int(ends[end - 1]) - done, slice(first, end)
        part_ids = (storage_id, major, minor + first)
        yield _packed(size, keys[key_at:], key_sizes[part], values[value_at:], value_sizes[part], part_ids)
        key_at += int(key_sizes[part].sum())
        value_at += int(value_sizes[part].sum())
        first, done = end, done + size
