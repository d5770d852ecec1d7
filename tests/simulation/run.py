"""One run from its seed: a replica set with clients goes through faults, heals, loses all power, and is checked.

    outcome = run(17)
    assert not outcome.violations

The checks live elsewhere, independent of the system: checkers of what clients saw, watchers that inspect nodes during
the run, and endings that compare the final data. A run fails with messages (`violations`), never with an exception;
equal seeds have equal hashes.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from textwrap import shorten
from typing import Final

from tests.simulation import endings
from tests.simulation.checkers import append, bank, register, set
from tests.simulation.clients import Clients
from tests.simulation.disk import Loss
from tests.simulation.faults import Nemesis
from tests.simulation.followers import Followers
from tests.simulation.history import History
from tests.simulation.limestone_pair import limestone_of
from tests.simulation.membership_faults import resume_replication
from tests.simulation.plan import Plan, plan
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import Simulation
from tests.simulation.watchers import Watchers

OPERATIONS_MIN: Final = 300
"""Minimum number of client operations answered in every run."""

FAULTS_MIN: Final = 10
"""Minimum number of effective faults in every run."""

SECONDS_MAX: Final = 600.0
"""Virtual seconds within which a run must reach these minimums; otherwise it is a violation."""

DEADLINE_SECONDS: Final = 3600.0
"""Limit of virtual time for all phases of a run.

A run that reaches it fails and reports where it waits. All runs of seeds 0 to 249 end before it.
"""

LINE_LENGTH_MAX: Final = 200
"""Maximum length of an operation in the story of a run: lists grow."""

CHECKERS: Final[dict[str, Callable[[History, str], list[str]]]] = {
    "register": register.check,
    "append": append.check,
    "set": set.check,
    "bank": bank.check,
    "notes": set.check,
}
"""The checker for the history of each workload."""


@dataclass
class Figures:
    """Statistics of a run."""

    seconds: float = 0.0
    """Virtual time with faults."""
    asked: int = 0
    answered: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    """Faults that took effect, by kind."""
    power_losses: int = 0
    unsynced_losses: int = 0
    """Power losses in which unsynced data existed."""
    deposed: int = 0
    """Writes sent to a leader that did not know of its successor."""
    cpu_seconds: float = 0.0

    @property
    def fault_count(self) -> int:
        return sum(self.faults.values())


@dataclass
class Outcome:
    seed: int
    plan: Plan
    violations: list[str]
    trace_hash: str
    figures: Figures
    story: list[str]
    """The last events, or all of them in a verbose run, of clients, faults and nodes."""

    @property
    def verdict(self) -> str:
        return "VIOLATED" if self.violations else "ok"


class _Found(Exception):
    """Raised when the run has shown the expected violation."""


IsFound = Callable[[Sequence[str]], bool]


def run(seed: int, *, is_verbose: bool = False, until: IsFound | None = None) -> Outcome:
    """Run a seed. Every error in it, including an exception of the simulation, is a violation.

    The run ends early as soon as `until` holds for the violations so far.
    """
    begun = time.process_time()
    sim = Simulation(seed, is_verbose=is_verbose)
    sim.loop.deadline = DEADLINE_SECONDS
    this = _Run(sim, plan(seed))
    if until is not None:
        this.end_when(until)
    try:
        sim.run(lambda _: this.go())
    except _Found:
        pass
    except Exception as error:
        this.violations.append(_in_words(error))
    this.violations += [failure for failure in sim.failures if failure not in "\n".join(this.violations)]
    this.judge()
    figures = this.figures
    figures.asked, figures.answered = len(this.history.operations), this.history.answered
    figures.faults = dict(this.nemesis.counts)
    figures.power_losses, figures.unsynced_losses = sim.power_losses, sim.unsynced_losses
    figures.deposed = this.clients.deposed
    figures.cpu_seconds = time.process_time() - begun
    return Outcome(seed, this.plan, this.violations, sim.trace.hash, figures, list(sim.trace.story))


def _in_words(error: BaseException) -> str:
    """Return an error as text, with the innermost location in our own code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/tests/" in frame.filename or "/flowstone/" in frame.filename]
    last = (ours or frames)[-1]
    return f"{type(error).__name__}: {error} ({last.name}, line {last.lineno} of {last.filename.rsplit('/', 1)[-1]})"


