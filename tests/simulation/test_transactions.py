"""Transactions in simulated replica sets are atomic: on every node, at every moment, after every crash."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import pytest

from flowstone.errors import FlowstoneError
from tests.simulation.cluster import NAMES, converge, start_set
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.workload import SPACE, SPACE_ID, make_space

COUNT: Final = 8
"""Rows of a transaction: all rows of one writer, each time with the next version."""

WRITERS: Final = 3


async def write_all(sim: Simulation, name: str, writer: int, version: int) -> None:
    """Set all rows of one writer to this version in one transaction."""
    node = sim.node(name)
    async with node.transaction() as transaction:
        space = transaction.space(SPACE)
        for number in range(COUNT):
            space.replace((writer * COUNT + number, version, "x" * sim.random.randrange(300)))


def versions(sim: Simulation, name: str) -> list[list[int]]:
    """Return the version of each writer's rows."""
    spaces = sim.node(name).box.spaces
    if SPACE_ID not in spaces or spaces[SPACE_ID].primary is None:
        return []
    found: dict[int, list[int]] = {}
    for row in sim.node(name).space(SPACE).select():
        found.setdefault(row[0] // COUNT, []).append(row[1])
    return list(found.values())


def check(sim: Simulation, name: str) -> None:
    for found in versions(sim, name):
        assert len(found) == COUNT, f"{name} has {len(found)} rows of {COUNT}"
        assert len(dict.fromkeys(found)) == 1, f"{name} has versions {found} of one transaction"


@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
@simulated(seeds=range(4))
async def test_transactions_are_atomic_on_every_node(sim: Simulation, dialect: str) -> None:
    await start_set(sim, dialect=dialect, wal_mode="fsync", wal_max_size=30_000, replication_timeout=0.5)
    await make_space(sim, "a")
    await converge(sim)
    acknowledged = dict.fromkeys(range(WRITERS), 0)
    until = sim.now + 6

    async def write(writer: int, name: str) -> None:
        version = 0
        while sim.now < until:
            await sim.sleep(sim.random.uniform(0, 0.3))
            if sim.is_ready(name):
                version += 1
                with suppress(Crashed, FlowstoneError):
                    await sim.on(name, write_all(sim, name, writer, version))
                    acknowledged[writer] = version

    def look() -> None:
        for name in NAMES:
            if sim.is_ready(name):
                check(sim, name)

    sim.loop.before_jump.append(look)
    writing = asyncio.gather(*(write(number, name) for number, name in enumerate(NAMES)))
    while sim.now < until:
        await sim.sleep(sim.random.uniform(0, 1))
        one, other = sim.random.sample(NAMES, 2)
        match sim.random.randrange(4):
            case 0:
                sim.cut(one, other)
            case 1:
                sim.heal()
            case 2:
                sim.black_hole(one, other)
            case _:
                sim.crash_after(one, sim.random.randrange(1, 10), sim.random.choice(list(Loss)))
                await sim.sleep(1)
                if not sim.is_running(one):
                    await sim.restart(one, replication_connect_timeout=1, replication_sync_timeout=1)
    sim.heal()
    for name in NAMES:
        sim.storage(name).spare()
        if not sim.is_running(name):
            await sim.restart(name)
    await writing
    await converge(sim)
    for writer, version in acknowledged.items():
        row = sim.node("a").space(SPACE).get(writer * COUNT)
        assert (row[1] if row is not None else 0) >= version
