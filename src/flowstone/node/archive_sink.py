"""What the appliers of an archive feed: one that follows the log, and one that only takes a snapshot.

Rows wait in `Intake` until a worker writes all that is there in one go; what they wait for is the disk, never the other
way round. An archive acknowledges what is durable, and nothing else.
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

from flowstone.box.dialect import Dialect
from flowstone.box.system import CLUSTER_ID
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.node.archive_snapshot import IncomingSnapshot
from flowstone.node.archive_store import Store
from flowstone.outside import Outside
from flowstone.outside.worker import by_worker
from flowstone.replication.synchro import RaftState, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.reader import Slab

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

QUEUE_SIZE_MAX = 64 * 1024 * 1024
"""Bytes that may wait to be written before the upstream has to."""

BATCH_SIZE = 8 * 1024 * 1024
"""What is written and synced together at most: an ACK should not wait for a minute's backlog."""

BATCH_SIZE_WITH_IMAGES = 256 * 1024
"""Rows that are applied first take their time, and a server that hears nothing for seconds hangs up."""

UNKNOWN_ID = -1
"""Registered, and the row that says as which replica has not come yet."""


class Intake:
    """Slabs in, files out. `vclock` is durable; `submitted` is where it will be when all that waits is written."""

    def __init__(self, outside: Outside, store: Store) -> None:
        self._outside = outside
        self._queue: deque[Slab] = deque()
        self._queued = 0
        self._task: asyncio.Task[None] | None = None
        self._disk = asyncio.Lock()
        self.store = store
        self.submitted = store.vclock
        self.vclock = store.vclock
        self.failure: FlowstoneError | None = None
        self.on_written: list[Callable[[], None]] = []
        self.on_snapshot: Callable[[], None] = lambda: None
        """Told that the upstream has let us in, and that a snapshot of it begins."""
        self.is_free = asyncio.Event()
        """Cleared while rows have to wait until it is known where a snapshot stands."""
        self.is_free.set()
        self.has_moved = asyncio.Event()
        """Set by every write, for who waits for one."""
        self.gather_seconds = 0.0
        """How long rows are waited for that share a write."""

    async def take(self, slab: Slab) -> None:
        """Queues what is new of `slab`; waits where much is queued already."""
        await self.is_free.wait()
        unknown = _unknown(slab, self.submitted)
        if unknown is not None:
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
        """Returns when everything taken so far is written; raises what made that impossible."""
        while self._task is not None:
            await self._wait_for_write()
        if self.failure is not None:
            raise self.failure

    async def alone(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs `work` on the store in a worker, with nothing else going on there; WriteFailed if the disk refuses."""
        async with self._disk:
            try:
                return await by_worker(self._outside, work, *arguments)
            except OSError as error:  # else an applier would take it for a lost connection
                path = error.filename if isinstance(error.filename, str) else self.store.directory
                raise WriteFailed(path, 0, error, is_usable=False) from error

    def begin_anew(self) -> None:
        """The store's log begins at another position: nothing waits by now."""
        self.submitted = self.vclock = self.store.vclock

    async def _wait_for_write(self) -> None:
        self.has_moved.clear()
        await self.has_moved.wait()

    async def _work(self) -> None:
        """Writes batch after batch until nothing is queued."""
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
            # Whatever it is, the rows of this batch are not written, and none may follow them.
            LOG.exception("cannot write to %s", self.store.directory)
            self.failure = FlowstoneError(f"cannot write to {self.store.directory}: {type(error).__name__}: {error}")
        finally:
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
    """Takes one snapshot, as nobody, and is then of no more use."""

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
        """`files_uuid` is asked whose files a new archive's are; `on_begun` is told where the snapshot stands."""
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
        await self.abandon()
        version = ".".join(map(str, greeting_version))
        position, uuid = vclock.without_zero(), str(self._files_uuid())

        def receive() -> None:  # by the worker: who is cancelled meanwhile must find it here all the same
            self.snapshot = self._intake.store.receive_snapshot(position, version, uuid)

        await self._intake.alone(receive)
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
        """The snapshot is whole; what becomes of it is for whoever asked for it."""

    async def apply(self, slab: Slab) -> None:
        raise _only_a_snapshot()

    def raft(self, source_id: int, row: Row) -> None:
        """Elections are none of its business."""

    async def abandon(self) -> None:
        """Remove an unfinished snapshot; if that fails, the next start removes it."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            with suppress(WriteFailed):
                await self._intake.alone(snapshot.abandon)


class LogSink:
    """Takes the log; where the archive registers, also the snapshot that it begins from."""

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
        """Why no more rows are taken: those that have come already would follow something else."""
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
        """The upstream says that we are registered already."""
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
        """The snapshot is whole: the log begins there, and what follows is its first part."""
        assert self._joining is not None
        snapshot, self._joining = self._joining.snapshot, None
        assert snapshot is not None
        await self._intake.alone(self._intake.store.begin_from, snapshot, "")
        self._intake.begin_anew()
        if self.on_joined is not None:
            await self.on_joined(snapshot)

    async def final_rows(self, slab: Slab) -> None:
        self._learn_id(slab)
        await self._intake.take(slab)

    async def end_join(self, vclock: VClock) -> None:
        await self._intake.drain()

    async def apply(self, slab: Slab) -> None:
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
        """Finds the row of `_cluster` that gives us our number."""
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
    """The rows that are not known, all of whose transactions are whole: one is known, or none of it is."""
    replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
    originators = np.unique(replica_ids).tolist() if len(slab) else []
    if all(int(lsns[replica_ids == number].min()) > known.get(number) for number in originators):
        return slab if len(slab) else None
    limits = np.array([known.get(number) for number in range(originators[-1] + 1)], np.int64)
    is_new = lsns > limits[replica_ids]
    count = int(is_new.sum())
    if not count:
        return None
    # One column too many, as `RowStream` does it: kernels are compiled for tables of one layout.
    cells = np.empty((scan.LINES, count + 1), np.int64)
    cells[:, :count] = slab.cells[:, is_new]
    return replace(slab, cells=cells[:, :count])


def _only_a_snapshot() -> LocalProtocolError:
    return LocalProtocolError("of who fetches a snapshot nothing else is asked")
