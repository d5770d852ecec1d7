"""A sink that keeps the rows of an applier in lists, for tests of appliers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import msgpack

from flowstone.iproto.constants import RequestType
from flowstone.iproto.greeting import version_id
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.vclock import VClock, VClockBuilder

SCHEMA_ID, CLUSTER_ID = 272, 320


class MemorySink:
    """Counts rows as written on arrival; `told` has the names of the calls in order."""

    def __init__(self, instance_uuid: UUID, *, is_anonymous: bool = False) -> None:
        self.instance_uuid = instance_uuid
        self.replicaset_uuid: UUID | None = None
        self.replica_id = 0
        self.is_anonymous = is_anonymous
        self.version_id = version_id(2, 6, 0)
        self.term = 1
        self.on_written: list[Callable[[], None]] = []
        self.id_filter: tuple[int, ...] = (0,) if is_anonymous else ()
        self.told: list[str] = []
        self.snapshot: list[Row] = []
        self.rows: list[Row] = []
        self.raft_rows: list[Row] = []
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        """Cleared: rows are not applied before it is set."""
        self.gate.set()
        self._vclock = VClockBuilder()

    @property
    def vclock(self) -> VClock:
        return self._vclock.vclock()

    def restart_at(self, vclock: VClock) -> None:
        self._vclock = VClockBuilder(vclock)

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        self.told.append(f"begin_snapshot {vclock}")
        self._vclock = VClockBuilder(vclock)

    async def meta(self, row: Row) -> None:
        self.told.append(f"meta {RequestType(row.type).name}")

    async def snapshot_rows(self, slab: Slab) -> None:
        self._note("snapshot_rows")
        for row in slab.rows():
            self.snapshot.append(row)
            self._learn(row)

    async def begin_final(self, stop_vclock: VClock) -> None:
        self.told.append(f"begin_final {stop_vclock}")

    async def final_rows(self, slab: Slab) -> None:
        self._note("final_rows")
        self._take(slab)

    async def end_join(self, vclock: VClock) -> None:
        self.told.append(f"end_join {vclock}")

    async def apply(self, slab: Slab) -> None:
        if self.failure is not None:
            raise self.failure
        await self.gate.wait()
        self._note("apply")
        self._take(slab)
        for written in self.on_written:
            written()

    def raft(self, source_id: int, row: Row) -> None:
        self.raft_rows.append(row)

    def _note(self, what: str) -> None:
        if not self.told or self.told[-1] != what:
            self.told.append(what)

    def _take(self, slab: Slab) -> None:
        for row in slab.rows():
            if row.lsn > self._vclock.get(row.replica_id):
                self._vclock.follow(row.replica_id, row.lsn)
                self.rows.append(row)
                self._learn(row)

    def _learn(self, row: Row) -> None:
        """Learn our identity from rows of system spaces."""
        if row.type != RequestType.INSERT:
            return
        body = msgpack.unpackb(row.body, strict_map_key=False, raw=True)
        if body[0x10] == SCHEMA_ID and body[0x21][0] in (b"cluster", b"replicaset_uuid"):
            self.replicaset_uuid = UUID(body[0x21][1].decode())
        if body[0x10] == CLUSTER_ID and body[0x21][1].decode() == str(self.instance_uuid):
            self.replica_id = body[0x21][0]
