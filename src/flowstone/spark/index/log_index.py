"""The runs of all logs in a directory, and the batches planned over them.

For an archive or a spool, the runs come from the indexes beside the logs; for a plain directory, from a first pass over
the logs (`directory_index`). The only rows read here are definitions, and rows of a run in which an exact position is
searched. A batch lies between two settled positions. Its slices are ranges of whole blocks that executors decode
independently: each slice carries the place in the log and the schema that hold before its first row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.block_index import BlockRun
from flowstone.archive.manifest import Gap
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import INDEX_ID, SPACE_ID, TRUNCATE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.index.directory_index import DirectoryRuns
from flowstone.spark.index.log import NEWEST_VERSION, BatchPlan
from flowstone.spark.index.log_runs import Added, ArchiveRuns, DirectoryFacts, RunFeed, SnapshotFile, newest_at
from flowstone.spark.index.schema_epochs import SchemaEpochs, newest
from flowstone.spark.sources.options import AsOf
from flowstone.spark.sources.stream_order import Range, StreamPlace, Withdrawn, commit_times
from flowstone.xlog.block import decode_fixheader
from flowstone.xlog.block_table import FIXHEADER_SIZE
from flowstone.xlog.reader import LogFile

SLICE_SIZE = 8 * 1024 * 1024
"""Default size of a slice, in bytes of log: about 400 000 rows."""

MICROSECONDS = 1e6


class DataLoss(FlowstoneError):
    """Rows after a position no longer exist, or never arrived."""


class NotSettled(FlowstoneError):
    """A position is not settled, or lies inside a transaction."""


class EndsEarlier(NotSettled):
    """A time is later than the time up to which an archive is known to be complete."""


class NoImages(FlowstoneError):
    """Tuples before and after changes were requested, but the archive does not have them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes `offset` to `end` of the file `path`; both are block boundaries.

    `before` is the position before the first row, and `definitions` are the definitions in force at that position. In a
    snapshot, all rows are at the place `before`. Where executors do not share the file system, `data` holds the bytes
    themselves, or `remote` names the server that sends them. Picklable, because slices are sent to executors.
    """

    path: str
    offset: int
    end: int
    row_count: int
    before: StreamPlace
    definitions: SchemaTracker
    rolled_back: tuple[Range, ...] = ()
    is_snapshot: bool = False
    data: bytes | None = None
    remote: tuple[str, int, bytes] | None = None


@dataclass(frozen=True, slots=True)
class FormatChange:
    """A change of a space's typed columns: `was` holds up to the position `before`, `space` after it."""

    before: VClock
    was: SpaceDefinition | None
    space: SpaceDefinition | None


@dataclass(frozen=True, slots=True)
class _Placed:
    """A run, its log, the place before the run and the position after it."""

    path: str
    run: BlockRun
    before: StreamPlace
    vclock: VClock


