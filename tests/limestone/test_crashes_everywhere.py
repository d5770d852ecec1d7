"""Random programs, and a crash at any write, sync or send of either side: what was reported persistent is there, in
full, and of what was not all or nothing; both sides go on from there and agree.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, replace
from random import Random
from typing import Final, get_args

import pytest

from flowstone.errors import FlowstoneError
from flowstone.limestone.settings import GroupCommit, SessionClose, Settings
from tests.conftest import FULL
from tests.limestone.model import Model
from tests.limestone.programs import (
    ENDPOINT,
    MASTER,
    REPLICA,
    Program,
    Shape,
    check,
    is_seeding,
    start_master,
    start_replica,
)
from tests.limestone.stage import Stage
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed

ALONE: Final = Settings(f"/{MASTER}", spill=150)
REPLICATED: Final = replace(ALONE, replicas=(ENDPOINT,))
SHAPE: Final = Shape()
COMPACTING: Final = Shape(compacts=True)
PAUSE_SECONDS: Final = 0.2
"""For how long a machine stays dead."""
PATIENCE_SECONDS: Final = 300.0


# --- a store alone ---


async def run_alone(stage: Stage, model: Model, rng: Random, shape: Shape) -> None:
    master = await start_master(stage, model, ALONE, shape.channels)
    await Program(stage, model, shape, rng).run(master)
    assert check(stage, MASTER, model) >= model.last_epoch()
    await stage.stop(MASTER)


def operations_alone(seed: int, shape: Shape) -> int:
    """How many writes and syncs a program makes that nothing happens to."""

    async def scenario(stage: Stage) -> None:
        stage.build(MASTER)
        await run_alone(stage, Model(), Random(f"{seed}/0"), shape)

    stage = Stage(f"crash/{seed}")
    stage.run(scenario)  # type: ignore[arg-type]
    return stage.storage(MASTER).operation_count


@pytest.mark.parametrize("seed", range(200 if FULL else 20))
@pytest.mark.parametrize("shape", [SHAPE, COMPACTING], ids=["plain", "compacting"])
def test_a_store_alone(seed: int, shape: Shape) -> None:
    count, rng = operations_alone(seed, shape), Random(seed)
    for first in range(1 + seed % 7, count, 1 if FULL else 7):
        crash_alone(seed, shape, [first, rng.randint(1, 30), rng.randint(1, count)], rng.choice(list(Loss)))


def crash_alone(seed: int, shape: Shape, numbers: list[int], loss: Loss) -> None:
    async def scenario(stage: Stage) -> None:
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

    Stage(f"crash/{seed}").run(scenario)  # type: ignore[arg-type]


# --- a master and its replica ---


@dataclass(frozen=True)
class Crash:
    """Where one of the two dies: in the middle of its operation of this number, counted from the crash before."""

    victim: str
    number: int
    loss: Loss


class Pair:
    """A master and a replica that are started again whenever one dies, until all of a program is persistent."""

    def __init__(self, stage: Stage, settings: Settings, seed: int, crashes: list[Crash], shape: Shape) -> None:
        self.stage = stage
        self.shape = shape
        self.settings = settings
        self.model = Model()
        self.past: list[Model] = []
        """What would have been without each of the master's crashes."""
        self.seed = seed
        self.crashes = list(reversed(crashes))

    async def run(self) -> None:
        stage = self.stage
        stage.build(MASTER, REPLICA)
        self._arm()
        keeper = asyncio.ensure_future(self._keep_replica())
        lives = asyncio.ensure_future(self._live())
        keeper.add_done_callback(lambda _: lives.cancel())
        try:
            await lives
        finally:
            if keeper.done():
                keeper.result()
            keeper.cancel()
        for name in (MASTER, REPLICA):
            stage.storage(name).spare()
            assert check(stage, name, self.model) >= self.model.last_epoch()

    def _arm(self) -> None:
        if self.crashes:
            crash = self.crashes.pop()
            self.stage.crash_after(crash.victim, crash.number, crash.loss)

    async def _live(self) -> None:
        life = 0
        while not await self._lived(life):
            life += 1

    async def _lived(self, life: int) -> bool:
        """Whether the master came to the end of its program."""
        stage, model = self.stage, self.model
        try:
            master = await start_master(stage, model, self.settings, self.shape.channels)
            await Program(stage, model, self.shape, Random(f"{self.seed}/{life}")).run(master)
        except Crashed:
            self._check_replica()
            durable = check(stage, MASTER, model)
            self.past.append(copy.deepcopy(model))
            model.forget(durable)
            self._arm()
            await stage.sleep(PAUSE_SECONDS)
            return False
        return True

    async def _keep_replica(self) -> None:
        stage = self.stage
        while True:
            try:
                replica = await start_replica(stage)
                if self.shape.compacts:
                    await stage.sleep(stage.random.uniform(0, 10 * self.shape.pause_seconds))
                    if stage.is_running(REPLICA):
                        await stage.on(REPLICA, replica.compact())
                await stage.until(lambda: not stage.is_running(REPLICA), seconds=1e6)
            except Crashed:
                pass
            self._check_replica()
            self._arm()
            await stage.sleep(PAUSE_SECONDS)

    def _check_replica(self) -> None:
        if not is_seeding(self.stage, REPLICA):
            check(self.stage, REPLICA, self.model, *self.past)


