"""The master's side of replication, as pure logic: request checks, row filter, heartbeats, acknowledgements.

`node/downstream/relays.py` and `node/downstream/relay_stream.py` own the connections and the log, and call these parts.
Nothing here sends a byte, reads a file or reads a clock. docs/spec/replication.md#join-checks and
docs/spec/replication.md#subscribe-checks specify the checks.

Theory of operation
-------------------

A relay sends the log of this instance to one replica, from SUBSCRIBE until the connection ends. Four parts decide what
it does; they share no state:

- `refusal` checks a request (JOIN, FETCH_SNAPSHOT, REGISTER, SUBSCRIBE) against the current `RelayFacts`, in the order
  of real servers. It returns the error to answer with, or None to serve the request.
- `RowFilter` takes positions and slabs of our log and returns the rows to send.
- `Pulse` takes the times of sent and received packets and returns when the next heartbeat is due, and when the replica
  counts as lost.
- `Acked` takes the ACKs of the replica and returns what it has written, and its lag.

States of the relay to one replica, kept across its connections:

    OFF -> FOLLOW         the replica subscribes for the first time since the start of this instance
    FOLLOW -> STOPPED     the connection ends, times out or fails, or the instance stops it
    STOPPED -> FOLLOW     the replica subscribes again

Invariants:

- A replica has at most one relay: SUBSCRIBE is rejected while it has one.
- Rows are sent in log order, a row at most once per connection. A row that the replica has, that it excluded by its
  ID_FILTER, or that is local to this instance is not sent.
- The acknowledged vclock of a connection never decreases.
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
from flowstone.iproto.slab import Slab
from flowstone.replication.membership.membership import NO_FOLLOWERS, NO_MEMBERS
from flowstone.replication.messages import NIL_UUID, Ack, FetchSnapshot, Join, Register, Subscribe
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import LSN_MAX


class RelayState(Enum):
    """The state of the relay to one replica. `box.info.replication[n].downstream.status` has the same values."""

    OFF = "off"  # the replica has not subscribed since this instance started
    FOLLOW = "follow"
    STOPPED = "stopped"


TRANSITIONS: Final[dict[RelayState, frozenset[RelayState]]] = {
    RelayState.OFF: frozenset({RelayState.FOLLOW}),
    RelayState.FOLLOW: frozenset({RelayState.STOPPED}),
    RelayState.STOPPED: frozenset({RelayState.FOLLOW}),
}
"""Maps each state to the states that may follow it. FOLLOW cannot repeat: a second SUBSCRIBE is rejected."""


# --- Request checks -------------------------------------------------------------------------------------------------

RequestOfReplica = Join | FetchSnapshot | Register | Subscribe


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """Facts about the master and the requesting replica at the time of a request."""

    is_2_6: bool
    instance_uuid: UUID
    replicaset_uuid: UUID
    replica_id: int = 0
    """The id of the requesting replica; 0 if it is not registered."""
    is_replaced: bool = False
    """True if the requesting replica was a member, and its former id belongs to another member now."""
    is_followed: bool = False
    """True if the requesting replica has a relay already."""
    is_joining: bool = False
    """True if another connection with the UUID of the requesting replica is joining."""
    is_loading: bool = False
    is_anonymous: bool = False
    is_expelled: bool = False
    has_log: bool = True
    read_only: TarantoolError | None = None
    """The error of a write, if this instance is read-only."""
    no_read: TarantoolError | None = None
    """The error if the user may not read everything."""
    no_write: TarantoolError | None = None
    """The error if the user may not write to `_cluster`."""


Check = Callable[[RequestOfReplica, RelayFacts], TarantoolError | None]


def _loading(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    return errors.Loading("Instance bootstrap hasn't finished yet") if facts.is_loading else None


def _nil(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if _uuid(request) != NIL_UUID:
        return None
    return errors.NilUuid("Nil UUID is reserved and can't be used in replication")


def _self(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    return errors.ConnectionToSelf("Connection to self") if _uuid(request) == facts.instance_uuid else None


def _read(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    return facts.no_read


def _write(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    return facts.read_only or facts.no_write


def _write_if_unregistered(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    # A replica that is registered joins again under its id, and nothing is written
    # (docs/spec/replication.md#join-stream).
    return None if facts.replica_id else facts.read_only or facts.no_write


def _log(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    return None if facts.has_log else errors.Unsupported("Replication does not support wal_mode = 'none'")


def _expelled(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    """Reject anonymous replicas, too, which 3.8 serves: they would get no new rows without an error."""
    if not facts.is_expelled:
        return None
    return errors.Unsupported(NO_FOLLOWERS)


def _anonymous_registers_nobody(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if not facts.is_anonymous and not facts.is_expelled:
        return None
    return errors.Unsupported("Anonymous replica does not support registration of non-anonymous nodes.")


def _anonymous_feeds_members(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if not (facts.is_anonymous or facts.is_expelled) or _is_anonymous(request):
        return None
    return errors.Unsupported(NO_MEMBERS)


def _registered(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if not facts.replica_id:
        return None
    return errors.ReplicaNotAnon(f"Replica '{_uuid(request)}' is not anonymous and cannot register.")


def _checkpoint(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if not (isinstance(request, FetchSnapshot) and request.is_checkpoint_join):
        return None
    return errors.Unsupported("Community edition does not support checkpoint from snapshot")


def _replica_set(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    # A missing UUID is compared as nil: it must not match by omission.
    theirs = (request.replicaset_uuid if isinstance(request, Subscribe) else None) or NIL_UUID
    if theirs == facts.replicaset_uuid:
        return None
    return errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {facts.replicaset_uuid}, got {theirs}")


def _unknown(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if facts.replica_id or _is_anonymous(request):
        return None
    if facts.is_2_6:
        text = f"Replica {_uuid(request)} is not registered with replica set {facts.replicaset_uuid}"
        return errors.UnknownReplica(text)
    return errors.TooEarlySubscribe(f"Can't subscribe non-anonymous replica {_uuid(request)} until join is done")


def _anonymous_with_id(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if not facts.replica_id or not _is_anonymous(request):
        return None
    return errors.Protocol("Can't subscribe an anonymous replica having an ID assigned")


def _anonymous_with_former_id(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    """Reject a former member whose own rows would hide rows of its successor. 3.8 rejects any that it remembers."""
    if not facts.is_replaced or not _is_anonymous(request):
        return None
    return errors.Protocol("Can't subscribe a previously deleted non-anonymous replica as an anonymous replica")


def _twice(_: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    if not facts.is_followed:
        return None
    text = "Incorrect value for option 'replication': duplicate connection with the same replica UUID"
    return errors.Cfg(text)


def _at_a_time(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    """Reject a second JOIN with the same UUID, as 3.x; older servers register both instances under one id."""
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
"""The checks of each request, in order. In 2.6 the replica compares the replica set UUIDs, not the master.