@dataclass
class ArchiveIndex:
    """The runs of all logs of a directory, in log order; `refresh` adds the runs written since."""

    disk: Disk
    directory: str
    _feed: RunFeed
    facts: DirectoryFacts = field(default_factory=lambda: DirectoryFacts("", VClock(), VClock()))
    _runs: list[_Placed] = field(default_factory=list)
    _withdrawn: Withdrawn = field(default_factory=Withdrawn)
    _schema: SchemaEpochs = field(init=False)
    _settled: VClock = field(default_factory=VClock)
    _begun_at: VClock | None = None
    _cuts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _version: tuple[str, tuple[int, ...]] = ("", NEWEST_VERSION)
    """The newest file, and the version of the server that wrote it."""

    def __post_init__(self) -> None:
        self._schema = SchemaEpochs(self.disk)

    @classmethod
    def open(cls, disk: Disk, directory: str) -> ArchiveIndex:
        """Open the archive in `directory`, or scan the logs of a directory that has no manifest."""
        is_archive = archive_manifest.load(disk, directory) is not None
        index = cls(disk, directory, (ArchiveRuns if is_archive else DirectoryRuns)(disk, directory))
        index.refresh()
        return index

    # --- contents ---

    def refresh(self) -> None:
        """Add what was written since the last call. Cheap if nothing was."""
        news = self._feed.poll()
        facts = self.facts = news.facts
        gaps = {VClock(gap.until) for gap in facts.gaps}
        if news.gone:
            self._runs = [placed for placed in self._runs if placed.path not in news.gone]
        if not self._is_begun and not news.added and facts.defined_at(facts.reached) is not None:
            # There is no row after the snapshot yet.
            self._begin(facts.reached)
        for added in news.added:
            if not self._is_begun or (added.before in gaps and added.before != self._begun_at):
                self._begin(added.before)
            self._add(added)
        settled = VClock(self._runs[-1].run.settled) if self._runs else facts.settled
        for until in sorted(gaps, key=lambda vclock: vclock.signature):
            if until <= facts.settled and not until <= settled:
                # Only a snapshot follows the gap so far.
                settled = settled.merged(until)
                if not until <= self._settled and self._begun_at != until:
                    self._begin(until)
        self._settled = self._settled.merged(settled)
        self._schema.settle(self._settled, self._withdrawn.ranges)
        if news.gone:
            oldest = min((each.vclock for each in facts.snapshots), key=lambda vclock: vclock.signature, default=None)
            self._schema.forget(self.earliest if oldest is None else oldest.common(self.earliest))

    def _begin(self, position: VClock) -> None:
        """Reload the definitions in force at `position`."""
        self._schema.begin(position, self.facts.defined_at(position))
        self._begun_at = position

    @property
    def _is_begun(self) -> bool:
        return self._begun_at is not None

    def _add(self, added: Added) -> None:
        before = added.before
        time = 0
        if self._runs:
            time = max(self._runs[-1].before.time, _micros(self._runs[-1].run.last_timestamp))
        for run in added.runs:
            vclock = VClock(run.vclock)
            self._runs.append(_Placed(added.path, run, StreamPlace(before, time), vclock))
            if run.has_definitions or run.spaces is None or TRUNCATE_ID in run.spaces:
                self._schema.add(added.path, run.offset, run.end, before)
            if run.rolled_back:
                self._withdrawn.add(run.rolled_back)
            before, time = vclock, max(time, _micros(run.last_timestamp))

    @property
    def replicaset_uuid(self) -> str:
        return self.facts.replicaset_uuid

    @property
    def has_times(self) -> bool:
        return True

    @property
    def server_version(self) -> tuple[int, ...]:
        """The version of the server that wrote the newest rows; the semantics of UPSERT depend on it."""
        newest = self._runs[-1].path if self._runs else self.snapshots[-1].path if self.snapshots else ""
        if newest != self._version[0]:
            with LogFile.open(self.disk, newest) as log:
                text = (log.meta.version or "").partition("-")[0]
            version = tuple(int(part) for part in text.split(".") if part.isdecimal())
            self._version = newest, version or NEWEST_VERSION
        return self._version[1]

    @property
    def gaps(self) -> Sequence[Gap]:
        """The missing stretches of the log."""
        return self.facts.gaps

    @property
    def snapshots(self) -> tuple[SnapshotFile, ...]:
        """All complete snapshots, in ascending order."""
        return self.facts.snapshots

    @property
    def earliest(self) -> VClock:
        """The position at which the first available log begins."""
        return self._runs[0].before.vclock if self._runs else self.facts.reached

    @property
    def settled(self) -> VClock:
        """The position up to which no row can be rolled back any more."""
        return self._settled

    def snapshot_at(self, position: VClock) -> SnapshotFile:
        """Return the newest snapshot from which the state at `position` can be built.

        Raises DataLoss if there is none.
        """
        found = newest_at(self.snapshots, position)
        if found is None:
            raise DataLoss(
                f"{self.directory}: no snapshot at or before {position}",
                hint=f"the oldest snapshot is at {self.snapshots[0].vclock}"
                if self.snapshots
                else "the directory has no snapshot",
            )
        self.check(found.vclock, position)
        return found

    # --- checks ---

    def check(self, start: VClock, end: VClock) -> None:
        """Raise NotSettled or DataLoss unless every row after `start` up to `end` is settled and available."""
        if not end <= self.settled:
            raise NotSettled(f"{self.directory}: {end} is not settled", hint=f"rows are settled up to {self.settled}")
        gap = self.first_gap(start, end)
        if gap is not None:
            raise self._lost(gap, start)

    def _lost(self, gap: Gap, start: VClock) -> DataLoss:
        return DataLoss(
            f"{self.directory}: {gap} after {start}: {gap.why}",
            hint="start from a later snapshot, or set failOnDataLoss=false",
        )

    def first_gap(self, start: VClock, end: VClock) -> Gap | None:
        """Return the first gap with rows after `start` up to `end`; rows before the oldest log count as a gap."""
        missing = start.missing_rows(self.earliest.common(end))
        if missing:
            until = self.earliest.to_mapping()
            return Gap(start.to_mapping(), until, missing, 0.0, "the oldest log starts later")
        for gap in self.gaps:
            if not VClock(gap.until) <= start and not end <= VClock(gap.after):
                return gap
        return None

    def check_images(self, start: VClock) -> None:
        """Raise NoImages unless the archive has images of all rows after `start`."""
        since = self.facts.images_since
        if since is None or not since <= start:
            known = "the archive has none" if since is None else f"the archive has images after {since}"
            raise NoImages(
                f"{self.directory}: no images of the rows after {start}: {known}",
                hint="set images=ops, or archive with --images",
            )

    # --- batches ---

    def plan(self, start: VClock, *, max_rows: int, max_bytes: int) -> BatchPlan:
        """Return the next batch after `start`; its first transaction may change definitions, the others do not."""
        end = self.cut(start, max_rows=max_rows, max_bytes=max_bytes, at_definitions=True)
        return BatchPlan(start, end, self._schema.at(end), end.signature - start.signature, self.time_at(end))

    def cut(
        self,
        start: VClock,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        at_definitions: bool = False,
    ) -> VClock:
        """Return the settled end of a batch that begins at `start`: at least one run, and about as large as allowed.

        A batch never splits a transaction, nor rows that were settled together. A batch ends before a gap; a batch that
        would begin at a gap raises DataLoss. With `at_definitions`, a batch ends before the first transaction that
        changes definitions or truncates a space, or right after that transaction if the batch begins with it.
        """
        rows = size = 0
        end = start
        gaps = {VClock(gap.until): gap for gap in self.gaps if not VClock(gap.until) <= start}
        for number in range(self._first_after(start), len(self._runs)):
            run = self._runs[number].run
            if gaps and self._runs[number].before.vclock in gaps:
                break
            rows, size = rows + run.row_count, size + run.end - run.offset
            is_full = (max_rows is not None and rows > max_rows) or (max_bytes is not None and size > max_bytes)
            if is_full and end != start:
                break
            end = end.merged(VClock(run.settled))
        if end == start and gaps and start != self.settled:
            raise self._lost(min(gaps.values(), key=lambda gap: VClock(gap.until).signature), start)
        if at_definitions and (epochs := self._schema.after(start)):
            first = epochs[0]
            limit = first.before if start != first.before and start <= first.before else first.start
            if limit <= end:
                return limit
        return end

    def cut_before_gap(self, start: VClock) -> VClock:
        """Return the last settled position reachable from `start` without a gap; `start` if the gap follows at once."""
        end = start
        if start.missing_rows(self.earliest):
            return start
        gaps = {VClock(gap.until) for gap in self.gaps if not VClock(gap.until) <= start}
        for number in range(self._first_after(start), len(self._runs)):
            if self._runs[number].before.vclock in gaps:
                break
            end = end.merged(VClock(self._runs[number].run.settled))
        return end

    def stretches(self, start: VClock, end: VClock) -> list[tuple[VClock, VClock]]:
        """Split `start` to `end` into stretches without gaps; the result is one stretch if nothing is missing."""
        found: list[tuple[VClock, VClock]] = []
        while (gap := self.first_gap(start, end)) is not None:
            until = self.cut_before_gap(start).common(end)
            if until != start and start <= until:
                found.append((start, until))
            start = VClock(gap.until)
        return [*found, (start, end)]

    def slices(self, start: VClock, end: VClock, *, size: int = SLICE_SIZE, spaces: Sequence[int] = ()) -> list[Slice]:
        """Return the blocks that hold the rows after `start` up to `end`, in slices of about `size` bytes.

        With `spaces`, runs without rows of these spaces are skipped.
        """
        self.check(start, end)
        wanted = {*spaces, SPACE_ID, INDEX_ID} if spaces else None
        groups: list[list[_Placed]] = []
        for number in range(self._first_after(start), len(self._runs)):
            placed = self._runs[number]
            if end <= placed.before.vclock:
                break
            if wanted is not None and placed.run.spaces is not None and wanted.isdisjoint(placed.run.spaces):
                continue
            if groups and _joins(groups[-1], placed, size):
                groups[-1].append(placed)
            else:
                groups.append([placed])
        return [self._slice(group) for group in groups]

    def _slice(self, group: Sequence[_Placed]) -> Slice:
        first, last = group[0], group[-1]
        return Slice(
            first.path,
            first.run.offset,
            last.run.end,
            sum(placed.run.row_count for placed in group),
            first.before,
            self._schema.at(first.before.vclock),
            self._withdrawn.within(first.before.vclock, last.vclock),
        )

    def size_between(self, start: VClock, end: VClock) -> int:
        """Return the approximate number of log bytes between two positions."""
        stop = bisect_left(self._runs, True, key=lambda placed: end <= placed.before.vclock)
        return sum(placed.run.end - placed.run.offset for placed in self._runs[self._first_after(start) : stop])

    def snapshot_slices(self, snapshot: SnapshotFile, *, size: int = SLICE_SIZE) -> list[Slice]:
        """Return the blocks of a snapshot in slices of about `size` bytes. The row count of each slice is unknown."""
        place = StreamPlace(snapshot.vclock, self.time_of(snapshot))
        definitions = self._schema.defined_by(snapshot.path)
        cuts = [block for block, _ in self._blocks(snapshot)[:1]]
        stop = cuts[0] if cuts else 0
        ends = []
        for block, end in self._blocks(snapshot):
            if block - cuts[-1] >= size:
                cuts.append(block)
                ends.append(block)
            stop = end
        return [
            Slice(snapshot.path, offset, end, 0, place, definitions, is_snapshot=True)
            for offset, end in zip(cuts, [*ends, stop], strict=True)
        ]

    def _blocks(self, snapshot: SnapshotFile) -> list[tuple[int, int]]:
        """Return the start and end offset of each block of a snapshot, reading only the block headers."""
        known = self._cuts.get(snapshot.path)
        if known is None:
            known = self._cuts[snapshot.path] = []
            with LogFile.open(self.disk, snapshot.path) as log:
                at = log.first_block
                while (header := decode_fixheader(log.file.read_at(at, FIXHEADER_SIZE))) is not None:
                    known.append((at, at + FIXHEADER_SIZE + header.size))
                    at = known[-1][1]
        return known

    def time_of(self, snapshot: SnapshotFile) -> int:
        """Return the commit time of a snapshot's rows: not before any row below it, nor after any row above it.

        The timestamp inside the snapshot is the time of writing, by the clock of the instance that wrote it.
        """
        number = self._first_after(snapshot.vclock)
        if number and self._runs[number - 1].vclock == snapshot.vclock:
            last = self._runs[number - 1]
            return max(last.before.time, _micros(last.run.last_timestamp))
        with LogFile.open(self.disk, snapshot.path) as log:
            slab = next(log.slabs(), None)
        own = float(np.ascontiguousarray(slab.cells[scan.TIMESTAMP, :1]).view(np.float64)[0]) if slab else 0.0
        if number < len(self._runs):
            own = min(own, self._runs[number].run.first_timestamp)
        return _micros(own)

    def time_at(self, position: VClock) -> int:
        """Return a commit time, in microseconds, that no transaction after `position` precedes."""
        number = self._first_after(position)
        if number < len(self._runs):
            return self._runs[number].before.time
        if not self._runs:
            return 0
        return max(self._runs[-1].before.time, _micros(self._runs[-1].run.last_timestamp))

    def _first_after(self, position: VClock) -> int:
        """Return the number of the first run with rows after `position`; all earlier runs end at or before it."""
        return bisect_left(self._runs, True, key=lambda placed: not placed.vclock <= position)

    # --- definitions ---

    def schema_at(self, position: VClock) -> SchemaTracker:
        """Return a copy of the definitions at a settled position."""
        return self._schema.at(position).copy()

    def definition_at(self, position: VClock, space: int | str) -> SpaceDefinition | None:
        """Return the definition of a space at a settled position."""
        return self._schema.at(position).schema.get(space)

    def definition_after(self, position: VClock, space: int | str) -> SpaceDefinition | None:
        """Return the definition of a space for the next rows after a settled position.

        If the space does not exist there, return its first later definition. A definition made by the very next
        transaction counts, because a stream that stopped before this transaction continues with it.
        """
        found = self.definition_at(position, space)
        for epoch in self._schema.after(position):
            if epoch.before != position and _is_usable(found):
                break
            now = epoch.definitions.schema.get(space)
            found = now if _is_usable(now) else found
        return found

    def last_definition(self, position: VClock, space: int | str) -> SpaceDefinition | None:
        """Return the definition of a space at a settled position, or its last one before."""
        found = self.definition_at(position, space)
        for epoch in reversed(self._schema.up_to(position)):
            if _is_usable(found):
                break
            found = epoch.definitions.schema.get(space) or found
        return found

    def format_changes(self, space_id: int, start: VClock, end: VClock) -> list[FormatChange]:
        """Return where the columns of a space change after `start` and up to `end`.

        After a space is dropped, it has no further rows; a space created again under the same name is a different
        space. A space counts as existing once it has a primary key, because nothing can be written before that.
        """
        found: list[FormatChange] = []
        was = self.last_definition(start, space_id)
        for epoch in self._schema.after(start):
            if not epoch.start <= end:
                break
            schema = epoch.definitions.schema
            now = schema.get(space_id)
            if now is None and was is not None:
                now = schema.get(was.name)
            if now is None or not _is_usable(now):
                continue
            if was is None or was.shape != now.shape:
                found.append(FormatChange(epoch.before, was, now))
            was, space_id = now, now.id
        return found

    # --- moments of the past ---

    def resolve(self, as_of: AsOf) -> VClock:
        """Return the settled position of a moment, between two transactions.

        Raises NotSettled, with the nearest positions, if the moment is not a settled position between two transactions.
        """
        if as_of.vclock is not None:
            return self._resolve_vclock(as_of.vclock)
        if as_of.lsn is not None:
            return self._resolve_lsn(as_of.lsn)
        assert as_of.time is not None
        return self._resolve_time(_micros(as_of.time))

    def doubt(self, as_of: AsOf) -> str | None:
        """Return a warning if the state at a moment is uncertain, else None.

        A plain directory does not record until when its server was writing to it.
        """
        if as_of.time is None or self.facts.known_until is not None or not (self._runs or self.snapshots):
            return None
        time = _micros(as_of.time)
        last = _end_time(self._runs[-1]) if self._runs else self.time_of(self.snapshots[-1])
        if time <= last:
            return None
        return (
            f"the last row in {self.directory} was written at {_time_text(last)}; rows written between then and "
            f"{_time_text(time)} may be missing"
        )

    def _resolve_vclock(self, wanted: VClock) -> VClock:
        if any(wanted == known for known in (*(each.vclock for each in self.snapshots), self.earliest, self.settled)):
            return wanted
        before, after = self._around(self._first_after(wanted), lambda place: not place.vclock <= wanted)
        if before != wanted or not wanted <= self.settled:
            raise self._refused(f"{wanted} is not a position between two settled transactions", before, after)
        return wanted

    def _resolve_lsn(self, lsn: int) -> VClock:
        origins = [origin for origin, _ in self._place_before(len(self._runs)).vclock if origin]
        if len(origins) != 1:
            raise NotSettled(
                f"{self.directory}: LSN {lsn} is ambiguous: {len(origins)} instances have written rows",
                hint=f"use a vclock, such as {self.settled}",
            )
        (origin,) = origins
        number = bisect_left(self._runs, True, key=lambda placed: placed.vclock.get(origin) > lsn)
        before, after = self._around(number, lambda place: place.vclock.get(origin) > lsn)
        if before.get(origin) != lsn or not before <= self.settled:
            raise self._refused(f"the position after LSN {lsn} is not settled", before, after)
        return before

    def _around(self, number: int, is_after: Callable[[StreamPlace], bool]) -> tuple[VClock, VClock]:
        """Return the last position that is not past a limit and the first one that is; both lie in or before a run."""
        before = self._place_before(number)
        if is_after(before):
            # A gap precedes the run.
            return (self._runs[number - 1].vclock if number else before.vclock), before.vclock
        for place in self._places(number):
            if is_after(place):
                return before.vclock, place.vclock
            before = place
        return before.vclock, self.settled

    def _resolve_time(self, time: int) -> VClock:
        """Return the position after the last transaction whose commit time is at most `time`."""
        number = bisect_left(self._runs, True, key=lambda placed: _end_time(placed) > time)
        found = self._place_before(number)
        is_at_beginning = not number or self._runs[number - 1].vclock != found.vclock
        for place in self._places(number):
            if place.time > time:
                break
            found, is_at_beginning = place, False
        end = max(found.time, _micros(self.facts.known_until or 0.0))
        if is_at_beginning:
            base = next((each for each in self.snapshots if each.vclock == found.vclock), None)
            if base is None or self.time_of(base) > time:
                before = self._runs[number - 1].vclock if number else found.vclock
                raise self._refused(f"the state at {_time_text(time)} is unknown", before, found.vclock)
            end = max(end, self.time_of(base))
        if number == len(self._runs) and time > end and self.facts.known_until is not None:
            raise EndsEarlier(
                f"{self.directory} ends at {_time_text(end)}, before {_time_text(time)}",
                hint="use that time or an earlier one, or no time for the newest state",
            )
        if not found.vclock <= self.settled:
            raise self._refused(f"rows written up to {_time_text(time)} are not settled", self.settled, self.settled)
        return found.vclock

    def _place_before(self, number: int) -> StreamPlace:
        if number < len(self._runs):
            return self._runs[number].before
        if not self._runs:
            return StreamPlace(self.facts.reached)
        last = self._runs[-1]
        return StreamPlace(last.vclock.merged(self.facts.reached), _end_time(last))

    def _places(self, number: int) -> Iterator[StreamPlace]:
        """Yield the place after each transaction of a run; nothing if there is no run of this number."""
        if number >= len(self._runs):
            return
        placed = self._runs[number]
        before = placed.before
        with LogFile.open(self.disk, placed.path) as log:
            for slab in log.slabs(placed.run.offset, placed.run.end):
                times = commit_times(slab.cells, before.time)
                for commit in np.flatnonzero(slab.cells[scan.FLAGS] & scan.COMMIT).tolist():
                    yield StreamPlace(before.vclock.merged(newest(slab, commit + 1)), int(times[commit]))
                before = StreamPlace(before.vclock.merged(VClock(slab.newest())), int(times[-1]))

    def _refused(self, what: str, before: VClock, after: VClock) -> NotSettled:
        before, after = before.common(self.settled), after.common(self.settled)
        near = f"{before}" if before == after else f"{before} and {after}"
        return NotSettled(f"{self.directory}: {what}", hint=f"the nearest: {near}")


def _is_usable(space: SpaceDefinition | None) -> bool:
    return space is not None and space.primary_key is not None


def _micros(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def _end_time(placed: _Placed) -> int:
    return max(placed.before.time, _micros(placed.run.last_timestamp))


def _time_text(time: int) -> str:
    return datetime.fromtimestamp(time / MICROSECONDS, UTC).isoformat()


def _joins(group: Sequence[_Placed], placed: _Placed, size: int) -> bool:
    """Return True if a run continues the group and fits into `size`."""
    first, last = group[0], group[-1]
    return last.path == placed.path and last.run.end == placed.run.offset and placed.run.end - first.run.offset <= size
