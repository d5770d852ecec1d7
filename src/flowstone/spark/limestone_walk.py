"""Entries of a Limestone log file in chunks of numbers, each with the session that it stands in.

The compiled walk of `limestone/entry_table.py` over windows of a file, and what markers say of the entries behind them,
by whole arrays (`docs/spec/limestone.md#scanner`). Never decides what is durable: who walks compares epochs. Stops
where no whole entry is; whether that is a tail that is still being written or damage, `stopped` helps to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowstone.limestone import entries
from flowstone.limestone.entry_table import AT, FULL, MAJOR, NEED, OTHER, TABLE_ROWS, TYPE, Bytes, Table, walk_table
from flowstone.limestone.errors import DamagedFile

Mask = NDArray[np.bool_]

WINDOW_SIZE: Final = 4 << 20
"""What is read at once; an entry that is longer is read whole."""

ENTRIES_AT_ONCE: Final = 1 << 16
ENTRY_SIZE_MIN: Final = 9
"""That of a marker."""

OUTSIDE, VALID, VOID = 0, 1, 2
"""What a marker begins: nothing; a session that counts if its epoch is durable; one that never does."""

_WRONG: Final = 3
_STATES: Final = np.zeros(256, np.uint8)
_STATES[[entries.EntryType.MARKER_BEGIN, entries.EntryType.MARKER_INVALIDATED_BEGIN]] = (VALID, VOID)
_STATES[entries.EntryType.MARKER_DURABLE] = _WRONG
_IS_MARKER: Final = np.zeros(256, np.bool_)
_IS_MARKER[list(entries.MARKER_TYPES)] = True
_END: Final = np.uint64(entries.EntryType.MARKER_END)


class Session(NamedTuple):
    """Where a walk stands: in a session of this epoch, or in none."""

    epoch: int = 0
    state: int = OUTSIDE


@dataclass(frozen=True)
class Chunk:
    """Whole entries that follow each other. `base` is where `buf` begins in the file, `end` where the entries end.

    `epochs` and `states` are those of the session that each entry stands in; of a marker, the one that it begins.
    `before` and `session` are in front of the first entry and behind the last. `stopped`: the walk ends here, because
    the rest is no entry (OTHER) or not a whole one (NEED).
    """

    buf: Bytes
    base: int
    table: Table
    epochs: NDArray[np.uint64]
    states: NDArray[np.uint8]
    before: Session
    session: Session
    end: int
    stopped: int | None = None

    @property
    def start(self) -> int:
        return self.base + int(self.table[AT, 0]) if self.table.shape[1] else self.end

    @property
    def is_marker(self) -> Mask:
        found: Mask = _IS_MARKER[self.table[TYPE].astype(np.uint8)]
        return found

    def cut(self, count: int) -> Chunk:
        """Its first entries alone."""
        if count >= self.table.shape[1]:
            return self
        end = self.base + int(self.table[AT, count])
        session = Session(int(self.epochs[count - 1]), int(self.states[count - 1])) if count else self.before
        return Chunk(
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
    session: Session,
    path: str,
    *,
    window: int = WINDOW_SIZE,
) -> Iterator[Chunk]:
    """The entries between two offsets, of which the first begins one; `path` is for the messages only.

    DamagedFile where an entry stands in no session. The last chunk may have no entries, and says why.
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
    """How many bytes the entry that is cut off takes, as far as one can see."""
    return max(1, entries.extent(data, stop)) if stop < len(data) else 0


def _chunk(buf: Bytes, base: int, table: Table, before: Session, end: int, stopped: int | None, path: str) -> Chunk:
    count = table.shape[1]
    types = table[TYPE].astype(np.uint8)
    is_marker = _IS_MARKER[types]
    places = np.flatnonzero(is_marker)
    if not len(places):
        states = np.full(count, before.state, np.uint8)
        epochs = np.full(count, before.epoch, np.uint64)
    else:
        own = _STATES[types[places]]
        # An end marker closes what is open; it has the epoch, too, which then says nothing.
        lengths = np.diff(np.concatenate(([0], places, [count])))
        states = np.repeat(np.concatenate(([np.uint8(before.state)], own)).astype(np.uint8), lengths)
        epochs = np.repeat(np.concatenate(([np.uint64(before.epoch)], table[MAJOR, places])), lengths)
    _check(table, types, is_marker, states, before, base, path)
    session = Session(int(epochs[-1]), int(states[-1])) if count else before
    return Chunk(buf, base, table, epochs, states, before, session, end, stopped)


def _check(
    table: Table,
    types: NDArray[np.uint8],
    is_marker: Mask,
    states: NDArray[np.uint8],
    before: Session,
    base: int,
    path: str,
) -> None:
    """Nothing but a begin marker may stand outside of a session."""
    former = np.concatenate(([np.uint8(before.state)], states[:-1])) if len(states) else states
    wrong = (former == OUTSIDE) & (~is_marker | (types == _END)) | (states == _WRONG)
    if wrong.any():
        place = int(np.argmax(wrong))
        kind = entries.EntryType(int(types[place])).name
        raise DamagedFile(
            path, base + int(table[AT, place]), f"{kind} outside of a session", hint="repair the directory"
        )
