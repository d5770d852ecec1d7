"""The log of an archive: writes rows durably, and keeps the index and the settled position up to date.

All calls block on the disk; call them from one worker at a time. Rows are written undecoded, in blocks of the size that
a real server writes, into files that a real server recovers from. A new file starts exactly at the position of each
snapshot, as after a checkpoint of a real server: a start reads only the logs that begin there or later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flowstone.archive.block_index import BlockWriter, blocks_of, read_blocks
from flowstone.archive.definitions_file import DefinitionsFile
from flowstone.archive.settled_tracker import Verdicts, newest
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.slab import Slab
from flowstone.outside.disk import Disk
from flowstone.replication.limbo.control_rows import Promote, decode_control
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import FLUSH_THRESHOLD
from flowstone.xlog.directory import ListedFile, LogDirectory
from flowstone.xlog.errors import LogGap
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import Chunk, LogFile
from flowstone.xlog.writer import LogWriter

WAL_MAX_SIZE = 256 * 1024**2
"""Size in bytes at which a log file is full, as in `box.cfg`: the next write starts a new file."""

COMMIT = scan.COMMIT
FIRST_USER_SPACE_ID = 512
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)", re.ASCII)


class BrokenOrder(FlowstoneError):
    """Rows do not continue the log."""


@dataclass(slots=True)
class _Open:
    """The log file that is being written, and its index."""

    writer: LogWriter
    blocks: BlockWriter


class ArchiveLog:
    """The log of an archive. `vclock` is its durable position; `verdicts` has the settled position."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        instance_uuid: str,
        vclock: VClock,
        verdicts: Verdicts,
        version: str,
        wal_max_size: int = WAL_MAX_SIZE,
    ) -> None:
        """Start a log at `vclock`, where `verdicts` was started. The first write creates the first file."""
        self._disk = disk
        self._directory = directory
        self.instance_uuid = instance_uuid
        self._open: _Open | None = None
        self._prev_vclock: VClock | None = None
        self.verdicts = verdicts
        self.vclock = vclock
        self.version = version
        self.wal_max_size = wal_max_size
        self.row_count = 0
        """Rows written since the archive started."""
        self.byte_count = 0
        self.cut_at: VClock | None = None
        """Position of a snapshot, where the current file must end; None after the log has reached it."""
        self.was_cut = False
        """True if the file ended exactly at that position."""
        self._unindexed: LogWriter | None = None
        """A new file whose index could not be created: the next attempt continues with this file."""
        self.before_file: Callable[[], None] = lambda: None
        """Called before a new file starts at `vclock`."""

    # --- writing ---

    def write(self, rows: bytes) -> None:
        """Write new rows of whole transactions, encoded as in the log; they are durable on return."""
        slab = slab_of_rows(rows, self._directory)
        # Check before anything is written: a server does not start from a log with a repeated LSN.
        self._check_order(slab)
        first = 0
        if self.cut_at is not None:
            first = self._rows_before_cut(slab, self.cut_at)
            # Write two parts: the file must end at the position of the snapshot, inside this batch.
            self._append(slab, 0, first)
            self._end_at_cut()
        self._append(slab, first, len(slab))
        self._end_at_cut()

    def cut(self, vclock: VClock) -> None:
        """End the file at `vclock`, the position of a snapshot: now, or when the log has reached that position."""
        self.cut_at, self.was_cut = vclock, False
        self._end_at_cut()

    def flush(self) -> None:
        """Write the index up to the end of the log."""
        if self._open is not None:
            self._open.blocks.flush()

    def close(self) -> None:
        """Close the file with its end marker. The next start continues the same file."""
        if self._unindexed is not None:
            unindexed, self._unindexed = self._unindexed, None
            unindexed.close()
        if self._open is not None:
            opened, self._open = self._open, None
            try:
                opened.blocks.close()
            finally:
                opened.writer.close()

    def abandon(self) -> None:
        """Close the files as they are, without an end marker."""
        if self._unindexed is not None:
            unindexed, self._unindexed = self._unindexed, None
            unindexed.abandon()
        if self._open is not None:
            opened, self._open = self._open, None
            opened.blocks.abandon()
            opened.writer.abandon()

    def _check_order(self, slab: Slab) -> None:
        """Raise BrokenOrder unless LSNs increase: no server recovers from a log in any other order."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        for number in np.unique(replica_ids).tolist():
            mine = lsns[replica_ids == number]
            if (np.diff(mine, prepend=self.vclock.get(number)) <= 0).any():
                raise BrokenOrder(f"rows of replica {number} are out of order: {self._directory} is at {self.vclock}")

    def _append(self, slab: Slab, first: int, stop: int) -> None:
        if first == stop:
            return
        opened = self._ready()
        writer = opened.writer
        before = writer.size
        written: list[tuple[int, int, int]] = []
        vclock = self.vclock
        for start, end in _pieces(slab, first, stop):
            vclock = vclock.merged(newest(slab, start, end))
            data = slab.payload[int(slab.cells[scan.ROW_AT, start]) : int(slab.cells[scan.ROW_END, end - 1])]
            writer.append_encoded([data], vclock.to_mapping())
            written.append((start, end, writer.size))
        # One sync for all blocks of the batch. ACKs follow it, so the server may delete its logs after this.
        writer.sync(since=before)
        for start, end, size in written:
            # Update the index after the sync: it must not refer to bytes that a crash could lose.
            opened.blocks.add(slab, start, end, size)
        self.vclock = vclock
        self.row_count += stop - first
        self.byte_count += writer.size - before

    def _ready(self) -> _Open:
        """Return the file to write to: a new one if the open one is full or the upstream runs another version now."""
        if self._open is not None:
            writer = self._open.writer
            if writer.size < self.wal_max_size and writer.meta.version == self.version:
                return self._open
            self._end_file()
        return self._create()

    def _create(self) -> _Open:
        writer = self._unindexed
        if writer is None:
            self.before_file()
            lsns = self.vclock.to_mapping()
            previous = self._prev_vclock.to_mapping() if self._prev_vclock is not None else None
            meta = Meta(FileType.XLOG, self.instance_uuid, lsns, prev_vclock=previous, version=self.version)
            # Per file: readers go by the version in the header, which tells whether rows have flags
            # (docs/spec/synchro.md#limbo-recovery).
            self.verdicts.follow_version(version_of(self.version))
            # Kept until its index exists: a second attempt would find the name taken.
            writer = self._unindexed = LogWriter.create(self._disk, self._directory, meta)
        blocks = BlockWriter.create(self._disk, writer.path, writer.meta, writer.size, self.verdicts)
        self._unindexed = None
        self._open = _Open(writer, blocks)
        return self._open

    def _end_file(self) -> None:
        """Close the file, so that the next one starts here. Delete an empty file: the next one has the same name."""
        opened, self._open = self._open, None
        assert opened is not None
        start = opened.writer.meta.vclock
        is_empty = opened.writer.vclock == start
        if not is_empty:
            # Set even if closing fails: a server reports a gap unless the next file names this one.
            self._prev_vclock = VClock(start)
        try:
            opened.blocks.close()
            if is_empty:
                self._disk.unlink(opened.writer.path)
            else:
                opened.writer.close()
        finally:
            # No effect on a closed file; after an error, it releases the file.
            opened.writer.abandon()

    # --- snapshots ---

    def _rows_before_cut(self, slab: Slab, cut: VClock) -> int:
        """Return the number of rows before the cut, which are the rows in the snapshot."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        limits = np.array([cut.get(number) for number in range(int(replica_ids.max(initial=0)) + 1)], np.int64)
        later = np.flatnonzero(lsns > limits[replica_ids])
        first = int(later[0]) if len(later) else len(slab)
        # The position of a snapshot is between two transactions; if this is inside one, the log is past it.
        return first if not first or slab.cells[scan.FLAGS, first - 1] & COMMIT else 0

    def _end_at_cut(self) -> None:
        if self.cut_at is None or not self.cut_at <= self.vclock:
            return
        self.was_cut = self.cut_at == self.vclock
        self.cut_at = None
        if self.was_cut and self._open is not None and self._open.writer.meta.vclock != self.vclock.to_mapping():
            self._end_file()
            # Create the file now, not with the next row: the snapshot is published only if a file starts at its
            # position.
            self._create()

    # --- resuming ---

    def resume(self, logs: list[ListedFile]) -> None:
        """Continue after `logs`, which follow the snapshot that this log starts from; truncate a torn tail.

        Reads only rows that the index does not cover, and rows that decide about other rows. Raises LogGap if rows are
        missing between two files. An error leaves no file open.
        """
        for number, listed in enumerate(logs):
            start = VClock(listed.meta.vclock)
            if not start <= self.vclock:
                missing = [(each, self.vclock.get(each) + 1, lsn) for each, lsn in start if lsn > self.vclock.get(each)]
                raise LogGap(listed.path, self.vclock.to_mapping(), listed.meta.vclock, missing)
            self.verdicts.follow_version(version_of(listed.meta.version))
            size, blocks = self._read(listed)
            if number < len(logs) - 1:
                blocks.close()
                self._prev_vclock = start
                continue
            try:
                writer = LogWriter.resume(self._disk, listed.path, listed.meta, self.vclock.to_mapping(), size)
            except BaseException:
                blocks.abandon()
                raise
            self._open = _Open(writer, blocks)

    def _read(self, listed: ListedFile) -> tuple[int, BlockWriter]:
        """Complete the index of a log file. Return the end offset of its rows, and the index."""
        with LogFile.open(self._disk, listed.path) as log:
            known = read_blocks(self._disk, listed.path)
            # The index may be older than the log (it is completed below), but never newer: that is another file.
            if known is None or known.end > log.file.size() or known.header.offset != log.first_block:
                blocks = BlockWriter.create(self._disk, listed.path, listed.meta, log.first_block, self.verdicts)
                start = log.first_block
            else:
                for run in known.runs:
                    # Nothing in this run decides or waits, so its rows need not be read: a start takes seconds, not
                    # hours.
                    if run.is_plain and self.verdicts.is_quiet:
                        self.verdicts.skip(VClock(run.vclock))
                    else:
                        for slab in log.slabs(run.offset, run.end):
                            self.verdicts.push(slab, 0, len(slab))
                start = known.end
                blocks = BlockWriter.resume(self._disk, listed.path, known, self.verdicts)
            try:
                for chunk in log.chunks(start):
                    _add_chunk(blocks, chunk)
            except BaseException:
                blocks.abandon()
                raise
            self.vclock = blocks.vclock
            assert log.ending is not None  # set once a log is read to its end
            return log.ending.offset, blocks


