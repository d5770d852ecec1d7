"""The master's side of replication, as far as it is logic: who is refused, which rows a replica gets, what is due.

`refusal` holds the checks of JOIN, FETCH_SNAPSHOT, REGISTER and SUBSCRIBE in the order of the real servers (reference
sections 9.1 and 10.2); `RowFilter` says which rows of our log go to one replica, `Pulse` when a heartbeat is due and
when a replica counts as lost, `Acked` what it has written. `node/relay.py` does what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto import errors, scan
from flowstone.iproto.constants import VCLOCK_MAX, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.replication.membership import NO_FOLLOWERS, NO_MEMBERS
from flowstone.replication.messages import NIL_UUID, Ack, FetchSnapshot, Join, Register, Subscribe
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import LSN_MAX
from flowstone.xlog.reader import Slab

_NOTHING_LEFT_OUT: Final = LSN_MAX


class RelayState(Enum):
    """Of the way to one replica, spelled as `box.info.replication[n].downstream.status` has it."""

    OFF = "off"  # it has not subscribed since we started
    FOLLOW = "follow"
    STOPPED = "stopped"


TRANSITIONS: Final[dict[RelayState, frozenset[RelayState]]] = {
    RelayState.OFF: frozenset({RelayState.FOLLOW}),
    RelayState.FOLLOW: frozenset({RelayState.STOPPED}),
    RelayState.STOPPED: frozenset({RelayState.FOLLOW}),
}
"""The states that may follow each: a second connection of a replica that is followed is refused."""


# --- Who is refused -------------------------------------------------------------------------------------------------

RequestOfReplica = Join | FetchSnapshot | Register | Subscribe


@dataclass(frozen=True, slots=True)
class Facts:
    """What a master knows of itself, and of who asks, at the moment of a request."""

    is_2_6: bool
    instance_uuid: UUID
    replicaset_uuid: UUID
    replica_id: int = 0
    """Of who asks; 0: not registered."""
    is_replaced: bool = False
    """True if the requesting replica was a member, and its former id belongs to another member now."""
    is_followed: bool = False
    """A connection of who asks has subscribed already."""
    is_joining: bool = False
    """Another connection in the name of who asks is being given data."""
    is_loading: bool = False
    is_anonymous: bool = False
    is_expelled: bool = False
    has_log: bool = True
    read_only: TarantoolError | None = None
    """What refuses a write, and below what refuses the user to read everything and to write to `_cluster`."""
    no_read: TarantoolError | None = None
    no_write: TarantoolError | None = None


Check = Callable[[RequestOfReplica, Facts], TarantoolError | None]


def _loading(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    return errors.Loading("Instance bootstrap hasn't finished yet") if facts.is_loading else None


def _nil(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if _uuid(request) != NIL_UUID:
        return None
    return errors.NilUuid("Nil UUID is reserved and can't be used in replication")


def _self(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    return errors.ConnectionToSelf("Connection to self") if _uuid(request) == facts.instance_uuid else None


def _read(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    return facts.no_read


def _write(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    return facts.read_only or facts.no_write


def _write_if_unregistered(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    return None if facts.replica_id else facts.read_only or facts.no_write


def _log(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    return None if facts.has_log else errors.Unsupported("Replication does not support wal_mode = 'none'")


def _expelled(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    """Refuse anonymous replicas, too, which 3.8 serves: they would get no new rows, and not learn why."""
    if not facts.is_expelled:
        return None
    return errors.Unsupported(NO_FOLLOWERS)


def _anonymous_registers_nobody(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if not facts.is_anonymous and not facts.is_expelled:
        return None
    return errors.Unsupported("Anonymous replica does not support registration of non-anonymous nodes.")


def _anonymous_feeds_members(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if not (facts.is_anonymous or facts.is_expelled) or _is_anonymous(request):
        return None
    return errors.Unsupported(NO_MEMBERS)


def _registered(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if not facts.replica_id:
        return None
    return errors.ReplicaNotAnon(f"Replica '{_uuid(request)}' is not anonymous and cannot register.")


def _checkpoint(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if not (isinstance(request, FetchSnapshot) and request.is_checkpoint_join):
        return None
    return errors.Unsupported("Community edition does not support checkpoint from snapshot")


def _replica_set(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    theirs = (request.replicaset_uuid if isinstance(request, Subscribe) else None) or NIL_UUID
    if theirs == facts.replicaset_uuid:
        return None
    return errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {facts.replicaset_uuid}, got {theirs}")


def _unknown(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if facts.replica_id or _is_anonymous(request):
        return None
    if facts.is_2_6:
        text = f"Replica {_uuid(request)} is not registered with replica set {facts.replicaset_uuid}"
        return errors.UnknownReplica(text)
    return errors.TooEarlySubscribe(f"Can't subscribe non-anonymous replica {_uuid(request)} until join is done")


def _anonymous_with_id(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if not facts.replica_id or not _is_anonymous(request):
        return None
    return errors.Protocol("Can't subscribe an anonymous replica having an ID assigned")


def _anonymous_with_former_id(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    """Refuse a former member whose own rows would hide rows of its successor. 3.8 refuses any that it remembers."""
    if not facts.is_replaced or not _is_anonymous(request):
        return None
    return errors.Protocol("Can't subscribe a previously deleted non-anonymous replica as an anonymous replica")


def _twice(_: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    if not facts.is_followed:
        return None
    text = "Incorrect value for option 'replication': duplicate connection with the same replica UUID"
    return errors.Cfg(text)


def _at_a_time(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    """As 3.x; servers before it give two instances of one name the same id."""
    return _twice(request, replace(facts, is_followed=facts.is_joining))


_CHECKS_2_6: Final[dict[type, tuple[Check, ...]]] = {
    Join: (_loading, _self, _read, _expelled, _write_if_unregistered, _log),
    FetchSnapshot: (_loading, _read, _expelled, _log),
    Register: (_loading, _self, _read, _expelled, _registered, _write, _log),
    Subscribe: (
        _loading,
        _self,
        _read,
        _anonymous_feeds_members,
        _expelled,
        _unknown,
        _anonymous_with_former_id,
        _twice,
        _log,
    ),
}
_CHECKS: Final[dict[type, tuple[Check, ...]]] = {
    Join: (_loading, _nil, _self, _read, _anonymous_registers_nobody, _write_if_unregistered, _log, _at_a_time),
    FetchSnapshot: (_loading, _read, _expelled, _log, _checkpoint),
    Register: (_loading, _nil, _self, _read, _registered, _anonymous_registers_nobody, _twice, _write, _log),
    Subscribe: (
        _loading,
        _nil,
        _self,
        _read,
        _replica_set,
        _anonymous_feeds_members,
        _expelled,
        _unknown,
        _anonymous_with_id,
        _anonymous_with_former_id,
        _twice,
        _log,
    ),
}
"""Checks in their order. 2.6 lets the replica compare the UUIDs of the replica set.

