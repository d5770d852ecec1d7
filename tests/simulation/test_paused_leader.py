"""A leader is suspended with writes in flight, is replaced, and resumes: its rows arrive late in files and at
followers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import flowstone
from flowstone.errors import FlowstoneError
from tests.judges.files import list_files
from tests.simulation.cluster import NAMES, converge, start_set
from tests.simulation.judged import files_of, judged
from tests.simulation.link import Fault
from tests.simulation.logs import NOP
from tests.simulation.moving_address import ADDRESS, MovingAddress
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, election, make_space, some

WRITERS = 30
PAUSE_SECONDS = 7.0
SEND_SECONDS = 0.2
"""How long the leader writes rows that no member receives: they are in its log and its kernel's buffers."""


class Load:
    """Writers at one node, until it rejects writes."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._key = 0
        self.acknowledged: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str) -> None:
        self._tasks += [asyncio.get_running_loop().create_task(self._write(name)) for _ in range(WRITERS)]

    async def _write(self, name: str) -> None:
        space = self._sim.node(name).space("test")
        with suppress(FlowstoneError, Crashed):
            while True:
                self._key += 1
                key = self._key
                await self._sim.on(name, space.replace((key,)))
                self.acknowledged.add(key)

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)
        self._tasks.clear()


async def paused(sim: Simulation, load: Load) -> tuple[str, str]:
    """Suspend a leader with rows in flight, and resume it; return it and its successor."""
    leader = await elect(sim)
    others = [name for name in NAMES if name != leader]
    load.start(leader)
    await sim.until(lambda: len(load.acknowledged) > 2 * WRITERS, seconds=60, what="acknowledged writes")
    for name in others:
        sim.internet.break_link(leader, name, Fault.BLACK_HOLE)
    await sim.sleep(SEND_SECONDS)
    sim.freeze(leader)

    def is_replaced() -> bool:
        return any(election(sim, name)["state"] == "leader" for name in others)

    await sim.until(is_replaced, seconds=60, what="another leader")
    await sim.sleep(PAUSE_SECONDS)
    for name in others:
        sim.internet.heal(leader, name)
    sim.thaw(leader)
    await load.end()
    return leader, await elect(sim)


def nops(sim: Simulation, name: str) -> int:
    """Return the number of late rows in the logs of a node."""
    _, logs = list_files(files_of(name, sim.storage(name)))
    return sum(row.type == NOP for log in logs for row in log.rows())


def held(sim: Simulation, name: str) -> set[int]:
    return {row.values[0] for row in sim.node(name).space("test").select()}


@simulated(seeds=some(4))
async def test_servers_recover_the_files_of_a_paused_leader_and_its_set(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate", dialect="2.11", replication_synchro_timeout=5)
    load = Load(sim)
    await make_space(sim, await elect(sim))
    late = 0
    for _ in range(3):
        await paused(sim, load)
        await converge(sim)
        late += sum(nops(sim, name) for name in NAMES)
    for name in NAMES:
        assert load.acknowledged <= held(sim, name)
    boxes = {name: sim.node(name).box for name in NAMES}
    for name in NAMES:
        await sim.stop(name)
    assert late, "no row arrived late"
    assert [each for name in NAMES for each in judged(name, sim.storage(name), boxes[name])] == []


@simulated(seeds=some(4))
async def test_follower_continues_when_its_address_leads_to_another_member(sim: Simulation) -> None:
    """The address may lead to the former leader, which sends rolled-back rows before it sends the PROMOTE that is known
    here."""
    await start_set(sim, election_mode="candidate", dialect="2.11", replication_synchro_timeout=5)
    load = Load(sim)
    await make_space(sim, await elect(sim))
    address = MovingAddress(sim.outside.network, NAMES[0])
    uri = sim.uri(NAMES[0]).replace(f"@{NAMES[0]}:", f"@{ADDRESS}:")
    async with flowstone.follow(uri, outside=address.outside(sim.outside)) as replica:
        for _ in range(3):
            leader = await elect(sim)
            await address.move(next(name for name in NAMES if name != leader))
            former, successor = await paused(sim, load)
            await address.move(former)
            node = sim.node(successor)
            await sim.on(successor, node.space("test").replace((0,)))
            await converge(sim)
            wanted = held(sim, successor)

            def has_all(wanted: set[int] = wanted) -> bool:
                return {row[0] for row in replica.space("test")} == wanted

            await sim.until(has_all, seconds=60, what="the follower has what the set has")
    assert load.acknowledged <= wanted
