"""The write-ahead log of a running node: what is submitted in one turn is one write.

Relies on `xlog.writer` for the files and on `outside.blocking` for everything that waits for a disk to sync. Rows come
as bytes, numbered and grouped; what they mean, and undoing them when they could not be written, is their submitter's
business. Nothing is ever reported as written that a crash of the process (mode `write`) or a loss of power (mode
`fsync`) could take away.
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
from flowstone.xlog.block import FIXHEADER_SIZE, TRANSACTION_SIZE_MAX
from flowstone.xlog.errors import BlockTooLarge, WriteFailed
from flowstone.xlog.meta import FileType, Meta, file_name
from flowstone.xlog.writer import SMALL_SIZE_MAX, LogWriter

LOG = logging.getLogger("flowstone.node")

QUICK_SECONDS = SECONDS_BOUNDS[0]

WAL_MAX_SIZE = 256 * 1024**2
"""As in `box.cfg`: a log of this size is ended before the next write."""

Done = Callable[[FlowstoneError | None], None]


class WalMode(Enum):
    """`wal_mode`, spelled as in `box.cfg`."""

    NONE = "none"
    WRITE = "write"
    FSYNC = "fsync"


@dataclass(frozen=True, slots=True)
class LastLog:
    """The log that was read, or written, last: its rows end at byte `size`. `is_complete`: the end marker follows."""

    path: str
    meta: Meta
    size: int
    is_complete: bool


class JournalClosed(FlowstoneError):
    """Rows were submitted after the end: nobody writes them any more, and the files may be another's by now."""


