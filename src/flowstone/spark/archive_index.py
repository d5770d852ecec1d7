"""What an archive holds, from its manifest and the indexes beside its logs: the plan of every batch over it.

Reads no rows but definitions: those at the beginning of the snapshot, and of runs of blocks that have some. A batch
lies between two settled positions; its slices are ranges of whole blocks that executors decode by themselves, each with
the place in the log and the schema that hold before it. What an archive is, `docs/archive.md` tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import FIRST_USER_SPACE_ID, INDEX_ID, SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from flowstone.node.archive_blocks import Run, read_blocks
from flowstone.node.archive_manifest import Manifest, NotAnArchive, load, missing_rows, rows_text
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.contract import shape_of
from flowstone.spark.stream_order import Place, Range, Window, rows_between, within
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.reader import LogFile, Slab

SLICE_SIZE = 8 * 1024 * 1024
"""Bytes of the log per slice, unless the caller knows better: some 400 000 rows."""


class DataLoss(FlowstoneError):
    """Rows behind a position are not there any more, or never came."""


class NotSettled(FlowstoneError):
    """A batch was to end where rows may still be withdrawn, or have not come yet."""


class NoImages(FlowstoneError):
    """Tuples before and after changes were asked for where the archive does not have them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes `offset` to `end` of the log `path`, both block boundaries. `before` is the place before its first row.

    `definitions` hold there. Picklable: it is what an executor gets.
    """

    path: str
    offset: int
    end: int
    row_count: int
    before: Place
    definitions: SchemaTracker
    rolled_back: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class FormatChange:
    """The definition of a space changes so that its typed columns do: it is `was` up to `before`, `space` behind it."""

    before: VClock
    was: SpaceDefinition | None
    space: SpaceDefinition | None


@dataclass(frozen=True, slots=True)
class _Placed:
    """A run, the log it is of, and the place before it."""

    path: str
    run: Run
    before: Place


@dataclass
class ArchiveIndex:
    """The runs of all logs of an archive, in the order of the log. Open it again to see what came since."""

    disk: Disk
    directory: str
    manifest: Manifest
    _runs: list[_Placed] = field(default_factory=list)
    _snapshots: dict[str, str] = field(default_factory=dict)  # what is defined where a log begins, by path
    _rolled_back: tuple[Range, ...] = ()

    @classmethod
    def open(cls, disk: Disk, directory: str) -> ArchiveIndex:
        """Reads manifest and indexes."""
        manifest = load(disk, directory)
        if manifest is None:
            raise NotAnArchive(
                f"{directory}: there is no archive", hint="name a directory that `flowstone archive` writes"
            )
        index = cls(disk, directory, manifest)
        index._read()
        return index

    def _read(self) -> None:
        listed = scan_directory(self.disk, self.directory)
        time = 0
        for log in listed.logs:
            blocks = read_blocks(self.disk, log.path)
            if blocks is None:
                continue
            vclock = VClock(blocks.header.vclock)
            for run in blocks.runs:
                self._runs.append(_Placed(log.path, run, Place(vclock, time)))
                vclock, time = VClock(run.vclock), max(time, round(run.last_timestamp * 1e6))
        self._rolled_back = tuple(each for placed in self._runs for each in placed.run.rolled_back)
        gaps = [VClock(gap.until) for gap in self.manifest.gaps]
        for log in listed.logs:
            start = VClock(log.meta.vclock)
            snapshots = [snap.path for snap in listed.snapshots if snap.signature <= log.signature]
            # Definitions follow the log from its beginning on; behind a gap they begin anew.
            if snapshots and (not self._snapshots or start in gaps):
                self._snapshots[log.path] = snapshots[-1]

    @property
    def replicaset_uuid(self) -> str:
        return self.manifest.replicaset_uuid or ""

    @property
    def earliest(self) -> VClock:
        """Where the first log that is there begins."""
        return self._runs[0].before.vclock if self._runs else VClock(self.manifest.position)

    @property
    def settled(self) -> VClock:
        """Up to where nothing can be withdrawn any more. The logs may be ahead of the manifest."""
        settled = VClock(self.manifest.settled)
        return settled.merged(VClock(self._runs[-1].run.settled)) if self._runs else settled

    def check(self, start: VClock, end: VClock) -> None:
        """Raises NotSettled or DataLoss unless every row behind `start` up to `end` is settled, archived and there."""
        if not end <= self.settled:
            raise NotSettled(
                f"{self.directory}: {end} is not settled", hint=f"settled is what lies up to {self.settled}"
            )
        missing = missing_rows(start, self.earliest.common(end))
        if missing:
            raise DataLoss(
                f"{self.directory}: {rows_text(missing)} behind {start} came before its oldest log",
                hint="begin with a snapshot, or set failOnDataLoss=false",
            )
        for gap in self.manifest.gaps:
            if not VClock(gap.until) <= start and not end <= VClock(gap.after):
                raise DataLoss(
                    f"{self.directory}: {gap} behind {start}: {gap.why}",
                    hint="begin with the snapshot behind the gap, or set failOnDataLoss=false",
                )

    def check_images(self, start: VClock) -> None:
        """Raises NoImages unless the rows behind `start` have the tuples that they changed."""
        since = self.manifest.images_since
        if since is None or not VClock(since) <= start:
            known = "it has none" if since is None else f"it has them behind {VClock(since)}"
            raise NoImages(
                f"{self.directory}: there are no images of the rows behind {start}: {known}",
                hint="set images=ops, or archive with --images",
            )

    def cut(self, start: VClock, *, max_rows: int | None = None, max_bytes: int | None = None) -> VClock:
        """The end of a batch that begins at `start`: settled, and about as large as is allowed; at least one run.

        A transaction is in one batch whole, and so is all that was settled together with it.
        """
        rows = size = 0
        end = start
        for placed in self._runs:
            run = placed.run
            if VClock(run.vclock) <= start:
                continue
            rows, size = rows + run.row_count, size + run.end - run.offset
            is_full = (max_rows is not None and rows > max_rows) or (max_bytes is not None and size > max_bytes)
            if is_full and end != start:
                break
            end = end.merged(VClock(run.settled))
        return end

    def slices(self, start: VClock, end: VClock, *, size: int = SLICE_SIZE, spaces: Sequence[int] = ()) -> list[Slice]:
        """The blocks that hold the rows behind `start` up to `end`, in slices of about `size` bytes.

        With `spaces` those runs are left out that have no rows of them.
        """
        self.check(start, end)
        wanted = {*spaces, SPACE_ID, INDEX_ID} if spaces else None
        groups: list[list[_Placed]] = []
        definitions: list[SchemaTracker] = []
        for placed, tracker in self._with_definitions():
            run = placed.run
            if VClock(run.vclock) <= start or end <= placed.before.vclock:
                continue
            if wanted is not None and run.spaces is not None and wanted.isdisjoint(run.spaces):
                continue
            if groups and _joins(groups[-1], placed, size):
                groups[-1].append(placed)
            else:
                groups.append([placed])
                definitions.append(tracker)
        return [self._slice(group, tracker) for group, tracker in zip(groups, definitions, strict=True)]

    def _slice(self, group: Sequence[_Placed], definitions: SchemaTracker) -> Slice:
        first, last = group[0], group[-1].run
        return Slice(
            first.path,
            first.run.offset,
            last.end,
            sum(placed.run.row_count for placed in group),
            first.before,
            definitions,
            within(self._rolled_back, first.before.vclock, VClock(last.vclock)),
        )

    def format_changes(self, space_id: int, start: VClock, end: VClock) -> list[FormatChange]:
        """Where the columns of a space change behind `start` and up to `end`."""
        found: list[FormatChange] = []
        for placed, definitions in self._with_definitions():
            if not placed.run.has_definitions or VClock(placed.run.vclock) <= start or end <= placed.before.vclock:
                continue
            tracker = deepcopy(definitions)
            for before, rows, slab in self._defining_transactions(placed):
                was = tracker.schema.get(space_id)
                _apply(tracker, slab, rows)
                now = tracker.schema.get(space_id)
                if shape_of(was) != shape_of(now) and start <= before and before < end:
                    found.append(FormatChange(before, was, now))
        return found

    def definition_at(self, position: VClock, space: int | str) -> SpaceDefinition | None:
        """The space as it is defined at a settled position."""
        tracker = SchemaTracker()
        for placed, before in self._with_definitions():
            if position <= placed.before.vclock and position != placed.before.vclock:
                break
            tracker = before
            if placed.run.has_definitions:
                tracker = deepcopy(before)
                self._follow(tracker, placed, position)
        return tracker.schema.get(space)

    def _with_definitions(self) -> Iterator[tuple[_Placed, SchemaTracker]]:
        """Each run with what is defined before it. Trackers are shared, and changed by nobody."""
        tracker, path = SchemaTracker(), ""
        for placed in self._runs:
            if placed.path != path and placed.path in self._snapshots:
                tracker = SchemaTracker()
                self._define(tracker, self._snapshots[placed.path])
            path = placed.path
            yield placed, tracker
            if placed.run.has_definitions:
                tracker = deepcopy(tracker)
                self._follow(tracker, placed, VClock(placed.run.vclock))

    def _follow(self, tracker: SchemaTracker, placed: _Placed, end: VClock) -> None:
        with LogFile.open(self.disk, placed.path) as log:
            for slab in log.slabs(placed.run.offset, placed.run.end):
                kept = rows_between(slab.cells, Window(VClock(), end, self._rolled_back))
                _apply(tracker, slab, defining(slab, np.flatnonzero(kept)))

    def _defining_transactions(self, placed: _Placed) -> Iterator[tuple[VClock, Cells, Slab]]:
        """Transactions with definitions that stand: the position before each, its defining rows, their slab."""
        vclock = placed.before.vclock
        with LogFile.open(self.disk, placed.path) as log:
            for slab in log.slabs(placed.run.offset, placed.run.end):
                kept = rows_between(slab.cells, Window(VClock(), VClock(placed.run.vclock), self._rolled_back))
                rows = defining(slab, np.flatnonzero(kept))
                commits = np.flatnonzero(slab.cells[scan.FLAGS] & scan.COMMIT)
                numbers = np.searchsorted(commits, rows)
                for number in np.unique(numbers).tolist():
                    first = int(commits[number - 1]) + 1 if number else 0
                    yield vclock.merged(_newest(slab, first)), rows[numbers == number], slab
                vclock = vclock.merged(VClock(slab.newest()))

    def _define(self, tracker: SchemaTracker, path: str) -> None:
        with LogFile.open(self.disk, path) as log:
            for slab in log.slabs():
                _apply(tracker, slab, defining(slab, np.arange(len(slab))))
                # A snapshot is ordered by space id: what describes spaces stands at its beginning.
                if (slab.cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                    break


def defining(slab: Slab, rows: Cells) -> Cells:
    """Those of the rows that define spaces and indexes."""
    space_ids = slab.cells[scan.SPACE_ID, rows]
    found: Cells = rows[(space_ids == SPACE_ID) | (space_ids == INDEX_ID)]
    return found


def _apply(tracker: SchemaTracker, slab: Slab, rows: Cells) -> None:
    for row in slab.rows(rows):
        tracker.apply(row.type, row.body)


def _newest(slab: Slab, stop: int) -> VClock:
    origins, lsns = slab.cells[scan.REPLICA_ID, :stop], slab.cells[scan.LSN, :stop]
    return VClock({origin: int(lsns[origins == origin].max()) for origin in np.unique(origins).tolist()})


def _joins(group: Sequence[_Placed], placed: _Placed, size: int) -> bool:
    """Whether a run goes on where the group ends, and there is room for it."""
    first, last = group[0], group[-1]
    return last.path == placed.path and last.run.end == placed.run.offset and placed.run.end - first.run.offset <= size
