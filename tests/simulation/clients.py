"""The clients of a run: processes that write and read over the network as real ones would, each with a will of its own.

They write to whoever seems to lead and read on any member; they give up after a while, break connections that have
failed, make new ones and go on. What they asked for and were told goes into the history; which answers mean that
something was not done, and which leave that open, is decided here. What they do is in `workloads/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from random import Random
from typing import Any, Final

from flowstone.client.connection import Connection, ConnectionFailed
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.greeting import GreetingError
from flowstone.iproto.uri import Uri
from tests.simulation.conversation import Conversation, NotCommitted
from tests.simulation.history import FINAL, History, Operation, Outcome
from tests.simulation.plan import Plan
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import PASSWORD, PORT, USER
from tests.simulation.workloads.append import Append
from tests.simulation.workloads.bank import Bank
from tests.simulation.workloads.notes import Notes
from tests.simulation.workloads.register import Register
from tests.simulation.workloads.set import Set
from tests.simulation.workloads.workload import Workload

COUNT: Final = 5
ANSWERS_PER_SECOND, ANSWERS_AIM = 5.2, 305
"""What all clients together aim at: every operation costs messages, and so time of the processor."""

SECONDS_BETWEEN: Final = 0.6
"""How long a client thinks before its next operation, on average, while they are behind that."""
PATIENCE: Final = 5
"""So many times longer while they are ahead."""

SECONDS_THOUGHT: Final = 0.3
THOUGHT_SHARE: Final = 0.5
"""How long clients think in the middle of a transaction, on average, if they do: others come in between."""

READ_SHARES: Final = {3: 0.7, 5: 0.85, 7: 0.9}
"""How often a client reads, by the size of the set: the more members, the dearer is a write."""
BURST, BURST_SHARE = 6, 0.3
"""How many writes a client sends at once, without waiting, and how often: much is under way when something happens, and
what is sent at once is replicated at once."""

DEPOSED_SHARE: Final = 0.5
"""How often a client writes to a leader who does not know yet that another leads, if there is one."""

ELSEWHERE_SHARE: Final = 0.1
"""How often a client writes to somebody who does not seem to lead."""

CONNECT_SECONDS: Final = 2.0
TIMEOUTS: Final = (1.0, 3.0, 8.0)
"""How long clients wait for an answer: each has one of these."""
FINAL_TIMEOUT: Final = 20.0
FINAL_SECONDS: Final = 120.0
"""Within which a set that is well must have answered a final read."""

NOT_DONE: Final = (
    errors.Readonly,
    errors.Loading,
    errors.TransactionConflict,
    errors.TransactionTimeout,
    errors.SyncQueueUnclaimed,
    errors.SyncQueueForeign,
    errors.SyncQueueFull,
    errors.UncommittedForeignSyncTxns,
)
"""Refused before anything was written."""

TAKEN_BACK: Final = (errors.SyncQuorumTimeout, errors.SyncRollback)
"""By a verdict in the log of the member that told so. Where another may take the queue over, its verdict counts, and
that may have come first (docs/reference/replication.md)."""

UNDECIDED: Final = (errors.WalIo,)
"""A loss of power can bring back what could not be cut off durably; so is told, too, what a node that stops leaves."""

NOT_READ: Final = (*NOT_DONE, *TAKEN_BACK, *UNDECIDED, errors.System, errors.LocalInstanceIdIsReadOnly)
"""The last one is what an expelled member answers."""

WORKLOADS: Final[dict[str, Callable[[Plan], Workload]]] = {
    "register": Register,
    "append": Append,
    "set": Set,
    "bank": Bank,
    "notes": Notes,
}


def outcome_of(error: FlowstoneError, plan: Plan) -> Outcome:
    """What a client knows of its write when it is told this."""
    if isinstance(error, (NotCommitted, *NOT_DONE)):
        return Outcome.FAILED
    if isinstance(error, TAKEN_BACK) and not plan.has_elections:
        return Outcome.FAILED
    return Outcome.UNKNOWN


def is_promised(error: FlowstoneError, *, is_read: bool) -> bool:
    """Whether a client has to live with this: a refusal, or a connection that is lost. All others are mistakes, and
    bytes that are no answer are, too."""
    if isinstance(error, NotCommitted) and isinstance(error.__cause__, FlowstoneError):
        error = error.__cause__
    known = NOT_READ if is_read else (*NOT_DONE, *TAKEN_BACK, *UNDECIDED)
    return isinstance(error, (ConnectionFailed, *known))


class Client:
    """One process. It talks to one member at a time, in a hurry about several things at once."""

    def __init__(self, clients: Clients, process: str, rng: Random, timeout: float) -> None:
        self._clients = clients
        self._replica_set = clients.replica_set
        self._timeout = timeout
        self._conversations: dict[str, Conversation] = {}
        self._opening = asyncio.Lock()  # of those who write at once, one connects
        self._closing: dict[asyncio.Task[None], None] = {}
        self.process = process
        self.random = rng

    @property
    def plan(self) -> Plan:
        return self._replica_set.plan

    def new_value(self) -> int:
        return self._clients.new_value()

    async def run(self, until: Callable[[], bool]) -> None:
        sim = self._replica_set.sim
        while True:
            patience = PATIENCE if self._clients.is_ahead() else 1
            await sim.sleep(self.random.expovariate(1 / (SECONDS_BETWEEN * patience)))
            if until():
                return
            workload = self.random.choice(self._clients.workloads)
            if self.random.random() < READ_SHARES[self.plan.size]:
                await workload.read(self, self._reader())
            elif (member := self.writer()) is not None:
                count = BURST if self.random.random() < BURST_SHARE else 1
                await asyncio.gather(*(workload.write(self, member) for _ in range(count)))

    async def think(self) -> None:
        if self.random.random() < THOUGHT_SHARE:
            await self._replica_set.sim.sleep(self.random.expovariate(1 / SECONDS_THOUGHT))

    # --- whom to talk to ---

    def any_member(self) -> str:
        """Ready or not."""
        return self.random.choice(self._replica_set.members)

    def any_node(self) -> str:
        """Also one that only follows."""
        return self.random.choice(self._replica_set.names)

    def _reader(self) -> str:
        """Anybody; the master where the dialect promises nothing elsewhere."""
        return self._replica_set.members[0] if self.plan.dialect == "2.6" else self.any_member()

    def writer(self) -> str | None:
        replica_set = self._replica_set
        leader = replica_set.leader()
        if self.plan.dialect == "2.6":  # whose queue goes to anybody who writes
            return leader
        if self.random.random() < DEPOSED_SHARE and (deposed := replica_set.deposed()):
            return self.random.choice(deposed)
        if leader is None or self.random.random() < ELSEWHERE_SHARE:
            ready = replica_set.ready()
            return self.random.choice(ready) if ready and self.random.random() < 0.5 else leader
        return leader

    # --- operations ---

    async def perform(
        self,
        member: str,
        workload: str,
        kind: str,
        key: Hashable,
        value: Any,
        work: Callable[[Conversation], Awaitable[Any]],
    ) -> Operation | None:
        """An operation on a member, put down in the history; None if nobody was there to be asked."""
        conversation = await self._reach(member)
        if conversation is None:
            return None
        if kind != "read":
            self._clients.deposed += member in self._replica_set.deposed()
        history = self._clients.history
        operation = history.invoke(self.process, workload, kind, key, value, member=member)
        try:
            result = await work(conversation)
        except FlowstoneError as error:
            self._failed(operation, error)
        else:
            history.ok(operation, result)
        return operation

    def _failed(self, operation: Operation, error: FlowstoneError) -> None:
        history, is_read = self._clients.history, operation.kind == "read"
        cause = error.__cause__ if isinstance(error, NotCommitted) else error
        is_answered = isinstance(cause, TarantoolError)
        if is_read or outcome_of(error, self.plan) is Outcome.FAILED:
            history.failed(operation, cause, is_answered=is_answered)
        else:
            history.unknown(operation, cause, is_answered=is_answered)
        if not is_promised(error, is_read=is_read):
            self._clients.surprises.append(f"an answer that nobody has promised: {operation}")
        if not is_answered:
            self._drop(operation.member)

    # --- connections ---

    async def _reach(self, member: str) -> Conversation | None:
        if member in self._conversations:
            return self._conversations[member]
        async with self._opening:
            if member not in self._conversations:
                uri = Uri(member, PORT, USER, PASSWORD)
                try:
                    connection = await Connection.open(self._replica_set.sim.outside, uri, timeout=CONNECT_SECONDS)
                except FlowstoneError as error:
                    self._not_reached(member, error)
                    return None
                self._conversations[member] = Conversation(connection, self._timeout)
            return self._conversations[member]

    def _not_reached(self, member: str, error: FlowstoneError) -> None:
        """Nobody need be there, or let it in yet; one that closes the connection may do so before its greeting."""
        if isinstance(error, RemoteProtocolError) and not isinstance(error, GreetingError):
            self._clients.surprises.append(
                f"{member} answered a client that came with what nobody has promised: {error}"
            )

    def _drop(self, member: str) -> None:
        conversation = self._conversations.pop(member, None)
        if conversation is not None:
            task = asyncio.get_running_loop().create_task(conversation.connection.close())
            self._closing[task] = None
            task.add_done_callback(lambda task: self._closing.pop(task, None))

    async def close(self) -> None:
        for member in list(self._conversations):
            self._drop(member)
        await asyncio.gather(*self._closing)


class Clients:
    """All clients of a run. `surprises` are answers that nobody has promised, which are violations."""

    def __init__(self, replica_set: ReplicaSet, history: History, rng: Random) -> None:
        self.replica_set = replica_set
        self.history = history
        self.surprises: list[str] = []
        self.deposed = 0
        """Writes that were asked of a leader who did not know that another leads."""
        self._random = rng
        self._value = 0
        self._begun, self._answered_before = 0.0, 0
        self.workloads = [WORKLOADS[name](replica_set.plan) for name in replica_set.plan.workloads]

    def new_value(self) -> int:
        """One that was never written before."""
        self._value += 1
        return self._value

    def is_ahead(self) -> bool:
        """Whether more was answered than they aim at."""
        aim = min(ANSWERS_PER_SECOND * (self.replica_set.sim.now - self._begun), ANSWERS_AIM)
        return self.history.answered - self._answered_before > aim

    async def prepare(self) -> None:
        """What has to be there when the first client comes; all is well yet."""
        client = self._client("first", FINAL_TIMEOUT)
        leader = self.replica_set.leader()
        assert leader is not None, "a set that was formed has a leader"
        for workload in self.workloads:
            await workload.prepare(client, leader)
        await client.close()

    async def run(self, until: Callable[[], bool]) -> None:
        """Returns when `until` holds and all have ended what they were doing."""
        self._begun, self._answered_before = self.replica_set.sim.now, self.history.answered
        clients = [self._client(str(number), self._random.choice(TIMEOUTS)) for number in range(COUNT)]
        await asyncio.gather(*(client.run(until) for client in clients))
        await asyncio.gather(*(client.close() for client in clients))

    async def final_reads(self) -> None:
        """Reads everything on all members; for a set that is well."""
        client = self._client(FINAL, FINAL_TIMEOUT)
        members = self.replica_set.members
        for member in members[:1] if self.replica_set.plan.dialect == "2.6" else members:
            for workload in self.workloads:
                await self._read_finally(client, member, workload)
        await client.close()

    async def _read_finally(self, client: Client, member: str, workload: Workload) -> None:
        sim = self.replica_set.sim
        end = sim.now + FINAL_SECONDS
        while sim.now < end:
            if await workload.read_all(client, member):
                return
            await sim.sleep(1)
        self.surprises.append(f"{workload.name} was never read on {member} after all faults were over")

    def _client(self, process: str, timeout: float) -> Client:
        return Client(self, process, Random(f"{self._random.random()}/{process}"), timeout)
