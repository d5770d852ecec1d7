"""A Limestone store in a simulation with nodes keeps its data; one that loses data is reported."""

from __future__ import annotations

from random import Random

from flowstone.limestone.format.entries import WriteVersion, put
from tests.limestone.programs import MASTER, STORAGES
from tests.simulation.limestone_pair import LimestonePair
from tests.simulation.simulation import Simulation, simulated


@simulated(seeds=range(3))
async def test_pair_keeps_its_data_next_to_a_node(sim: Simulation) -> None:
    await sim.start("a")
    pair = LimestonePair(sim, Random(f"{sim.seed}/limestone"))
    pair.start()
    await sim.sleep(60)
    assert await pair.finish() == []
    assert pair.pair.program_count > 3
    assert pair.hurt_count > 3


@simulated()
async def test_lost_session_is_found(sim: Simulation) -> None:
    pair = LimestonePair(sim, Random(0))
    pair.start()
    await sim.sleep(5)
    session = next(each for each in pair.pair.model.sessions if each.is_ended and not each.is_aborted)
    session.entries.append(put(STORAGES[0], b"planted", b"", WriteVersion(2**60, 0)))
    (found,) = await pair.finish()
    assert found.startswith(f"the Limestone: {MASTER} differs at epoch")
