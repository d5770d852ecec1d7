"""The sinks of an archive's appliers: one follows the log, the other only receives a snapshot.

`Intake` queues rows, and a worker writes all queued rows together, so that the disk never waits for rows. An archive
acknowledges only durable rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import numpy as np

from flowstone.archive.received_snapshot import IncomingSnapshot
from flowstone.archive.store import ArchiveStore
from flowstone.box.dialect import Dialect
from flowstone.box.system import CLUSTER_ID
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.outside import Outside
from flowstone.outside.worker import by_worker
from flowstone.replication.limbo.control_rows import RaftState, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

QUEUE_SIZE_MAX = 64 * 1024 * 1024
"""Bytes that may be queued for the disk; with more, no rows are read from the upstream."""

BATCH_SIZE = 8 * 1024 * 1024
"""Most bytes that are written and synced together: an ACK must not wait for a long backlog."""

BATCH_SIZE_WITH_IMAGES = 256 * 1024
"""The same for an archive with images: applying rows takes time, and a server without ACKs disconnects."""

UNKNOWN_ID = -1
"""Replica id of an archive that is registered but has not received its row of `_cluster` yet."""


class Intake:
    """The write queue of an archive. `vclock` is the durable position, `submitted` includes the queued rows."""

    def __init__(self, outside: Outside, store: ArchiveStore) -> None:
        self._outside = outside
        self._queue: deque[Slab] = deque()
        self._queued = 0
        self._task: asyncio.Task[None] | None = None
        # The writer, snapshots and the saving task use the files in turn; none of them may run concurrently with
        # another.
        self._disk = asyncio.Lock()
        self.store = store
        self.submitted = store.vclock
        self.vclock = store.vclock
        self.failure: FlowstoneError | None = None
        self.on_written: list[Callable[[], None]] = []
        self.on_snapshot: Callable[[], None] = lambda: None
        """Called when the upstream has granted a snapshot."""
        self.is_free = asyncio.Event()
        """Cleared while rows must wait because the position of a snapshot is not known yet."""
        self.is_free.set()
        self.has_moved = asyncio.Event()
        """Set after every write."""
        self.gather_seconds = 0.0
        """Time to wait for more rows before a write."""

    async def take(self, slab: Slab) -> None:
        """Queue the new rows of `slab`. Wait while the queue is full; raise the failure if the disk failed."""
        # Wait here and not in `_work`: rows that are already queued are drained before the snapshot is requested.
        await self.is_free.wait()
        unknown = _unknown(slab, self.submitted)
        if unknown is not None:
            # Rows in the queue count as known: after a reconnect, the server sends them again.
            self.submitted = self.submitted.merged(VClock(unknown.newest()))
            self._queue.append(unknown)
            self._queued += len(unknown.payload)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._work())
        while self._queued > QUEUE_SIZE_MAX and self.failure is None:
            await self._wait_for_write()
        if self.failure is not None:
            raise self.failure

    async def drain(self) -> None:
        """Wait until all queued rows are written; raise the failure if the disk failed."""
        while self._task is not None:
            await self._wait_for_write()
        if self.failure is not None:
            raise self.failure

    async def alone(self, work: Callable[..., T], *arguments: object) -> T:
        """Run `work` in a worker, with exclusive access to the store. Raise WriteFailed if the disk fails."""
        async with self._disk:
            try:
                return await by_worker(self._outside, work, *arguments)
            except OSError as error:  # an applier would treat an OSError as a lost connection
                path = error.filename if isinstance(error.filename, str) else self.store.directory
                raise WriteFailed(path, 0, error, is_usable=False) from error

    def begin_anew(self) -> None:
        """Take over the position of a new log of the store. The queue must be empty."""
        self.submitted = self.vclock = self.store.vclock

    async def _wait_for_write(self) -> None:
        # No `await` between the check of the caller and this line, so no wake-up is lost.
        self.has_moved.clear()
        await self.has_moved.wait()

    async def _work(self) -> None:
        """Write batches until the queue is empty."""
        try:
            while self._queue:
                if self.gather_seconds and self._queued < BATCH_SIZE:
                    await self._outside.clock.sleep(self.gather_seconds)
                batch = self._next_batch()
                await self.alone(self.store.write, batch)
                self._queued -= sum(len(slab.payload) for slab in batch)
                self._move()
        except FlowstoneError as error:
            self.failure = error
        except Exception as error:
            # The rows of this batch are not written, so no later rows may be written.
            LOG.exception("cannot write to %s", self.store.directory)
            self.failure = FlowstoneError(f"cannot write to {self.store.directory}: {type(error).__name__}: {error}")
        finally:
            # Must precede `_move`, which wakes the caller of `drain`: it must find no task.
            self._task = None
            self._move()

    def _next_batch(self) -> list[Slab]:
        batch: list[Slab] = []
        size, size_max = 0, BATCH_SIZE if self.store.on_rows is None else BATCH_SIZE_WITH_IMAGES
        while self._queue and size < size_max:
            batch.append(self._queue.popleft())
            size += len(batch[-1].payload)
        return batch

    def _move(self) -> None:
        self.vclock = self.store.vclock
        for tell in tuple(self.on_written):
            tell()
        self.has_moved.set()


class SnapshotSink:
    """Receives one snapshot, as an anonymous replica, and is not used again."""

    is_anonymous = True
    replica_id = 0
    replicaset_uuid: UUID | None = None
    id_filter: tuple[int, ...] = ()
    term = 1
    version_id = Dialect.V2_11.version_id

    def __init__(
        self,
        intake: Intake,
        instance_uuid: UUID,
        files_uuid: Callable[[], UUID],
        on_begun: Callable[[VClock], Awaitable[None]] | None = None,
    ) -> None:
        """`files_uuid` returns the instance UUID for a new archive's files; `on_begun` gets the snapshot's position."""
        self._intake = intake
        self._files_uuid = files_uuid
        self._on_begun = on_begun
        self.instance_uuid = instance_uuid
        self.snapshot: IncomingSnapshot | None = None
        self.on_rows: Callable[[], None] = lambda: None
        self.on_written: list[Callable[[], None]] = []

    @property
    def vclock(self) -> VClock:
        return VClock()

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        # The applier has started over; discard the incomplete file of the last attempt.
        await self.abandon()
        version = ".".join(map(str, greeting_version))
        position, uuid = vclock.without_zero(), str(self._files_uuid())

        def receive() -> None:  # in the worker, so that `abandon` finds the snapshot after a cancellation
            self.snapshot = self._intake.store.receive_snapshot(position, version, uuid)

        await self._intake.alone(receive)
        # Report it only now that the file exists: an archive counts as opened when it can receive rows.
        self._intake.on_snapshot()
        if self._on_begun is not None:
            await self._on_begun(position)

    async def meta(self, row: Row) -> None:
        assert self.snapshot is not None
        self.snapshot.meta(row)

    async def snapshot_rows(self, slab: Slab) -> None:
        assert self.snapshot is not None
        self.on_rows()
        await self._intake.alone(self.snapshot.add, slab)

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise _only_a_snapshot()

    async def final_rows(self, slab: Slab) -> None:
        raise _only_a_snapshot()

    async def end_join(self, vclock: VClock) -> None:
        """Do nothing: the snapshot is complete, and the caller of the fetch uses it."""

    async def apply(self, slab: Slab) -> None:
        raise _only_a_snapshot()

    def raft(self, source_id: int, row: Row) -> None:
        """Ignore the message: an anonymous replica takes no part in elections."""

    async def abandon(self) -> None:
        """Remove an unfinished snapshot; if that fails, the next start removes it."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            with suppress(WriteFailed):
                await self._intake.alone(snapshot.abandon)


