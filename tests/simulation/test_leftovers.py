"""A stopped process that leaves any resource behind is reported."""

from __future__ import annotations

import asyncio

import pytest

from flowstone.outside import File
from tests.simulation.simulation import Simulation, simulated


class Careless:
    """A process that acquires a resource and never releases it."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.files: list[File] = []

    async def stop(self) -> None:
        pass


async def left_by(sim: Simulation, what: str) -> list[str]:
    sim.build("a", "b")
    loop = asyncio.get_running_loop()

    async def start(outside: object) -> Careless:
        careless = Careless()
        match what:
            case "task":
                careless.tasks.append(loop.create_task(asyncio.sleep(10)))
            case "timer":
                loop.call_later(10, print)
            case "lock":
                sim.machine("a").outside(sim.machine("a").life).disk.lock("/")
            case "file":
                careless.files.append(sim.machine("a").outside(sim.machine("a").life).disk.create("/forgotten"))
            case "closed file":
                careless.files.append(sim.machine("a").outside(sim.machine("a").life).disk.create("/closed"))
                careless.files[0].close()
            case "dropped file":
                sim.machine("a").outside(sim.machine("a").life).disk.create("/dropped")
            case "address":
                network = sim.machine("a").outside(sim.machine("a").life).network
                await network.listen("a", 3301, lambda client: None)  # type: ignore[arg-type, return-value]
            case "work":
                working = loop.create_task(sim.machine("a").outside(sim.machine("a").life).blocking(print))
                await asyncio.sleep(0)
                working.cancel()
        return careless

    await sim.launch("a", start)
    await sim.stop("a")
    found, sim.failures = sim.failures, []
    return found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("task", "the task"),
        ("timer", "the timer"),
        ("lock", "a lock on /"),
        ("file", "/forgotten, open"),
        ("address", "the address a:3301"),
    ],
)
@simulated()
async def test_leftover_resource_is_found(sim: Simulation, what: str, words: str) -> None:
    assert any(f"a stopped and left behind {words}" in each for each in await left_by(sim, what))


@pytest.mark.parametrize("what", ["nothing", "work", "closed file", "dropped file"])
@simulated()
async def test_released_resource_is_not_reported(sim: Simulation, what: str) -> None:
    assert await left_by(sim, what) == []


@simulated()
async def test_open_view_of_a_stopped_node_is_found(sim: Simulation) -> None:
    node = await sim.start("a")
    view = node.box.open_view()
    await sim.stop("a")
    (found,) = sim.failures
    assert "left behind the view" in found
    sim.failures.clear()
    view.close()
