"""What is defined at any settled position of a log: one tracker per stretch between two changes of definitions.

Reads the rows of runs that have definitions or truncations, each run once, and the beginning of the snapshots that
definitions start from. A truncation changes no definition, and ends an epoch all the same: rows before it and rows
behind it are not to be folded together. Trackers are shared and changed by nobody.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowstone.box.schema import SchemaTracker
from flowstone.box.system import FIRST_USER_SPACE_ID, INDEX_ID, SPACE_ID, TRUNCATE_ID
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Cells
from flowstone.node.archive_definitions import EXTENSION, read_definitions
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.stream_order import Range
from flowstone.xlog.reader import LogFile, Slab


@dataclass(frozen=True, slots=True)
class Epoch:
    """`definitions` hold from `start` on; `before` is the position before the transaction that changed them.

    Where they come from a snapshot, the two are the same.
    """

    before: VClock
    start: VClock
    definitions: SchemaTracker


@dataclass(frozen=True, slots=True)
class _Definition:
    """A transaction that changes definitions, between two positions; or a file that they begin anew from."""

    before: VClock
    after: VClock
    rows: tuple[tuple[int, int, int, bytes], ...] = ()  # originator, LSN, type, body
    defines: bool = True
    """False where it only truncates."""
    file: str | None = None


@dataclass
class SchemaEpochs:
    """The epochs of one log, ascending. Told of beginnings and runs in the order of the log, and of what is settled."""

    disk: Disk
    epochs: list[Epoch] = field(default_factory=list)
    _waiting: deque[_Definition] = field(default_factory=deque)
    _files: dict[str, SchemaTracker] = field(default_factory=dict)

    def begin(self, position: VClock, file: str | None) -> None:
        """From `position` on definitions are those of a snapshot, or of a file of definitions alone.

        Without either, only system spaces are known.
        """
        self._waiting.append(_Definition(position, position, file=file or ""))

    def add(self, path: str, offset: int, end: int, before: VClock) -> None:
        """A run of the log with definitions or truncations."""
        with LogFile.open(self.disk, path) as log:
            for slab in log.slabs(offset, end):
                self._waiting.extend(_definitions(slab, before))
                before = before.merged(VClock(slab.newest()))

    def settle(self, settled: VClock, rolled_back: Sequence[Range]) -> None:
        """Everything up to `settled` is decided; `rolled_back` has what of it does not stand."""
        while self._waiting and self._waiting[0].after <= settled:
            definition = self._waiting.popleft()
            if definition.file is not None:
                self._append(definition, self.defined_by(definition.file))
                continue
            rows = [row for row in definition.rows if not _is_within(rolled_back, row[0], row[1])]
            if rows:
                tracker = self.at(definition.before)
                if definition.defines:
                    tracker = tracker.copy()
                    for _, _, kind, body in rows:
                        tracker.apply(kind, body)
                self._append(definition, tracker)

    def forget(self, position: VClock) -> None:
        """Nobody will ask for what was defined before `position`."""
        del self.epochs[: max(self._number(position), 0)]

    def at(self, position: VClock) -> SchemaTracker:
        """What is defined at a settled position; not the caller's to change."""
        number = self._number(position)
        if number < 0:
            return self.epochs[0].definitions if self.epochs else SchemaTracker()
        return self.epochs[number].definitions

    def behind(self, position: VClock) -> list[Epoch]:
        """The epochs that begin behind `position`."""
        return self.epochs[self._number(position) + 1 :]

    def up_to(self, position: VClock) -> list[Epoch]:
        """The epochs that begin at `position` or before it."""
        return self.epochs[: self._number(position) + 1]

    def _number(self, position: VClock) -> int:
        """Of the epoch in force; positions of a log are a chain, so "begins at or before" holds for a prefix."""
        return bisect_right(self.epochs, False, key=lambda epoch: not epoch.start <= position) - 1

    def _append(self, definition: _Definition, tracker: SchemaTracker) -> None:
        self.epochs.append(Epoch(definition.before, definition.after, tracker))

    def defined_by(self, path: str) -> SchemaTracker:
        """What a snapshot or a file of definitions says; not the caller's to change."""
        if path not in self._files:
            self._files[path] = self._read(path)
        return self._files[path]

    def _read(self, path: str) -> SchemaTracker:
        tracker = SchemaTracker()
        if path.endswith(EXTENSION):
            read_definitions(self.disk, path).apply_to(tracker)
            return tracker
        if not path:
            return tracker
        with LogFile.open(self.disk, path) as log:
            for slab in log.slabs():
                for row in slab.rows(defining(slab, np.arange(len(slab)))):
                    tracker.apply(row.type, row.body)
                # A snapshot is ordered by space id: what describes spaces stands at its beginning.
                if (slab.cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                    break
        return tracker


def defining(slab: Slab, rows: Cells) -> Cells:
    """Those of the rows that define spaces and indexes."""
    space_ids = slab.cells[scan.SPACE_ID, rows]
    found: Cells = rows[(space_ids == SPACE_ID) | (space_ids == INDEX_ID)]
    return found


def _definitions(slab: Slab, before: VClock) -> Iterator[_Definition]:
    """The transactions of a slab that follows `before` which change definitions or truncate."""
    space_ids = slab.cells[scan.SPACE_ID]
    is_wanted = (space_ids == SPACE_ID) | (space_ids == INDEX_ID)
    # When a space is dropped, its row in `_truncate` goes, and that empties nothing.
    is_wanted |= (space_ids == TRUNCATE_ID) & (slab.cells[scan.TYPE] != RequestType.DELETE)
    rows = np.flatnonzero(is_wanted)
    commits = np.flatnonzero(slab.cells[scan.FLAGS] & scan.COMMIT)
    numbers = np.searchsorted(commits, rows)
    for number in np.unique(numbers).tolist():
        first = int(commits[number - 1]) + 1 if number else 0
        chosen = rows[numbers == number]
        found = tuple((row.replica_id, row.lsn, row.type, row.body) for row in slab.rows(chosen))
        behind = before.merged(newest(slab, int(commits[number]) + 1))
        defines = bool((space_ids[chosen] != TRUNCATE_ID).any())
        yield _Definition(before.merged(newest(slab, first)), behind, found, defines)


def newest(slab: Slab, stop: int) -> VClock:
    """The highest LSN of each originator in the rows up to `stop`."""
    origins, lsns = slab.cells[scan.REPLICA_ID, :stop], slab.cells[scan.LSN, :stop]
    return VClock({origin: int(lsns[origins == origin].max()) for origin in np.unique(origins).tolist()})


def _is_within(ranges: Sequence[Range], origin: int, lsn: int) -> bool:
    return any(origin == each and first <= lsn <= last for each, first, last in ranges)
