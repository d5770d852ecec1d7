"""A snapshot of a live server: FETCH_SNAPSHOT as an iterator of slabs, with a bounded queue.

The connection has a thread of its own, so rows are received while others are decoded. Nothing is stored: if the
iteration stops early or fails, there is no snapshot.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final
from uuid import UUID

import numpy as np

from flowstone.box.dialect import Dialect
from flowstone.client import rights
from flowstone.errors import FlowstoneError, LocalProtocolError
from flowstone.iproto import errors, scan
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import Uri
from flowstone.node.upstream.applier import Applier
from flowstone.outside import production
from flowstone.outside.loop_thread import LoopThread
from flowstone.replication.applier.states import ApplierState, ConnectionLost
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.tarantool.live_node import CannotUse, explained, unreachable

CHUNK_SIZE: Final = 512 * 1024
"""Bytes to decode together: servers send row by row, and a single read returns little."""

QUEUE_SIZE_MAX: Final = 16 * 1024 * 1024
"""Bytes that may be queued for decoding before the receiver stops reading."""


_OFFSETS: Final = [
    scan.KEY_AT,
    scan.KEY_END,
    scan.TUPLE_AT,
    scan.TUPLE_END,
    scan.OPS_AT,
    scan.OPS_END,
    scan.ROW_AT,
    scan.BODY_AT,
    scan.ROW_END,
]


def snapshot_slabs(members: Sequence[Uri]) -> Iterator[Slab]:
    """Yield the rows of a snapshot of the first of `members` that can be reached, in the server's order.

    All rows are from one moment. Another member is tried only before the first row.
    """
    thread = LoopThread("flowstone-snapshot")
    try:
        receiver = thread.run(_begin(members))
        try:
            while slabs := thread.run(receiver.take()):
                yield merged(slabs)
        finally:
            with suppress(FlowstoneError):
                thread.run(receiver.end())
    finally:
        thread.close()


async def _begin(members: Sequence[Uri]) -> _Receiver:
    failures = []
    for uri in members:
        receiver = _Receiver(uri)
        try:
            await receiver.begin()
            return receiver
        except ConnectionLost as error:
            failures.append(error)
            await receiver.end()
        except BaseException:
            await receiver.end()
            raise
    raise unreachable(failures)


def merged(slabs: Sequence[Slab]) -> Slab:
    """Return the rows of all slabs as one slab."""
    if len(slabs) == 1:
        return slabs[0]
    payload = b"".join(slab.payload for slab in slabs)
    # One extra column gives kernels the same table layout as for files.
    cells: Cells = np.empty((scan.LINES, sum(map(len, slabs)) + 1), np.int64)
    row = at = 0
    for slab in slabs:
        part = cells[:, row : row + len(slab)]
        part[:] = slab.cells
        if at:
            offsets = part[_OFFSETS]
            part[_OFFSETS] = np.where(offsets >= 0, offsets + at, offsets)
        row, at = row + len(slab), at + len(slab.payload)
    buf: Bytes = np.frombuffer(payload, np.uint8)
    return Slab(slabs[0].path, payload, buf, cells[:, :row], slabs[0].offsets)


class _Receiver:
    """The sink of an applier that fetches a single snapshot anonymously."""

    is_anonymous = True
    replica_id = 0
    replicaset_uuid: UUID | None = None
    id_filter: tuple[int, ...] = ()
    term = 1
    version_id = Dialect.V2_11.version_id
    instance_uuid = UUID(int=0)

    def __init__(self, uri: Uri) -> None:
        self._uri = uri
        self._slabs: deque[Slab] = deque()
        self._size = 0
        self._moved = asyncio.Event()
        self._applier = Applier(production(), uri, self)
        self._fetching: asyncio.Task[None] | None = None
        self.on_written: list[Callable[[], None]] = []

    @property
    def vclock(self) -> VClock:
        return VClock()

    # --- for the reader ---

    async def begin(self) -> None:
        """Log in to the server and start to fetch."""
        self._applier.start(pause_at=(ApplierState.READY,))
        try:
            await self._applier.resume_to(ApplierState.READY, is_patient=False)
        except ConnectionLost:
            raise
        except FlowstoneError as error:
            raise explained(error, self._uri, "log in to") from error
        self._fetching = asyncio.get_running_loop().create_task(self._fetch())

    async def take(self) -> list[Slab]:
        """Return the slabs received since the last call, once there are enough; an empty list at the end.

        Raises the error that ended the snapshot early.
        """
        assert self._fetching is not None
        while self._size < CHUNK_SIZE and not self._fetching.done():
            self._moved.clear()
            await self._moved.wait()
        slabs, self._size = [*self._slabs], 0
        self._slabs.clear()
        self._moved.set()
        if not slabs:
            self._fetching.result()
        return slabs

    async def end(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
        await self._applier.stop()

    async def _fetch(self) -> None:
        try:
            await self._applier.resume_to(ApplierState.FETCHED_SNAPSHOT, is_patient=False)
        except errors.AccessDenied as error:
            user = self._uri.user or rights.GUEST
            hint = (
                f"grant the role: box.schema.user.grant('{user}', 'replication'); or set readMode=select, "
                "which needs only the right to read the space"
            )
            raise CannotUse(
                f"{self._uri.address} rejects a snapshot request of user {user!r}: {error.message}",
                hint=rights.NO_USER if rights.is_guest(user) else hint,
            ) from error
        except FlowstoneError as error:
            raise explained(error, self._uri, "take a snapshot of") from error
        finally:
            self._moved.set()

    # --- for the applier ---

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        """Ignore the position of the snapshot."""

    async def meta(self, row: Row) -> None:
        """Ignore terms and promotions."""

    async def snapshot_rows(self, slab: Slab) -> None:
        self._slabs.append(slab)
        self._size += len(slab.payload)
        self._moved.set()
        while self._size > QUEUE_SIZE_MAX:
            self._moved.clear()
            await self._moved.wait()

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise _only_a_snapshot()

    async def final_rows(self, slab: Slab) -> None:
        raise _only_a_snapshot()

    async def end_join(self, vclock: VClock) -> None:
        """Do nothing: the snapshot is complete."""

    async def apply(self, slab: Slab) -> None:
        raise _only_a_snapshot()

    def raft(self, source_id: int, row: Row) -> None:
        """Ignore elections."""


def _only_a_snapshot() -> LocalProtocolError:
    return LocalProtocolError("unexpected rows: only a snapshot was requested")