Real servers check a SUBSCRIBE's replica set before the user's rights and so tell its UUID to any guest. Here only the
checks whose answers are in the greeting anyway (loading, nil UUID, connection to self) come before `_read`. The event
`box.id` shows the UUID to every client all the same, as in real servers.
"""


def refusal(request: RequestOfReplica, facts: Facts) -> TarantoolError | None:
    """The error that answers the request; None: it is served."""
    checks = (_CHECKS_2_6 if facts.is_2_6 else _CHECKS)[type(request)]
    return next((error for check in checks if (error := check(request, facts)) is not None), None)


def _uuid(request: RequestOfReplica) -> UUID:
    return request.instance_uuid or NIL_UUID


def _is_anonymous(request: RequestOfReplica) -> bool:
    return isinstance(request, Subscribe) and request.is_anonymous


def xlog_gap(have: VClock, need: VClock, *, is_2_6: bool) -> TarantoolError:
    """Rows that a replica needs are in no log any more: it has to begin anew."""
    message = f"Missing .xlog file between LSN {have.signature} {have} and {need.signature} {need}"
    kind = errors.ProcLua if is_2_6 else errors.XlogGap  # 2.6 has no code for it, and gives any error of its own 32
    record = ErrorRecord("XlogGapError", message, "flowstone", 0, code=kind.code)
    return kind(message, stack=ErrorStack((record,)))


# --- Which rows -----------------------------------------------------------------------------------------------------


class RowFilter:
    """The rows of our log that one replica gets: of each originator those behind what it has, up to a limit.

    The limit is 0 for originators it does not want, and for its own rows what we had of them when it subscribed: what
    came later came from itself. Local rows (id 0) go to nobody.
    """

    def __init__(
        self, known: VClock, *, left_out: tuple[int, ...] = (), own_id: int = 0, own_lsn_max: int = _NOTHING_LEFT_OUT
    ) -> None:
        self._known: NDArray[np.int64] = np.zeros(VCLOCK_MAX, np.int64)
        self._limit: NDArray[np.int64] = np.full(VCLOCK_MAX, _NOTHING_LEFT_OUT, np.int64)
        self._vclock = VClock()
        if own_id:
            self._limit[own_id] = own_lsn_max
        self._limit[[0, *left_out]] = 0
        self._limited = frozenset(np.flatnonzero(self._limit != _NOTHING_LEFT_OUT).tolist()) - {0}
        self.follow(known)

    @property
    def known(self) -> VClock:
        """What the replica has, or was sent, without local rows."""
        return self._vclock

    def follow(self, vclock: VClock) -> None:
        """Everything of our log up to `vclock` was looked at."""
        self._vclock = self._vclock.merged(vclock.without_zero())

    def takes_all(self, before: VClock, after: VClock) -> bool:
        """Whether no row between these positions of our log is left out, but for local ones."""
        known = self._vclock
        for replica_id, lsn in after:
            start = before.get(replica_id)
            if lsn == start or not replica_id:
                continue
            if known.get(replica_id) > start or (replica_id in self._limited and self._limit[replica_id] < lsn):
                return False
        return True

    def takes_nothing(self, before: VClock, after: VClock) -> bool:
        """Whether all rows between these positions are left out, as those that the replica has written itself are."""
        for replica_id, lsn in after:
            start = max(before.get(replica_id), self._vclock.get(replica_id))
            stop = min(lsn, int(self._limit[replica_id])) if replica_id in self._limited else lsn
            if replica_id and stop > start:
                return False
        return True

    def count(self, after: VClock) -> int:
        """How many rows it gets between what it has and `after`."""
        known, limited, limit = self._vclock, self._limited, self._limit
        total = 0
        for replica_id, lsn in after:
            if replica_id:
                stop = min(lsn, int(limit[replica_id])) if replica_id in limited else lsn
                total += max(0, stop - known.get(replica_id))
        return total

    def keep(self, slab: Slab) -> NDArray[np.bool_]:
        """Which rows of the slab are sent."""
        for replica_id, lsn in self._vclock:
            self._known[replica_id] = lsn
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        kept: NDArray[np.bool_] = (lsns > self._known[replica_ids]) & (lsns <= self._limit[replica_ids])
        return kept


PROMOTIONS: Final = (RequestType.RAFT_PROMOTE.value, RequestType.RAFT_DEMOTE.value)
"""Rows that a replica understands only when it knows their term: a RAFT row with it goes before them."""


# --- What is due ----------------------------------------------------------------------------------------------------


class Pulse:
    """The signs of life between us and one replica, by the monotonic clock.

    2.6 sends a heartbeat when it has sent nothing for `replication_timeout`; newer servers send one every
    `replication_timeout`, and leave its TIMESTAMP out where rows went before it.
    """

    def __init__(self, now: float, *, is_2_6: bool) -> None:
        self._is_2_6 = is_2_6
        self.row_time = now
        """When anything was sent last."""
        self._heartbeat_time = now
        self._ack_time = now
        self._had_rows = False

    def sent(self, now: float) -> None:
        """Rows went to the replica."""
        self.row_time = now
        self._had_rows = True

    def heartbeat(self, now: float) -> bool:
        """A heartbeat goes to the replica; whether it shows the time."""
        shows_time = self._is_2_6 or not self._had_rows
        self.row_time = self._heartbeat_time = now
        self._had_rows = False
        return shows_time

    def acked(self, now: float) -> None:
        """Something came from the replica."""
        self._ack_time = now

    def heartbeat_due(self, timeout: float) -> float:
        return (self.row_time if self._is_2_6 else self._heartbeat_time) + timeout

    def lost_at(self, silence: float) -> float:
        """When a replica counts as lost that may say nothing for so many seconds."""
        return self._ack_time + silence


class Acked:
    """What a replica says it has written. Never goes back, whatever it says."""

    def __init__(self, vclock: VClock) -> None:
        self.vclock = vclock.without_zero()
        self.term = 0
        self.vclock_sync = 0
        self.lag = 0.0
        """Seconds from the write of the last transaction here to the ACK of its write there."""
        self._is_heard = False

    def take(self, ack: Ack, now: float) -> bool:
        """Whether its vclock is news. `now` is the wall clock's, which stamped the row that the ACK names.

        The first ACK always is, also where it says what SUBSCRIBE said: a restarted node knows of no ACK before.
        """
        is_first, self._is_heard = not self._is_heard, True
        self.term = max(self.term, ack.term)
        self.vclock_sync = max(self.vclock_sync, ack.vclock_sync)
        if ack.vclock <= self.vclock:
            return is_first
        self.vclock = self.vclock.merged(ack.vclock)
        if ack.timestamp:
            self.lag = max(0.0, now - ack.timestamp)
        return True
