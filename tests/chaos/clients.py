"""Clients of a set under chaos: they read and write over real sockets, time out, reconnect, and record a history.

They run on a loop in a thread of their own. They draw the same conclusions from an answer as clients of the simulator
(`tests/simulation/clients.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from threading import Event, Thread
from typing import Any, Final

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from tests.chaos.lines import Dial, Line
from tests.chaos.seats import ASYNCHRONOUS, Seats
from tests.interop.member import Member, RealMember
from tests.simulation.clients import NOT_DONE, TAKEN_BACK, is_promised
from tests.simulation.history import History, Operation

PACE_SECONDS: Final = 0.12
"""Average think time of a client between operations."""

TIMEOUTS: Final = (1.0, 2.5, 8.0)
"""Answer timeouts of clients: each has one of these. The longest ones outlast the rollback by timeout."""

STOP_SECONDS: Final = 60.0
NOT_YET: Final = (errors.AccessDenied,)
"""A starting member rejects guests."""


class Doors:
    """Addresses of the members, and the member that appears to accept writes."""

    def __init__(self, seats: Seats) -> None:
        self.members = seats.members
        self._seats = seats
        self._turn = 0

    @property
    def is_calm(self) -> bool:
        """True while synchronous spaces have no writer."""
        return self._seats.is_calm

    def port(self, member: Member) -> int:
        return self._seats.doors[member].port

    @property
    def writer(self) -> Member:
        return self._seats.master or self.members[self._turn % len(self.members)]

    def is_refused(self, member: Member) -> None:
        """Try another writer next: this member accepts no writes, or is unreachable."""
        if member is self.writer:
            self._turn += 1


class Client:
    """A client operation in progress."""

    def __init__(self, clients: Clients, process: str, rng: Random, dial: Dial) -> None:
        self._clients = clients
        self._dial = dial
        self._timeout = rng.choice(TIMEOUTS)
        self._lines: dict[Member, Line] = {}
        self._is_always_welcome = True
        self.process = process
        self.random = rng
        self.doors = clients.doors

    async def run(self, job: Job) -> None:
        self._is_always_welcome = job.is_always_welcome
        while not self._clients.is_ending:
            await asyncio.sleep(self.random.expovariate(1 / job.pace))
            await job.do(self)
        for member in list(self._lines):
            await self._hang_up(member)

    async def perform(
        self,
        member: Member,
        what: tuple[str, str, Any, Any],
        work: Callable[[Line], Awaitable[Any]],
    ) -> Operation | None:
        """Perform an operation with its key and value; return None if no member was reachable."""
        line = await self._reach(member)
        if line is None:
            self.doors.is_refused(member)
            return None
        if self.doors.is_calm and not self._is_always_welcome:  # now, just before the request is sent
            return None
        history = self._clients.history
        operation = history.invoke(self.process, *what, member=member.name)
        try:
            result = await work(line)
        except FlowstoneError as error:
            self._failed(operation, member, error)
            if not isinstance(error, TarantoolError):
                await self._hang_up(member)
        else:
            history.ok(operation, result)
        return operation

    def _failed(self, operation: Operation, member: Member, error: FlowstoneError) -> None:
        history, is_read = self._clients.history, operation.kind == "read"
        is_answered = isinstance(error, TarantoolError)
        if is_read or isinstance(error, self._clients.not_done):
            history.failed(operation, error, is_answered=is_answered)
        else:
            history.unknown(operation, error, is_answered=is_answered)
        if not (isinstance(member, RealMember) or isinstance(error, NOT_YET) or is_promised(error, is_read=is_read)):
            self._clients.surprises.append(f"an answer that nobody has promised: {operation}")
        if not is_read:
            self.doors.is_refused(member)

    async def _reach(self, member: Member) -> Line | None:
        line = self._lines.get(member)
        if line is None:
            try:
                line = await self._dial(self.doors.port(member), self._timeout)
            except FlowstoneError:
                return None
            self._lines[member] = line
        return line

    async def _hang_up(self, member: Member) -> None:
        with suppress(FlowstoneError, OSError):
            await self._lines.pop(member).close()


class Job:
    """The loop of a client; `do` is one operation. `workload` is its name in the history."""

    def __init__(self, workload: str, space: int, first: int = 1, pace: float = PACE_SECONDS) -> None:
        self.workload = workload
        self.pace = pace
        self.is_always_welcome = space in ASYNCHRONOUS
        self._space = space
        self._last = first - 1

    def _next(self) -> int:
        self._last += 1
        return self._last

    async def do(self, client: Client) -> None:
        raise NotImplementedError


class Clients:
    """All clients of a set, in one thread. `surprises` are unexpected answers of nodes: violations.

    Real servers, which are not under test, report every space as missing while they load.
    """

    def __init__(self, doors: Doors, rng: Random, *, has_elections: bool) -> None:
        self.doors = doors
        self.history = History(time.monotonic)
        self.not_done = (*NOT_DONE, *NOT_YET, *(() if has_elections else TAKEN_BACK))
        self.surprises: list[str] = []
        self._random = rng
        self._ending = Event()
        self._hired: list[tuple[Client, Job]] = []
        self._problem: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def hire(self, job: Job, *dials: Dial) -> None:
        """Create a client for each of `dials`."""
        for dial in dials:
            process = f"{job.workload}/{len(self._hired)}"
            self._hired.append((Client(self, process, Random(f"{self._random.random()}/{process}"), dial), job))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return when all operations in progress have ended."""
        self._ending.set()
        self._thread.join(STOP_SECONDS)

    def check(self) -> None:
        """Raise the error of a client that could not interpret an answer."""
        assert not (self.is_ending and self._thread.is_alive()), "clients do not come to an end"
        if self._problem is not None:
            raise self._problem

    def workloads(self) -> Sequence[str]:
        return sorted({job.workload for _, job in self._hired})

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseExceptionGroup as error:
            self._problem = error.exceptions[0]

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            for client, job in self._hired:
                group.create_task(client.run(job))
