"""Replica sets of unmodified nodes in the simulator: bootstrapped, partitioned, crashed, and equal in the end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import Readonly
from flowstone.node.upstream.applier import Applier
from tests.simulation.cluster import (
    NAMES,
    all_follow_all,
    converge,
    downstream,
    follows,
    is_converged,
    start_set,
    upstream,
    vclock,
)
from tests.simulation.disk import Loss
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.workload import Writer, held, make_space, replace, rows

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])


@DIALECTS
@simulated(seeds=range(5))
async def test_three_nodes_bootstrap_one_replica_set(sim: Simulation, dialect: str) -> None:
    nodes = await start_set(sim, dialect=dialect)
    infos = [node.info() for node in nodes]
    assert len({info["cluster"]["uuid"] for info in infos}) == 1
    assert sorted(info["id"] for info in infos) == [1, 2, 3]
    await sim.until(lambda: all_follow_all(sim))
    await converge(sim)
    assert [node.info()["status"] for node in nodes] == ["running"] * 3
    assert not any(node.info()["ro"] for node in nodes)


@DIALECTS
@simulated(seeds=range(5))
async def test_rows_of_one_member_reach_all(sim: Simulation, dialect: str) -> None:
    await start_set(sim, dialect=dialect)
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 100)
    assert writer.count == 100
    await converge(sim, seconds=5)
    for name in NAMES:
        writer.check(await rows(await sim.client(name)))


@DIALECTS
@simulated(seeds=range(5))
async def test_replica_joins_a_writing_master_with_data(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    writers = [Writer(sim, number) for number in range(2)]
    await writers[0].run("a", 50)
    writing = asyncio.gather(*(writer.run("a", 200) for writer in writers))
    await sim.start("b", dialect=dialect, replication=[sim.uri("a")])
    await writing
    await converge(sim, "ab")
    for writer in writers:
        writer.check(await rows(await sim.client("b")))


@simulated(seeds=range(5))
async def test_isolated_replica_catches_up(sim: Simulation) -> None:
    await start_set(sim)
    await make_space(sim, "a")
    await converge(sim)
    sim.isolate("c", is_quiet=sim.random.random() < 0.5)
    writer = Writer(sim, 0)
    await writer.run("a", 100)
    await converge(sim, "ab")
    await sim.sleep(sim.random.uniform(0, 20))
    assert not held(sim, "c")
    sim.heal()
    await converge(sim, seconds=30)
    writer.check(await rows(await sim.client("c")))


@simulated(seeds=range(5))
async def test_replica_that_lags_beyond_the_cached_tail_is_fed_from_files(sim: Simulation) -> None:
    await start_set(sim, wal_max_size=5000)
    await make_space(sim, "a")
    await converge(sim)
    await sim.stop("c")
    writer = Writer(sim, 0)
    await writer.run("a", 200)
    await sim.restart("a")
    await sim.restart("c")
    await converge(sim, seconds=30)
    writer.check(await rows(await sim.client("c")))


@pytest.mark.parametrize("victim", ["a", "b"])
@simulated(seeds=range(5))
async def test_crashed_member_recovers(sim: Simulation, victim: str) -> None:
    await start_set(sim, wal_mode="fsync")
    await make_space(sim, "a")
    await converge(sim)
    writers = [Writer(sim, number) for number in range(3)]
    for _ in range(3):
        loss = sim.random.choice(list(Loss))
        sim.crash_after(victim, sim.random.randrange(1, 60), loss)
        writing = asyncio.gather(*(writer.run("a", 50, timeout=5) for writer in writers))
        await sim.until(lambda: not sim.is_running(victim))
        await writing
        await sim.sleep(sim.random.uniform(0, 10))
        await sim.restart(victim)
        await converge(sim)
        found = await rows(await sim.client("c"))
        for writer in writers:
            writer.check(found)


@simulated(seeds=range(5))
async def test_all_members_recover_after_crashing_at_once(sim: Simulation) -> None:
    await start_set(sim, wal_mode="fsync")
    await make_space(sim, "a")
    await converge(sim)
    writer = Writer(sim, 0)
    writing = asyncio.gather(writer.run("a", 1000, timeout=5))
    await sim.until(lambda: writer.count)
    await sim.sleep(sim.random.uniform(0, 0.5))
    for name in NAMES:
        sim.crash(name)
    await writing
    await asyncio.gather(*(sim.restart(name) for name in NAMES))
    await converge(sim)
    assert writer.count
    writer.check(await rows(await sim.client("b")))


@DIALECTS
@simulated(seeds=range(3))
async def test_anonymous_replica_has_the_data_and_no_id(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 50)
    replica = await sim.start("b", dialect=dialect, replication=[sim.uri("a")], replication_anon=True, read_only=True)
    await writer.run("a", 50)
    await converge(sim, "ab")
    assert replica.info()["id"] == 0
    assert len(sim.node("a").info()["replication"]) == 1
    assert sim.node("a").info()["replication_anon"]["count"] == 1
    client = await sim.client("b")
    writer.check(await rows(client))
    with pytest.raises(Readonly):
        await replace(client, (1, 1, ""))


@simulated(seeds=range(5))
async def test_masters_that_write_different_keys_converge(sim: Simulation) -> None:
    await start_set(sim)
    await make_space(sim, "a")
    await converge(sim)
    writers = {name: Writer(sim, number) for number, name in enumerate(NAMES)}
    writing = asyncio.gather(*(writer.run(name, 100) for name, writer in writers.items()))
    for _ in range(3):
        await sim.sleep(sim.random.uniform(0, 0.1))
        one, other = sim.random.sample(NAMES, 2)
        sim.random.choice([sim.cut, sim.black_hole])(one, other)
        await sim.sleep(sim.random.uniform(0, 10))
        sim.heal()
    await writing
    await converge(sim)
    assert set(vclock(sim, "a")) == {1, 2, 3}
    found = await rows(await sim.client("a"))
    for writer in writers.values():
        assert writer.count == 100
        writer.check(found)


@pytest.mark.parametrize("timeout", [0.5, 3.0])
@simulated(seeds=range(3))
async def test_silent_peer_is_disconnected_after_four_timeouts(sim: Simulation, timeout: float) -> None:
    await start_set(sim, "ab", replication_timeout=timeout)
    await sim.until(lambda: all_follow_all(sim, "ab"))
    await sim.sleep(20 * timeout)
    assert all_follow_all(sim, "ab")
    sim.black_hole("a", "b")
    before = sim.now
    await sim.until(lambda: not follows(sim, "b", "a"), seconds=100)
    assert 2.9 * timeout < sim.now - before < 4.5 * timeout
    await sim.until(lambda: downstream(sim, "a", "b").get("status") == "stopped", seconds=2 * timeout)
    assert upstream(sim, "b", "a")["status"] == "disconnected"
    sim.heal()
    await sim.until(lambda: all_follow_all(sim, "ab"), seconds=10 * timeout)


@DIALECTS
@simulated(seeds=range(5))
async def test_connection_is_retried_after_the_peer_lost_power(sim: Simulation, dialect: str) -> None:
    await start_set(sim, "ab", wal_mode="fsync", dialect=dialect)
    await converge(sim, "ab")
    sim.cut("a", "b")
    await sim.sleep(3)
    sim.heal()
    await sim.until(lambda: upstream(sim, "b", "a").get("status") != "disconnected")
    await sim.sleep(sim.random.uniform(0, 0.02))
    sim.crash("a")
    await sim.sleep(sim.random.uniform(0, 5))
    await sim.restart("a")
    await sim.until(lambda: all_follow_all(sim, "ab"), seconds=60)


@simulated(seeds=range(3))
async def test_member_without_its_quorum_is_an_orphan_until_it_has_caught_up(sim: Simulation) -> None:
    await start_set(sim, dialect="2.6", replication_connect_timeout=5)
    await make_space(sim, "a")
    await converge(sim)
    await sim.stop("b")
    writer = Writer(sim, 0)
    await writer.run("a", 20)
    sim.kill("a")
    await sim.stop("c")
    node = await sim.restart("b")
    assert node.info()["status"] == "orphan"
    assert node.info()["ro"]
    with pytest.raises(Readonly):
        await replace(await sim.client("b"), (1, 1, ""))
    await asyncio.gather(sim.restart("a"), sim.restart("c"))
    await sim.until(lambda: node.info()["status"] == "running")
    writer.check(await rows(await sim.client("b")))
    await replace(await sim.client("b"), (1000, 1, ""))
    await converge(sim)


@simulated(seeds=range(3))
async def test_logs_are_kept_for_the_slowest_registered_replica(sim: Simulation) -> None:
    await start_set(sim, wal_max_size=5000, checkpoint_count=1)
    await make_space(sim, "a")
    await converge(sim)
    sim.isolate("c")
    writer = Writer(sim, 0)
    for _ in range(4):
        await writer.run("a", 50)
        for name in ("a", "b"):
            await sim.on(name, sim.node(name).snapshot())
    sim.heal()
    await converge(sim)
    writer.check(await rows(await sim.client("c")))
    await sim.on("a", sim.node("a").snapshot())
    await sim.until(lambda: sum(name.endswith(".xlog") for name in sim.storage("a").names) <= 2)


@simulated(seeds=range(4))
async def test_a_storm_of_faults_ends_in_equal_replicas(sim: Simulation) -> None:
    await start_set(sim, wal_mode="fsync", wal_max_size=20_000, checkpoint_wal_threshold=60_000)
    await make_space(sim, "a")
    await converge(sim)
    writers = {name: Writer(sim, number) for number, name in enumerate(NAMES)}
    until = sim.now + 40

    async def write(name: str, writer: Writer) -> None:
        while sim.now < until:
            if sim.is_running(name):
                await writer.run(name, 5, timeout=3)
            await sim.sleep(1)

    writing = asyncio.gather(*(write(name, writer) for name, writer in writers.items()))
    while sim.now < until:
        await sim.sleep(sim.random.uniform(0, 4))
        name, other = sim.random.sample(NAMES, 2)
        match sim.random.randrange(5):
            case 0:
                sim.cut(name, other)
            case 1:
                sim.black_hole(name, other, is_one_way=sim.random.random() < 0.3)
            case 2:
                sim.heal()
            case 3 if sim.is_running(name):
                sim.crash(name, sim.random.choice(list(Loss)))
            case _ if not sim.is_running(name):
                await sim.restart(name, replication_connect_timeout=3, replication_sync_timeout=3)
    sim.heal()
    await writing
    for name in NAMES:
        if not sim.is_running(name):
            await sim.restart(name)
    await converge(sim, seconds=120)
    found = await rows(await sim.client("a"))
    for writer in writers.values():
        writer.check(found)


@simulated()
async def test_unreachable_upstream_is_named(sim: Simulation) -> None:
    with pytest.raises(FlowstoneError, match="replication"):
        await sim.start("b", replication=[sim.uri("a")], replication_connect_timeout=3)


@simulated()
async def test_peer_may_be_lost_while_replication_is_reconfigured(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reconfiguration keeps its applier, which retries by itself; it must not be started twice (seed 906)."""
    stop = Applier.stop

    async def stop_slowly(applier: Applier) -> None:
        await stop(applier)
        await sim.sleep(1)

    await start_set(sim, replication_timeout=0.5)
    await sim.until(lambda: all_follow_all(sim))
    monkeypatch.setattr(Applier, "stop", stop_slowly)
    replication = [sim.uri(name) for name in NAMES]
    configuring = asyncio.ensure_future(sim.on("a", sim.node("a").reconfigure(replication=replication)))
    sim.cut("a", "c")
    await sim.sleep(3)
    sim.heal()
    await configuring
    await sim.until(lambda: all_follow_all(sim))


async def eventful(sim: Simulation) -> None:
    await start_set(sim)
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 30)
    sim.isolate("b", is_quiet=True)
    await writer.run("a", 30)
    await sim.sleep(10)
    sim.crash("c", Loss.ANY)
    sim.heal()
    await sim.restart("c")
    await sim.until(lambda: is_converged(sim))


PRINT_HASH = f"""
from tests.simulation.simulation import Simulation
from {__name__} import eventful
sim = Simulation(3)
sim.run(eventful)
print(sim.trace.hash)
"""


def test_seed_determines_the_run_of_a_cluster_in_any_process() -> None:
    sim = Simulation(3)
    sim.run(eventful)
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", PRINT_HASH],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == sim.trace.hash
