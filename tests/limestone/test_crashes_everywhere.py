"""Random programs with a crash at any write, sync or send of either side.

Reported epochs are present in full, other epochs completely or not at all; both sides continue from there and agree.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import Final, get_args

import pytest

from flowstone.errors import FlowstoneError
from flowstone.limestone.settings import GroupCommit, SessionClose, Settings
from tests.conftest import FULL
from tests.limestone.model import Model
from tests.limestone.pair import PAUSE_SECONDS, Pair
from tests.limestone.programs import (
    ENDPOINT,
    MASTER,
    REPLICA,
    Program,
    Shape,
    check,
    start_master,
    start_replica,
)
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation

ALONE: Final = Settings(f"/{MASTER}", spill=150)
REPLICATED: Final = replace(ALONE, replicas=(ENDPOINT,))
SHAPE: Final = Shape()
COMPACTING: Final = Shape(compacts=True)
PATIENCE_SECONDS: Final = 300.0
STEP: Final = 7
"""Below full scale a store dies in every seventh operation, at different offsets for different seeds."""


# --- a store alone ---


async def run_alone(stage: Simulation, model: Model, rng: Random, shape: Shape) -> None:
    master = await start_master(stage, model, ALONE, shape.channels)
    await Program(stage, model, shape, rng).run(master)
    assert check(stage, MASTER, model) >= model.last_epoch()
    await stage.stop(MASTER)


def operations_alone(seed: int, shape: Shape) -> int:
    """Return the number of writes and syncs of a program without faults."""

    async def scenario(stage: Simulation) -> None:
        stage.build(MASTER)
        await run_alone(stage, Model(), Random(f"{seed}/0"), shape)

    stage = Simulation(f"crash/{seed}")
    stage.run(scenario)
    return stage.storage(MASTER).operation_count


@pytest.mark.parametrize("seed", range(200 if FULL else STEP))
@pytest.mark.parametrize("shape", [SHAPE, COMPACTING], ids=["plain", "compacting"])
def test_crashed_store_keeps_reported_epochs(seed: int, shape: Shape) -> None:
    count, rng = operations_alone(seed, shape), Random(seed)
    for first in range(1 + seed % STEP, count, 1 if FULL else STEP):
        crash_alone(seed, shape, [first, rng.randint(1, 30), rng.randint(1, count)], rng.choice(list(Loss)))


def crash_alone(seed: int, shape: Shape, numbers: list[int], loss: Loss) -> None:
    async def scenario(stage: Simulation) -> None:
        stage.build(MASTER)
        model = Model()
        for life, number in enumerate(numbers):
            stage.crash_after(MASTER, number, loss)
            try:
                await run_alone(stage, model, Random(f"{seed}/{life}"), shape)
            except Crashed:
                model.forget(check(stage, MASTER, model))
        stage.storage(MASTER).spare()
        await run_alone(stage, model, Random(f"{seed}/last"), shape)

    Simulation(f"crash/{seed}").run(scenario)


# --- a master and its replica ---


@dataclass(frozen=True)
class Crash:
    """The crash of one side, in the middle of the operation with this number, counted from the previous crash."""

    victim: str
    number: int
    loss: Loss


async def go_through(stage: Simulation, settings: Settings, seed: int, crashes: list[Crash], shape: Shape) -> None:
    """Run a pair from its creation to the end of its program, with one crash after another."""
    later = list(reversed(crashes))

    def arm() -> None:
        if later:
            crash = later.pop()
            stage.crash_after(crash.victim, crash.number, crash.loss)

    pair = Pair(stage, settings, seed, shape, on_death=arm)
    arm()
    await pair.run()
    pair.check_end()


def operations(settings: Settings, seed: int, shape: Shape = SHAPE) -> dict[str, int]:
    """Return the number of writes, syncs and sends of each side in a program without faults."""
    stage = run_pair(settings, seed, [], shape)
    return {name: stage.storage(name).operation_count for name in (MASTER, REPLICA)}


def run_pair(settings: Settings, seed: int, crashes: list[Crash], shape: Shape = SHAPE) -> Simulation:
    stage = Simulation(f"pair/{seed}")

    async def scenario(_: object) -> None:
        await go_through(stage, settings, seed, crashes, shape)

    stage.run(scenario)
    return stage


every_order = pytest.mark.parametrize("group_commit", get_args(GroupCommit))
every_close = pytest.mark.parametrize("session_close", get_args(SessionClose))


def moments(counts: dict[str, int], rng: Random) -> list[Crash]:
    """Return the operations of both sides at which to crash; in CI a sample, different for each test."""
    step = 1 if FULL else 9
    found = [(name, number) for name in (MASTER, REPLICA) for number in range(rng.randint(1, step), counts[name], step)]
    return [Crash(name, number, rng.choice(list(Loss))) for name, number in found]


@every_close
@every_order
@pytest.mark.parametrize("seed", range(50 if FULL else 1))
def test_pair_continues_and_agrees_after_crashes(
    seed: int, group_commit: GroupCommit, session_close: SessionClose
) -> None:
    settings = replace(REPLICATED, group_commit=group_commit, session_close=session_close)
    rng = Random(f"{seed}/{group_commit}/{session_close}")
    for first in moments(operations(settings, seed), rng):
        later = [Crash(rng.choice((MASTER, REPLICA)), rng.randint(1, 60), rng.choice(list(Loss))) for _ in range(2)]
        run_pair(settings, seed, [first, *later[: rng.randint(0, 2)]])


@every_order
@pytest.mark.parametrize("seed", range(50 if FULL else 1))
def test_pair_that_compacts_on_both_sides_agrees_after_crashes(seed: int, group_commit: GroupCommit) -> None:
    """A replica that lacks data of the compacted file is seeded; each side compacts by itself."""
    settings, rng = replace(REPLICATED, group_commit=group_commit), Random(f"{seed}/{group_commit}")
    for first in moments(operations(settings, seed, COMPACTING), rng):
        later = [Crash(rng.choice((MASTER, REPLICA)), rng.randint(1, 60), rng.choice(list(Loss))) for _ in range(2)]
        run_pair(settings, seed, [first, *later[: rng.randint(0, 2)]], COMPACTING)


# --- without extensions: the original's messages, or a replica that writes the original's files ---


async def one_life(stage: Simulation, settings: Settings, seed: int, crash: Crash | None, *, compatible: bool) -> None:
    """Run until one of the two dies: there is no recovery, because the original's files do not show the
    durable epoch.
    """
    model = Model()
    stage.build(MASTER, REPLICA)
    if crash is not None:
        stage.crash_after(crash.victim, crash.number, crash.loss)
    booting = asyncio.ensure_future(boot_after_crash(stage))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):  # a master that has never reached its replica waits for it
            await start_replica(stage, compatible=compatible)
            master = await start_master(stage, model, settings, SHAPE.channels)
            await Program(stage, model, SHAPE, Random(seed)).run(master)
    except (Crashed, FlowstoneError, TimeoutError):
        assert crash is not None
    booting.cancel()
    sides = [MASTER] if compatible else [MASTER, REPLICA]
    for name in sides:
        durable = check(stage, name, model)
        assert crash is not None or durable >= model.last_epoch()


async def boot_after_crash(stage: Simulation) -> None:
    """Boot the machine of a replica after a power loss, so that it resets unknown connections."""
    await stage.until(lambda: stage.storage(REPLICA).names and not stage.is_running(REPLICA), seconds=1e6)
    await stage.sleep(PAUSE_SECONDS)
    stage.internet.boot(stage.machine(REPLICA).host)


@every_close
@every_order
@pytest.mark.parametrize("seed", range(50 if FULL else 1))
@pytest.mark.parametrize("compatible", [MASTER, REPLICA])
def test_pair_with_a_compatible_side_keeps_reported_epochs_until_a_crash(
    compatible: str, seed: int, group_commit: GroupCommit, session_close: SessionClose
) -> None:
    settings = replace(
        REPLICATED, group_commit=group_commit, session_close=session_close, compatible=compatible == MASTER
    )

    def run(crash: Crash | None) -> Simulation:
        stage = Simulation(f"compatible/{seed}")
        stage.run(lambda _: one_life(stage, settings, seed, crash, compatible=compatible == REPLICA))
        return stage

    stage = run(None)
    counts = {name: stage.storage(name).operation_count for name in (MASTER, REPLICA)}
    for crash in moments(counts, Random(f"{compatible}/{seed}/{group_commit}/{session_close}")):
        run(crash)
