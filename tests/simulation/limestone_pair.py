"""A Limestone store and its replica next to a replica set, in the same simulation, with crashes and partitions.

In half of the runs the master is a model of the original (`tests/limestone/original_pair.py`). Programs and checks come
from `tests/limestone/`; this module injects the faults.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final, get_args

from flowstone.limestone.settings import GroupCommit, SessionClose, Settings
from tests.limestone.original_pair import OriginalPair
from tests.limestone.pair import Pair
from tests.limestone.programs import ENDPOINT, MASTER, REPLICA, Shape
from tests.simulation.disk import Loss
from tests.simulation.simulation import Simulation

PAUSE_SECONDS: Final = (4.0, 15.0)
"""Seconds between two faults."""

HURT_SECONDS_MAX: Final = 3.0
FINISH_SECONDS: Final = 300.0
ENTRIES_MAX: Final = 400
"""Maximum number of entries; the model scans all of them, and more would be slow."""


def limestone_of(sim: Simulation, rng: Random) -> LimestonePair | OriginalPair:
    """Return a pair of ours, or one whose master is the original's model."""
    return OriginalPair(sim, rng, PAUSE_SECONDS) if rng.random() < 0.5 else LimestonePair(sim, rng)


class LimestonePair:
    """Call `start()` at any time, and `finish()` after all faults; it returns the violations as text."""

    def __init__(
        self,
        sim: Simulation,
        rng: Random,
        *,
        pause_seconds: tuple[float, float] = PAUSE_SECONDS,
        shape: Shape | None = None,
    ) -> None:
        self._sim = sim
        self._random = rng
        self._is_over = False
        self._pause_seconds = pause_seconds
        settings = Settings(
            f"/{MASTER}",
            (ENDPOINT,),
            spill=150,
            group_commit=rng.choice(get_args(GroupCommit)),
            session_close=rng.choice(get_args(SessionClose)),
        )
        shape = shape or Shape(pause_seconds=rng.choice([0.01, 0.1]))
        self.pair = Pair(sim, settings, f"{sim.seed}/limestone", shape, is_enough=lambda: self._is_over)
        self.hurt_count = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self.pair.run()), loop.create_task(self._keep_hurting())]

    async def finish(self) -> list[str]:
        """Wait until the running program ends; then check that both sides have all that was written."""
        running, hurting = self._tasks
        hurting.cancel()
        self._is_over = True
        self._sim.heal(MASTER, REPLICA)
        for name in (MASTER, REPLICA):
            self._sim.storage(name).spare()
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await running
            self.pair.check_end()
        except TimeoutError:
            return [f"the Limestone had not all that was written persistent {FINISH_SECONDS:g} s after all faults"]
        except AssertionError as error:
            return [f"the Limestone: {error}"]
        return []

    async def _keep_hurting(self) -> None:
        running = self._tasks[0]
        while not running.done():
            await self._sim.sleep(self._random.uniform(*self._pause_seconds))
            if sum(len(session.entries) for session in self.pair.model.sessions) > ENTRIES_MAX:
                self._is_over = True
            await self._hurt(self._random.choice([MASTER, REPLICA]))

    async def _hurt(self, name: str) -> None:
        sim, rng = self._sim, self._random
        if not sim.is_running(name) or self._tasks[0].done():
            return
        self.hurt_count += 1
        match rng.randrange(4):
            case 0:
                sim.kill(name)
            case 1:
                sim.crash(name, rng.choice([Loss.UNSYNCED, Loss.ANY]))
            case 2:
                sim.crash_after(name, rng.randrange(1, 60), rng.choice(list(Loss)))
            case 3:
                break_link = rng.choice([sim.cut, sim.black_hole])
                break_link(MASTER, REPLICA)
                await sim.sleep(rng.uniform(0, HURT_SECONDS_MAX))
                sim.heal(MASTER, REPLICA)
