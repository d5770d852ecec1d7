"""Reads log files as a stream of pieces, each with the schema in force, optionally without rolled back rows.

A `Piece` is a selection of rows of one slab that share a schema. Workers decode chunks ahead of the reader, in order;
everything that depends on earlier rows (schema, settled transactions) runs in the reader's thread.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from flowstone.box.schema import Schema, SchemaTracker, UnknownSpace
from flowstone.box.system import FIRST_USER_SPACE_ID, INDEX_ID, SPACE_ID
from flowstone.history.selection import Mask, Selection
from flowstone.history.settled_rows import Settling
from flowstone.iproto import scan as rows_of
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Skipped, Slab
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.errors import LogGap
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import Chunk, Ending, EndingKind, LogFile

DECODERS = 2
"""Threads that decode ahead of the reader."""

FLAGS_SINCE = (2, 8, 1)
"""The first release whose rows have flags that mark synchronous transactions."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of `slab` by number, ascending, for which `schema` is in force."""

    meta: Meta
    slab: Slab
    rows: Cells
    schema: Schema


@dataclass
class ReadReport:
    """Problems and counts of a reading; complete when its pieces have been read to the end."""

    endings: dict[str, Ending] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    gaps: list[LogGap] = field(default_factory=list)  # accepted with `force`
    unread: list[Skipped] = field(default_factory=list)  # in files that were read for their definitions only
    rows_rolled_back: int = 0
    rows_pending: int = 0
    first_pending: tuple[int, int] | None = None  # replica id and LSN of the first pending transaction

    def warnings(self) -> Iterator[str]:
        """Yield a line for each part of the files that could not be read."""
        for path, ending in self.endings.items():
            if ending.kind is EndingKind.TORN:
                yield f"{path}: torn at byte {ending.offset} ({ending.what}); {ending.lost} bytes lost"
        for skipped in self.skipped:
            yield f"{skipped.path}: skipped bytes {skipped.offset} to {skipped.end}: {skipped.why}"
        for gap in self.gaps:
            yield gap.message
        for skipped in self.unread:
            yield f"{skipped.path}: unreadable at byte {skipped.offset} ({skipped.why}); definitions may be missing"

    def notes(self) -> Iterator[str]:
        """Yield a line for each kind of rows that were read and not delivered."""
        if self.rows_rolled_back:
            yield f"{_rows(self.rows_rolled_back)} skipped (all spaces): rolled back"
        if self.rows_pending:
            yield f"{_rows(self.rows_pending)} withheld (all spaces): neither confirmed nor rolled back in this log"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