class _Run:
    """The phases of a run, in order."""

    def __init__(self, sim: Simulation, plan: Plan) -> None:
        self.sim = sim
        self.plan = plan
        self.figures = Figures()
        self.violations: list[str] = []
        self.set = ReplicaSet(sim, plan)
        self.history = History(lambda: sim.now, self._tell)
        self.clients = Clients(self.set, self.history, Random(f"{sim.seed}/clients"))
        self.nemesis = Nemesis(self.set, Random(f"{sim.seed}/nemesis"), plan.faults)
        self.watchers = Watchers(self.set)
        self.followers = Followers(
            self.set,
            Random(f"{sim.seed}/followers"),
            listeners=plan.listeners,
            has_archive=plan.has_archive,
            has_one_order=not plan.has_masters,
        )
        self.limestone = limestone_of(sim, Random(f"{sim.seed}/limestone")) if plan.has_limestone else None
        self._begun = 0.0

    def end_when(self, is_found: IsFound) -> None:
        """Raise `_Found` at the first moment at which new violations satisfy `is_found`."""
        seen = [0] * 5

        def look() -> None:
            lists = self.violations, self.watchers.violations, self.set.violations, self.clients.surprises
            new = [each for start, told in zip(seen, (*lists, self.sim.failures), strict=True) for each in told[start:]]
            if new:
                seen[:] = map(len, (*lists, self.sim.failures))
                if is_found(new):
                    raise _Found

        self.sim.loop.before_jump.append(look)

    async def go(self) -> None:
        self._phase("begins")
        await self.set.form()
        await self.clients.prepare()
        self.followers.start()
        if self.limestone is not None:
            self.limestone.start()
        self._phase("faults begin")
        await self._hurt()
        self._phase("faults end")
        await self._heal()
        self._phase("all lose power")
        await self._lose_power()
        self._phase("all stop")
        await self._stop()

    async def _hurt(self) -> None:
        self._begun = self.sim.now
        await asyncio.gather(self.clients.run(self._is_enough), self.nemesis.run(self._is_enough))
        self.figures.seconds = self.sim.now - self._begun

    def _is_enough(self) -> bool:
        seconds = self.sim.now - self._begun
        return seconds >= SECONDS_MAX or (seconds >= self.plan.seconds and not self._missing())

    def _missing(self) -> list[str]:
        """Return what the run should have seen but did not."""
        answered, fault_count = self.history.answered, sum(self.nemesis.counts.values())
        missing = []
        if answered < OPERATIONS_MIN:
            missing.append(f"only {answered} operations were answered")
        if fault_count < FAULTS_MIN:
            missing.append(f"only {fault_count} faults took effect")
        return missing

    async def _heal(self) -> None:
        await self.set.heal()
        self.violations += await endings.check_liveness(self.set, operator=self._resume_all)
        await self.clients.final_reads()
        self.violations += await endings.check_idle(self.set)
        self.violations += endings.check_equal(self.set)
        self.violations += await endings.check_reports(self.set)

    async def _resume_all(self) -> None:
        """Restart replication where it stopped, and nodes whose upstreams have deleted the logs (seed 1000396)."""
        for name in self.set.names:
            await resume_replication(self.set, name)

    async def _lose_power(self) -> None:
        """Cut the power of all machines and restart them together: each must have kept its promises by itself."""
        rng = Random(f"{self.sim.seed}/power")
        for name in self.set.names:
            loss = rng.choice([Loss.UNSYNCED, Loss.ANY]) if self.plan.is_durable else Loss.NOTHING
            if self.sim.is_running(name):
                self.sim.crash(name, loss)
        await self.sim.sleep(rng.uniform(0, 10))
        await self._heal()

    async def _stop(self) -> None:
        """Stop the followers first: they must receive the end of the log."""
        self.set.rest()
        self.violations += await self.followers.finish()
        if self.limestone is not None:
            self.violations += await self.limestone.finish()
        left = await endings.stop_and_compare(self.set)
        self.violations += [*left.violations, *self.followers.check(left)]

    def judge(self) -> None:
        """Judge the observations up to the end, however the run ended."""
        for workload in self.plan.workloads:
            self.violations += CHECKERS[workload](self.history, workload)
        self.violations += [*self.clients.surprises, *self.watchers.violations, *self.set.violations]
        if not self.violations:
            self.violations += self._missing()

    def _tell(self, process: str, what: str) -> None:
        line = what if len(what) <= LINE_LENGTH_MAX else shorten(what, LINE_LENGTH_MAX)
        self.sim.trace.note(f"client-{process}", line)

    def _phase(self, what: str) -> None:
        self.sim.trace.note("run", what)
