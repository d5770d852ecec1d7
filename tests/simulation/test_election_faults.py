"""Replica sets that elect their leaders while nodes die and links break: what a quorum has is never lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from flowstone.errors import FlowstoneError
from flowstone.replication.election import State
from tests import served_node
from tests.conftest import FULL
from tests.simulation.cluster import NAMES, all_follow_all, converge, start_set
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, leaders, running
from tests.simulation.workload import FIELDS, SPACE, SPACE_ID, Writer, rows

SEEDS = range(100 if FULL else 4)
FIVE = ("a", "b", "c", "d", "e")


class Chronicle:
    """Who leads in which term; two in one are a failure."""

    def __init__(self, sim: Simulation, names: tuple[str, ...]) -> None:
        self._sim = sim
        self._names = names
        self.terms: dict[int, str] = {}
        sim.loop.before_jump.append(self._look)

    def _look(self) -> None:
        for name in self._names:
            # Looked at whenever time moves: `info()` would take most of it.
            raft = self._sim.node(name)._instance.elections.raft if self._sim.is_ready(name) else None
            if raft is None or raft.state is not State.LEADER:
                continue
            term = raft.term
            if self.terms.setdefault(term, name) != name:
                self._sim.failures.append(f"{name} leads term {term}, which {self.terms[term]} does")


async def keep_writing(sim: Simulation, writer: Writer, names: tuple[str, ...]) -> None:
    """Writes to whoever leads, for ever."""
    while True:
        found = leaders(sim, [name for name in names if sim.is_ready(name)])
        if found:
            await writer.run(sim.random.choice(found), sim.random.randrange(1, 5), timeout=10)
        await sim.sleep(sim.random.expovariate(1))


async def hurt(sim: Simulation, names: tuple[str, ...]) -> None:
    """One thing goes wrong, for a while."""
    name, seconds = sim.random.choice(names), sim.random.uniform(0, 15)
    match sim.random.randrange(5):
        case 0:
            sim.kill(name)
        case 1:
            sim.crash(name, sim.random.choice([Loss.UNSYNCED, Loss.ANY]))
        case 2:
            sim.isolate(name, is_quiet=sim.random.random() < 0.5)
        case 3:
            other = sim.random.choice([other for other in names if other != name])
            sim.random.choice([sim.cut, sim.black_hole])(name, other)
        case 4:
            with suppress(FlowstoneError, Crashed):
                await sim.on(name, sim.node(name).promote())
    await sim.sleep(seconds)
    sim.heal()
    for name in names:
        if not sim.is_running(name):
            await sim.restart(name)


async def survive(sim: Simulation, names: tuple[str, ...], *, rounds: int = 5) -> Chronicle:
    await start_set(sim, names, election_mode="candidate", wal_mode="fsync", replication_timeout=0.5)
    chronicle = Chronicle(sim, names)
    await sim.until(lambda: all_follow_all(sim, names))
    leader = await elect(sim, names)
    await served_node.create_space(await sim.client(leader), SPACE_ID, SPACE, FIELDS, options={"is_sync": True})
    await converge(sim, names)  # what is asynchronous, as a definition is, may be lost
    writers = [Writer(sim, number) for number in range(3)]
    writing = asyncio.gather(*(keep_writing(sim, writer, names) for writer in writers))
    for _ in range(rounds):
        await hurt(sim, names)
        await sim.sleep(sim.random.uniform(0, 10))
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    leader = await elect(sim, names)
    await converge(sim, names)
    found = await rows(await sim.client(leader))
    for writer in writers:
        writer.check(found)
        assert writer.count
    assert not sim.node(leader).info()["synchro"]["queue"]["len"]
    assert running(sim, names) == list(names)
    return chronicle


@simulated(seeds=SEEDS)
async def test_three_nodes_lose_nothing_that_was_acknowledged(sim: Simulation) -> None:
    await survive(sim, NAMES)


@simulated(seeds=SEEDS[: len(SEEDS) // 2])
async def test_five_nodes_lose_nothing_that_was_acknowledged(sim: Simulation) -> None:
    await survive(sim, FIVE)