class LogSink:
    """Receives the log and, if the archive registers, the snapshot of the join."""

    version_id = Dialect.V2_11.version_id

    def __init__(self, intake: Intake, *, is_anonymous: bool, on_registered: Callable[[], None]) -> None:
        self._intake = intake
        self._on_registered = on_registered
        self._manifest = intake.store.manifest
        self._is_known = False
        self._term = 1
        self._joining: SnapshotSink | None = None
        self.instance_uuid = UUID(self._manifest.replica_uuid)
        self.is_anonymous = is_anonymous
        self.on_written = intake.on_written
        self.refusal: FlowstoneError | None = None
        """Error that rejects all further rows: rows already in transit do not continue the log."""
        self.on_joined: Callable[[IncomingSnapshot], Awaitable[None]] | None = None

    @property
    def replicaset_uuid(self) -> UUID | None:
        known = self._manifest.replicaset_uuid
        return UUID(known) if known is not None and self._intake.store.log is not None else None

    @property
    def replica_id(self) -> int:
        return self._manifest.replica_id or (UNKNOWN_ID if self._is_known else 0)

    @property
    def vclock(self) -> VClock:
        return self._intake.vclock

    @property
    def id_filter(self) -> tuple[int, ...]:
        return (0,) if self.is_anonymous else ()

    @property
    def term(self) -> int:
        return self._term

    def register_known(self) -> None:
        """Record that the upstream reported us as registered already."""
        self._is_known = True

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        await self.abandon()
        self._joining = SnapshotSink(self._intake, self.instance_uuid, lambda: self.instance_uuid)
        await self._joining.begin_snapshot(vclock, greeting_version)

    async def meta(self, row: Row) -> None:
        assert self._joining is not None
        await self._joining.meta(row)

    async def snapshot_rows(self, slab: Slab) -> None:
        assert self._joining is not None
        self._learn_id(slab)
        await self._joining.snapshot_rows(slab)

    async def begin_final(self, stop_vclock: VClock) -> None:
        """Start the log at the complete snapshot; the rows that follow are its first rows."""
        assert self._joining is not None
        snapshot = self._joining.snapshot
        assert snapshot is not None
        await self._intake.alone(self._intake.store.begin_from, snapshot, "")
        self._joining = None  # only now: after an error, `abandon` removes the snapshot
        self._intake.begin_anew()
        if self.on_joined is not None:
            await self.on_joined(snapshot)

    async def final_rows(self, slab: Slab) -> None:
        self._learn_id(slab)
        await self._intake.take(slab)

    async def end_join(self, vclock: VClock) -> None:
        await self._intake.drain()

    async def apply(self, slab: Slab) -> None:
        # These rows were in transit when the refusal was set, and do not continue the log.
        if self.refusal is not None:
            raise self.refusal
        self._learn_id(slab)
        await self._intake.take(slab)

    def raft(self, source_id: int, row: Row) -> None:
        state = decode_control(row.type, row.body)
        if isinstance(state, RaftState):
            self._term = max(self._term, state.term)

    async def abandon(self) -> None:
        joining, self._joining = self._joining, None
        if joining is not None:
            await joining.abandon()

    def _learn_id(self, slab: Slab) -> None:
        """Look for the row of `_cluster` that has our replica id."""
        if self.is_anonymous or self._manifest.replica_id:
            return
        cells = slab.cells
        for number in np.flatnonzero(cells[scan.SPACE_ID] == CLUSTER_ID).tolist():
            at, end = int(cells[scan.TUPLE_AT, number]), int(cells[scan.TUPLE_END, number])
            if at < 0 or cells[scan.TYPE, number] not in (RequestType.INSERT, RequestType.REPLACE):
                continue
            member = unpack(slab.payload[at:end])
            if isinstance(member, tuple) and len(member) > 1 and member[1] == str(self.instance_uuid):
                self._manifest.replica_id = member[0]
                self._on_registered()


def _unknown(slab: Slab, known: VClock) -> Slab | None:
    """Return the rows after `known`; None if there are none. A transaction is never known in part."""
    replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
    originators = np.unique(replica_ids).tolist() if len(slab) else []
    if all(int(lsns[replica_ids == number].min()) > known.get(number) for number in originators):
        return slab if len(slab) else None
    limits = np.array([known.get(number) for number in range(originators[-1] + 1)], np.int64)
    is_new = lsns > limits[replica_ids]
    count = int(is_new.sum())
    if not count:
        return None
    # One extra column, as in `RowStream`: kernels are compiled for tables of this memory layout.
    cells = np.empty((scan.LINES, count + 1), np.int64)
    cells[:, :count] = slab.cells[:, is_new]
    return replace(slab, cells=cells[:, :count])


def _only_a_snapshot() -> LocalProtocolError:
    return LocalProtocolError("unexpected rows: only a snapshot was requested")