class Reading:
    """Reads log files in the given order. Iterate over `pieces()` once.

    `settled` omits rolled back and pending transactions. `force` continues after damage and gaps. `workers` is the
    number of threads that decode ahead; 0 decodes in the reader's thread. `on_progress` is called with (bytes read,
    path) for each chunk, `on_end` with the report at the end.
    """

    def __init__(
        self,
        outside: Outside,
        paths: Sequence[str],
        *,
        selection: Selection = Selection(),
        settled: bool = False,
        force: bool = False,
        workers: int = DECODERS,
        on_progress: Callable[[int, str], None] | None = None,
        on_end: Callable[[ReadReport], None] | None = None,
    ) -> None:
        self._outside = outside
        self._paths = tuple(paths)
        self._selection = selection
        self._force = force
        self._workers = workers
        self._has_logs = any(path.endswith(".xlog") for path in paths)
        self._on_progress = on_progress
        self._on_end = on_end
        self._trackers: dict[str, SchemaTracker] = {}
        # For logs without flags: the schema at the row being read. `_trackers` change only once a row is settled.
        self._ahead: dict[str, SchemaTracker] = {}
        self._settlings: dict[str, Settling] | None = {} if settled else None
        self._found: set[int | str] = set()
        self._names: dict[str, None] = {}  # of all spaces that ever existed, in order of appearance
        self._noted: Schema | None = None
        self._reached: dict[str, VClock] = {}
        self.report = ReadReport()

    def pieces(self) -> Iterator[Piece]:
        """Yield the selected rows in log order. Raise an error of a file when the damaged part is reached."""
        for path in self._paths:
            with LogFile.open(self._outside.disk, path, force=self._force) as log:
                is_after_gap = self._is_behind_gap(path, log.meta)
                self._schema_of(path, log.meta)
                if is_after_gap:
                    yield from self._selected(self._pass_gap(log.meta))
                for slab in self._slabs(log):
                    self._follow(log.meta, slab)
                    yield from self._selected(self._settle(log, slab))
                self.report.skipped.extend(log.skipped)
                if log.ending is not None:
                    self.report.endings[path] = log.ending
        if self._settlings is not None:
            self.report.rows_pending = sum(settling.pending for settling in self._settlings.values())
            waiting = (settling.first_pending for settling in self._settlings.values())
            self.report.first_pending = next(filter(None, waiting), None)
        self._check_spaces()
        if self._on_end is not None:
            self._on_end(self.report)

    def _slabs(self, log: LogFile) -> Iterator[Slab]:
        def chunks() -> Iterator[Chunk]:
            for chunk in log.chunks():
                if self._on_progress is not None:
                    self._on_progress(chunk.end - chunk.base, log.path)
                yield chunk

        for slab in self._decoded(chunks()):
            self.report.skipped.extend(slab.skipped)
            yield slab

    def _decoded(self, chunks: Iterator[Chunk]) -> Iterator[Slab]:
        if self._workers:
            return self._outside.blocking.map(Chunk.decode, chunks, self._workers)
        return map(Chunk.decode, chunks)

    def _is_behind_gap(self, path: str, meta: Meta) -> bool:
        """Return True if rows are missing between the files read so far and this log; without `force` raise LogGap."""
        before, start = self._reached.get(meta.instance_uuid), VClock(meta.vclock)
        is_after_gap = before is not None and meta.file_type is FileType.XLOG and not start <= before
        if before is not None and is_after_gap:
            missing = [(number, before.get(number) + 1, lsn) for number, lsn in start if lsn > before.get(number)]
            gap = LogGap(path, before.to_mapping(), meta.vclock, missing)
            if not self._force:
                raise gap
            self.report.gaps.append(gap)
        if before is None or meta.file_type is FileType.XLOG:
            self._reached[meta.instance_uuid] = start
        return is_after_gap

    def _follow(self, meta: Meta, slab: Slab) -> None:
        if meta.file_type is FileType.XLOG:
            reached = self._reached[meta.instance_uuid]
            self._reached[meta.instance_uuid] = reached.merged(VClock(slab.newest()))

    def _schema_of(self, path: str, meta: Meta) -> None:
        """Load the schema in force at the start of the file, from the other files in its directory."""
        if meta.instance_uuid in self._trackers:
            return
        tracker = self._trackers[meta.instance_uuid] = SchemaTracker()
        if meta.file_type is not FileType.XLOG:
            return
        for file in _before(scan_directory(self._outside.disk, posixpath.dirname(path) or "."), path):
            with LogFile.open(self._outside.disk, file.path, force=True) as log:
                for slab in self._decoded(log.chunks()):
                    self.report.unread.extend(slab.skipped)
                    _apply(tracker, slab, _definitions(slab.cells))
                    # A snapshot is ordered by space id: definitions are at its beginning.
                    if file.file_type is FileType.SNAP and (slab.cells[rows_of.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                        break
                self.report.unread.extend(log.skipped)

    def _pass_gap(self, meta: Meta) -> Iterator[Piece]:
        """With `settled`, yield settled rows that were queued after transactions whose verdict may be in the gap."""
        settling = self._settlings.get(meta.instance_uuid) if self._settlings is not None else None
        if settling is not None:
            for decided, rows in settling.pass_gap():
                yield from self._by_schema(meta, decided, rows)

    def _settle(self, log: LogFile, slab: Slab) -> Iterator[Piece]:
        """Yield the slab as pieces of one schema each; with `settled`, all rows settled now, also of earlier slabs."""
        meta = log.meta
        everything = np.arange(len(slab), dtype=np.int64)
        if self._settlings is None:
            yield from self._by_schema(meta, slab, everything)
            return
        settling = self._settlings.setdefault(meta.instance_uuid, Settling())
        if meta.file_type is FileType.SNAP:
            settling.pass_snapshot(meta, slab)
            yield from self._by_schema(meta, slab, everything)
            return
        synchronous = self._synchronous_rows(meta, slab) if _version(meta.version) < FLAGS_SINCE else None
        # The file knows what was skipped between blocks; the report has the blocks that failed to decode.
        holes = [each.offset for each in (*log.skipped, *self.report.skipped) if each.path == log.path]
        # Definitions take effect when they are settled, like any other row.
        for decided, rows in settling.push(slab, synchronous, holes):
            yield from self._by_schema(meta, decided, rows)
        self.report.rows_rolled_back = sum(each.rolled_back for each in self._settlings.values())

    def _by_schema(self, meta: Meta, slab: Slab, rows: Cells) -> Iterator[Piece]:
        tracker = self._trackers[meta.instance_uuid]
        for part, schema in _parts(tracker, slab, rows):
            self._note_names(schema)
            yield Piece(meta, slab, part, schema)
        self._note_names(tracker.schema)

    def _note_names(self, schema: Schema) -> None:
        if schema is not self._noted:
            self._noted = schema
            self._names |= dict.fromkeys(space.name for space in schema if space.id >= FIRST_USER_SPACE_ID)

    def _synchronous_rows(self, meta: Meta, slab: Slab) -> Mask:
        """Return which rows belong to synchronous spaces, by the schema at each row, settled or not."""
        tracker = self._ahead.get(meta.instance_uuid)
        if tracker is None:
            tracker = self._ahead[meta.instance_uuid] = deepcopy(self._trackers[meta.instance_uuid])
        space_ids = slab.cells[rows_of.SPACE_ID]
        found: Mask = np.zeros(len(slab), np.bool_)
        for part, schema in _parts(tracker, slab, np.arange(len(slab), dtype=np.int64)):
            _check_defined(slab, part, schema)
            found[part] = np.isin(space_ids[part], sorted(schema.synchronous))
        return found

    def _selected(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            kept = self._select(piece)
            if len(kept.rows):
                yield kept

    def _select(self, piece: Piece) -> Piece:
        slab, rows = piece.slab, piece.rows
        self._found.update(space for space in self._selection.spaces if piece.schema.get(space) is not None)
        before_logs = piece.meta.file_type is FileType.SNAP and self._has_logs
        mask = self._selection.mask(slab, rows, piece.schema, comes_before_logs=before_logs)
        # Without its snapshot a log does not define its spaces; selected by number, they are found by their rows.
        numbers = [space for space in self._selection.spaces if isinstance(space, int) and space not in self._found]
        self._found.update(space for space in numbers if (slab.cells[rows_of.SPACE_ID, rows] == space).any())
        return piece if mask.all() else Piece(piece.meta, slab, rows[mask], piece.schema)

    def _check_spaces(self) -> None:
        for space in self._selection.spaces:
            if space in self._found or space in self._names:
                continue
            where = f"{self._paths[0]} and {len(self._paths) - 1} more" if len(self._paths) > 1 else self._paths[0]
            names = sorted(self._names)
            known = f"known spaces: {', '.join(names)}" if names else "the log defines no spaces; add its snapshot"
            raise UnknownSpace(f"no space {space!r} in {where}", hint=known)


def _definitions(cells: Cells) -> Cells:
    """Return the numbers of the rows that define spaces and indexes."""
    space_ids = cells[rows_of.SPACE_ID]
    found: Cells = np.flatnonzero((space_ids == SPACE_ID) | (space_ids == INDEX_ID))
    return found


def _parts(tracker: SchemaTracker, slab: Slab, rows: Cells) -> Iterator[tuple[Cells, Schema]]:
    """Yield the rows in parts that share a schema, with that schema; apply their definitions to `tracker`."""
    defining = _definitions(slab.cells if len(rows) == len(slab) else slab.cells[:, rows])
    start = 0
    while len(defining):
        # Consecutive definitions are one change of the schema.
        run = 1 + int(np.argmin(np.append(np.diff(defining) == 1, False)))
        end = int(defining[run - 1]) + 1
        yield rows[start:end], tracker.schema
        _apply(tracker, slab, rows[defining[:run]])
        start, defining = end, defining[run:]
    if start < len(rows):
        yield rows[start:], tracker.schema


def _apply(tracker: SchemaTracker, slab: Slab, rows: Cells) -> None:
    for row in slab.rows(rows):
        tracker.apply(row.type, row.body)


def _before(directory: LogDirectory, path: str) -> list[ListedFile]:
    """Return the newest snapshot at or before the log `path`, and the logs between the two."""
    listed = next((log for log in directory.logs if posixpath.basename(log.path) == posixpath.basename(path)), None)
    if listed is None:
        return []
    snapshots = [file for file in directory.snapshots if file.signature <= listed.signature]
    start = snapshots[-1].signature if snapshots else 0
    logs = [log for log in directory.logs if start <= log.signature < listed.signature]
    return [*snapshots[-1:], *logs]


def _version(text: str) -> tuple[int, ...]:
    """Parse `2.6.0-0-g47aa4e01e` as (2, 6, 0); a text without a version counts as the newest."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else FLAGS_SINCE


def _check_defined(slab: Slab, rows: Cells, schema: Schema) -> None:
    """Raise UnknownSpace if a space is not defined: in logs without flags only the definition tells whether a row is
    synchronous."""
    for space_id in np.unique(slab.cells[rows_of.SPACE_ID, rows]).tolist():
        if space_id >= FIRST_USER_SPACE_ID and schema.get(space_id) is None:
            raise UnknownSpace(
                f"{slab.path}: cannot tell whether rows of space {space_id} are settled: the log does not define it",
                hint="read the directory with the snapshot, or read without settling",
            )
