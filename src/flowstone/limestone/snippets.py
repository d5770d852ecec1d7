"""Where the sessions of a log file lie: a fast pass that hands out their bounds and their entries with blobs.

By the compiled walk of `entry_table.py`, in windows, through the Disk one is handed. For those that copy sessions or
count blobs in files of millions of entries. It ends where no entry begins; what that means, `scan.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from flowstone.limestone import entry_table
from flowstone.limestone.entries import Entry, EntryType, Marker, decode, extent
from flowstone.outside import Disk, File

WINDOW_SIZE: Final = 4 << 20
TABLE_COLUMNS: Final = 1 << 15
_WANTED: Final = np.array(
    [
        EntryType.MARKER_BEGIN,
        EntryType.MARKER_END,
        EntryType.MARKER_DURABLE,
        EntryType.MARKER_INVALIDATED_BEGIN,
        EntryType.NORMAL_WITH_BLOB,
    ],
    dtype=np.uint64,
)


@dataclass(frozen=True)
class Snippet:
    """A session in a file, from its begin marker to where the next one begins or nothing can be read any more."""

    at: int
    end: int
    epoch: int
    is_marked: bool
    """It does not count: its epoch never became durable."""
    with_blobs: tuple[Entry, ...]


def snippets(disk: Disk, path: str) -> Iterator[Snippet]:
    """The sessions of a log file in their order; entries outside of one are left out."""
    with disk.open(path) as file:
        begin: Marker | None = None
        at = 0
        found: list[Entry] = []
        for offset, token in _walk(file):
            if isinstance(token, Entry):
                found.append(token)
            elif token is None or token.type in (EntryType.MARKER_BEGIN, EntryType.MARKER_INVALIDATED_BEGIN):
                if begin is not None:
                    yield _snippet(begin, at, offset, found)
                begin, at, found = token, offset, []


def _snippet(begin: Marker, at: int, end: int, found: list[Entry]) -> Snippet:
    return Snippet(at, end, begin.epoch, begin.type is EntryType.MARKER_INVALIDATED_BEGIN, tuple(found))


def _walk(file: File) -> Iterator[tuple[int, Marker | Entry | None]]:
    """Offset and token of what is wanted; None where the readable part ends."""
    table = np.empty((entry_table.TABLE_ROWS, TABLE_COLUMNS), dtype=np.uint64)
    size = file.size()
    base, window = 0, WINDOW_SIZE
    while base < size:
        data = file.read_at(base, min(window, size - base))
        count, at, why = entry_table.walk_table(np.frombuffer(data, dtype=np.uint8), 0, table, 0)
        types = table[entry_table.TYPE, :count]
        for index in np.flatnonzero(np.isin(types, _WANTED)).tolist():
            start = int(table[entry_table.AT, index])
            token, _ = decode(data, start)
            assert isinstance(token, Marker | Entry)
            yield base + start, token
        base += at
        window = WINDOW_SIZE
        if not at:
            # The entry is longer than the window, or it is torn, or it is none.
            window = extent(data, 0)
            if why == entry_table.OTHER or window <= len(data) or window > size - base:
                break
        elif why == entry_table.OTHER:
            break
    yield base, None
