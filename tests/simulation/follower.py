"""An applier whose sink checks that no row is lost, duplicated or reordered, and that no transaction is split."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import parse_uri
from flowstone.node.upstream.applier import Applier
from flowstone.replication.vclock import VClock
from tests.simulation.simulation import Simulation


class Follower:
    """A `Sink` without a node: an anonymous replica inside the scenario."""

    replica_id = 0
    is_anonymous = True
    id_filter = ()
    term = 1

    def __init__(self, sim: Simulation, version_id: int) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.instance_uuid = sim.outside.random.uuid()
        self.replicaset_uuid: UUID | None = None
        self.version_id = version_id
        self.snapshot: list[Row] = []
        self._lsns: dict[int, int] = {}

    def follow(self, sim: Simulation, name: str) -> Applier:
        applier = Applier(sim.outside, parse_uri(sim.uri(name)), self, replication_timeout=1.0)
        applier.start()
        return applier

    @property
    def vclock(self) -> VClock:
        return VClock(self._lsns)

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        self.snapshot = []
        self._lsns = vclock.without_zero().to_mapping()

    async def meta(self, row: Row) -> None:
        pass

    async def snapshot_rows(self, slab: Slab) -> None:
        self.snapshot += slab.rows()

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise AssertionError("unexpected join")

    async def final_rows(self, slab: Slab) -> None:
        raise AssertionError("unexpected join")

    async def end_join(self, vclock: VClock) -> None:
        self.replicaset_uuid = UUID(int=1)
        for row in self.snapshot:
            if b"\xa7cluster\xd9\x24" in row.body or b"\xafreplicaset_uuid\xd9\x24" in row.body:
                self.replicaset_uuid = UUID(row.body[-36:].decode())

    async def apply(self, slab: Slab) -> None:
        rows = list(slab.rows())
        assert rows[-1].is_commit, "half a transaction"
        for row in rows:
            expected = self._lsns.get(row.replica_id, 0) + 1
            assert row.lsn == expected, f"row {row.lsn} of {row.replica_id}, expected {expected}"
            self._lsns[row.replica_id] = row.lsn
        for tell in self.on_written:
            tell()

    def raft(self, source_id: int, row: Row) -> None:
        pass
