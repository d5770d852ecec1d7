"""Readers of the entries of log files, many at once, by tables of `entry_table.py` or as objects.

For readers of millions of entries: recovery, compaction, Spark. Pure: the caller passes a function that reads a file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from flowstone.limestone.format.entries import Entry, EntryType, Torn, Unknown, WriteVersion, decode, extent, only_zeros
from flowstone.limestone.format.entry_table import FULL, OTHER, TABLE_ROWS, Bytes, Table
from flowstone.limestone.format.entry_table_kernels import walk_table

WINDOW_SIZE: Final = 4 << 20
"""Bytes that `tables` reads at once. A longer entry is read as a whole."""

COLUMNS: Final = 1 << 15
"""Maximum number of entries in a table; further entries of a window come in another table."""

_TYPES: Final = {kind.value: kind for kind in EntryType}


class EntryPart(NamedTuple):
    """Consecutive entries of a file: a buffer, its offset in the file, and the table of its entries."""

    buf: Bytes
    base: int
    table: Table


class EntryTail(NamedTuple):
    """The torn or unknown entry after the last complete one of a file, and its offset."""

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
    """Yield the entries of `data`, which consists of complete entries without markers."""
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
