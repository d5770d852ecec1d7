"""Members of a replica set reduced to elections: a real log each, a queue that only changes its owner, no network.

A broadcast reaches the other members after a moment, unless the sender is isolated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.node.synchro.elections import Elections
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.replication.limbo.control_rows import RaftState, decode_control
from flowstone.replication.raft.election import Config, ElectionMode, ElectionState
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.reader import LogFile
from tests.simulation.simulation import Simulation

LATENCY = 0.001
UUID = "11111111-0000-4000-8000-00000000000{}"


class Queue:
    """The synchronous queue as elections see it; `waits` pending transactions delay a change of owner."""

    def __init__(self) -> None:
        self.limbo = self
        self.owner_id = self.term = self.own_id = self.waits = 0
        self.is_frozen = False
        self.timeout = 5.0
        self.promote_terms: dict[int, int] = {}
        self.story: list[object] = []
        self.error: TarantoolError | None = None
        self._transfer: asyncio.Future[None] | None = None
        self._emptied = asyncio.Event()

    @property
    def is_owner(self) -> bool:
        return self.owner_id != 0 and self.owner_id == self.own_id

    def __len__(self) -> int:
        return self.waits

    def see_term(self, term: int) -> None:
        self.story.append(f"term {term}")
        self.is_frozen = self.is_frozen or term > self.term

    def fence(self) -> None:
        self.story.append("fence")
        self.is_frozen = True

    async def promote(self, term: int, *, timeout: float | None = None) -> None:
        await self._wait(timeout)
        self.take(self.own_id, term)

    async def demote(self, term: int, *, timeout: float | None = None) -> None:
        await self._wait(timeout)
        self.take(self.own_id, term, owner_id=0)

    def take(self, origin_id: int, term: int, *, owner_id: int | None = None) -> None:
        """Apply PROMOTE of `origin_id`, or DEMOTE if there is no owner."""
        self.owner_id = origin_id if owner_id is None else owner_id
        self.term = self.promote_terms[origin_id] = term
        self.is_frozen = False
        self.story.append(f"{origin_id} gives {self.owner_id} the queue in term {term}")

    async def _wait(self, timeout: float | None) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not self.waits:
            return
        self._transfer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self._transfer
        except TimeoutError:
            raise errors.QuorumWait("Couldn't wait for quorum 2: timed out with 1 acks") from None

    def empty(self) -> None:
        """Confirm the pending transactions: a quorum has them."""
        self.waits = 0
        self._emptied.set()
        if self._transfer is not None and not self._transfer.done():
            self._transfer.set_result(None)

    def cancel_transfer(self, error: TarantoolError) -> None:
        self.story.append(f"{error.code}: {error.message}")
        if self._transfer is not None and not self._transfer.done():
            self._transfer.set_exception(error)

    async def settled(self, timeout: float | None = None) -> None:
        self.story.append(f"waits {timeout:g} s for its owner")
        try:
            async with asyncio.timeout(timeout):
                await self._emptied.wait()
        except TimeoutError:
            raise errors.SyncQuorumTimeout("Quorum collection for a synchronous transaction is timed out") from None


class Electorate:
    """`count` members, all connected with each other; `cut` isolates one. Their ids start at 1."""

    def __init__(
        self,
        sim: Simulation,
        count: int = 3,
        *,
        mode: ElectionMode = ElectionMode.CANDIDATE,
        wal_mode: WalMode = WalMode.WRITE,
    ) -> None:
        self.sim = sim
        self.ids = range(1, count + 1)
        self.config = Config(mode=mode)
        self.cut_off: set[int] = set()
        self.journals: dict[int, Journal] = {}
        self.queues: dict[int, Queue] = {}
        self.members: dict[int, Elections] = {}
        self._wal_mode = wal_mode
        for number in self.ids:
            self.add(number)

    def add(self, number: int, *, vclock: VClock | None = None) -> Elections:
        """Add a member that does not take part yet; it replaces one with the same id."""
        outside, directory = self.sim.outside, f"/elections/{number}"
        outside.disk.make_directory(directory)
        uuid = UUID.format(number)
        journal = Journal(
            outside,
            directory,
            instance_uuid=uuid,
            vclock=vclock or VClock({1: 10}),
            replica_id=number,
            mode=self._wal_mode,
        )
        self.journals[number] = journal
        queue = self.queues[number] = Queue()
        queue.own_id = number
        self.members[number] = elections = Elections(outside, journal, queue)
        elections.on_broadcast.append(lambda: self._shown(number))
        elections.set_quorum(len(self.ids) // 2 + 1, self.ids)
        elections.configure(self.config)
        return elections

    def start(self) -> None:
        """Start all members in term 1."""
        for number in self.ids:
            self.members[number].start(RaftState(term=1), number)
        self.connect()

    def connect(self) -> None:
        for one in self.ids:
            for other in self.ids:
                is_connected = one != other and not {one, other} & self.cut_off
                self.members[one].connection(other, upstream=is_connected, downstream=is_connected)
                if is_connected:
                    self._deliver(one, other)

    def cut(self, number: int) -> None:
        self.cut_off.add(number)
        self.connect()

    def heal(self) -> None:
        self.cut_off.clear()
        self.connect()

    def _shown(self, source: int) -> None:
        for target in self.ids:
            if target != source:
                self._deliver(source, target)

    def _deliver(self, source: int, target: int) -> None:
        if not {source, target} & self.cut_off:
            shown = self.members[source].shown
            asyncio.get_running_loop().call_later(LATENCY, self._hear, source, target, shown)

    def _hear(self, source: int, target: int, shown: RaftState) -> None:
        if not {source, target} & self.cut_off:
            self.members[target].message(source, shown)

    async def beat(self, seconds: float) -> None:
        """Let time pass, with heartbeats between all members every second."""
        end = self.sim.now + seconds
        while self.sim.now < end:
            for one in self.ids:
                for other in self.ids:
                    if one != other and not {one, other} & self.cut_off:
                        self.members[one].heartbeat(other)
            await self.sim.sleep(min(1.0, end - self.sim.now))

    async def until(self, condition: Callable[[], object]) -> None:
        beating = asyncio.ensure_future(self.beat(1000.0))
        try:
            await self.sim.until(condition)
        finally:
            beating.cancel()

    @property
    def leaders(self) -> list[int]:
        return [number for number, member in self.members.items() if member.raft.state is ElectionState.LEADER]

    async def elect(self) -> int:
        """Return the leader, once it owns the queue and all members know it."""
        everybody = set(self.ids) - self.cut_off

        def is_settled() -> bool:
            leaders = {self.members[number].raft.leader for number in everybody}
            return len(leaders & everybody) == len(leaders) == 1 and all(
                leader in self.leaders and self.queues[leader].promote_terms.get(leader) == self.members[leader].term
                for leader in leaders & everybody
            )

        await self.until(is_settled)
        return self.members[min(everybody)].raft.leader

    async def close(self) -> None:
        for number in self.ids:
            await self.members[number].close()
            await self.journals[number].close()

    def written(self, number: int) -> list[tuple[int, int, int]]:
        """Return LSN, term and vote of the RAFT rows in the log of a member."""
        found = []
        disk = self.sim.outside.disk
        for listed in scan_directory(disk, f"/elections/{number}").logs:
            with LogFile.open(disk, listed.path) as log:
                for transaction in log.transactions():
                    for row in transaction.rows:
                        assert (row.type, row.replica_id, row.group_id) == (30, 0, 1)
                        state = decode(row.body)
                        found.append((row.lsn, state.term, state.vote))
        return found


def decode(body: bytes) -> RaftState:
    state = decode_control(30, body)
    assert isinstance(state, RaftState)
    return state
