"""The sessions of a log file: a fast pass that returns their offsets and their entries with blobs.

Uses the compiled walk of `entry_table.py` and the Disk that is passed in. For code that copies sessions or counts blobs
in files of millions of entries. It stops where no entry begins; `log_scan.py` decides what that means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from flowstone.limestone.format.entries import Entry, EntryType, Marker, decode
from flowstone.limestone.format.entry_table import AT, END, TYPE
from flowstone.limestone.format.entry_walk import EntryTail, tables
from flowstone.outside import Disk, File

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
    """A session in a file, from its begin marker to the next one, or to the end of the readable part."""

    at: int
    end: int
    epoch: int
    is_marked: bool
    """True if the session is invalidated: its epoch never became durable."""
    with_blobs: tuple[Entry, ...]


def snippets(disk: Disk, path: str) -> Iterator[Snippet]:
    """Yield the sessions of a log file in order; entries outside of a session are skipped."""
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
    """Yield offset and token of markers and entries with blobs; None at the end of the readable part."""
    end = 0
    for part in tables(file.read_at, file.size()):
        if isinstance(part, EntryTail):
            break
        for index in np.flatnonzero(np.isin(part.table[TYPE], _WANTED)).tolist():
            start, end = int(part.table[AT, index]), int(part.table[END, index])
            token, _ = decode(part.buf[start:end].tobytes())
            assert isinstance(token, Marker | Entry)
            yield part.base + start, token
        end = part.base + int(part.table[END, -1])
    yield end, None
