"""Bodies of control rows, which are about the log instead of data: CONFIRM, ROLLBACK, PROMOTE, DEMOTE, RAFT.

They are decoded from and encoded to the MessagePack body of a row, with exactly the keys that real servers write: 2.6.0
stops replication at any other key. The effect of the rows is described in
`replication/settled_position.py` and `limbo.py`.
"""

from __future__ import annotations

import msgpack
import msgspec

from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import Key, RaftKey, RequestType
from flowstone.replication.vclock import VClock, VClockError
from flowstone.xlog.transactions import CONTROL_TYPES

_STATE_MAX = 3

NUMBER_MAX = 2**63 - 1
"""The largest LSN, as servers store it. Also the limit of terms, so that the next term is still a valid number."""


_MINUS_ONE = 2**64 - 1


class SynchroError(RemoteProtocolError):
    """The body of a control row does not match its type."""


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """The synchronous transactions of `owner_id` up to `lsn` are committed."""

    owner_id: int
    lsn: int

    def encode(self) -> bytes:
        return _pack({Key.REPLICA_ID: self.owner_id, Key.LSN: self.lsn})


class Rollback(msgspec.Struct, frozen=True, tag="rollback"):
    """The synchronous transaction of `owner_id` at `lsn`, and all queued after it, are rolled back."""

    owner_id: int
    lsn: int

    def encode(self) -> bytes:
        return _pack({Key.REPLICA_ID: self.owner_id, Key.LSN: self.lsn})


class Promote(msgspec.Struct, frozen=True, tag="promote"):
    """The origin of the row takes over the queue from `owner_id`, whose transactions are committed up to `lsn` only.

    In a snapshot the row is the state instead: `owner_id` is the owner, `lsn` its last confirmed LSN, and
    `confirmed_vclock` the last confirmed LSN of every owner so far.
    """

    owner_id: int
    lsn: int
    term: int
    confirmed_vclock: VClock | None = None

    def encode(self) -> bytes:
        body: dict[int, object] = {Key.REPLICA_ID: self.owner_id, Key.LSN: self.lsn}
        if self.term:
            body[Key.TERM] = self.term
        if self.confirmed_vclock is not None:
            body[Key.VCLOCK] = self.confirmed_vclock.to_mapping()
        return _pack(body)


class Demote(msgspec.Struct, frozen=True, tag="demote"):
    """Like Promote, but leaves the queue without an owner."""

    owner_id: int
    lsn: int
    term: int

    def encode(self) -> bytes:
        return _pack({Key.REPLICA_ID: self.owner_id, Key.LSN: self.lsn, Key.TERM: self.term})


class RaftState(msgspec.Struct, frozen=True, tag="raft"):
    """The election state of an instance; `state`: 1 follower, 2 candidate, 3 leader, 0 not included."""

    term: int
    vote: int = 0
    state: int = 0
    vclock: VClock | None = None
    leader_id: int = 0
    is_leader_seen: bool = False

    def encode(self) -> bytes:
        body: dict[int, object] = {RaftKey.TERM: self.term}
        if self.vote:
            body[RaftKey.VOTE] = self.vote
        if self.state:
            body[RaftKey.STATE] = self.state
        if self.vclock is not None:
            body[RaftKey.VCLOCK] = self.vclock.without_zero().to_mapping()
        if self.leader_id:
            body[RaftKey.LEADER_ID] = self.leader_id
        if self.is_leader_seen:
            body[RaftKey.IS_LEADER_SEEN] = True
        return _pack(body)


ControlBody = Confirm | Rollback | Promote | Demote | RaftState


def decode_control(row_type: int, body: bytes) -> ControlBody:
    """Decode the body of a row of one of CONTROL_TYPES; raise SynchroError. Unknown keys are ignored, as in servers."""
    fields = _Fields(row_type, body)
    if row_type == RequestType.RAFT:
        return _raft_state(fields)
    owner_id = fields.unsigned(Key.REPLICA_ID)
    if row_type == RequestType.RAFT_ROLLBACK:
        return Rollback(owner_id, fields.first_lsn())
    lsn = fields.unsigned(Key.LSN)
    if row_type == RequestType.RAFT_CONFIRM:
        return Confirm(owner_id, lsn)
    # Servers omit a zero term, so snapshots from before the first promotion have none.
    term = fields.unsigned(Key.TERM, 0)
    if row_type == RequestType.RAFT_DEMOTE:
        return Demote(owner_id, lsn, term)
    return Promote(owner_id, lsn, term, fields.vclock(Key.VCLOCK))


def _raft_state(fields: _Fields) -> RaftState:
    state = fields.unsigned(RaftKey.STATE, 0)
    if state > _STATE_MAX:
        raise SynchroError(f"body of RAFT: invalid state {state}, not 1 (follower), 2 (candidate) or 3 (leader)")
    return RaftState(
        term=fields.unsigned(RaftKey.TERM),
        vote=fields.unsigned(RaftKey.VOTE, 0),
        state=state,
        vclock=fields.vclock(RaftKey.VCLOCK),
        leader_id=fields.unsigned(RaftKey.LEADER_ID, 0),
        is_leader_seen=fields.boolean(RaftKey.IS_LEADER_SEEN),
    )


class _Fields:
    """A decoded body whose values are checked for their types when read."""

    def __init__(self, row_type: int, body: bytes) -> None:
        if row_type not in CONTROL_TYPES:
            raise SynchroError(f"row type {row_type} is not a control row")
        self._name = RequestType(row_type).name
        try:
            values = msgpack.unpackb(body, strict_map_key=False, raw=True)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise self._error(f"invalid MessagePack: {str(error) or type(error).__name__}") from error
        if not isinstance(values, dict):
            raise self._error(f"expected a map, got {type(values).__name__}")
        self._values: dict[object, object] = values

    def _error(self, what: str) -> SynchroError:
        return SynchroError(f"body of {self._name}: {what}")

    def unsigned(self, key: Key | RaftKey, default: int | None = None) -> int:
        value = self._values.get(int(key), default)
        if value is None:
            raise self._error(f"{key.name} is missing")
        if type(value) is not int or not 0 <= value <= NUMBER_MAX:
            raise self._error(f"{key.name} is {value!r}, not a number from 0 to {NUMBER_MAX}")
        return value

    def first_lsn(self) -> int:
        """Return the LSN of a ROLLBACK; 0 stands for all pending transactions.

        2.6.0 writes -1 to roll back a transaction without an LSN, which replicas treat as all pending ones.
        """
        return 0 if self._values.get(int(Key.LSN)) == _MINUS_ONE else self.unsigned(Key.LSN)

    def boolean(self, key: RaftKey) -> bool:
        value = self._values.get(int(key), False)
        if type(value) is not bool:
            raise self._error(f"{key.name} is {value!r}, not a boolean")
        return value

    def vclock(self, key: Key | RaftKey) -> VClock | None:
        value = self._values.get(int(key))
        if value is None:
            return None
        if not isinstance(value, dict) or any(type(replica_id) is not int for replica_id in value):
            raise self._error(f"{key.name} is {value!r}, not a vclock")
        try:
            return VClock(value)
        except VClockError as error:
            raise self._error(f"{key.name}: {error}") from error


def _pack(body: dict[int, object] | dict[Key, int]) -> bytes:
    packed: bytes = msgpack.packb({int(key): value for key, value in body.items()})
    return packed