def operations(settings: Settings, seed: int, shape: Shape = SHAPE) -> dict[str, int]:
    """How many writes, syncs and sends each side makes in a program that nothing happens to."""
    stage = run_pair(settings, seed, [], shape)
    return {name: stage.storage(name).operation_count for name in (MASTER, REPLICA)}


def run_pair(settings: Settings, seed: int, crashes: list[Crash], shape: Shape = SHAPE) -> Stage:
    stage = Stage(f"pair/{seed}")

    async def scenario(_: object) -> None:
        await Pair(stage, settings, seed, crashes, shape).run()

    stage.run(scenario)
    return stage


every_order = pytest.mark.parametrize("group_commit", get_args(GroupCommit))
every_close = pytest.mark.parametrize("session_close", get_args(SessionClose))


def moments(counts: dict[str, int], rng: Random) -> list[Crash]:
    """Operations of both sides to die in: in CI some of them, others in each test."""
    step = 1 if FULL else 9
    found = [(name, number) for name in (MASTER, REPLICA) for number in range(rng.randint(1, step), counts[name], step)]
    return [Crash(name, number, rng.choice(list(Loss))) for name, number in found]


@every_close
@every_order
@pytest.mark.parametrize("seed", range(50 if FULL else 2))
def test_a_pair_of_ours_goes_on_and_agrees(seed: int, group_commit: GroupCommit, session_close: SessionClose) -> None:
    settings = replace(REPLICATED, group_commit=group_commit, session_close=session_close)
    rng = Random(f"{seed}/{group_commit}/{session_close}")
    for first in moments(operations(settings, seed), rng):
        later = [Crash(rng.choice((MASTER, REPLICA)), rng.randint(1, 60), rng.choice(list(Loss))) for _ in range(2)]
        run_pair(settings, seed, [first, *later[: rng.randint(0, 2)]])


@every_order
@pytest.mark.parametrize("seed", range(50 if FULL else 2))
def test_a_pair_of_which_both_compact(seed: int, group_commit: GroupCommit) -> None:
    """A replica that lacks what only the compacted file has is seeded; either side compacts for itself."""
    settings, rng = replace(REPLICATED, group_commit=group_commit), Random(f"{seed}/{group_commit}")
    for first in moments(operations(settings, seed, COMPACTING), rng):
        later = [Crash(rng.choice((MASTER, REPLICA)), rng.randint(1, 60), rng.choice(list(Loss))) for _ in range(2)]
        run_pair(settings, seed, [first, *later[: rng.randint(0, 2)]], COMPACTING)


# --- without extensions: the original's messages, or a replica that writes the original's files ---


async def one_life(stage: Stage, settings: Settings, seed: int, crash: Crash | None, *, compatible: bool) -> None:
    """Until one of the two dies: there is no coming back. The original's files cannot tell which epoch is durable."""
    model = Model()
    stage.build(MASTER, REPLICA)
    if crash is not None:
        stage.crash_after(crash.victim, crash.number, crash.loss)
    booting = asyncio.ensure_future(boot_after_crash(stage))
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):  # who has never reached a replica waits for it
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


async def boot_after_crash(stage: Stage) -> None:
    """The machine of a replica that lost power tells, when it has it back, that it knows of no connection."""
    await stage.until(lambda: stage.storage(REPLICA).names and not stage.is_running(REPLICA), seconds=1e6)
    await stage.sleep(PAUSE_SECONDS)
    stage.internet.boot(stage.machine(REPLICA).host)


@every_close
@every_order
@pytest.mark.parametrize("seed", range(50 if FULL else 1))
@pytest.mark.parametrize("compatible", [MASTER, REPLICA])
def test_a_pair_of_which_one_is_compatible(
    compatible: str, seed: int, group_commit: GroupCommit, session_close: SessionClose
) -> None:
    settings = replace(
        REPLICATED, group_commit=group_commit, session_close=session_close, compatible=compatible == MASTER
    )

    def run(crash: Crash | None) -> Stage:
        stage = Stage(f"compatible/{seed}")
        stage.run(lambda _: one_life(stage, settings, seed, crash, compatible=compatible == REPLICA))
        return stage

    stage = run(None)
    counts = {name: stage.storage(name).operation_count for name in (MASTER, REPLICA)}
    for crash in moments(counts, Random(f"{compatible}/{seed}/{group_commit}/{session_close}")):
        run(crash)
