"""The schema at any settled position of a log: one tracker per epoch between two changes of definitions.

Reads the runs that have definitions or truncations, each run once, and the beginning of the snapshots that definitions
start from. A truncation changes no definition but still ends an epoch, because rows before and after it must not be
folded together. Trackers are shared and never modified.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from flowstone.archive.definitions_file import EXTENSION, read_definitions
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import FIRST_USER_SPACE_ID, INDEX_ID, SPACE_ID, TRUNCATE_ID
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.stream_order import Range
from flowstone.xlog.reader import LogFile


@dataclass(frozen=True, slots=True)
class Epoch:
    """`definitions` are in force from `start`; `before` is the position before the transaction that changed them.

    The two are equal if the definitions come from a snapshot.
    """

    before: VClock
    start: VClock
    definitions: SchemaTracker


@dataclass(frozen=True, slots=True)
class _Definition:
    """A transaction between two positions that changes definitions or truncates, or a file that replaces them all."""

    before: VClock
    after: VClock
    rows: tuple[tuple[int, int, int, bytes], ...] = ()  # originator, LSN, type, body
    defines: bool = True
    """False if the transaction only truncates."""
    file: str | None = None


@dataclass
class SchemaEpochs:
    """The epochs of one log, ascending. Beginnings, runs and settled positions must be added in log order."""

    disk: Disk
    epochs: list[Epoch] = field(default_factory=list)
    _waiting: deque[_Definition] = field(default_factory=deque)
    _files: dict[str, SchemaTracker] = field(default_factory=dict)

    def begin(self, position: VClock, file: str | None) -> None:
        """Start from the definitions in `file` at `position`: a snapshot or a definitions file.

        Without a file only system spaces are known.
        """
        self._waiting.append(_Definition(position, position, file=file or ""))

    def add(self, path: str, offset: int, end: int, before: VClock) -> None:
        """Add a run of the log that has definitions or truncations."""
        with LogFile.open(self.disk, path) as log:
            for slab in log.slabs(offset, end):
                self._waiting.extend(_definitions(slab, before))
                before = before.merged(VClock(slab.newest()))

    def settle(self, settled: VClock, rolled_back: Sequence[Range]) -> None:
        """Apply the definitions up to `settled`, except for rows in `rolled_back`."""
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
        """Drop the epochs before the one in force at `position`."""
        del self.epochs[: max(self._number(position), 0)]

    def at(self, position: VClock) -> SchemaTracker:
        """Return the definitions at a settled position. The caller must not modify them."""
        number = self._number(position)
        if number < 0:
            return self.epochs[0].definitions if self.epochs else SchemaTracker()
        return self.epochs[number].definitions

    def after(self, position: VClock) -> list[Epoch]:
        """Return the epochs that begin after `position`."""
        return self.epochs[self._number(position) + 1 :]

    def up_to(self, position: VClock) -> list[Epoch]:
        """Return the epochs that begin at or before `position`."""
        return self.epochs[: self._number(position) + 1]

    def _number(self, position: VClock) -> int:
        """Return the number of the epoch in force, or -1.

        Positions of a log are totally ordered, so the epochs that begin at or before one are a prefix.
        """
        return bisect_right(self.epochs, False, key=lambda epoch: not epoch.start <= position) - 1

    def _append(self, definition: _Definition, tracker: SchemaTracker) -> None:
        self.epochs.append(Epoch(definition.before, definition.after, tracker))

    def defined_by(self, path: str) -> SchemaTracker:
        """Return the definitions in a snapshot or definitions file. The caller must not modify them."""
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
                # A snapshot is ordered by space id, so definitions precede the rows of user spaces.
                if (slab.cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                    break
        return tracker


def defining(slab: Slab, rows: Cells) -> Cells:
    """Return the rows among `rows` that define spaces and indexes."""
    space_ids = slab.cells[scan.SPACE_ID, rows]
    found: Cells = rows[(space_ids == SPACE_ID) | (space_ids == INDEX_ID)]
    return found


def _definitions(slab: Slab, before: VClock) -> Iterator[_Definition]:
    """Yield the transactions of a slab that change definitions or truncate. The slab follows `before`."""
    space_ids = slab.cells[scan.SPACE_ID]
    is_wanted = (space_ids == SPACE_ID) | (space_ids == INDEX_ID)
    # Dropping a space deletes its row in `_truncate`; this delete is no truncation.
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
    """Return the highest LSN of each originator in the rows before `stop`."""
    origins, lsns = slab.cells[scan.REPLICA_ID, :stop], slab.cells[scan.LSN, :stop]
    return VClock({origin: int(lsns[origins == origin].max()) for origin in np.unique(origins).tolist()})


def _is_within(ranges: Sequence[Range], origin: int, lsn: int) -> bool:
    return any(origin == each and first <= lsn <= last for each, first, last in ranges)
