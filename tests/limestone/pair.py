"""A master and its replica in the simulator; each is restarted after its death and a check of its directory."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from random import Random
from typing import Final

from flowstone.limestone.settings import Settings
from tests.limestone.model import Model
from tests.limestone.programs import (
    MASTER,
    REPLICA,
    Program,
    Shape,
    check,
    is_seeding,
    start_master,
    start_replica,
)
from tests.simulation.simulation import Crashed, Simulation

PAUSE_SECONDS: Final = 0.2
"""How long a machine stays down."""

BETWEEN_SECONDS: Final = (0.0, 8.0)
"""Time from the end of a program to the start of the next one."""


class Pair:
    """Runs programs on a master with a replica, until one program is fully durable and `is_enough` holds."""

    def __init__(
        self,
        stage: Simulation,
        settings: Settings,
        seed: int | str,
        shape: Shape,
        *,
        on_death: Callable[[], None] = lambda: None,
        is_enough: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stage = stage
        self.shape = shape
        self.settings = settings
        self.model = Model()
        self.past: list[Model] = []
        """The expected content as it was before each crash of the master."""
        self.seed = seed
        self.program_count = 0
        """Number of started programs."""
        self._on_death = on_death
        self._is_enough = is_enough
        stage.build(MASTER, REPLICA)

    async def run(self) -> None:
        keeper = asyncio.ensure_future(self._keep_replica())
        lives = asyncio.ensure_future(self._live())
        keeper.add_done_callback(lambda _: lives.cancel())
        try:
            await lives
        finally:
            if keeper.done():
                keeper.result()
            keeper.cancel()

    def check_end(self) -> None:
        """Check that both sides have all reported epochs."""
        for name in (MASTER, REPLICA):
            self.stage.storage(name).spare()
            assert check(self.stage, name, self.model) >= self.model.last_epoch()

    async def _live(self) -> None:
        while not await self._lived():
            pass

    async def _lived(self) -> bool:
        """Return True if the master completed its programs."""
        stage, model = self.stage, self.model
        try:
            master = await start_master(stage, model, self.settings, self.shape.channels)
            while True:
                rng = Random(f"{self.seed}/{self.program_count}")
                self.program_count += 1
                await Program(stage, model, self.shape, rng).run(master)
                if self._is_enough():
                    return True
                await stage.sleep(rng.uniform(*BETWEEN_SECONDS))
                if not stage.is_running(MASTER):
                    raise Crashed(MASTER)
        except Crashed:
            self._check_replica()
            durable = check(stage, MASTER, model)
            self.past.append(copy.deepcopy(model))
            model.forget(durable)
            self._on_death()
            await stage.sleep(PAUSE_SECONDS)
            return False

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
            self._on_death()
            await stage.sleep(PAUSE_SECONDS)

    def _check_replica(self) -> None:
        if not is_seeding(self.stage, REPLICA):
            check(self.stage, REPLICA, self.model, *self.past)
