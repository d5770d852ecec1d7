"""A master in the simulator and a follower that checks every row: none lost, duplicated, split or reordered."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest

from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.node.downstream import relay_stream
from flowstone.replication.messages import SubscribeReply
from flowstone.replication.vclock import VClock
from tests.simulation.cluster import all_follow_all, converge, start_set, vclock
from tests.simulation.disk import Loss
from tests.simulation.follower import Follower
from tests.simulation.run import run
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.workload import Writer, make_space

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])


def has_all(sim: Simulation, follower: Follower, name: str = "a") -> bool:
    return sim.is_running(name) and follower.vclock.to_mapping() == vclock(sim, name)


@DIALECTS
@simulated(seeds=range(5))
async def test_follower_gets_a_snapshot_and_then_every_row_once(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    writers = [Writer(sim, number) for number in range(3)]
    writing = asyncio.gather(*(writer.run("a", 100) for writer in writers))
    await sim.sleep(sim.random.uniform(0, 0.5))
    follower = Follower(sim, Dialect(dialect).version_id)
    applier = follower.follow(sim, "a")
    await writing
    await sim.until(lambda: has_all(sim, follower) and applier.state.value == "follow")
    await applier.stop()


@DIALECTS
@simulated(seeds=range(10))
async def test_cuts_black_holes_and_crashes_lose_and_duplicate_no_row(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect, wal_mode="fsync", wal_max_size=20_000)
    await make_space(sim, "a")
    follower = Follower(sim, Dialect(dialect).version_id)
    applier = follower.follow(sim, "a")
    writers = [Writer(sim, number) for number in range(3)]
    for _ in range(6):
        writing = asyncio.gather(*(writer.run("a", 50, timeout=5) for writer in writers))
        await sim.sleep(sim.random.uniform(0, 0.3))
        match sim.random.randrange(4):
            case 0:
                sim.cut("a", "scenario")
            case 1:
                sim.black_hole("a", "scenario", is_one_way=sim.random.random() < 0.5)
            case 2:
                sim.crash("a", sim.random.choice(list(Loss)))
            case 3:
                await sim.stop("a")
        await sim.sleep(sim.random.uniform(0, 10))
        sim.heal()
        await writing
        if not sim.is_running("a"):
            await sim.restart("a")
    await sim.until(lambda: has_all(sim, follower) and applier.state.value == "follow", seconds=120)
    await applier.stop()


@simulated(seeds=range(3))
async def test_unreadable_log_stops_the_relay_temporarily(sim: Simulation) -> None:
    """No exception is logged: that would fail this test like any other."""
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    await sim.start("b", replication=[sim.uri("a")], read_only=True)
    await sim.stop("b")
    await Writer(sim, 0).run("a", 300)
    await sim.restart("a")  # without the cached tail for returning replicas
    sim.storage("a").broken.add("read_at")
    await sim.restart("b", replication_sync_timeout=0.1)
    await sim.until(lambda: sim.storage("a").failure_count > 2)
    sim.storage("a").broken.clear()
    await converge(sim, "ab")


@simulated(seeds=range(3))
async def test_unreadable_log_rejects_a_join_temporarily(sim: Simulation) -> None:
    await sim.start("a", wal_mode="fsync", wal_max_size=4000)
    await make_space(sim, "a")
    await Writer(sim, 0).run("a", 100)
    await sim.restart("a")
    sim.storage("a").broken.add("open")
    uuid = "5e7f2c1a-0000-4000-8000-00000000000b"  # the same answer at the second attempt: the first one registered it
    replication = [sim.uri("a"), sim.uri("b")]
    with pytest.raises(FlowstoneError, match="Internal error: Input/output error"):
        await sim.start("b", replication=replication, read_only=True, instance_uuid=uuid)
    sim.storage("a").broken.clear()
    await sim.restart("b")
    await converge(sim, "ab")


@simulated(seeds=range(3))
async def test_member_whose_vclock_lags_its_relay_is_followed_once_it_has_caught_up(sim: Simulation) -> None:
    """Real 2.6 and 2.11 can send a row before the vclock in their answers to SUBSCRIBE includes it."""
    lags = 0

    def lagging(replica_id: int, vclock: VClock, *others: Any) -> SubscribeReply:
        nonlocal lags
        number = sim.node("a")._instance.id
        if replica_id == number and not lags:
            lags += 1
            vclock = VClock(vclock.to_mapping() | {number: vclock.get(number) - 1})
        return SubscribeReply(replica_id, vclock, *others)

    await start_set(sim, "ab", replication_timeout=0.5)
    await sim.until(lambda: all_follow_all(sim, "ab"))
    await make_space(sim, "a")
    await converge(sim, "ab")
    writer = Writer(sim, 0)
    await writer.run("a", 10)
    await converge(sim, "ab")
    replication = [sim.uri("a"), sim.uri("b")]
    await sim.on("b", sim.node("b").reconfigure(replication=[]))
    with patch.object(relay_stream, "SubscribeReply", lagging):
        changing = asyncio.ensure_future(sim.on("b", sim.node("b").reconfigure(replication=replication)))
        await sim.until(lambda: lags, what="b asks a")
        await writer.run("a", 10)
        await changing
        await sim.until(lambda: all_follow_all(sim, "ab"), what="b follows a")
    await converge(sim, "ab")


def test_relay_survives_the_collection_of_logs_that_its_replica_has_from_another_member() -> None:
    """As in the run that found it: after a full disk, a replica catches up from two members at once."""
    assert run(581783091).violations == []
