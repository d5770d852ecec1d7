"""The write-ahead log of a running node. All rows that are submitted in one turn are written together.

Relies on `xlog.writer` for the files and on `outside.blocking` for everything that waits for a sync of the disk. Rows
arrive encoded, numbered and grouped. Their submitter interprets them, and rolls them back if the write fails. Rows are
never reported as written before they survive a crash of the process (mode `write`) or a loss of power (mode `fsync`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from flowstone.errors import FlowstoneError
from flowstone.node.configuration import TOO_LONG_THRESHOLD
from flowstone.node.counters import SECONDS_BOUNDS, Histogram, WalCounters
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock
from flowstone.xlog.block import TRANSACTION_SIZE_MAX
from flowstone.xlog.block_table import FIXHEADER_SIZE
from flowstone.xlog.errors import BlockTooLarge, WriteFailed
from flowstone.xlog.meta import FileType, Meta, file_name
from flowstone.xlog.writer import SMALL_SIZE_MAX, LogWriter

LOG = logging.getLogger("flowstone.node")

QUICK_SECONDS = SECONDS_BOUNDS[0]

WAL_MAX_SIZE = 256 * 1024**2
"""Default of `wal_max_size`: a log of this size is closed before the next write."""

Done = Callable[[FlowstoneError | None], None]


class WalMode(Enum):
    """The values of `wal_mode`."""

    NONE = "none"
    WRITE = "write"
    FSYNC = "fsync"


@dataclass(frozen=True, slots=True)
class LastLog:
    """The last log that was read or written. Its rows end at offset `size`; `is_complete`: the end marker follows."""

    path: str
    meta: Meta
    size: int
    is_complete: bool


class JournalClosed(FlowstoneError):
    """Rows were submitted after `close`. They are not written: another process may own the files by now."""


class Journal:
    """Writes rows in batches, and calls the submitters when they are written.

    `submit` queues rows; `flush`, called once per turn, writes all queued rows. A short write happens in `flush`
    itself. A worker does writes that have to wait for the disk (mode `fsync`, a new file, the end of a full file), one
    batch at a time; later submissions form the next batch.
    """

    def __init__(
        self,
        outside: Outside,
        directory: str,
        *,
        instance_uuid: str,
        vclock: VClock,
        replica_id: int = 0,
        mode: WalMode = WalMode.WRITE,
        wal_max_size: int = WAL_MAX_SIZE,
        version: str = "Flowstone",
        last: LastLog | None = None,
    ) -> None:
        """Continue at `vclock`, where recovery ended, after its `last` log. No file is opened yet."""
        self._outside = outside
        self._directory = directory
        self._instance_uuid = instance_uuid
        self._version = version
        self._writer: LogWriter | None = None
        self._rows: list[bytes] = []
        self._done: list[Done] = []
        # Positions at which `rotate` ends the file: the number of queued submissions before each, and the vclock there.
        self._cuts: list[tuple[int, dict[int, int]]] = []
        self._must_sync = False
        self._worker: asyncio.Task[None] | None = None
        # True while callbacks run. A callback may submit rows, and these must not be written, or fail, before the
        # callbacks of earlier rows were called.
        self._is_telling = False
        self._is_closed = False
        self._now = outside.clock.monotonic
        self._written_lsns: dict[int, int] = {}
        self._rows_before = self._start_signature = 0
        self.continue_at(vclock, last)
        self.replica_id = replica_id
        self.mode = mode
        self.wal_max_size = wal_max_size
        self.on_written: list[Callable[[bytes, VClock], None]] = []
        """Called with the rows of every successful write, and the vclock after them; for relays."""
        self.on_failure: list[Callable[[], None]] = []
        """Called after a failed write, when all submitters were called; for elections. It must not submit rows."""
        self.written_bytes = 0
        """Bytes written to the files since the start."""
        self.counters = WalCounters()
        self.too_long_threshold = TOO_LONG_THRESHOLD
        """Seconds after which a write is logged as too long."""
        self.size_limit: int | None = None
        self.on_size: Callable[[], None] | None = None
        """Called after each write while `written_bytes` is at or above `size_limit`; for checkpoints."""

    def continue_at(self, vclock: VClock, last: LastLog | None = None) -> None:
        """Continue at `vclock`, after the `last` log, once the data is loaded. No row may have been submitted since."""
        # Rows are counted by LSNs; a rejoin sets the vclock to another one, which must not change the counter.
        self._rows_before, self._start_signature = self.row_count, vclock.signature
        self._last = last
        self._prev_vclock = last.meta.vclock if last else None
        self._lsns = vclock.to_mapping()
        self._written_lsns = vclock.to_mapping()
        self._written: VClock | None = vclock

    @property
    def vclock(self) -> VClock:
        """The vclock after the last submitted row."""
        return VClock(self._lsns)

    @property
    def written_vclock(self) -> VClock:
        """The vclock after the last written row."""
        if self._written is None:
            self._written = VClock(self._written_lsns)
        return self._written

    @property
    def row_count(self) -> int:
        """Rows written since the start."""
        return self._rows_before + sum(self._written_lsns.values()) - self._start_signature

    @property
    def is_idle(self) -> bool:
        """True if all submitted rows are written, or have failed."""
        return self._worker is None and not self._done

    def next_lsn(self, replica_id: int) -> int:
        """Return the LSN of the next submitted row of `replica_id`; 0 stands for local rows."""
        return self._lsns.get(replica_id, 0) + 1

    def submit(self, rows: bytes, count: int, done: Done, *, local_count: int = 0, sync: bool = False) -> None:
        """Queue the encoded rows of whole transactions, to be written together with the other rows of this turn.

        `count` rows belong to this instance and are numbered from `next_lsn(replica_id)`; `local_count` rows are local
        and numbered from `next_lsn(0)`. `done` is called once: with None when the rows are written, or with the error.
        After an error all rows that are not written fail, the last submission first, and `done` must not submit rows.
        With `sync` the rows survive a loss of power in mode `write`, too. Raise JournalClosed after `close`, and
        BlockTooLarge if the rows do not fit in a block.
        """
        self._check_submission(rows)
        # The LSNs are taken now and not at the write: the caller has encoded them into the rows.
        lsns = self._lsns
        lsns[self.replica_id] = lsns.get(self.replica_id, 0) + count
        if local_count:
            lsns[0] = lsns.get(0, 0) + local_count
        self._must_sync = self._must_sync or sync
        self._rows.append(rows)
        self._done.append(done)

    def submit_replicated(self, rows: bytes, lsns: Mapping[int, int], done: Done) -> None:
        """Queue rows as `submit` does, but numbered by other instances; `lsns` has the last LSN of each of them."""
        self._check_submission(rows)
        for replica_id, lsn in lsns.items():
            assert lsn > self._lsns.get(replica_id, 0), "rows of one originator come in their order, each once"
            self._lsns[replica_id] = lsn
        self._rows.append(rows)
        self._done.append(done)

    def _check_submission(self, rows: bytes) -> None:
        if self._is_closed:
            raise self._closed()
        if len(rows) > TRANSACTION_SIZE_MAX:
            raise BlockTooLarge(self._directory, 0, len(rows), TRANSACTION_SIZE_MAX)

    @property
    def is_ready(self) -> bool:
        """True if nothing is queued and a small write is short, so that `write_now` may be called."""
        if self._done or self._worker is not None or self._is_telling or self.mode is WalMode.FSYNC:
            return False
        return not self._takes_long()

    def write_now(self, rows: bytes, count: int) -> None:
        """Submit and write the rows of a single request; raise the error if the write fails. Requires `is_ready`."""
        if self._is_closed:
            raise self._closed()
        # `_lsns` is replaced only after the write: if it fails, the LSN is free again, and nothing else was submitted
        # meanwhile.
        after = self._lsns.copy()
        after[self.replica_id] = after.get(self.replica_id, 0) + count
        try:
            if len(rows) <= SMALL_SIZE_MAX and self._writer is not None and self.mode is WalMode.WRITE:
                begun = self._now()
                self._writer.append_small(rows, after)
                seconds, quick = self._now() - begun, self.counters.write_seconds
                if seconds > QUICK_SECONDS:
                    self._took(seconds, quick)
                else:  # `_took` inlined: for a single request the cost of a call matters
                    quick.counts[0] += 1
                    quick.sum += seconds
                    self.counters.failure = None
                self.written_bytes += FIXHEADER_SIZE + len(rows)
            else:
                self._write([rows], after)
        except Exception as error:
            self._fail([], error)
            raise self._as_failure(error) from error
        self._lsns = after.copy()
        self._succeed([rows], [], after)

    def flush(self) -> None:
        """Write the queued rows: at once if that is short, else in a worker, which calls every `done` afterwards."""
        # One batch at a time: a second writer could put later rows into the file before earlier ones.
        if self._worker is not None or not self._done:
            return
        if self._is_telling:
            # A `done` of the last write has submitted rows: they wait until all its other `done` were called.
            asyncio.get_running_loop().call_soon(self.flush)
            return
        if self._takes_long():
            self._worker = asyncio.get_running_loop().create_task(self._work())
            return
        rows, done, after = self._take()
        self._is_telling = True
        try:
            self._write(rows, after)
        except Exception as error:
            self._fail(done, error)
        else:
            self._succeed(rows, done, after)
        finally:
            self._is_telling = False

    async def drain(self) -> None:
        """Wait until all rows submitted so far are written, or have failed. Later submissions are not waited for."""
        if self.is_idle:
            return
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # An empty submission marks the place; the log writes nothing for it.
        self._rows.append(b"")
        self._done.append(lambda error: None if passed.done() else passed.set_result(None))
        self.flush()
        if self._worker is not None:
            self._worker.add_done_callback(lambda worker: _pass_on(worker, passed))
        await passed

    async def rotate(self, at_end: Callable[[], None] | None = None) -> VClock:
        """Close the file after all rows submitted so far are written, and return the vclock after them.

        `at_end` is called after the `done` of these rows, and before the `done` of any later row. The next write
        creates the next file. Raise the error if the write of these rows, or closing the file, fails; the journal then
        continues with the current file.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: FlowstoneError | None) -> None:
            if written.cancelled():
                return
            if error is None:
                if at_end is not None:
                    at_end()
                written.set_result(None)
            else:
                written.set_exception(error)

        if self._is_closed:
            raise self._closed()
        # The submitted vclock: no row can be submitted between here and the cut below.
        position = self.vclock
        self._rows.append(b"")
        self._done.append(done)
        self._cuts.append((len(self._done), dict(self._lsns)))
        self.flush()
        await written
        return position

    async def close(self) -> None:
        """Write the queued rows and close the file with its end marker. Later submissions raise JournalClosed."""
        # Before the loop: rows that callbacks submit while the log drains are rejected, so the loop ends.
        self._is_closed = True
        while not self.is_idle:
            await self.drain()
        if self._writer is not None:
            await self._outside.blocking(self._end_file)
        if self._writer is not None:
            # The first write to a new file failed, and the file has no rows. The next start continues it.
            self._writer.abandon()
            self._writer = None

    def _closed(self) -> JournalClosed:
        return JournalClosed(f"the log in {self._directory} is closed", hint="end transactions before the node stops")

    def _takes_long(self) -> bool:
        if self.mode is WalMode.NONE:
            return False
        writer = self._writer
        return (
            self.mode is WalMode.FSYNC
            or writer is None
            # A failed write left a tail of unknown length, which has to be cut off first.
            or not writer.is_usable
            or writer.size >= self.wal_max_size
            or self._must_sync
            or bool(self._cuts)
        )

    async def _work(self) -> None:
        """Write batches until nothing is queued, or `flush` can write the rest at once."""
        try:
            while self._done and self._takes_long():
                ends_file, must_sync = bool(self._cuts), self._must_sync
                rows, done, after = self._take()
                # Reset before the write: rows submitted during it set the flag for the next batch.
                self._must_sync = must_sync and bool(self._done)  # the rows to sync may be after the cut
                try:
                    await self._outside.blocking(self._write, rows, after, must_sync)
                except Exception as error:
                    self._fail(done, error)
                    continue
                # Called last, when the file is closed: the caller relies on a complete file.
                whose_end = done.pop() if ends_file else None
                self._succeed(rows, done, after)
                if whose_end is not None:
                    _tell(whose_end, await self._outside.blocking(self._try_to_end_file))
        finally:
            self._worker = None
        # Rows submitted after the last check of the loop have no worker.
        self.flush()

    def _take(self) -> tuple[list[bytes], list[Done], dict[int, int]]:
        """Return the next batch: all queued submissions up to the next position at which the file has to end."""
        if self._cuts:
            count, after = self._cuts.pop(0)
            # The other cuts count from the start of the queue, which is shorter now.
            self._cuts = [(end - count, lsns) for end, lsns in self._cuts]
            rows, self._rows = self._rows[:count], self._rows[count:]
            done, self._done = self._done[:count], self._done[count:]
            return rows, done, after
        rows, done = self._rows, self._done
        self._rows, self._done = [], []
        return rows, done, dict(self._lsns)

    def _write(self, rows: list[bytes], after: dict[int, int], sync: bool = False) -> None:
        if self.mode is WalMode.NONE or not any(rows):
            return
        writer = self._ready_writer()
        before, begun = writer.size, self._now()
        is_synced = sync or self.mode is WalMode.FSYNC
        writer.append_encoded(rows, after, sync=is_synced)
        counters = self.counters
        self._took(self._now() - begun, counters.synced_seconds if is_synced else counters.write_seconds)
        self.written_bytes += writer.size - before

    def _took(self, seconds: float, histogram: Histogram) -> None:
        histogram.observe(seconds)
        self.counters.failure = None
        if seconds > self.too_long_threshold:
            LOG.warning("too long WAL write at LSN %d: %.3f sec", self._lsns.get(self.replica_id, 0), seconds)

    def _ready_writer(self) -> LogWriter:
        """Return the file to write to: the open file; if there is none or it is full, a new file."""
        writer = self._writer
        if writer is None:
            writer = self._open()
        elif not writer.is_usable:
            writer.mend()
        # Checked before the write, not after it: the file ends with the row that filled it, and no file stays empty.
        if writer.size >= self.wal_max_size:
            full, writer = writer, writer.rotate()
            self.counters.rotations += writer is not full
        self._writer = writer
        return writer

    def _open(self) -> LogWriter:
        disk, last, lsns = self._outside.disk, self._last, self._written_lsns
        if last is not None and last.path == posixpath.join(self._directory, file_name(lsns, FileType.XLOG)):
            # The last log has no rows, so the next file would have the same name.
            writer = LogWriter.resume(disk, last.path, last.meta, lsns, last.size)
        else:
            if last is not None and not last.is_complete:
                # The last log must be durable, and without a torn tail, before the next file exists.
                LogWriter.resume(disk, last.path, last.meta, lsns, last.size).close()
            meta = Meta(FileType.XLOG, self._instance_uuid, lsns, prev_vclock=self._prev_vclock, version=self._version)
            writer = LogWriter.create(disk, self._directory, meta)
        self._last = None
        return writer

    def _try_to_end_file(self) -> FlowstoneError | None:
        try:
            self._end_file()
        except Exception as error:
            return self._as_failure(error)
        return None

    def _end_file(self) -> None:
        writer = self._writer
        if writer is None or writer.vclock == writer.meta.vclock:
            # A file without rows stays open: the next file would have the same name.
            return
        if not writer.is_usable:
            writer.mend()
        self._writer = None
        self._prev_vclock = writer.meta.vclock
        # If `close` fails, the next `_open` repairs this file before it creates another one.
        self._last = LastLog(writer.path, writer.meta, writer.size, is_complete=False)
        writer.close()
        self._last = None
        self.counters.rotations += 1

    def _succeed(self, rows: list[bytes], done: list[Done], after: dict[int, int]) -> None:
        self._written_lsns, self._written = after, None
        if self.on_written and any(rows):
            together, vclock = b"".join(rows), self.written_vclock
            # Notify before the submitters: relays see rows in log order, even those that a submitter writes in its
            # callback.
            for callback in self.on_written:
                callback(together, vclock)
        for tell in done:
            _tell(tell, None)
        if self.on_size is not None and self.size_limit is not None and self.written_bytes >= self.size_limit:
            self.on_size()

    def _fail(self, done: list[Done], cause: Exception) -> None:
        """Fail all submissions that are not written, the last one first, and release their LSNs."""
        error = self._as_failure(cause)
        waiting = [*done, *self._done]
        self._rows, self._done, self._cuts = [], [], []
        self._must_sync = False
        # Reset before the callbacks, which may read `vclock`: it must not include the lost rows.
        self._lsns = dict(self._written_lsns)
        self.counters.failures += 1
        self.counters.failure = error.message
        LOG.error("WAL write failed, %d submissions rolled back: %s", len(waiting), error)
        # Newest first: each rollback restores the state that the next older transaction has left.
        for tell in reversed(waiting):
            _tell(tell, error)
        for callback in self.on_failure:
            callback()

    def _as_failure(self, cause: Exception) -> FlowstoneError:
        if isinstance(cause, FlowstoneError):
            return cause
        refused = cause if isinstance(cause, OSError) else OSError(errno.EIO, f"{type(cause).__name__}: {cause}")
        path = refused.filename if isinstance(refused.filename, str) else self._directory
        failure = WriteFailed(path, 0, refused, is_usable=False)
        failure.__cause__ = cause
        return failure


def _pass_on(worker: asyncio.Task[None], passed: asyncio.Future[None]) -> None:
    """Pass the error of a failed worker, or its cancellation, to a caller of `drain`."""
    if passed.done():
        return
    why = None if worker.cancelled() else worker.exception()
    if why is None:
        passed.cancel()
    else:
        passed.set_exception(why)


def _tell(done: Done, error: FlowstoneError | None) -> None:
    try:
        done(error)
    except Exception:
        # An error in one callback must not keep the other submitters waiting.
        LOG.exception("WAL completion callback failed")
