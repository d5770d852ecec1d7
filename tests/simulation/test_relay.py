"""A master in the simulator and a follower that checks every row: nothing lost, doubled, split or out of order."""

from __future__ import annotations

import asyncio

import pytest

from flowstone.box.dialect import Dialect
from tests.simulation.cluster import vclock
from tests.simulation.disk import Loss
from tests.simulation.follower import Follower
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.workload import Writer, make_space

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])


def has_all(sim: Simulation, follower: Follower, name: str = "a") -> bool:
    return sim.is_running(name) and follower.vclock.to_mapping() == vclock(sim, name)


@DIALECTS
@simulated(seeds=range(5))
async def test_a_follower_gets_a_snapshot_and_then_every_row_once(sim: Simulation, dialect: str) -> None:
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
async def test_cuts_black_holes_and_deaths_lose_and_double_nothing(sim: Simulation, dialect: str) -> None:
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
