"""The clients of a run: independent processes that write and read over the network.

They write to the member that seems to lead and read from any member. They time out, drop failed connections, and
reconnect. Requests and answers go into the history; this module decides which answers mean that an operation failed and
which leave its outcome unknown. The operations are in `workloads/`.
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
"""The rate and total of answers that all clients aim for together: every operation costs messages and processor time.
"""

SECONDS_BETWEEN: Final = 0.6
"""Mean pause of a client between operations while the clients lag their target."""
PATIENCE: Final = 5
"""Factor for the pause while they are ahead of it."""

SECONDS_THOUGHT: Final = 0.3
THOUGHT_SHARE: Final = 0.5
"""Mean pause of a client inside a transaction, if it pauses: other transactions interleave."""

READ_SHARES: Final = {3: 0.7, 5: 0.85, 7: 0.9}
"""Share of reads by the size of the set: writes get more expensive with each member."""
BURST, BURST_SHARE = 6, 0.3
"""Number of writes that a client pipelines, and how often: many writes are in flight when a fault hits, and they are
replicated together."""

DEPOSED_SHARE: Final = 0.5
"""How often a client writes to a deposed leader that does not know it yet, if there is one."""

ELSEWHERE_SHARE: Final = 0.1
"""How often a client writes to a member that does not seem to lead."""

CONNECT_SECONDS: Final = 2.0
TIMEOUTS: Final = (1.0, 3.0, 8.0)
"""Timeouts of clients, in seconds; each client has one of them."""
FINAL_TIMEOUT: Final = 20.0
FINAL_SECONDS: Final = 120.0
"""Time within which a healthy set must answer a final read."""

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
"""Rejected before anything was written."""

TAKEN_BACK: Final = (errors.SyncQuorumTimeout, errors.SyncRollback)
"""Rolled back by a verdict in the log of the member that answered.

If another member may take over the queue, its verdict counts, and may have come first (docs/reference/replication.md).
"""

UNDECIDED: Final = (errors.WalIo,)
"""The outcome is unknown: a power loss can bring back what could not be cut off durably.

A stopping node answers with it, too.
"""

NOT_READ: Final = (*NOT_DONE, *TAKEN_BACK, *UNDECIDED, errors.System, errors.LocalInstanceIdIsReadOnly)
"""Errors of reads. An expelled member answers with the last one."""

WORKLOADS: Final[dict[str, Callable[[Plan], Workload]]] = {
    "register": Register,
    "append": Append,
    "set": Set,
    "bank": Bank,
    "notes": Notes,
}


def outcome_of(error: FlowstoneError, plan: Plan) -> Outcome:
    """Return what a client knows about its write after this error."""
    if isinstance(error, (NotCommitted, *NOT_DONE)):
        return Outcome.FAILED
    if isinstance(error, TAKEN_BACK) and not plan.has_elections:
        return Outcome.FAILED
    return Outcome.UNKNOWN


def is_promised(error: FlowstoneError, *, is_read: bool) -> bool:
    """Return True if clients must accept this error: a rejection, or a lost connection.

    All others are bugs, as are undecodable answers.
    """
    if isinstance(error, NotCommitted) and isinstance(error.__cause__, FlowstoneError):
        error = error.__cause__
    known = NOT_READ if is_read else (*NOT_DONE, *TAKEN_BACK, *UNDECIDED)
    return isinstance(error, (ConnectionFailed, *known))


class Client:
    """One process. It talks to one member at a time, with several requests in flight."""

    def __init__(self, clients: Clients, process: str, rng: Random, timeout: float) -> None:
        self._clients = clients
        self._replica_set = clients.replica_set
        self._timeout = timeout
        self._conversations: dict[str, Conversation] = {}
        self._opening = asyncio.Lock()  # of concurrent writers, one connects
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

    # --- choice of a member ---

    def any_member(self) -> str:
        """Return any member, ready or not."""
        return self.random.choice(self._replica_set.members)

    def any_node(self) -> str:
        """Return any node, including anonymous replicas."""
        return self.random.choice(self._replica_set.names)

    def _reader(self) -> str:
        """Return a node to read from; the master if the dialect promises nothing elsewhere."""
        return self._replica_set.members[0] if self.plan.dialect == "2.6" else self.any_member()

    def writer(self) -> str | None:
        replica_set = self._replica_set
        leader = replica_set.leader()
        if self.plan.dialect == "2.6":  # any writer may own the queue
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
        """Run an operation on a member and record it; return None if the member could not be reached."""
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
            self._clients.surprises.append(f"undocumented answer: {operation}")
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
        """Check an error of a connection attempt: a member may be down, starting, or closing before its greeting."""
        if isinstance(error, RemoteProtocolError) and not isinstance(error, GreetingError):
            self._clients.surprises.append(f"undocumented answer of {member} to a connecting client: {error}")

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
    """All clients of a run. `surprises` are undocumented answers, which are violations."""

    def __init__(self, replica_set: ReplicaSet, history: History, rng: Random) -> None:
        self.replica_set = replica_set
        self.history = history
        self.surprises: list[str] = []
        self.deposed = 0
        """Writes sent to a leader that did not know of its successor."""
        self._random = rng
        self._value = 0
        self._begun, self._answered_before = 0.0, 0
        self.workloads = [WORKLOADS[name](replica_set.plan) for name in replica_set.plan.workloads]

    def new_value(self) -> int:
        """Return a value that was never written before."""
        self._value += 1
        return self._value

    def is_ahead(self) -> bool:
        """Return True if the clients have more answers than their target."""
        aim = min(ANSWERS_PER_SECOND * (self.replica_set.sim.now - self._begun), ANSWERS_AIM)
        return self.history.answered - self._answered_before > aim

    async def prepare(self) -> None:
        """Create the spaces before the first client starts; no fault is active yet."""
        client = self._client("first", FINAL_TIMEOUT)
        leader = self.replica_set.leader()
        assert leader is not None, "a new set has a leader"
        for workload in self.workloads:
            await workload.prepare(client, leader)
        await client.close()

    async def run(self, until: Callable[[], bool]) -> None:
        """Run until `until` holds and all operations have ended."""
        self._begun, self._answered_before = self.replica_set.sim.now, self.history.answered
        clients = [self._client(str(number), self._random.choice(TIMEOUTS)) for number in range(COUNT)]
        await asyncio.gather(*(client.run(until) for client in clients))
        await asyncio.gather(*(client.close() for client in clients))

    async def final_reads(self) -> None:
        """Read everything on all members; requires a healthy set."""
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
