"""Entries of a Limestone log file in chunks of numbers, each with its session.

Runs the compiled walk of `limestone/format/entry_table.py` over windows of a file, and applies markers to the entries
that follow them on whole arrays (`docs/spec/limestone.md#scanner`). Never decides what is durable: callers compare
epochs. Stops at the first incomplete entry; `stopped` helps to tell a tail that is still being written from damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import entries
from flowstone.limestone.format.entry_table import (
    AT,
    FULL,
    MAJOR,
    NEED,
    OTHER,
    TABLE_ROWS,
    TYPE,
    Bytes,
    Table,
)
from flowstone.limestone.format.entry_table_kernels import walk_table

Mask = NDArray[np.bool_]

WINDOW_SIZE: Final = 4 << 20
"""Bytes to read at once; a longer entry is read completely."""

ENTRIES_AT_ONCE: Final = 1 << 16
ENTRY_SIZE_MIN: Final = 9
"""The size of a marker."""

OUTSIDE, VALID, VOID = 0, 1, 2
"""States after a marker: outside a session; in a session that counts if its epoch is durable; in a session that never
counts."""

_WRONG: Final = 3
_STATES: Final = np.zeros(256, np.uint8)
_STATES[[entries.EntryType.MARKER_BEGIN, entries.EntryType.MARKER_INVALIDATED_BEGIN]] = (VALID, VOID)
_STATES[entries.EntryType.MARKER_DURABLE] = _WRONG
_IS_MARKER: Final = np.zeros(256, np.bool_)
_IS_MARKER[list(entries.MARKER_TYPES)] = True
_END: Final = np.uint64(entries.EntryType.MARKER_END)


class EntrySession(NamedTuple):
    """The session at a point of a walk: its epoch and its state."""

    epoch: int = 0
    state: int = OUTSIDE


@dataclass(frozen=True)
class EntryChunk:
    """Consecutive whole entries. `base` is the file offset of `buf`, `end` the file offset after the last entry.

    `epochs` and `states` describe the session of each entry; for a marker, the session that it begins. `before` and
    `session` are the sessions before the first entry and after the last. `stopped`: the walk ends here, because the
    rest is no entry (OTHER) or an incomplete one (NEED).
    """

    buf: Bytes
    base: int
    table: Table
    epochs: NDArray[np.uint64]
    states: NDArray[np.uint8]
    before: EntrySession
    session: EntrySession
    end: int
    stopped: int | None = None

    @property
    def start(self) -> int:
        return self.base + int(self.table[AT, 0]) if self.table.shape[1] else self.end

    @property
    def is_marker(self) -> Mask:
        found: Mask = _IS_MARKER[self.table[TYPE].astype(np.uint8)]
        return found

    def cut(self, count: int) -> EntryChunk:
        """Return the chunk with only its first `count` entries."""
        if count >= self.table.shape[1]:
            return self
        end = self.base + int(self.table[AT, count])
        session = EntrySession(int(self.epochs[count - 1]), int(self.states[count - 1])) if count else self.before
        return EntryChunk(
            self.buf,
            self.base,
            self.table[:, :count],
            self.epochs[:count],
            self.states[:count],
            self.before,
            session,
            end,
        )


def walk(
    read_at: Callable[[int, int], bytes],
    start: int,
    end: int,
    session: EntrySession,
    path: str,
    *,
    window: int = WINDOW_SIZE,
) -> Iterator[EntryChunk]:
    """Yield the entries between two offsets; an entry begins at `start`. `path` is used in messages only.

    Raises DamagedFile if an entry is outside of a session. The last chunk may be empty and only carry `stopped`.
    """
    at, wanted = start, window
    while at < end:
        size = min(wanted, end - at)
        data = read_at(at, size)
        is_last = len(data) < size or at + size >= end
        buf: Bytes = np.frombuffer(data, np.uint8)
        stop, reason, needed, stopped = 0, FULL, 0, None
        while reason == FULL:
            room = min(ENTRIES_AT_ONCE, (len(data) - stop) // ENTRY_SIZE_MIN + 1)
            table: Table = np.empty((TABLE_ROWS, room), np.uint64)
            count, stop, reason = walk_table(buf, stop, table, 0)
            needed = _needed(data, stop) if reason == NEED else 0
            if stop < len(data) and (reason == OTHER or (reason == NEED and (is_last or at + stop + needed > end))):
                stopped = reason
            if count or stopped is not None:
                chunk = _chunk(buf, at, table[:, :count], session, at + stop, stopped, path)
                session = chunk.session
                yield chunk
        if stopped is not None or is_last:
            return
        at, wanted = at + stop, max(window, needed)


def _needed(data: bytes, stop: int) -> int:
    """Return the size of the incomplete entry, as far as it can be determined."""
    return max(1, entries.extent(data, stop)) if stop < len(data) else 0


def _chunk(
    buf: Bytes, base: int, table: Table, before: EntrySession, end: int, stopped: int | None, path: str
) -> EntryChunk:
    count = table.shape[1]
    types = table[TYPE].astype(np.uint8)
    is_marker = _IS_MARKER[types]
    places = np.flatnonzero(is_marker)
    if not len(places):
        states = np.full(count, before.state, np.uint8)
        epochs = np.full(count, before.epoch, np.uint64)
    else:
        own = _STATES[types[places]]
        # An end marker closes the session; its epoch has no meaning here.
        lengths = np.diff(np.concatenate(([0], places, [count])))
        states = np.repeat(np.concatenate(([np.uint8(before.state)], own)).astype(np.uint8), lengths)
        epochs = np.repeat(np.concatenate(([np.uint64(before.epoch)], table[MAJOR, places])), lengths)
    _check(table, types, is_marker, states, before, base, path)
    session = EntrySession(int(epochs[-1]), int(states[-1])) if count else before
    return EntryChunk(buf, base, table, epochs, states, before, session, end, stopped)


def _check(
    table: Table,
    types: NDArray[np.uint8],
    is_marker: Mask,
    states: NDArray[np.uint8],
    before: EntrySession,
    base: int,
    path: str,
) -> None:
    """Raise DamagedFile if anything but a begin marker is outside of a session."""
    former = np.concatenate(([np.uint8(before.state)], states[:-1])) if len(states) else states
    wrong = (former == OUTSIDE) & (~is_marker | (types == _END)) | (states == _WRONG)
    if wrong.any():
        place = int(np.argmax(wrong))
        kind = entries.EntryType(int(types[place])).name
        raise DamagedFile(
            path,
            base + int(table[AT, place]),
            f"{kind} entry outside of a session",
            hint="repair the directory with flowstone limestone repair",
        )