def _add_chunk(blocks: BlockWriter, chunk: Chunk) -> None:
    slab = chunk.decode()
    for first, stop, end in blocks_of(chunk, slab):
        blocks.add(slab, first, stop, end)


def logs_behind(directory: LogDirectory, vclock: VClock) -> list[ListedFile]:
    """Return the logs that start at `vclock` or after it."""
    return [log for log in directory.logs if vclock <= VClock(log.meta.vclock)]


def verdicts_of(definitions: DefinitionsFile) -> Verdicts:
    """Do the same as `start_verdicts`, from a definitions file instead of a snapshot."""
    verdicts = Verdicts()
    definitions.apply_to(verdicts.schema)
    verdicts.start(VClock(definitions.vclock), definitions.promote)
    return verdicts


def start_verdicts(disk: Disk, snapshot: ListedFile) -> Verdicts:
    """Read the definitions and the owner of the limbo from the beginning of a snapshot."""
    verdicts = Verdicts()
    promote: Promote | None = None
    with LogFile.open(disk, snapshot.path) as log:
        for slab in log.slabs():
            verdicts.define(slab)
            for row in slab.rows(np.flatnonzero(slab.cells[scan.TYPE] == RequestType.RAFT_PROMOTE)):
                body = decode_control(row.type, row.body)
                promote = body if isinstance(body, Promote) else None
            # Spaces are in the order of their ids, and the state of the limbo comes before the user spaces.
            if (slab.cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                break
    verdicts.start(VClock(snapshot.meta.vclock), promote)
    return verdicts


def version_of(text: str) -> tuple[int, ...]:
    """Parse a version: `2.6.0-0-g47aa4e01e` is (2, 6, 0). An unknown format counts as 2.11.9."""
    match = _VERSION.match(text)
    return tuple(int(part) for part in match.groups()) if match else (2, 11, 9)


def _pieces(slab: Slab, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole transactions, each about as large as a block of a real server."""
    stops = np.flatnonzero(slab.cells[scan.FLAGS, first:stop] & COMMIT) + first + 1
    ends = slab.cells[scan.ROW_END, stops - 1]
    while first < stop:
        wanted = int(slab.cells[scan.ROW_AT, first]) + FLUSH_THRESHOLD
        number = min(int(np.searchsorted(ends, wanted)), len(stops) - 1)
        last = int(stops[number])
        if last <= first:
            raise BrokenOrder(f"{slab.path}: rows end inside a transaction")
        yield first, last
        first = last