class Journal:
    """Takes rows, writes them in batches, says so.

    `submit` queues; `flush`, once per turn, starts the write of all that is queued. Short work is done at once, in
    `flush` itself; what has to wait for the disk (mode `fsync`, a new file, the end of a full one) is done by a worker,
    one batch at a time, while later submissions gather for the next.
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
        """Continues at `vclock`, where recovery ended, behind its `last` log. Touches no file yet."""
        self._outside = outside
        self._directory = directory
        self._instance_uuid = instance_uuid
        self._version = version
        self._writer: LogWriter | None = None
        self._rows: list[bytes] = []
        self._done: list[Done] = []
        self._cuts: list[tuple[int, dict[int, int]]] = []
        self._must_sync = False
        self._worker: asyncio.Task[None] | None = None
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
        """Called with the rows, and the vclock behind them, of every write that succeeded; for relays."""
        self.on_failure: list[Callable[[], None]] = []
        """Called when a write has failed and all who wait for it were told; for elections. It must not submit."""
        self.written_bytes = 0
        """What the files have grown by since the start."""
        self.counters = WalCounters()
        self.too_long_threshold = TOO_LONG_THRESHOLD
        """Seconds from which on a write is worth a line."""
        self.size_limit: int | None = None
        self.on_size: Callable[[], None] | None = None
        """Called after each write by which `written_bytes` is at or above `size_limit`; for checkpoints."""

    def continue_at(self, vclock: VClock, last: LastLog | None = None) -> None:
        """The data has been loaded, up to `vclock` and the `last` log: this is before anything is submitted."""
        self._rows_before, self._start_signature = self.row_count, vclock.signature
        self._last = last
        self._prev_vclock = last.meta.vclock if last else None
        self._lsns = vclock.to_mapping()
        self._written_lsns = vclock.to_mapping()
        self._written: VClock | None = vclock

    @property
    def vclock(self) -> VClock:
        """The position behind the last row submitted."""
        return VClock(self._lsns)

    @property
    def written_vclock(self) -> VClock:
        """The position behind the last row written."""
        if self._written is None:
            self._written = VClock(self._written_lsns)
        return self._written

    @property
    def row_count(self) -> int:
        """Rows written since the start."""
        return self._rows_before + sum(self._written_lsns.values()) - self._start_signature

    @property
    def is_idle(self) -> bool:
        """Everything submitted is written, or has failed."""
        return self._worker is None and not self._done

    def next_lsn(self, replica_id: int) -> int:
        """The LSN that the next row of `replica_id` submitted gets; 0 is for local rows."""
        return self._lsns.get(replica_id, 0) + 1

    def submit(self, rows: bytes, count: int, done: Done, *, local_count: int = 0, sync: bool = False) -> None:
        """Queues the encoded rows of whole transactions, to be written together with whatever else this turn brings.

        `count` of them are of this instance, numbered from `next_lsn(replica_id)`; `local_count` are local, from
        `next_lsn(0)`. `done` is called once: with None when they are written, else with the error; the last submitted
        is then told first, and all that was not yet written fails. It must not submit in that case.
        `sync`: they have to survive a loss of power in mode `write`, too.
        """
        self._check_submission(rows)
        lsns = self._lsns
        lsns[self.replica_id] = lsns.get(self.replica_id, 0) + count
        if local_count:
            lsns[0] = lsns.get(0, 0) + local_count
        self._must_sync = self._must_sync or sync
        self._rows.append(rows)
        self._done.append(done)

    def submit_replicated(self, rows: bytes, lsns: Mapping[int, int], done: Done) -> None:
        """As `submit`, for rows that other instances have numbered: `lsns` has the last of each of them."""
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
        """Nothing is queued, and a small write is quick: `write_now` may be called."""
        if self._done or self._worker is not None or self._is_telling or self.mode is WalMode.FSYNC:
            return False
        return not self._takes_long()

    def write_now(self, rows: bytes, count: int) -> None:
        """`submit` and `flush` in one, for who is alone in a turn and where `is_ready`; raises what went wrong."""
        if self._is_closed:
            raise self._closed()
        after = self._lsns.copy()
        after[self.replica_id] = after.get(self.replica_id, 0) + count
        try:
            if len(rows) <= SMALL_SIZE_MAX and self._writer is not None and self.mode is WalMode.WRITE:
                begun = self._now()
                self._writer.append_small(rows, after)
                seconds, quick = self._now() - begun, self.counters.write_seconds
                if seconds > QUICK_SECONDS:
                    self._took(seconds, quick)
                else:  # as `_took` would count it; for a request that is alone every call is felt
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
        """Writes what is queued, now if that is quick, else by a worker that calls every `done` when it is through."""
        if self._worker is not None or not self._done:
            return
        if self._is_telling:
            # Somebody who was told of a write has made another: it waits until all others were told of the first.
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
        """Returns when everything submitted so far is written, or has failed; what others submit later is no matter."""
        if self.is_idle:
            return
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rows.append(b"")
        self._done.append(lambda error: None if passed.done() else passed.set_result(None))
        self.flush()
        if self._worker is not None:
            self._worker.add_done_callback(lambda worker: _pass_on(worker, passed))
        await passed

    async def rotate(self, at_end: Callable[[], None] | None = None) -> VClock:
        """Ends the file behind everything submitted so far, and returns that position once all of it is written.

        `at_end` is called when all of that has been told, and nothing that comes behind it. The next file begins with
        the next write. Raises what made the write of an earlier submission, or the ending
        of the file, fail; the journal then goes on with the file it has.
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
        position = self.vclock
        self._rows.append(b"")
        self._done.append(done)
        self._cuts.append((len(self._done), dict(self._lsns)))
        self.flush()
        await written
        return position

    async def close(self) -> None:
        """Writes what is queued and ends the file with its marker. Whoever submits from now on gets JournalClosed."""
        self._is_closed = True
        while not self.is_idle:
            await self.drain()
        if self._writer is not None:
            await self._outside.blocking(self._end_file)

    def _closed(self) -> JournalClosed:
        return JournalClosed(f"the log in {self._directory} is closed", hint="end transactions before the node stops")

    def _takes_long(self) -> bool:
        if self.mode is WalMode.NONE:
            return False
        writer = self._writer
        return (
            self.mode is WalMode.FSYNC
            or writer is None
            or not writer.is_usable
            or writer.size >= self.wal_max_size
            or self._must_sync
            or bool(self._cuts)
        )

    async def _work(self) -> None:
        """Writes batch after batch until nothing is queued, or the rest is quick."""
        try:
            while self._done and self._takes_long():
                ends_file, must_sync = bool(self._cuts), self._must_sync
                rows, done, after = self._take()
                self._must_sync = must_sync and bool(self._done)  # it may be about what is behind a cut
                try:
                    await self._outside.blocking(self._write, rows, after, must_sync)
                except Exception as error:
                    self._fail(done, error)
                    continue
                whose_end = done.pop() if ends_file else None
                self._succeed(rows, done, after)
                if whose_end is not None:
                    _tell(whose_end, await self._outside.blocking(self._try_to_end_file))
        finally:
            self._worker = None
        self.flush()

    def _take(self) -> tuple[list[bytes], list[Done], dict[int, int]]:
        """The next batch: all that is queued, but not beyond a place where the file is to end."""
        if self._cuts:
            count, after = self._cuts.pop(0)
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
        """The file to write to: the open one, the next one where that is full, a new one where there is none."""
        writer = self._writer
        if writer is None:
            writer = self._open()
        elif not writer.is_usable:
            writer.mend()
        if writer.size >= self.wal_max_size:
            full, writer = writer, writer.rotate()
            self.counters.rotations += writer is not full
        self._writer = writer
        return writer

    def _open(self) -> LogWriter:
        disk, last, lsns = self._outside.disk, self._last, self._written_lsns
        if last is not None and last.path == posixpath.join(self._directory, file_name(lsns, FileType.XLOG)):
            # The last log has no rows: the next would have its name.
            writer = LogWriter.resume(disk, last.path, last.meta, lsns, last.size)
        else:
            if last is not None and not last.is_complete:
                # Its rows must be as durable as the next file, and nothing torn may stand before that.
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
            # Without rows it goes on, for the next would have its name.
            return
        if not writer.is_usable:
            writer.mend()
        self._writer = None
        self._prev_vclock = writer.meta.vclock
        self._last = LastLog(writer.path, writer.meta, writer.size, is_complete=False)
        writer.close()
        self._last = None
        self.counters.rotations += 1

    def _succeed(self, rows: list[bytes], done: list[Done], after: dict[int, int]) -> None:
        self._written_lsns, self._written = after, None
        if self.on_written and any(rows):
            together, vclock = b"".join(rows), self.written_vclock
            for callback in self.on_written:
                callback(together, vclock)
        for tell in done:
            _tell(tell, None)
        if self.on_size is not None and self.size_limit is not None and self.written_bytes >= self.size_limit:
            self.on_size()

    def _fail(self, done: list[Done], cause: Exception) -> None:
        """Everything that is not written fails, the last submitted first; its LSNs are free again."""
        error = self._as_failure(cause)
        waiting = [*done, *self._done]
        self._rows, self._done, self._cuts = [], [], []
        self._must_sync = False
        self._lsns = dict(self._written_lsns)
        self.counters.failures += 1
        self.counters.failure = error.message
        LOG.error("%d submissions rolled back: %s", len(waiting), error)
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
    """Who waits for a worker that did not come to its end hears why."""
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
        # One submitter's mistake must not keep the others waiting for ever.
        LOG.exception("after a write to the log")
