"""One run: start a set, use it under faults, heal it, check it, kill and restart all members, check again."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from traceback import format_exception
from typing import Final

from flowstone.iproto.errors import TarantoolError
from tests.chaos.clients import Clients, Doors
from tests.chaos.faults import Nemesis, ProcessNemesis, WireNemesis
from tests.chaos.jobs import Adds, Appends, Registers, SettledRegisters
from tests.chaos.lines import dial_foreign, dial_own
from tests.chaos.seats import (
    LISTS,
    NAMES,
    OWN_REGISTERS,
    OWN_SETS,
    REGISTERS,
    SETS,
    ElectionSeats,
    Seats,
    Seats26,
)
from tests.chaos.upkeep import Operator
from tests.chaos.verdict import broken_promises, lost, read_finally, slips
from tests.chaos.watcher import Watcher, broken_reports
from tests.interop.member import Member, eventually
from tests.interop.versions import binaries
from tests.judges.judging import Refused, judge_all
from tests.simulation.history import FINAL

KEYS_EACH: Final = 10_000_000
OWN_PACE_SECONDS: Final = 0.6
"""Writers besides the master: a follower stops when it receives such a row while a transaction of the master is
pending.
"""

RECOVERY_SECONDS: Final = 90.0
"""Deadline for every workload to be answered again after all faults are healed."""


@dataclass
class Report:
    """The report of a run."""

    name: str
    seed: int
    seconds: float = 0.0
    asked: int = 0
    answered: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    disks: str = ""
    looks: int = 0
    found: Counter[str] = field(default_factory=Counter)
    explained: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.name}, seed {self.seed}: {self.seconds:.0f} s",
            f"  operations: {self.asked} asked, {self.answered} answered",
            f"  faults: {_told(self.faults)} ({self.faults.total()} in all; disks: {self.disks})",
            f"  followers helped by the operator: {_told(self.resumed)}",
            f"  looks at what is reported: {self.looks}, that found: {_told(self.found)}",
            f"  long lags explained by a finding: {self.explained} times",
            f"  answers of /health/ready: {_told(self.probes)}",
            f"  acknowledged and lost: {self.lost}",
            *(f"  VIOLATED: {violation}" for violation in self.violations),
            f"  verdict: {'VIOLATED' if self.violations else 'ok'}",
        ]
        return "\n".join(lines)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


# --- sets ---


def _elections(directory: Path, rng: Random) -> Seats:
    return ElectionSeats(directory)


def _elections_with_a_stranger(directory: Path, rng: Random) -> Seats:
    newer = next((binary for binary in binaries() if binary.dialect != "2.6"), None)
    assert newer is not None, "specify a Tarantool 2.11 or newer in FLOWSTONE_TARANTOOL"
    return ElectionSeats(directory, newer)


def _dialect_2_6(directory: Path, rng: Random) -> Seats:
    old = next((binary for binary in binaries() if binary.dialect == "2.6"), None)
    assert old is not None, "Tarantool 2.6.0 is not on PATH (Debian package `tarantool`)"
    return Seats26(directory, old, rng.choice(("real", "ours")))


SETS_BY_NAME: Final[dict[str, Callable[[Path, Random], Seats]]] = {
    "elections": _elections,
    "dialect-2.6": _dialect_2_6,
    "elections-with-a-real-server": _elections_with_a_stranger,
}


def _hire(seats: Seats, clients: Clients) -> None:
    if seats.master is None:
        clients.hire(Adds(NAMES[SETS], SETS), dial_own, dial_own)
        clients.hire(Registers(NAMES[REGISTERS], REGISTERS), dial_own, dial_own, dial_own)
        clients.hire(Appends(NAMES[LISTS], LISTS), dial_own, dial_own)
        return
    clients.hire(Adds(NAMES[SETS], SETS), dial_own, dial_foreign)
    clients.hire(SettledRegisters(NAMES[REGISTERS], REGISTERS, seats.master), dial_own, dial_foreign)
    for number, member in enumerate(seats.own_writers):
        options = {"first": number * KEYS_EACH + 1, "pace": OWN_PACE_SECONDS}
        clients.hire(Adds(NAMES[OWN_SETS], OWN_SETS, member, **options), dial_own)
        clients.hire(SettledRegisters(NAMES[OWN_REGISTERS], OWN_REGISTERS, member, **options), dial_foreign)


# --- runs ---


class Run:
    """Run on an existing set."""

    def __init__(self, seats: Seats, report: Report) -> None:
        self._seats = seats
        self._report = report
        self._clients = Clients(Doors(seats), Random(f"{report.seed}/clients"), has_elections=seats.has_elections)
        _hire(seats, self._clients)
        self._operator = Operator(seats)
        self._watcher = Watcher(seats)
        self._nemeses: list[Nemesis] = [
            ProcessNemesis(seats, Random(f"{report.seed}/processes")),
            WireNemesis(seats, Random(f"{report.seed}/wires")),
        ]
        self._threads: list[Clients | Operator | Watcher | Nemesis] = [
            self._clients,
            self._operator,
            self._watcher,
            *self._nemeses,
        ]

    def go(self, seconds: float) -> None:
        for one in self._threads:
            one.start()
        try:
            self._suffer(seconds)
            self._recover()
            self._judge("when all faults were over")
            self._end_all_at_once()
            self._judge("after all were killed")
            self._stop()
        finally:
            for one in reversed(self._threads):
                one.stop()
            self._count()

    def timeline(self) -> str:
        """Stop the faults; check the reports of the members, then the answers to clients."""
        faults = sorted(line for nemesis in self._nemeses for line in nemesis.timeline)
        views = [f"{member}: {view(member)}" for member in self._seats.members]
        return "\n".join([*faults, "", *views, "", *map(str, self._clients.history.operations)])

    def _suffer(self, seconds: float) -> None:
        began = time.monotonic()
        while time.monotonic() < began + seconds and not self._has_problem:
            time.sleep(0.1)
        for nemesis in self._nemeses:
            nemesis.stop()
            self._report.faults += nemesis.counts
        self._report.seconds = time.monotonic() - began
        for nemesis in self._nemeses:
            if nemesis.problem is not None:
                raise nemesis.problem

    @property
    def _has_problem(self) -> bool:
        return any(nemesis.problem is not None for nemesis in self._nemeses)

    def _recover(self) -> None:
        """With all faults healed, pending clients must be served and all members become equal."""
        self._seats.heal_wires()
        seen = len(self._clients.history.operations)

        def is_written(workload: str) -> bool:
            self._clients.check()
            self._seats.help()
            return any(
                one.workload == workload and one.is_ok and one.kind != "read"
                for one in self._clients.history.operations[seen:]
            )

        for workload in self._clients.workloads():
            eventually(f"{workload} are written again", partial(is_written, workload), seconds=RECOVERY_SECONDS)
        self._clients.stop()
        self._clients.check()
        self._seats.assert_equal()
        self._operator.stop()
        self._watcher.stop()
        self._report.violations += broken_reports(self._seats)

    def _count(self) -> None:
        """Add counts and violations to the report, whatever the verdict."""
        report, operations = self._report, self._clients.history.operations
        asked = [operation for operation in operations if operation.process != FINAL]
        report.asked, report.answered = len(asked), sum(operation.is_answered for operation in asked)
        report.resumed = self._operator.resumed
        if self._seats.rejoined:
            report.resumed["a real server's log that it refused itself"] = self._seats.rejoined
        report.found, report.looks = self._watcher.found, self._watcher.looks
        report.explained, report.probes = self._watcher.explained, self._watcher.probes
        report.violations += [*self._operator.violations, *self._watcher.violations, *self._clients.surprises]

    def _judge(self, when: str) -> None:
        """The final data must match the answers to clients, and final reads must match earlier ones."""
        report, history = self._report, self._clients.history
        missing = lost(self._seats, history)
        report.lost = max(report.lost, missing)
        read_finally(self._seats, history)
        report.violations += [f"{when}: {broken}" for broken in broken_promises(self._seats, history)]
        if missing:
            report.violations.append(f"{when}: {missing} acknowledged rows are not there")

    def _end_all_at_once(self) -> None:
        """Kill all members, restart them, and check that they become equal again."""
        members = self._seats.members
        with self._seats.calm(members):
            for member in members:
                member.kill()
            self._seats.start(*members)
        self._seats.assert_equal()

    def _stop(self) -> None:
        for node in self._seats.nodes:
            node.stop()
            if node.exit_code():
                self._report.violations.append(f"{node} was stopped and ended with {node.exit_code()}")
        self._report.violations += slips(self._seats)
        self._report.violations += refused(self._seats.nodes)


def refused(nodes: Sequence[Member]) -> list[str]:
    """Return the reasons why servers do not start from the directories of stopped nodes, or start with other rows.

    Copy rejected directories next to the logs of their processes: the small disks are unmounted at the end.
    """
    places = {node.name: Path(node.options.get("memtx_dir", node.directory)) for node in nodes}
    try:
        judge_all(places)
    except Refused as error:
        for node in nodes:
            shutil.copytree(places[node.name], node.directory / "refused")
        return [str(error)]
    return []


def view(member: Member) -> object:
    """Return the member's report about itself and its peers, or the error if there is none."""
    try:
        return member.info()
    except (TarantoolError, OSError) as error:
        return error


def run(name: str, seconds: float, seed: int, directory: Path) -> Report:
    """Errors of the harness count as violations, too: it found something unexplained."""
    report = Report(name, seed)
    seats = SETS_BY_NAME[name](directory, Random(f"{seed}/{name}"))
    report.disks = next(iter(seats.disks.values())).kind
    run = Run(seats, report)
    try:
        run.go(seconds)
    except Exception as error:
        report.violations += ("".join(format_exception(error)), *slips(seats))
    finally:
        (directory / "timeline.txt").write_text(run.timeline())
        seats.close()
    return report
