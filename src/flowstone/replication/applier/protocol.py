"""The replica's side of the replication protocol, as a pure state machine.

Bytes from the upstream go in; events and bytes to send come out. The module uses no socket, no clock and no box. The
states, and their theory of operation, are in `states.py`; `node/upstream/applier.py` runs the machine.
The protocol is in docs/spec/replication.md#connection-sequence, docs/spec/replication.md#join and
docs/spec/replication.md#subscribe.

One `ApplierProtocol` handles one connection. Besides `state`, which the node and `box.info` see, it tracks what the
upstream has to send next (`_Due`). `_STEPS` maps that to the method that decodes it, and `_BETWEEN` to the method for a
packet that arrives among rows and is not a row of data. Commands send a request and set what is due; the answer sets
the next state. `Entered` announces CONNECTED and READY, in which the machine waits for the next command.

Invariants: at most one request is pending, so requests need no SYNC, and a packet that arrives while nothing is due is
an error. Rows leave as whole transactions, in the order of the stream. After an error the connection is unusable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Protocol
from uuid import UUID

import numpy as np

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto import auth, errors, scan
from flowstone.iproto.constants import VCLOCK_MAX, Feature, Key, RequestType, type_name
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.greeting import GREETING_SIZE, Greeting, decode_greeting
from flowstone.iproto.limits import BLOCK_SIZE_MAX
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, frame
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.iproto.slab import Slab
from flowstone.replication import messages
from flowstone.replication.applier.ballot_watch import decode_vote
from flowstone.replication.applier.received_rows import check_rows
from flowstone.replication.applier.states import TRANSITIONS, ApplierState, UnsupportedPeer, other_replica_set
from flowstone.replication.membership.membership import Standing
from flowstone.replication.messages import Ack, Ballot, Heartbeat, Join, Register, Subscribe, SubscribeReply
from flowstone.replication.row_stream import REPLY_SIZE_MAX, RowStream
from flowstone.replication.vclock import VClock

OLDEST: Final = (1, 10, 0)
"""The oldest version that can be followed: masters before it have no ballots, heartbeats or final join stage."""

NEWER: Final = (2, 10, 0)
"""The first version that supports ID, JOIN_META, and ACKs with a term and a timestamp."""

BEATS_ALWAYS: Final = (2, 11, 0)
"""The first version whose masters send heartbeats even while they send rows."""


# --- Events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entered:
    """The applier has entered `state`. In CONNECTED and READY it waits for the next command."""

    state: ApplierState


@dataclass(frozen=True, slots=True)
class Greeted:
    greeting: Greeting


@dataclass(frozen=True, slots=True)
class BallotIsEvent:
    """The ballot must be watched on a connection of its own (see BallotWatch) and passed to `ballot_known`."""


@dataclass(frozen=True, slots=True)
class SnapshotBegun:
    vclock: VClock


@dataclass(frozen=True, slots=True)
class MetaRow:
    row: Row


@dataclass(frozen=True, slots=True)
class SnapshotRows:
    slab: Slab


@dataclass(frozen=True, slots=True)
class FinalBegun:
    stop_vclock: VClock


@dataclass(frozen=True, slots=True)
class FinalRows:
    slab: Slab


@dataclass(frozen=True, slots=True)
class JoinEnded:
    vclock: VClock


@dataclass(frozen=True, slots=True)
class Subscribed:
    reply: SubscribeReply


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole transactions; `timestamp` is the timestamp of the last row."""

    slab: Slab
    timestamp: float


@dataclass(frozen=True, slots=True)
class HeartbeatHeard:
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class RaftHeard:
    row: Row


Event = (
    Entered
    | Greeted
    | BallotIsEvent
    | SnapshotBegun
    | MetaRow
    | SnapshotRows
    | FinalBegun
    | FinalRows
    | JoinEnded
    | Subscribed
    | Rows
    | HeartbeatHeard
    | RaftHeard
)


