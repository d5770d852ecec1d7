"""`flowstone.follow` in the simulator: under any fault, the program knows which data it has."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

import flowstone
from flowstone.iproto.msgpack import unpack
from tests.simulation.cluster import NAMES, all_follow_all
from tests.simulation.disk import Loss
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_endings import form
from tests.simulation.workload import SPACE, Writer, held, make_space

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
ROUNDS = 8


class Copy:
    """The initial data, and all received changes."""

    def __init__(self, replica: flowstone.Replica) -> None:
        self._replica = replica
        self._rows: dict[object, bytes] = {}
        self.resync_count = 0
        self._read()
        replica.on_change(self._changed)
        replica.on_resync(self._resynced)

    def _read(self) -> None:
        self._rows = {row[0]: row.raw for row in self._replica.space(SPACE)}

    def _resynced(self, before: flowstone.VClock, after: flowstone.VClock) -> None:
        assert before <= after
        self.resync_count += 1
        self._read()

    def _changed(self, changes: list[flowstone.SettledChange]) -> None:
        for change in changes:
            if change.space == SPACE:
                assert change.new is not None
                assert self._rows.get(change.new[0]) == (change.old.raw if change.old is not None else None)
                self._rows[change.new[0]] = change.new.raw

    def check(self, sim: Simulation, name: str) -> None:
        """Check that the copy and the replica equal the node."""
        found = held(sim, name)
        assert sorted(self._rows.values()) == found
        assert sorted(row.raw for row in self._replica.space(SPACE)) == found


@DIALECTS
@simulated(seeds=range(5))
async def test_replica_gets_every_change_while_the_node_is_killed_and_restarted(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    async with flowstone.follow(sim.uri("a"), outside=sim.outside) as replica:
        copy = Copy(replica)
        for _ in range(ROUNDS):
            await writer.run("a", sim.random.randrange(30))
            match sim.random.randrange(4):
                case 0:
                    sim.kill("a")
                    await sim.restart("a")
                case 1:
                    await sim.restart("a")
                case 2:
                    await sim.on("a", sim.node("a").snapshot())
        await replica.wait_for(sim.node("a").info()["vclock"], timeout=60)
        copy.check(sim, "a")


@simulated(seeds=range(5))
async def test_replica_resumes_from_a_snapshot_when_the_logs_are_deleted(sim: Simulation) -> None:
    await sim.start("a", dialect="2.6", checkpoint_count=1)
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    async with flowstone.follow(sim.uri("a"), outside=sim.outside) as replica:
        copy = Copy(replica)
        await writer.run("a", 20)
        await replica.wait_for(sim.node("a").info()["vclock"], timeout=60)
        await sim.stop("a")
        await sim.start("a", checkpoint_count=1, listen="a:4000")
        for _ in range(3):
            await sim.on("a", sim.node("a").space(SPACE).replace((1, sim.random.randrange(10**6), "away")))
            await sim.on("a", sim.node("a").snapshot())
        await sim.restart("a", listen="a:3301")
        await replica.wait_for(sim.node("a").info()["vclock"], timeout=60)
        copy.check(sim, "a")
        assert copy.resync_count == 1


@simulated(seeds=range(8))
async def test_replica_reports_an_upstream_that_lost_rows_in_a_power_loss(sim: Simulation) -> None:
    await sim.start("a", dialect="2.6", wal_mode="write")
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    async with flowstone.follow(sim.uri("a"), outside=sim.outside) as replica:
        copy = Copy(replica)
        await writer.run("a", 20)
        await replica.wait_for(sim.node("a").info()["vclock"], timeout=60)
        ours = replica.vclock
        sim.crash("a", Loss.ANY)
        await sim.restart("a")
        theirs = flowstone.VClock(sim.node("a").info()["vclock"])
        if ours <= theirs:
            await asyncio.sleep(10)
            copy.check(sim, "a")
            return
        with pytest.raises(flowstone.CannotFollow, match="has lost rows"):
            await replica.wait_for({1: 10**6}, timeout=60)
        assert [unpack(raw) for raw in held(sim, "a")] != [row.values for row in replica.space(SPACE)]


@simulated(seeds=range(3))
async def test_list_of_members_gives_every_change_once_and_in_order_over_kills(sim: Simulation) -> None:
    await form(sim)
    told: list[tuple[int, int]] = []
    states: list[flowstone.ReplicaState] = []
    uris = [sim.uri(name) for name in NAMES]
    async with flowstone.follow(uris, outside=sim.outside, on_state=states.append) as replica:
        copy = Copy(replica)
        positions = [replica.vclock]

        @replica.on_change
        def changed(changes: list[flowstone.SettledChange]) -> None:
            told.extend((change.replica_id, change.lsn) for change in changes)
            positions.append(replica.vclock)

        for number in range(1, ROUNDS):
            upstream = replica.upstream.partition(":")[0]
            writing = asyncio.create_task(Writer(sim, number).run("a", 10))
            if upstream == "a":
                await writing
            sim.kill(upstream)
            await writing
            await sim.sleep(sim.random.uniform(0, 6))
            await sim.restart(upstream)
            await sim.until(lambda: all_follow_all(sim))
            if upstream == "a":
                await sim.on("a", sim.node("a").promote())
        await replica.wait_for(sim.node("a").info()["vclock"], timeout=60)
        copy.check(sim, "a")
        assert copy.resync_count == 0
    assert len(set(told)) == len(told) >= 10 * (ROUNDS - 1)
    assert told == sorted(told, key=lambda change: change[1])
    assert all(before <= after for before, after in pairwise(positions))
    assert len({state.upstream for state in states}) > 1


@simulated()
async def test_replica_without_any_upstream_becomes_stale(sim: Simulation) -> None:
    await form(sim)
    states: list[flowstone.ReplicaState] = []
    async with flowstone.follow([sim.uri("a"), sim.uri("b")], outside=sim.outside, on_state=states.append) as replica:
        await sim.until(lambda: replica.lag < 2)
        replica.check_fresh(2)
        for name in ("a", "b"):
            sim.kill(name)
        await sim.sleep(5)
        assert replica.lag > 4
        with pytest.raises(flowstone.StaleReplica, match=r"was in sync [0-9.]+ s ago, more than 2 s"):
            replica.check_fresh(2)
        assert (states[0].status, states[1].status) == ("follow", "disconnected")
        await sim.restart("b")
        await sim.until(lambda: replica.lag < 2)
        assert states[-1] == flowstone.ReplicaState("b:3301", "follow")


@simulated()
async def test_slow_reader_of_changes_throttles_the_upstream_and_misses_nothing(sim: Simulation) -> None:
    await form(sim)
    async with flowstone.follow(sim.uri("a"), outside=sim.outside) as replica:
        stream = replica.changes(buffer=2)
        await Writer(sim, 1).run("a", 30)
        await sim.sleep(30)  # longer than the upstream waits for a silent replica
        assert sim.node("a").info()["vclock"] != replica.vclock.to_mapping()
        await Writer(sim, 2).run("a", 10)
        read = [await anext(stream) for _ in range(40)]
        assert [len(changes) for changes in read] == [1] * 40
        lsns = [changes[0].lsn for changes in read]
        assert lsns == sorted(set(lsns))
        await replica.wait_for(sim.node("a").info()["vclock"], timeout=10)
