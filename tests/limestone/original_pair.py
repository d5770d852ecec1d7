"""A model of the original's master and our replica in the simulator, each restarted after it dies.

The independent reader checks the replica's disk: all acknowledged data is present, sessions are complete, and no
session is present whose end was never sent, or whose epoch its master did not commit before it died. The checks run at
every death, after every start, and at the end.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final
from unittest.mock import patch

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.replica import conversations as replica_conversations
from flowstone.limestone.replica.log_file_channel import SPILL
from flowstone.outside import Outside
from tests.limestone.independent_reader import Judgement, blob_path, judge
from tests.limestone.original_master import Aborted, Ledger, Orders, OriginalMaster
from tests.limestone.programs import ENDPOINT, MASTER, REPLICA, files_on, found_on, start_replica
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation

CHANNELS: Final = 3
DEAD_SECONDS: Final = 0.2
PAUSE_SECONDS: Final = (0.05, 1.0)
"""Default range of seconds between two faults, and after a program."""

FINISH_SECONDS: Final = 300.0
SESSIONS_MAX: Final = 40
"""Number of sessions of one life, after which the master idles."""

SESSIONS_TOTAL_MAX: Final = 400
"""Maximum number of sessions, all of which every check scans."""


class OriginalPair:
    """Call `start()` at any time, and `finish()` after all faults; `finish()` returns the violations as text."""

    def __init__(self, sim: Simulation, rng: Random, pause_seconds: tuple[float, float] = PAUSE_SECONDS) -> None:
        self.ledger = Ledger()
        self.hurt_count = self.life_count = self.judged_count = 0
        self.violations: list[str] = []
        self._sim = sim
        self._random = rng
        self._between = pause_seconds
        self._orders = Orders(rng.random() < 0.4, rng.random() < 0.4)
        self._pause = rng.choice([0.002, 0.01])
        self._compatible = rng.random() < 0.15
        self._is_over = False
        self._is_started = False
        self._enough = 0
        self._tasks: list[asyncio.Task[None]] = []
        sim.build(MASTER, REPLICA)

    def start(self) -> None:
        works = (self._live(), self._keep_replica(), self._keep_hurting())
        self._tasks = [asyncio.get_running_loop().create_task(work) for work in works]

    async def finish(self) -> list[str]:
        living, keeping, hurting = self._tasks
        hurting.cancel()
        self._sim.heal(MASTER, REPLICA)
        for name in (MASTER, REPLICA):
            self._sim.storage(name).spare()
        self._is_over = True
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await living
        except TimeoutError:
            self.violations.append(f"the original did not come to its end within {FINISH_SECONDS:g} s")
        await self._sim.until(lambda: self._is_started or keeping.done())
        keeping.cancel()
        if self._is_started:
            await self._sim.stop(REPLICA)
            self._check("in the end", is_settled=True)
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.violations.append(f"{task.exception()!r}")
        return [f"the original's replica: {violation}" for violation in self.violations]

    # --- processes ---

    async def _live(self) -> None:
        while not self._is_over and len(self.ledger.sessions) < SESSIONS_TOTAL_MAX:
            self.life_count += 1
            self._enough = len(self.ledger.sessions) + SESSIONS_MAX
            rng = Random(f"{self._sim.seed}/original/{self.life_count}")
            try:
                master = await self._sim.launch(MASTER, lambda outside, rng=rng: self._connected(outside, rng))  # type: ignore[misc]
                await self._sim.on(MASTER, self._program(master, rng))
                if not self._is_over:
                    await self._sim.sleep(rng.uniform(*self._between))
            except (Aborted, Crashed):
                pass
            if self._sim.is_running(MASTER):
                self._sim.kill(MASTER)
            await self._sim.sleep(rng.uniform(0, DEAD_SECONDS))

    async def _connected(self, outside: Outside, rng: Random) -> OriginalMaster:
        master = OriginalMaster(outside, self.ledger, self._orders, rng, self._pause)
        await master.connect(ENDPOINT, CHANNELS)
        await master.switch_epoch(self.ledger.last_epoch + 1)
        return master

    async def _program(self, master: OriginalMaster, rng: Random) -> None:
        """Run sessions on all channels while epochs are switched, until the end or a death."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._switch(master, Random(rng.random())))
                for channel in range(CHANNELS):
                    group.create_task(self._write(master, channel, Random(rng.random())))
        except BaseExceptionGroup as errors:
            if errors.split(Aborted)[1] is None:
                raise Aborted from None
            raise

    async def _switch(self, master: OriginalMaster, rng: Random) -> None:
        while not self._has_enough():
            await asyncio.sleep(rng.uniform(0, 8 * self._pause))
            await master.switch_epoch(master.switched + rng.choice((1, 1, 1, 3)))

    async def _write(self, master: OriginalMaster, number: int, rng: Random) -> None:
        channel, count = master.channels[number], 0
        while not self._has_enough():
            count += 1
            await asyncio.sleep(rng.uniform(0, 3 * self._pause))
            await master.session(channel, f"{self.life_count}-{number}-{count}", rng.randint(0, 4))

    def _has_enough(self) -> bool:
        return self._is_over or len(self.ledger.sessions) > self._enough

    async def _keep_replica(self) -> None:
        sim = self._sim
        while True:
            try:
                await start_replica(sim, compatible=self._compatible)
                self._is_started = True
                self._check("after its start", is_settled=True)
                await sim.until(lambda: not sim.is_running(REPLICA), seconds=1e6)
            except Crashed:
                pass
            except DamagedFile as error:
                self.violations.append(f"it does not start: {error}")
                return
            self._is_started = False
            self._check("at its death", is_settled=False)
            await sim.sleep(DEAD_SECONDS)

    # --- faults ---

    async def _keep_hurting(self) -> None:
        sim, rng = self._sim, self._random
        while not self._tasks[0].done():
            await sim.sleep(rng.uniform(*self._between))
            name = rng.choice([MASTER, REPLICA, REPLICA])
            if not sim.is_running(name):
                continue
            self.hurt_count += 1
            # The model of the master has no disk, and a replica learns of a dead host only after the host has
            # restarted.
            match rng.randrange(4) if name == REPLICA else 0:
                case 0:
                    sim.kill(name)
                case 1:
                    sim.crash(name, rng.choice([Loss.UNSYNCED, Loss.ANY]))
                case 2:
                    sim.crash_after(name, rng.randrange(1, 60), rng.choice(list(Loss)))
                case 3:
                    sim.cut(MASTER, REPLICA)
                    await sim.sleep(rng.uniform(0, 1.0))
                    sim.heal(MASTER, REPLICA)

    # --- checks ---

    def _check(self, when: str, *, is_settled: bool) -> None:
        disk = self._sim.look(REPLICA)
        files = files_on(disk, f"/{REPLICA}")
        found = judge(files)
        if found.problem is not None:
            if is_settled:
                self.violations.append(f"{when} the original cannot open it: {found.problem}")
            elif not self._compatible and found.inspect == 2:
                self.violations.append(f"{when} it is beyond repair: {found.problem}")
            elif not self._compatible:
                self._compare(when, *self._by_our_recovery())
            return
        self.judged_count += 1
        self._compare(when, {row.key: row.value for row in found.rows}, found.durable_epoch)
        self._check_blobs(when, found, files)

    def _by_our_recovery(self) -> tuple[dict[bytes, bytes], int]:
        found = found_on(self._sim, REPLICA)
        return {row.key: row.value for row in found.snapshot.rows()}, found.durable_epoch

    def _compare(self, when: str, rows: dict[bytes, bytes], durable: int) -> None:
        ledger, rest = self.ledger, dict(rows)
        tell = self.violations.append
        if durable < ledger.committed:
            tell(f"{when} epoch {ledger.committed} is forgotten: it has {durable}")
        for session in ledger.sessions:
            here = {key: rest.pop(key) for key in session.rows if key in rest}
            if session.must_be_there and here != session.rows:
                tell(f"{when} an acknowledged session of epoch {session.epoch} is lost")
            elif here and here != session.rows:
                if not self._compatible:
                    tell(f"{when} there is half of a session of epoch {session.epoch}")
            elif here and not session.is_ended and not self._compatible:
                tell(f"{when} there is a session of epoch {session.epoch} that never ended")
            elif here and session.epoch > session.life.asked and not self._compatible:
                tell(f"{when} there is a session of epoch {session.epoch}, which its master never committed")
        if rest:
            tell(f"{when} there are rows that nobody wrote: {sorted(rest)[:3]}")

    def _check_blobs(self, when: str, found: Judgement, files: dict[str, bytes]) -> None:
        for row in found.rows:
            for blob in row.blobs:
                if files.get(blob_path(blob)) != row.value:
                    self.violations.append(f"{when} blob {blob} is missing, or another one")


def run(seed: int, seconds: float = 6.0) -> tuple[list[str], OriginalPair]:
    """Return the violations in one run of such a pair.

    Half of the runs write open sessions to the file early.
    """
    sim = Simulation(f"original/{seed}")
    spill = Random(f"{seed}/spill").choice([0, 200, SPILL, SPILL])

    async def scenario(_: object) -> tuple[list[str], OriginalPair]:
        pair = OriginalPair(sim, Random(f"{sim.seed}/pair"))
        pair.start()
        await sim.sleep(seconds)
        return await pair.finish(), pair

    with patch.object(replica_conversations, "SPILL", spill):
        return sim.run(scenario)