class _Due(Enum):
    """The data that the peer has to send next."""

    GREETING = "greeting"
    FEATURES = "answer to ID"
    BALLOT = "answer to VOTE"
    NOTHING = "nothing"
    LOGIN = "answer to AUTH"
    SNAPSHOT = "answer to JOIN or FETCH_SNAPSHOT"
    SNAPSHOT_ROWS = "snapshot rows"
    FINAL_ROWS = "rows of the final join stage or of a registration"
    SUBSCRIPTION = "answer to SUBSCRIBE"
    ROWS = "rows"


_WITH_ROWS: Final = (_Due.SNAPSHOT_ROWS, _Due.FINAL_ROWS, _Due.ROWS)

_INSERT: Final = RequestType.INSERT.value
_OK: Final = RequestType.OK.value
_RAFT: Final = RequestType.RAFT.value
_META: Final = (RequestType.RAFT.value, RequestType.RAFT_PROMOTE.value)
_MARKERS: Final = (RequestType.JOIN_META.value, RequestType.JOIN_SNAPSHOT.value)


class Place(Protocol):
    """The receiver of the rows: its id, and the position up to which it has the rows."""

    @property
    def replica_id(self) -> int: ...

    @property
    def vclock(self) -> VClock: ...


# --- The protocol ---------------------------------------------------------------------------------------------------