Real servers check the replica set of a SUBSCRIBE before the user's rights, and thus disclose its UUID to any guest.
Here only the checks whose answers are in the greeting anyway (loading, nil UUID, connection to self) come before
`_read`. The event `box.id` still shows the UUID to every client, as in real servers.
"""


def refusal(request: RequestOfReplica, facts: RelayFacts) -> TarantoolError | None:
    """Return the error to answer the request with; None if the request is to be served."""
    checks = (_CHECKS_2_6 if facts.is_2_6 else _CHECKS)[type(request)]
    return next((error for check in checks if (error := check(request, facts)) is not None), None)


def _uuid(request: RequestOfReplica) -> UUID:
    return request.instance_uuid or NIL_UUID


def _is_anonymous(request: RequestOfReplica) -> bool:
    return isinstance(request, Subscribe) and request.is_anonymous


def xlog_gap(have: VClock, need: VClock, *, is_2_6: bool) -> TarantoolError:
    """Return the error for a replica that needs rows whose logs are deleted: it must rejoin."""
    message = f"Missing .xlog file between LSN {have.signature} {have} and {need.signature} {need}"
    kind = errors.ProcLua if is_2_6 else errors.XlogGap  # 2.6 has no code of its own for this error, and uses 32
    record = ErrorRecord("XlogGapError", message, "flowstone", 0, code=kind.code)
    return kind(message, stack=ErrorStack((record,)))


# --- Row filter -----------------------------------------------------------------------------------------------------


class RowFilter:
    """Selects the rows of our log for one replica: per originator, the rows after the known LSN, up to a limit.

    The limit is 0 for originators that the replica excluded (`left_out`). For the replica's own rows, the position is
    the last row that we had when it subscribed (`own_lsn_max`), because later rows came from the replica itself. Local
    rows (id 0) are never sent.
    """

    def __init__(
        self, known: VClock, *, left_out: tuple[int, ...] = (), own_id: int = 0, own_lsn_max: int = LSN_MAX
    ) -> None:
        self._known: dict[int, int] = {}
        self._limits = {own_id: own_lsn_max} if own_id else {}
        # Must follow the line above: a replica that excludes its own id (the usual ID_FILTER) gets none of its rows
        # back.
        self._limits |= dict.fromkeys(left_out, 0)
        self.follow(known)

    @property
    def known(self) -> VClock:
        """The vclock of rows that the replica has or was sent, without local rows."""
        return VClock(self._known)

    def follow(self, vclock: VClock) -> None:
        """Record that the log has been scanned up to `vclock`, or that the replica has acknowledged it."""
        # Merged, not replaced: an ACK may be older than what was sent since.
        for replica_id, lsn in vclock:
            if replica_id and lsn > self._known.get(replica_id, 0):
                self._known[replica_id] = lsn

    def takes_all(self, before: VClock, after: VClock) -> bool:
        """Return True if all rows between these positions of our log are sent, apart from local ones."""
        known, limits = self._known, self._limits
        for replica_id, lsn in after:
            start = before.get(replica_id)
            if lsn == start or not replica_id:
                continue
            # The replica has some of these rows already, from another member, or must not get the last ones.
            if known.get(replica_id, 0) > start or limits.get(replica_id, lsn) < lsn:
                return False
        return True

    def takes_nothing(self, before: VClock, after: VClock) -> bool:
        """Return True if no row between these positions is sent, for example because the replica wrote them all."""
        for replica_id, first, last in before.missing_rows(after):
            if min(last, self._limits.get(replica_id, last)) > max(first - 1, self._known.get(replica_id, 0)):
                return False
        return True

    def count(self, after: VClock) -> int:
        """Return the number of rows to send between `known` and `after`."""
        total = 0
        for replica_id, lsn in after:
            if replica_id:
                stop = min(lsn, self._limits.get(replica_id, lsn))
                total += max(0, stop - self._known.get(replica_id, 0))
        return total

    def keep(self, slab: Slab) -> NDArray[np.bool_]:
        """Return a mask of the rows of the slab to send."""
        known: NDArray[np.int64] = np.zeros(VCLOCK_MAX, np.int64)
        limits: NDArray[np.int64] = np.full(VCLOCK_MAX, LSN_MAX, np.int64)
        for replica_id, lsn in self._known.items():
            known[replica_id] = lsn
        for replica_id, lsn in (self._limits | {0: 0}).items():
            limits[replica_id] = lsn
        replica_ids, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
        kept: NDArray[np.bool_] = (lsns > known[replica_ids]) & (lsns <= limits[replica_ids])
        return kept


PROMOTIONS: Final = (RequestType.RAFT_PROMOTE.value, RequestType.RAFT_DEMOTE.value)
"""Rows that a replica accepts only if it knows their term, so a RAFT row with the term is sent before them."""


# --- Heartbeats and ACKs --------------------------------------------------------------------------------------------


class Pulse:
    """The signs of life between this instance and one replica, in monotonic time.

    2.6 sends a heartbeat when it has sent nothing for `replication_timeout`; newer servers send one every
    `replication_timeout`, without a TIMESTAMP if rows were sent since the last one.
    """

    def __init__(self, now: float, *, is_2_6: bool) -> None:
        self._is_2_6 = is_2_6
        self.row_time = now
        """The time of the last packet sent."""
        self._heartbeat_time = now
        self._ack_time = now
        self._had_rows = False

    def sent(self, now: float) -> None:
        """Record that rows were sent."""
        self.row_time = now
        self._had_rows = True

    def heartbeat(self, now: float) -> bool:
        """Record that a heartbeat is sent; return True if it must have a TIMESTAMP."""
        # The receiver computes its lag from TIMESTAMP. After rows, theirs is the relevant one
        # (docs/spec/replication.md#heartbeats).
        shows_time = self._is_2_6 or not self._had_rows
        self.row_time = self._heartbeat_time = now
        self._had_rows = False
        return shows_time

    def acked(self, now: float) -> None:
        """Record that a packet of the replica was received."""
        self._ack_time = now

    def heartbeat_due(self, timeout: float) -> float:
        return (self.row_time if self._is_2_6 else self._heartbeat_time) + timeout

    def lost_at(self, silence: float) -> float:
        """Return the time at which the replica counts as lost if it may be silent for `silence` seconds."""
        return self._ack_time + silence


class Acked:
    """The position that a replica has acknowledged. The vclock never decreases, even if a later ACK is lower."""

    def __init__(self, vclock: VClock) -> None:
        self.vclock = vclock.without_zero()
        self.term = 0
        self.vclock_sync = 0
        self.lag = 0.0
        """Seconds from the write of the last transaction here to the ACK of the replica for it."""
        self._is_heard = False

    def take(self, ack: Ack, now: float) -> bool:
        """Record an ACK; return True if its vclock is new. `now` is wall clock time, like the timestamps of rows.

        The first ACK is always new, even if it repeats the vclock of SUBSCRIBE: a restarted node has no earlier ACK.
        """
        is_first, self._is_heard = not self._is_heard, True
        self.term = max(self.term, ack.term)
        self.vclock_sync = max(self.vclock_sync, ack.vclock_sync)
        # 2.11 sends an empty vclock when its applier stops; it must not lower the acknowledged position
        # (docs/spec/replication.md#acknowledgements).
        if ack.vclock <= self.vclock:
            return is_first
        self.vclock = self.vclock.merged(ack.vclock)
        if ack.timestamp:
            self.lag = max(0.0, now - ack.timestamp)
        return True
