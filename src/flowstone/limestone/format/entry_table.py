"""The entries of a log file as a table of numbers, made by a compiled loop: offsets and fields, without the bytes.

For readers of millions of entries: recovery, compaction, Spark. A walk is one pass over a buffer; it accepts whole
entries only and stops at anything else. `entries.decode` tells what it stopped at, and `log_scan.py` what an entry
means in its place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte, little64, number, word
from flowstone.limestone.format.entries import Entry, EntryType, Torn, Unknown, WriteVersion, decode, extent, only_zeros

Bytes = NDArray[np.uint8]
Table = NDArray[np.uint64]

# Rows of the table, with one column per entry. Offsets are into the walked buffer. MAJOR of a marker is its epoch.
AT, END, TYPE, STORAGE_ID, KEY_AT, KEY_END, VALUE_AT, VALUE_END, MAJOR, MINOR, BLOB_COUNT = range(11)
TABLE_ROWS = 11

FULL, NEED, OTHER = 0, 1, 2
"""Why a walk stopped: the table is full; the buffer ends, possibly inside an entry; the next byte begins no entry."""

WINDOW_SIZE: Final = 4 << 20
"""Bytes that `tables` reads at once. A longer entry is read as a whole."""

COLUMNS: Final = 1 << 15
"""Maximum number of entries in a table; further entries of a window come in another table."""

_TYPES: Final = {kind.value: kind for kind in EntryType}
_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


@inlined
def _sizes(pair: np.uint64) -> tuple[int, int]:
    """Return the two 4-byte numbers of a word."""
    return number(pair & _LOW), number(pair >> _HIGH)


@kernel
def walk_table(buf: Bytes, at: int, table: Table, count: int) -> tuple[int, int, int]:
    """Fill the table from column `count` on with the entries from `at` on; return the new count, the end and why."""
    limit = buf.shape[0]
    while count < table.shape[1]:
        if at >= limit:
            return count, at, NEED
        kind = byte(buf, at)
        left = limit - at
        key_at = key_end = value_at = value_end = end = at
        blobs = 0
        if kind == 1 or kind == 10 or kind == 5:
            # The shortest of these has 29 bytes, so both lengths can be read before their presence is known.
            if left < 29:
                return count, at, NEED
            key_size, value_size = _sizes(little64(buf, at + 1))
            key_at = at + 17
            if kind == 5:
                key_at, value_size = at + 13, 0
            key_end = key_at + key_size
            value_at = key_end + 16
            value_end = end = value_at + value_size
            if kind == 10:
                if end + 4 > limit:
                    return count, at, NEED
                # The upper half of the word before the blob ids is their count; at least 33 bytes precede it.
                _, blobs = _sizes(little64(buf, end - 4))
                end += 4 + 8 * blobs
            if end > limit:
                return count, at, NEED
            table[STORAGE_ID, count] = little64(buf, key_at - 8)
            table[MAJOR, count] = little64(buf, key_end)
            table[MINOR, count] = little64(buf, key_end + 8)
        elif 7 <= kind <= 9:
            end = at + 25
            if end > limit:
                return count, at, NEED
            table[STORAGE_ID, count] = little64(buf, at + 1)
            table[MAJOR, count] = little64(buf, at + 9)
            table[MINOR, count] = little64(buf, at + 17)
        elif kind == 2 or kind == 3 or kind == 4 or kind == 6:
            end = at + (10 if kind == 3 else 9)
            if end > limit:
                return count, at, NEED
            table[STORAGE_ID, count] = np.uint64(0)
            table[MAJOR, count] = little64(buf, at + 1)
            table[MINOR, count] = np.uint64(0)
        else:
            return count, at, OTHER
        table[AT, count] = word(at)
        table[END, count] = word(end)
        table[TYPE, count] = word(kind)
        table[KEY_AT, count] = word(key_at)
        table[KEY_END, count] = word(key_end)
        table[VALUE_AT, count] = word(value_at)
        table[VALUE_END, count] = word(value_end)
        table[BLOB_COUNT, count] = word(blobs)
        count += 1
        at = end
    return count, at, FULL


class EntryPart(NamedTuple):
    """Consecutive entries of a file: a buffer, its offset in the file, and the table of its entries."""

    buf: Bytes
    base: int
    table: Table


class EntryTail(NamedTuple):
    """What follows the last whole entry of a file, and its offset."""

    offset: int
    token: Torn | Unknown


def tables(read_at: Callable[[int, int], bytes], size: int) -> Iterator[EntryPart | EntryTail]:
    """Yield all entries of `size` bytes, as `entries.walk` does. A table is valid until the next one is requested."""
    table = np.empty((TABLE_ROWS, COLUMNS), np.uint64)
    base, wanted = 0, WINDOW_SIZE
    while base < size:
        data = read_at(base, min(wanted, size - base))
        if len(data) < min(wanted, size - base):
            size = base + len(data)  # the file was truncated meanwhile
        buf = np.frombuffer(data, np.uint8)
        at, status = 0, FULL
        while status == FULL:
            count, at, status = walk_table(buf, at, table, 0)
            if count:
                yield EntryPart(buf, base, table[:, :count])
        if status == OTHER:
            yield EntryTail(base + at, Unknown(data[at], only_zeros(read_at, base + at, size)))
            return
        wanted = WINDOW_SIZE
        if at < len(data):
            wanted = max(wanted, extent(data, at))
            token, _ = decode(data, at)
            if isinstance(token, Torn) and (base + len(data) == size or extent(data, at) > size - base - at):
                yield EntryTail(base + at, token)
                return
        base += at


def entries_of(data: bytes) -> Iterator[Entry]:
    """Yield the entries of `data`, which consists of whole entries without markers."""
    table = np.empty((TABLE_ROWS, COLUMNS), np.uint64)
    buf, at = np.frombuffer(data, np.uint8), 0
    while at < len(data):
        count, at, status = walk_table(buf, at, table, 0)
        assert count, f"no whole entry at {at}: {status}"
        columns = table[:, :count].T.tolist()
        for _, end, kind, storage_id, key_at, key_end, value_at, value_end, major, minor, blobs in columns:
            blob_ids = struct.unpack_from(f"<{blobs}Q", data, end - 8 * blobs) if blobs else ()
            version = WriteVersion(major, minor)
            yield Entry(_TYPES[kind], storage_id, version, data[key_at:key_end], data[value_at:value_end], blob_ids)