class ApplierProtocol:
    """One connection to an upstream: pass bytes to `receive`, take events until none is left, send `data_to_send`.

    The commands are `log_in` or `go_on` in CONNECTED; `join`, `fetch_snapshot`, `register` or `subscribe` in READY;
    `acknowledge` and `synchronize` from SYNC on. `next_event` raises the errors that the peer sends, and
    RemoteProtocolError if the peer violates the protocol; the connection is unusable after that.
    """

    def __init__(self, peer: str, *, instance_uuid: UUID, came_from: ApplierState = ApplierState.OFF) -> None:
        self._peer = peer
        self._instance_uuid = instance_uuid
        self._greeting_bytes = b""
        self._stream = RowStream(peer, packet_size_max=REPLY_SIZE_MAX)
        self._events: deque[Event] = deque()
        self._outgoing: list[bytes] = []
        self._due = _Due.GREETING
        self._is_anonymous_join = False
        self._replicaset_uuid: UUID | None = None
        self._vclock_sync = 0
        self._unacknowledged: deque[tuple[dict[int, int], float]] = deque()
        self._greeting: Greeting | None = None
        self._admission: tuple[Standing, Place] | None = None
        self.state = came_from
        self.features: tuple[int, ...] = ()
        self.ballot: Ballot | None = None
        self.reply: SubscribeReply | None = None
        self.subscribed_from = VClock()  # as sent: our vclock may advance by other upstreams before the answer
        self.has_joined = False
        self.has_registered = False
        self._enter(ApplierState.CONNECT)

    @property
    def greeting(self) -> Greeting:
        """The greeting of the peer; only after `Greeted`."""
        assert self._greeting is not None
        return self._greeting

    @property
    def is_greeted(self) -> bool:
        return self._greeting is not None

    @property
    def is_subscribed(self) -> bool:
        return self._due is _Due.ROWS

    @property
    def is_joining(self) -> bool:
        """True while the peer prepares or sends a snapshot or the final rows, which may take long."""
        return self._due in (_Due.SNAPSHOT, _Due.SNAPSHOT_ROWS, _Due.FINAL_ROWS)

    def receive(self, data: bytes) -> None:
        if self._due is not _Due.GREETING:
            self._stream.feed(data)
            return
        self._greeting_bytes += data
        # A fast peer may send more than its greeting in one read.
        if len(self._greeting_bytes) > GREETING_SIZE:
            self._stream.feed(self._greeting_bytes[GREETING_SIZE:])
            self._greeting_bytes = self._greeting_bytes[:GREETING_SIZE]

    def data_to_send(self) -> bytes:
        data, self._outgoing = b"".join(self._outgoing), []
        return data

    def _expect(self, due: _Due) -> None:
        """Set what is due. Large packets are accepted only for rows: an arbitrary peer could fill our memory."""
        self._due = due
        self._stream.packet_size_max = BLOCK_SIZE_MAX if due in _WITH_ROWS else REPLY_SIZE_MAX

    def admit(self, standing: Standing, place: Place) -> None:
        """Let `standing` judge the rows of the subscription before they go to `place`; called after `Subscribed`."""
        self._admission = standing, place

    def next_event(self) -> Event | None:
        """Return the next event; None until more bytes arrive or the next command is given.

        Rows are admitted when they are returned, not when they arrive: rows returned earlier may have registered their
        originator.
        """
        while not self._events:
            if not _STEPS[self._due](self):
                return None
        event = self._events.popleft()
        return self._admitted(event) if type(event) is Rows else event

    def _admitted(self, event: Rows) -> Rows:
        """Return the rows of `event` that may be applied now; the rest becomes the next event."""
        if self._admission is None:
            return event
        standing, place = self._admission
        part, rest = standing.admit(event.slab, place.vclock, place.replica_id)
        if rest is None:
            return event
        self._events.appendleft(Rows(rest, event.timestamp))
        return Rows(part, _timestamp(part))

    def _enter(self, state: ApplierState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise LocalProtocolError(f"invalid applier transition: {self.state.value} to {state.value}")
        self.state = state
        self._events.append(Entered(state))

    # --- connecting ---

    def _hear_greeting(self) -> bool:
        if len(self._greeting_bytes) < GREETING_SIZE:
            return False
        greeting = self._greeting = decode_greeting(self._greeting_bytes)
        if greeting.version < OLDEST:
            raise UnsupportedPeer(
                f"{self._peer} runs Tarantool {greeting.version_text}, which is too old to follow",
                hint="upgrade it to 1.10 or newer",
            )
        if greeting.uuid.int == 0:
            raise errors.NilUuid(
                "Nil UUID is reserved and can't be used in replication",
                hint=f"{self._peer} is not configured yet, or is not an instance",
            )
        self._events.append(Greeted(greeting))
        # Servers before 2.10 do not know ID, and real appliers do not send it to them
        # (docs/spec/replication.md#connection-sequence).
        if greeting.version >= NEWER:
            body = pack({Key.VERSION.value: _PROTOCOL_VERSION, Key.FEATURES.value: _FEATURES})
            self._ask(_request(RequestType.ID, body), _Due.FEATURES)
        else:
            self._ask(messages.encode_vote(), _Due.BALLOT)
        return True

    def _hear_features(self) -> bool:
        response = self._take_response()
        if response is None:
            return False
        if not response.is_error:  # features are optional: a peer that rejects ID has none
            features = response.values().get(Key.FEATURES, ())
            self.features = features if isinstance(features, tuple) else ()
        # This server sends changes of its ballot on a separate connection while this node chooses a master; VOTE would
        # have to be repeated.
        if Feature.WATCHERS in self.features:
            self._expect(_Due.NOTHING)
            self._events.append(BallotIsEvent())
        else:
            self._ask(messages.encode_vote(), _Due.BALLOT)
        return True

    def _hear_ballot(self) -> bool:
        response = self._take_response()
        if response is None:
            return False
        ballot = decode_vote(response, self.greeting)
        # A server without VOTE has no ballot; an empty one lets the sequence continue.
        self.ballot_known(ballot if ballot is not None else Ballot())
        return True

    def ballot_known(self, ballot: Ballot) -> None:
        """Continue after BallotIsEvent with the ballot that was watched."""
        self.ballot = ballot
        self._expect(_Due.NOTHING)
        self._enter(ApplierState.CONNECTED)

    def _check_self(self) -> None:
        if self.greeting.uuid == self._instance_uuid:
            raise errors.ConnectionToSelf("Connection to self detected")

    def log_in(self, user: str, password: str) -> None:
        self._check_self()
        self._enter(ApplierState.AUTH)
        scramble = auth.scramble(password, self.greeting.salt)
        body = pack({Key.USER_NAME.value: user, Key.TUPLE.value: (auth.METHOD, scramble)})
        self._ask(_request(RequestType.AUTH, body), _Due.LOGIN)

    def go_on(self) -> None:
        """Continue as guest, without a login."""
        self._check_self()
        self._enter(ApplierState.READY)

    def _hear_login(self) -> bool:
        response = self._take_response()
        if response is None:
            return False
        if response.is_error:
            raise response.error()
        self._expect(_Due.NOTHING)
        self._enter(ApplierState.READY)
        return True

    # --- joining and registering ---

    def join(self, join: Join) -> None:
        self._enter(ApplierState.INITIAL_JOIN)
        self._is_anonymous_join = False
        self._ask(messages.encode_join(join, is_2_6=self._is_old), _Due.SNAPSHOT)

    def fetch_snapshot(self, fetch: messages.FetchSnapshot) -> None:
        self._enter(ApplierState.FETCH_SNAPSHOT)
        self._is_anonymous_join = True
        self._ask(messages.encode_fetch_snapshot(fetch, is_2_6=self._is_old), _Due.SNAPSHOT)

    def register(self, register: Register) -> None:
        self._enter(ApplierState.REGISTER)
        self._ask(messages.encode_register(register, is_2_6=self._is_old), _Due.FINAL_ROWS)

    @property
    def _is_old(self) -> bool:
        return self.greeting.version < NEWER

    def _hear_snapshot(self) -> bool:
        response = self._take_response()
        if response is None:
            return False
        if response.is_error:
            raise response.error()
        if response.type != _OK:
            raise _unknown_type(response.type)
        self._events.append(SnapshotBegun(messages.decode_vclock_reply(response.body)))
        self._expect(_Due.SNAPSHOT_ROWS)
        return True

    def _hear_rows(self) -> bool:
        try:
            slab = self._stream.take()
        except errors.ReplicaNotAnon:
            return self._was_registered_before()
        if slab is None:
            return False
        first, count = 0, len(slab)
        while first < count:
            first = self._pass_on(slab, first, count)
        return True

    def _was_registered_before(self) -> bool:
        """Handle ER_REPLICA_NOT_ANON: a former REGISTER succeeded, but its answer was lost.

        We are a member already, and the subscription brings the row that registers us.
        """
        packet = self._stream.take_packet() if self.state is ApplierState.REGISTER else None
        if packet is None:
            raise RemoteProtocolError(f"unexpected ER_REPLICA_NOT_ANON from {self._peer}: no REGISTER is pending")
        self._expect(_Due.NOTHING)
        self.has_registered = True
        self._enter(ApplierState.REGISTERED)
        self._enter(ApplierState.READY)
        return True

    def _pass_on(self, slab: Slab, first: int, count: int) -> int:
        """Create events for the data rows from row `first` of `count` on, and for the next packet that is not one.

        Return the number of the row after them.
        """
        if self._due is _Due.SNAPSHOT_ROWS:
            # Snapshot rows have no LSN, so that cannot tell them from markers and the final OK
            # (docs/spec/replication.md#join-stream).
            is_other = slab.cells[scan.TYPE, first:] != _INSERT
        else:
            # Rows of the log have an LSN; heartbeats, RAFT rows and OK do not (docs/spec/replication.md#heartbeats).
            is_other = slab.cells[scan.LSN, first:] == 0
        found = int(is_other.argmax())
        stop = first + found if is_other[found] else count
        if stop > first:
            whole = first == 0 and stop == count
            self._data(slab if whole else replace(slab, cells=slab.cells[:, first:stop]))
        if stop < count:
            at, end = int(slab.cells[scan.ROW_AT, stop]), int(slab.cells[scan.ROW_END, stop])
            self._other(slab.payload[at:end])
            stop += 1
        return stop

    def _data(self, slab: Slab) -> None:
        if self._due is _Due.SNAPSHOT_ROWS:
            self._events.append(SnapshotRows(slab))
            return
        # Check before the rows are returned: rows that no master can have sent must not reach the box or the log.
        check_rows(slab)
        if self._due is _Due.FINAL_ROWS:
            self._events.append(FinalRows(slab))
        elif self._due is _Due.ROWS:
            timestamp = _timestamp(slab)
            # ACKs to newer masters carry the timestamp of the newest row that they cover; the master computes its lag
            # from it.
            if not self._is_old:
                self._unacknowledged.append((slab.newest(), timestamp))
            self._events.append(Rows(slab, timestamp))
        else:
            raise RemoteProtocolError(f"unexpected rows from {self._peer}: the join has ended")

    def _other(self, packet: bytes) -> None:
        """Handle a packet among rows that is not a row of data."""
        _BETWEEN[self._due](self, decode_row(packet))

    def _between_snapshot_rows(self, row: Row) -> None:
        if row.type in _META:
            self._events.append(MetaRow(row))
        elif row.type == _OK:
            vclock = messages.decode_vclock_reply(row.body)
            # FETCH_SNAPSHOT ends here; JOIN continues with the rows written during the snapshot.
            if self._is_anonymous_join:
                self._end_join(vclock, ApplierState.FETCHED_SNAPSHOT)
            else:
                self._expect(_Due.FINAL_ROWS)
                self._events.append(FinalBegun(vclock))
                self._enter(ApplierState.FINAL_JOIN)
        # JOIN_META and JOIN_SNAPSHOT only separate the parts of the stream; masters before 2.10 do not send them.
        elif row.type not in _MARKERS:
            raise _unknown_type(row.type)

    def _between_final_rows(self, row: Row) -> None:
        if row.type != _OK:
            raise _unknown_type(row.type)
        is_join = self.state is ApplierState.FINAL_JOIN
        after = ApplierState.JOINED if is_join else ApplierState.REGISTERED
        self._end_join(messages.decode_vclock_reply(row.body), after)

    def _end_join(self, vclock: VClock, after: ApplierState) -> None:
        self._expect(_Due.NOTHING)
        self._events.append(JoinEnded(vclock))
        self.has_registered = after is ApplierState.REGISTERED
        self.has_joined = not self.has_registered
        self._enter(after)
        self._enter(ApplierState.READY)

    # --- following ---

    def subscribe(self, subscribe: Subscribe) -> None:
        self._replicaset_uuid = subscribe.replicaset_uuid
        self.subscribed_from = subscribe.vclock
        self._ask(messages.encode_subscribe(subscribe, is_2_6=self._is_old), _Due.SUBSCRIPTION)

    def _hear_subscription(self) -> bool:
        packet = self._stream.take_packet()
        if packet is None:
            return False
        response = decode_response(packet)
        if response.is_error:
            raise response.error()
        if response.type != _OK:
            raise errors.Protocol("Invalid response to SUBSCRIBE")
        reply = messages.decode_subscribe_reply(decode_row(packet))
        theirs, ours = reply.replicaset_uuid, self._replicaset_uuid
        # A master that sends no UUID, such as 1.10, has compared the two itself.
        if theirs is not None and theirs.int and ours is not None and theirs != ours:
            mismatch = errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {theirs}, got {ours}")
            mismatch.hint = other_replica_set(mismatch, ours)
            raise mismatch
        if reply.replica_id >= VCLOCK_MAX:
            raise RemoteProtocolError(f"{self._peer} claims invalid replica id {reply.replica_id}")
        self.reply = reply
        self._expect(_Due.ROWS)
        self._events.append(Subscribed(reply))
        self._enter(ApplierState.SYNC)
        return True

    def _between_rows(self, row: Row) -> None:
        """Handle a packet without an LSN: each counts as a heartbeat, regardless of its type."""
        if row.type == _RAFT:
            self._events.append(RaftHeard(row))
        # 2.6 takes a packet of any type without an LSN for a heartbeat, so an unknown type must not end the connection.
        heartbeat = Heartbeat(row.replica_id, row.timestamp)
        if row.type == _OK:
            heartbeat = messages.decode_heartbeat(row)
            if heartbeat.vclock_sync:
                self._follow_sync(heartbeat.vclock_sync)
        self._events.append(HeartbeatHeard(heartbeat))

    def _follow_sync(self, number: int) -> None:
        # The master waits for an ACK with a given number before a linearizable read: an ACK with an older one would
        # prove nothing.
        if number < self._vclock_sync:
            what = f"Non-monotonic vclock sync value. Old: {self._vclock_sync}, new: {number}"
            raise errors.Protocol(what)
        self._vclock_sync = number

    def acknowledge(self, vclock: VClock, term: int) -> None:
        """Send an ACK: all rows up to `vclock` are written here."""
        ack = Ack(vclock)
        if not self._is_old:
            ack = Ack(vclock, term, self._vclock_sync, self._newest_written(vclock))
        self._outgoing.append(messages.encode_ack(ack))

    def _newest_written(self, vclock: VClock) -> float:
        """Return the timestamp of the last rows that `vclock` covers and no ACK did before; 0 if there are none."""
        timestamp = 0.0
        while self._unacknowledged:
            lsns, when = self._unacknowledged[0]
            # Rows are written in the order of arrival, so the first slab that is not covered ends the search.
            if any(vclock.get(replica_id) < lsn for replica_id, lsn in lsns.items()):
                break
            timestamp = when
            self._unacknowledged.popleft()
        return timestamp

    def synchronize(self, vclock: VClock, lag: float, sync_lag: float) -> bool:
        """Move from SYNC to FOLLOW if possible; return True if the state has changed.

        That requires that we, at `vclock`, have reached the vclock of the master at SUBSCRIBE, and that `lag` is at
        most `sync_lag`.
        """
        if self.state is not ApplierState.SYNC or self.reply is None or lag > sync_lag:
            return False
        # Component 0 counts local rows of each instance, which are not comparable.
        if not self.reply.vclock.without_zero() <= vclock:
            return False
        self.state = ApplierState.FOLLOW
        return True

    # --- bytes ---

    def _ask(self, packet: bytes, due: _Due) -> None:
        self._outgoing.append(packet)
        self._expect(due)

    def _take_response(self) -> Response | None:
        packet = self._stream.take_packet()
        return None if packet is None else decode_response(packet)

    def _hear_nothing(self) -> bool:
        if self._stream.take_packet() is not None:
            raise RemoteProtocolError(f"unexpected packet from {self._peer}: no request is pending")
        return False


def _timestamp(slab: Slab) -> float:
    """Return the timestamp of the last row."""
    return float(slab.cells[scan.TIMESTAMP, -1:].view(np.float64)[0])


_STEPS: Final[dict[_Due, Callable[[ApplierProtocol], bool]]] = {
    _Due.GREETING: ApplierProtocol._hear_greeting,
    _Due.FEATURES: ApplierProtocol._hear_features,
    _Due.BALLOT: ApplierProtocol._hear_ballot,
    _Due.NOTHING: ApplierProtocol._hear_nothing,
    _Due.LOGIN: ApplierProtocol._hear_login,
    _Due.SNAPSHOT: ApplierProtocol._hear_snapshot,
    _Due.SNAPSHOT_ROWS: ApplierProtocol._hear_rows,
    _Due.FINAL_ROWS: ApplierProtocol._hear_rows,
    _Due.SUBSCRIPTION: ApplierProtocol._hear_subscription,
    _Due.ROWS: ApplierProtocol._hear_rows,
}
"""Maps what is due to the method that decodes it, which returns False if more bytes are needed."""


def _after_the_end(protocol: ApplierProtocol, row: Row) -> None:
    raise RemoteProtocolError(f"unexpected {type_name(row.type)} from {protocol._peer}: the join has ended")


_BETWEEN: Final[dict[_Due, Callable[[ApplierProtocol, Row], None]]] = {
    _Due.SNAPSHOT_ROWS: ApplierProtocol._between_snapshot_rows,
    _Due.FINAL_ROWS: ApplierProtocol._between_final_rows,
    _Due.ROWS: ApplierProtocol._between_rows,
    _Due.NOTHING: _after_the_end,
}
"""Maps what is due to the method for a packet that is not a row of data."""

_PROTOCOL_VERSION: Final = 3
"""The IPROTO version that introduced watchers."""

_FEATURES: Final = [
    Feature.STREAMS.value,
    Feature.TRANSACTIONS.value,
    Feature.ERROR_EXTENSION.value,
    Feature.WATCHERS.value,
]


def _request(type: RequestType, body: bytes) -> bytes:
    """Return a request without SYNC, as real appliers send it: at most one answer is pending."""
    return frame(encode_header(Row(type.value)) + body)


def _unknown_type(type: int) -> TarantoolError:
    return errors.UnknownRequestType(f"Unknown request type {type}")
