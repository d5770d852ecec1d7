"""Our Raft and limbo in place of one recorded instance: they get the same input, and must write the same rows.

The input of the instance is taken from both ends of its recorded connections, by time: rows and RAFT states of its
upstreams, ACKs of its replicas, connections made and lost. Own rows in its log without such a cause are requests of
clients. Its candidacies and resignations are visible in its broadcasts. Its journal writes immediately, so its log may
differ from the recorded one only in the positions of RAFT rows: real servers write those asynchronously.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import GROUP_LOCAL, Flag, RequestType
from flowstone.iproto.row import Row, decode_row
from flowstone.replication.limbo.actions import Action, Commit, Reject, TransferFailed, Undo, Write, WriteNop
from flowstone.replication.limbo.control_rows import Demote, Promote, RaftState, decode_control
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import LimboEntry, Pending
from flowstone.replication.limbo.split_brain import Fate, SettlingRequest
from flowstone.replication.messages import decode_ack
from flowstone.replication.raft.election import Config, ElectionMode
from flowstone.replication.raft.raft import Raft
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction
from tests.conversations import recording

COMMIT = Flag.COMMIT.value
WAIT_ACK = Flag.WAIT_ACK.value

IDS = {"a": 1, "b": 2, "c": 3}
LAG_SECONDS = {("2.11", "05-election", "to-b"): 0.05, ("3.8", "05-election", "to-b"): 0.066}
"""The two taps of that recording were started one after another, each with its own clock."""

PRECISION_SECONDS = 0.1
"""The precision of recorded timers: taps slowed the servers down, and the machine was busy."""


@dataclass(frozen=True)
class Event:
    """The event of a recorded packet. `row` is None if a connection was made (`is_up`) or lost."""

    at: float
    connection: str
    peer_id: int
    from_upstream: bool
    row: Row | None
    is_up: bool = True


@dataclass(frozen=True)
class Shown:
    """A state that the instance sent to one of its replicas."""

    at: float
    connection: str
    state: RaftState


def ends_of(scenario: str, connection: str) -> tuple[int, int]:
    """Return replica and upstream of a connection:

    `b-to-a-01`, `to-a-01` (of two), `join-01` (a replica to its master).
    """
    found = re.fullmatch(r"(?:(\w)-)?to-(\w)-\d+", connection)
    if found is None:
        return 2, 1
    server_id = IDS[found[2]]
    return IDS[found[1]] if found[1] else 3 - server_id, server_id


def packets_of(version: str, scenario: str, connection: str) -> Iterator[tuple[float, recording.Packet | None]]:
    """Yield the packets of a connection from SUBSCRIBE on, with times; None for its end."""
    path = recording.scenario(version, scenario) / connection
    sides = {side: path.with_name(f"{connection}.{side}.bin").read_bytes() for side in ("c2s", "s2c")}
    begin = {"c2s": 0, "s2c": recording.GREETING_SIZE}
    lag = LAG_SECONDS.get((version, scenario, connection[:4]), 0.0)
    is_subscribed = False
    for line in path.with_name(f"{connection}.idx").read_text().splitlines():
        read = json.loads(line)
        side, at = read["d"], read["t"] + lag
        for payload, stop in recording.split(sides[side], begin[side], read["off"] + read["len"]):
            begin[side] = stop
            packet = recording.Packet(side == "s2c", payload)
            is_subscribed = is_subscribed or packet.type == RequestType.SUBSCRIBE
            if is_subscribed:
                yield at, packet
    if is_subscribed:
        yield at, None


def recorded_events(version: str, scenario: str, instance_id: int) -> tuple[list[Event], list[Shown]]:
    """Return the input and the broadcasts of the instance."""
    heard: list[Event] = []
    shown: list[Shown] = []
    for name in recording.names(version, scenario):
        client_id, server_id = ends_of(scenario, name)
        if instance_id not in (client_id, server_id):
            continue
        follows = instance_id == client_id
        peer_id = server_id if follows else client_id
        for at, packet in packets_of(version, scenario, name):
            row = None if packet is None else decode_row(packet.payload)
            if packet is None or packet.type == RequestType.SUBSCRIBE:
                heard.append(Event(at, name, peer_id, follows, None, is_up=packet is not None))
            elif packet.from_server == follows:
                heard.append(Event(at, name, peer_id, follows, row))
            elif not follows and row is not None and row.type == RequestType.RAFT:
                shown.append(Shown(at, name, state_of(row)))
    # Connections are known before their packets.
    return sorted(heard, key=lambda event: (event.at, event.row is not None)), sorted(shown, key=lambda each: each.at)


def state_of(row: Row) -> RaftState:
    state = decode_control(row.type, row.body)
    assert isinstance(state, RaftState)
    return state


Written = tuple[int, int, int, bytes]
"""Type, origin, LSN and body of a log row."""


def written(row: Row) -> Written:
    return row.type, row.replica_id, row.lsn, row.body


def global_rows(transaction: LogTransaction) -> list[Row]:
    """Return the rows that are not local."""
    return [row for row in transaction.rows if row.group_id != GROUP_LOCAL]


class Seat:
    """The machines and their log. `rows` and `raft_rows` are their writes, `shown` their broadcasts."""

    def __init__(self, instance_id: int, members: list[int], quorum: int, mode: ElectionMode) -> None:
        self.id = instance_id
        self.now = 0.0
        self.rows: list[Written] = []
        self.raft_rows: list[RaftState] = []
        self.shown: list[RaftState] = []
        self.leaders: list[tuple[int, int]] = []
        self.owners: list[tuple[int, int]] = []
        self.committed: list[LogTransaction] = []
        self.undone: list[LogTransaction] = []
        self._members, self._quorum, self._mode = members, quorum, mode
        self._lsns: dict[int, int] = {}
        self._open: dict[str, list[Row]] = {}
        self._ups: set[tuple[int, bool]] = set()

    def start(self, vclock: VClock, raft: RaftState, queue: Promote) -> None:
        """Start from a snapshot."""
        self._lsns = vclock.to_mapping()
        self.limbo: Limbo[LogTransaction] = self._new_limbo()
        self.limbo.restore(queue)
        self._start_raft(raft)

    def restart(self, now: float) -> None:
        """Restart from the log: pending transactions are pending again, and there are no connections."""
        self.now = now
        old = self.limbo
        pending = [Pending(entry.transaction, entry.lsn, entry.is_synchronous) for entry in old.pending]
        self.limbo = self._new_limbo()
        self._do(self.limbo.restore(old.checkpoint(), promote_terms=old.promote_terms, pending=pending))
        self._ups.clear()
        self._start_raft(self.raft.persisted)

    def _new_limbo(self) -> Limbo[LogTransaction]:
        return Limbo(instance_id=self.id, dialect=Dialect.V2_11, quorum=self._quorum, timeout=60.0)

    def _start_raft(self, state: RaftState) -> None:
        self.raft = Raft(
            self.id, vclock=self.vclock, random=lambda: 0.0, now=self.now, term=state.term, vote=state.vote
        )
        self.raft.set_quorum(self._quorum, self._members, self.now)
        self.set_mode(self._mode)
        self.limbo.see_term(self.raft.volatile_term)
        self.shown.append(self.raft.shown)
        self._settle()

    def vclock(self) -> VClock:
        return VClock(self._lsns)

    # --- input ---

    def hear(self, event: Event) -> None:
        self._wait_until(event.at)
        if event.row is None:
            self._connected(event)
        elif not event.from_upstream:
            self._ack(event.peer_id, event.row)
        elif event.row.type == RequestType.RAFT:
            self.raft.message(event.peer_id, state_of(event.row), self.now)
        elif event.row.lsn:
            self._received(event.connection, event.row)
        elif event.row.replica_id:
            self.raft.heartbeat(event.peer_id, self.now)
        self._settle()

    def _wait_until(self, at: float) -> None:
        """Fire timers up to a time.

        The leader's death is timed by the recorded clock. Only the server itself knows when it starts to wait for a
        first leader.
        """
        deadline = self.raft.deadline
        if self.raft.leader and deadline is not None and deadline <= at:
            self.now = max(self.now, deadline)
            self.raft.tick(self.now)
            self._settle()
        self.now = max(self.now, at)

    def _connected(self, event: Event) -> None:
        (self._ups.add if event.is_up else self._ups.discard)((event.peer_id, event.from_upstream))
        ways = {way: (event.peer_id, way) in self._ups for way in (True, False)}
        self.raft.connection(event.peer_id, upstream=ways[True], downstream=ways[False], now=self.now)

    def _ack(self, peer_id: int, row: Row) -> None:
        ack = decode_ack(row)
        self.raft.heard_term(peer_id, ack.term, self.now)
        self._do(self.limbo.ack(peer_id, ack.vclock))

    def _received(self, connection: str, row: Row) -> None:
        rows = self._open.setdefault(connection, [])
        rows.append(row)
        if not row.is_commit:
            return
        transaction = LogTransaction(tuple(rows))
        rows.clear()
        if row.lsn <= self._lsns.get(row.replica_id, 0):
            return  # the row arrived on another connection
        if row.type in CONTROL_TYPES:
            body = decode_control(row.type, row.body)
            assert not isinstance(body, RaftState)
            if isinstance(body, Promote | Demote):
                self.raft.heard_term(row.replica_id, body.term, self.now)
                self._settle()
            self._do(self.limbo.request(SettlingRequest(row.replica_id, body)))
        else:
            self._apply(transaction)

    def _apply(self, transaction: LogTransaction) -> None:
        last, origin_id, lsn = transaction.rows[-1], transaction.replica_id, transaction.lsn
        has_effect = any(row.type != RequestType.NOP for row in transaction.rows)
        fate = self.limbo.admit(origin_id, lsn, flags=last.flags, has_effect=has_effect)
        entry = None
        if fate is Fate.ACCEPTED and has_effect:
            is_synchronous = bool(last.flags & WAIT_ACK)
            entry = self.limbo.receive(transaction, origin_id=origin_id, lsn=lsn, is_synchronous=is_synchronous)
        for row in transaction.rows:
            is_nop = fate is Fate.NOP or row.type == RequestType.NOP
            self._write((RequestType.NOP.value, row.replica_id, row.lsn, b"") if is_nop else written(row))
        self._logged(transaction, entry, has_effect=has_effect and fate is Fate.ACCEPTED)

    # --- requests of users ---

    def set_mode(self, mode: ElectionMode) -> None:
        self.raft.configure(Config(mode, election_timeout=2.0), self.now)

    def submit(self, transaction: LogTransaction) -> None:
        """Submit a transaction of the instance itself, which must get the recorded LSNs and flags."""
        flags = transaction.rows[-1].flags & ~COMMIT
        entry = self.limbo.submit(transaction, is_synchronous=bool(flags & WAIT_ACK))
        assert self.limbo.row_flags(entry) == flags
        for row in global_rows(transaction):
            self._write((row.type, self.id, self._lsns.get(self.id, 0) + 1, row.body))
        self._logged(transaction, entry, has_effect=True)
        self._settle()

    def time_out(self) -> None:
        """Time out the oldest pending transaction."""
        assert self.limbo.deadline is not None
        self._do(self.limbo.tick(self.limbo.deadline))

    def stand(self, at: float, term: int) -> None:
        """Start the election in `term`, by its timer unless its input was the reason."""
        self._wait_until(at + PRECISION_SECONDS if self.raft.volatile_term < term else at)
        if self.raft.volatile_term >= term:
            return
        assert self.raft.deadline is not None
        assert self.raft.deadline < at + PRECISION_SECONDS, "the server ran earlier than ours would"
        self.now = max(self.now, self.raft.deadline)
        self.raft.tick(self.now)
        self._settle()

    def promote(self) -> None:
        self.raft.promote(self.now)
        self._settle()

    def begin_term(self) -> int:
        term = self.raft.begin_term(self.now)
        self._settle()
        return term

    def resign(self) -> None:
        self.raft.resign(self.now)
        self._settle()

    def transfer(self, kind: type[Promote | Demote], term: int) -> None:
        move = self.limbo.promote if kind is Promote else self.limbo.demote
        self._do(move(term, self.now))

    # --- output ---

    def _settle(self) -> None:
        while ready := self.raft.ready():
            self.limbo.see_term(self.raft.volatile_term)
            if ready.fence:
                self.limbo.fence()
            if ready.broadcast is not None:
                self.shown.append(ready.broadcast)
            if self.raft.leader and (self.raft.volatile_term, self.raft.leader) not in self.leaders:
                self.leaders.append((self.raft.volatile_term, self.raft.leader))
            if ready.promote_term:
                self._do(self.limbo.promote(ready.promote_term, self.now))
            if ready.write is not None:
                self._lsns[0] = self._lsns.get(0, 0) + 1
                self.raft_rows.append(ready.write)
                self.raft.written(ready.write.term, ready.write.vote, self.now)

    def _write(self, row: Written) -> None:
        _, origin_id, lsn, _ = row
        assert lsn == self._lsns.get(origin_id, 0) + 1, "a gap in the log"
        self._lsns[origin_id] = lsn
        self.rows.append(row)

    def _logged(
        self, transaction: LogTransaction, entry: LimboEntry[LogTransaction] | None, *, has_effect: bool
    ) -> None:
        if entry is not None:
            self._do(self.limbo.written(entry, transaction.lsn, self.now))
        elif has_effect:
            self.committed.append(transaction)

    def _do(self, actions: list[Action[LogTransaction]]) -> None:
        for action in actions:
            match action:
                case Write(request):
                    self._write_control(request)
                    self._do(self.limbo.request_written(request))
                    if request.is_transfer:
                        self.owners.append((self.limbo.term, self.limbo.owner_id))
                case WriteNop(request):
                    lsn = self._lsns.get(request.origin_id, 0) + 1
                    self._write((RequestType.NOP.value, request.origin_id, lsn, b""))
                case Commit(entries):
                    self.committed += [entry.transaction for entry in entries]
                case Undo(entry):
                    self.undone.append(entry.transaction)
                case Reject(_, error) | TransferFailed(error):
                    raise error

    def _write_control(self, request: SettlingRequest) -> None:
        row_type = RequestType[f"RAFT_{type(request.body).__name__.upper()}"]
        lsn = self._lsns.get(request.origin_id, 0) + 1
        self._write((row_type.value, request.origin_id, lsn, request.body.encode()))
