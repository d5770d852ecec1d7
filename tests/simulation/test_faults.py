"""Each kind of fault takes effect where it can, heals itself, and reports when it had no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Final

import pytest

from tests.simulation.cluster import converge
from tests.simulation.faults import FAULTS, Nemesis
from tests.simulation.plan import FAULTS as PLANNED
from tests.simulation.plan import Plan, plan
from tests.simulation.replica_set import SPACES, ReplicaSet
from tests.simulation.simulation import BLOCKING_SECONDS, Simulation, simulated

ATTEMPTS_MAX: Final = 20
KINDS = pytest.mark.parametrize("kind", list(FAULTS))

PLAN: Final = replace(
    plan(0),
    size=3,
    dialect="2.11",
    election_mode="candidate",
    wal_mode="fsync",
    wal_max_size=4_000,
    anonymous=1,
    replication_timeout=0.5,
    election_timeout=1.0,
    fencing_mode="soft",
    synchro_timeout=5.0,
)
"""A plan in which every kind can take effect."""


async def keep_writing(replica_set: ReplicaSet) -> None:
    """Write to the leader continuously, ignoring errors."""
    sim, space, key = replica_set.sim, SPACES["set"], 0
    while True:
        leader = replica_set.leader()
        if leader is not None:
            key += 1
            node = sim.node(leader)
            work = sim.on(leader, node.space(space.id).replace((key, 0)))
            await asyncio.gather(work, return_exceptions=True)
        await sim.sleep(0.1)


@asynccontextmanager
async def under_load(sim: Simulation, plan: Plan = PLAN) -> AsyncIterator[ReplicaSet]:
    replica_set = ReplicaSet(sim, plan)
    await replica_set.form()
    writing = asyncio.ensure_future(keep_writing(replica_set))
    yield replica_set
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await replica_set.until(lambda: is_settled(replica_set), what="nothing waits for a verdict")
    await converge(sim, replica_set.names)


def is_settled(replica_set: ReplicaSet) -> bool:
    return all(replica_set.sim.node(name)._instance.queue.is_empty for name in replica_set.names)


def assert_is_well(replica_set: ReplicaSet) -> None:
    sim = replica_set.sim
    assert all(sim.is_running(name) and not sim.is_frozen(name) for name in replica_set.names)
    assert all(link.fault is None and link.is_calm for link in sim.internet.links.values())
    for name in replica_set.names:
        machine = sim.machine(name)
        assert not machine.storage.broken
        assert machine.blocking_seconds == BLOCKING_SECONDS
        assert machine.wall_skew == pytest.approx(0.0, abs=1e-3)


def test_plans_and_faults_have_the_same_kinds() -> None:
    assert sorted(PLANNED) == sorted(FAULTS)


@KINDS
@simulated()
async def test_fault_takes_effect_and_heals_itself(sim: Simulation, kind: str) -> None:
    rng = Random(f"{sim.seed}/fault")
    async with under_load(sim) as replica_set:
        for _ in range(ATTEMPTS_MAX):
            if await FAULTS[kind](replica_set, rng):
                break
        else:
            raise AssertionError("fault never took effect")
        assert_is_well(replica_set)
        await sim.until(replica_set.leader, what="a leader exists")


@simulated(seeds=range(2))
async def test_fault_without_a_target_has_no_effect(sim: Simulation) -> None:
    replica_set = ReplicaSet(sim, PLAN)
    await replica_set.form()
    for name in replica_set.names:
        sim.kill(name)
    rng = Random(f"{sim.seed}/fault")
    for kind in ("kill", "power_loss", "power_loss_of_all", "crash_in_disk_operation", "pause", "cut", "black_hole"):
        assert not await FAULTS[kind](replica_set, rng), kind


@simulated(seeds=range(2))
async def test_nemesis_counts_effective_faults_and_repairs_all(sim: Simulation) -> None:
    async with under_load(sim) as replica_set:
        nemesis = Nemesis(replica_set, Random(f"{sim.seed}/nemesis"), ("kill", "pause", "clog", "cut", "power_loss"))
        begun = sim.now
        await nemesis.run(lambda: sim.now > begun + 60)
        assert 10 <= sum(nemesis.counts.values()) <= 30
        assert all(nemesis.counts.values())
        await replica_set.heal()
        assert_is_well(replica_set)
        await sim.until(replica_set.leader, what="a leader exists")


@simulated()
async def test_machines_keep_power_if_logs_are_not_synced(sim: Simulation) -> None:
    async with under_load(sim, replace(PLAN, wal_mode="write")) as replica_set:
        await FAULTS["power_loss_of_all"](replica_set, Random(0))
    assert "loses unsynced" not in "".join(sim.trace.lines)
    assert "loses any" not in "".join(sim.trace.lines)
