"""The log of an archive: rows as they came, durable when a call returns, with the index and the settled position.

Everything here waits for the disk: one worker at a time calls it. Rows are written undecoded, in blocks as a real
server's, into files that a real server recovers from. A file begins exactly at each snapshot of the archive, because
a server that starts from a snapshot takes what is in the middle of a file for something that never was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.node.archive_blocks import BlockWriter, blocks_of, read_blocks
from flowstone.node.archive_definitions import Definitions
from flowstone.node.archive_verdicts import Verdicts, newest
from flowstone.outside.disk import Disk
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.synchro import Promote, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import FLUSH_THRESHOLD
from flowstone.xlog.directory import ListedFile, LogDirectory
from flowstone.xlog.errors import LogGap
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import Chunk, LogFile, Slab
from flowstone.xlog.writer import LogWriter

WAL_MAX_SIZE = 256 * 1024**2
"""As in `box.cfg`: a log of this size is ended before the next write."""

COMMIT = scan.COMMIT
FIRST_USER_SPACE_ID = 512
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)", re.ASCII)


class BrokenOrder(FlowstoneError):
    """Rows that do not follow the log."""


@dataclass(slots=True)
class _Open:
    """The file that is being written, and its index."""

    writer: LogWriter
    blocks: BlockWriter


class ArchiveLog:
    """Where rows go. `vclock` is what is durable; `verdicts` knows what of it is settled."""

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
        """A log that begins at `vclock`, where `verdicts` was started. Its first file is made by the first write."""
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
        """Rows written since the start."""
        self.byte_count = 0
        self.cut_at: VClock | None = None
        """Where a file is to end because a snapshot was taken there; None again when the log has come to it."""
        self.was_cut = False
        """Whether it ended just there."""
        self._unindexed: LogWriter | None = None
        """A file that begins here and whose index could not be made: the next attempt goes on with it."""
        self.before_file: Callable[[], None] = lambda: None
        """Told that a file is about to begin at `vclock`."""

    # --- writing ---

    def write(self, rows: bytes) -> None:
        """Rows of whole transactions, none of them known, as bytes of the log; durable on return."""
        slab = slab_of_rows(rows, self._directory)
        self._check_order(slab)
        first = 0
        if self.cut_at is not None:
            first = self._rows_before_cut(slab, self.cut_at)
            self._append(slab, 0, first)
            self._end_at_cut()
        self._append(slab, first, len(slab))
        self._end_at_cut()

    def cut(self, vclock: VClock) -> None:
        """Ends the file at `vclock`, where a snapshot was taken: now, or when rows up to there have come."""
        self.cut_at, self.was_cut = vclock, False
        self._end_at_cut()

    def flush(self) -> None:
        """Brings the index up to the log."""
        if self._open is not None:
            self._open.blocks.flush()

    def close(self) -> None:
        """Ends the file with its marker; the next start goes on in it."""
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
        """Gives the files back as they are."""
        if self._unindexed is not None:
            unindexed, self._unindexed = self._unindexed, None
            unindexed.abandon()
        if self._open is not None:
            opened, self._open = self._open, None
            opened.blocks.abandon()
            opened.writer.abandon()

    def _check_order(self, slab: Slab) -> None:
        """No server recovers from a log whose LSNs do not grow."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        for number in np.unique(replica_ids).tolist():
            mine = lsns[replica_ids == number]
            if (np.diff(mine, prepend=self.vclock.get(number)) <= 0).any():
                raise BrokenOrder(f"rows of replica {number} that do not follow {self.vclock} in {self._directory}")

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
        writer.sync(since=before)
        for start, end, size in written:
            opened.blocks.add(slab, start, end, size)
        self.vclock = vclock
        self.row_count += stop - first
        self.byte_count += writer.size - before

    def _ready(self) -> _Open:
        """The file to write to: the open one, unless it is full or an upgraded server's rows come next."""
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
            self.verdicts.follow_version(version_of(self.version))
            writer = self._unindexed = LogWriter.create(self._disk, self._directory, meta)
        blocks = BlockWriter.create(self._disk, writer.path, writer.meta, writer.size, self.verdicts)
        self._unindexed = None
        self._open = _Open(writer, blocks)
        return self._open

    def _end_file(self) -> None:
        """The next file begins here. One without rows makes way for it, as that would have its name."""
        opened = self._open
        assert opened is not None
        self._open = None
        try:
            opened.blocks.close()
            if opened.writer.vclock == opened.writer.meta.vclock:
                self._disk.unlink(opened.writer.path)
                return
            opened.writer.close()
        finally:
            opened.writer.abandon()
        self._prev_vclock = VClock(opened.writer.meta.vclock)

    # --- snapshots ---

    def _rows_before_cut(self, slab: Slab, cut: VClock) -> int:
        """How many rows belong before it: those that the snapshot has."""
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        limits = np.array([cut.get(number) for number in range(int(replica_ids.max(initial=0)) + 1)], np.int64)
        behind = np.flatnonzero(lsns > limits[replica_ids])
        first = int(behind[0]) if len(behind) else len(slab)
        # A snapshot is of a moment between two transactions.
        return first if not first or slab.cells[scan.FLAGS, first - 1] & COMMIT else 0

    def _end_at_cut(self) -> None:
        if self.cut_at is None or not self.cut_at <= self.vclock:
            return
        self.was_cut = self.cut_at == self.vclock
        self.cut_at = None
        if self.was_cut and self._open is not None and self._open.writer.meta.vclock != self.vclock.to_mapping():
            self._end_file()
            self._create()

    # --- going on with what is there ---

    def resume(self, logs: list[ListedFile]) -> None:
        """Goes on behind `logs`, which follow the snapshot that this log was made for; a torn tail is cut off.

        Of what the index vouches for only that is read again which others depend on.
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
            writer = LogWriter.resume(self._disk, listed.path, listed.meta, self.vclock.to_mapping(), size)
            self._open = _Open(writer, blocks)

    def _read(self, listed: ListedFile) -> tuple[int, BlockWriter]:
        """Brings the index of a log up to its end, and gives the byte where its rows end."""
        with LogFile.open(self._disk, listed.path) as log:
            known = read_blocks(self._disk, listed.path)
            if known is None or known.end > log.file.size() or known.header.offset != log.first_block:
                blocks = BlockWriter.create(self._disk, listed.path, listed.meta, log.first_block, self.verdicts)
                start = log.first_block
            else:
                for run in known.runs:
                    if run.is_plain and self.verdicts.is_quiet:
                        self.verdicts.skip(VClock(run.vclock))
                    else:
                        for slab in log.slabs(run.offset, run.end):
                            self.verdicts.push(slab, 0, len(slab))
                start = known.end
                blocks = BlockWriter.resume(self._disk, listed.path, known, self.verdicts)
            for chunk in log.chunks(start):
                _add_chunk(blocks, chunk)
            self.vclock = blocks.vclock
            assert log.ending is not None  # a log read to its end without an error has one
            return log.ending.offset, blocks


def _add_chunk(blocks: BlockWriter, chunk: Chunk) -> None:
    slab = chunk.decode()
    for first, stop, end in blocks_of(chunk, slab):
        blocks.add(slab, first, stop, end)


def logs_behind(directory: LogDirectory, vclock: VClock) -> list[ListedFile]:
    """The logs that begin at `vclock` or behind it."""
    return [log for log in directory.logs if vclock <= VClock(log.meta.vclock)]


def verdicts_of(definitions: Definitions) -> Verdicts:
    """As `start_verdicts`, where there is no snapshot."""
    verdicts = Verdicts()
    definitions.apply_to(verdicts.schema)
    verdicts.start(VClock(definitions.vclock), definitions.promote)
    return verdicts


def start_verdicts(disk: Disk, snapshot: ListedFile) -> Verdicts:
    """What the beginning of a snapshot says about definitions and the queue of synchronous transactions."""
    verdicts = Verdicts()
    promote: Promote | None = None
    with LogFile.open(disk, snapshot.path) as log:
        for slab in log.slabs():
            verdicts.define(slab)
            for row in slab.rows(np.flatnonzero(slab.cells[scan.TYPE] == RequestType.RAFT_PROMOTE)):
                body = decode_control(row.type, row.body)
                promote = body if isinstance(body, Promote) else None
            # Spaces are in the order of their ids, and the queue's state stands before those of users.
            if (slab.cells[scan.SPACE_ID] >= FIRST_USER_SPACE_ID).any():
                break
    verdicts.start(VClock(snapshot.meta.vclock), promote)
    return verdicts


def version_of(text: str) -> tuple[int, ...]:
    """`2.6.0-0-g47aa4e01e` as (2, 6, 0)."""
    match = _VERSION.match(text)
    return tuple(int(part) for part in match.groups()) if match else (2, 11, 9)


def _pieces(slab: Slab, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The rows in stretches of whole transactions, each for a block as large as a real server's."""
    behind = np.flatnonzero(slab.cells[scan.FLAGS, first:stop] & COMMIT) + first + 1
    ends = slab.cells[scan.ROW_END, behind - 1]
    while first < stop:
        wanted = int(slab.cells[scan.ROW_AT, first]) + FLUSH_THRESHOLD
        number = min(int(np.searchsorted(ends, wanted)), len(behind) - 1)
        last = int(behind[number])
        if last <= first:
            raise BrokenOrder(f"{slab.path}: rows that end inside a transaction")
        yield first, last
        first = last
