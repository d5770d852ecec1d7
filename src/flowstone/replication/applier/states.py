"""The states of an applier, the transitions between them, and the reaction to each error.

Everything that decides about states is in the tables of this module. `protocol.py` implements the protocol that
moves through them, and `node/upstream/applier.py` runs it on a socket. See docs/spec/replication.md#applier-states.

Theory of operation
-------------------

An applier follows one upstream, which is one URI of `replication`. It connects, fetches data if the instance has none,
subscribes at the vclock of the instance, and then receives rows until the connection fails. An attempt is one
connection and one `ApplierProtocol`; the applier and its state outlive the attempt.

Input is what the upstream sends, the commands of the instance (start, stop, what to request next), and errors. Output
is the state, which `box.info` shows and the quorum of connected upstreams counts
(`replication/membership/replica_set.py`).

    OFF, LOADING, STOPPED, DISCONNECTED -> CONNECT -> CONNECTED -> [AUTH ->] READY

    READY -> INITIAL_JOIN -> FINAL_JOIN -> JOINED -> READY      JOIN: the instance has no data
    READY -> FETCH_SNAPSHOT -> FETCHED_SNAPSHOT -> READY        the same for an anonymous replica
    READY -> REGISTER -> REGISTERED -> READY                    an anonymous replica becomes a member
    READY -> SYNC -> FOLLOW                                     SUBSCRIBE

- CONNECT: an attempt has started. The greeting and the ballot of the upstream move it to CONNECTED.
- CONNECTED: the upstream is known. The applier waits for the command to log in (AUTH) or to continue as guest.
- READY: the applier waits for the command to send one of the four requests above.
- SYNC: the upstream accepted SUBSCRIBE and sends rows. When the instance has reached the vclock that the upstream had
  at SUBSCRIBE, and the lag is at most `replication_sync_lag`, the applier enters FOLLOW.
- FOLLOW: the instance is in sync. Only an error or a stop ends this state.

An error in any of these states ends the attempt. `reaction` returns the state that follows:

- DISCONNECTED: the connection failed. The applier retries after a pause.
- LOADING: the upstream rejected a request for a reason that may pass: it is starting, or a login, a right or a
  registration is missing. The applier retries after a pause.
- STOPPED: a retry cannot help. The applier stays stopped until it is started again.
- OFF: the instance stopped the applier, or the upstream is the instance itself.

Invariants:

- The state changes only along TRANSITIONS.
- The applier has a connection, or is opening one, exactly in the states outside FAILED.
- Rows are applied only in the states of a join or registration, in SYNC and in FOLLOW.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.applier.lost_tail import TailLost
from flowstone.replication.applier.received_rows import OwnRowRefused
from flowstone.replication.membership.membership import NO_FOLLOWERS, NO_MEMBERS, NotAMember, VClockLags
from flowstone.replication.vclock import VClock


class ApplierState(Enum):
    """The state of an applier. `box.info.replication[n].upstream.status` has the same values."""

    OFF = "off"
    CONNECT = "connect"
    CONNECTED = "connected"
    AUTH = "auth"
    READY = "ready"
    INITIAL_JOIN = "initial_join"
    FINAL_JOIN = "final_join"
    JOINED = "joined"
    FETCH_SNAPSHOT = "fetch_snapshot"
    FETCHED_SNAPSHOT = "fetched_snapshot"
    REGISTER = "register"
    REGISTERED = "registered"
    SYNC = "sync"
    FOLLOW = "follow"
    LOADING = "loading"
    STOPPED = "stopped"
    DISCONNECTED = "disconnected"


_State = ApplierState

FAILED: Final = frozenset({_State.OFF, _State.LOADING, _State.STOPPED, _State.DISCONNECTED})
"""States without a connection. The applier retries from LOADING and DISCONNECTED, but not from OFF and STOPPED."""

ENDED: Final = frozenset({_State.OFF, _State.STOPPED})
"""States without a retry: the applier stays there until it is started again."""

FORWARD: Final = {
    _State.OFF: (_State.CONNECT,),
    _State.CONNECT: (_State.CONNECTED,),
    _State.CONNECTED: (_State.AUTH, _State.READY),
    _State.AUTH: (_State.READY,),
    _State.READY: (_State.INITIAL_JOIN, _State.FETCH_SNAPSHOT, _State.REGISTER, _State.SYNC),
    _State.INITIAL_JOIN: (_State.FINAL_JOIN,),
    _State.FINAL_JOIN: (_State.JOINED,),
    _State.JOINED: (_State.READY,),
    _State.FETCH_SNAPSHOT: (_State.FETCHED_SNAPSHOT,),
    _State.FETCHED_SNAPSHOT: (_State.READY,),
    _State.REGISTER: (_State.REGISTERED,),
    _State.REGISTERED: (_State.READY,),
    _State.SYNC: (_State.FOLLOW,),
    _State.FOLLOW: (),
    _State.LOADING: (_State.CONNECT,),
    _State.STOPPED: (_State.CONNECT,),
    _State.DISCONNECTED: (_State.CONNECT,),
}
"""The transitions of an attempt that succeeds, without errors and stops."""

TRANSITIONS: Final[dict[ApplierState, frozenset[ApplierState]]] = {
    # An applier with a connection can fail or be stopped; one without a connection can only be stopped.
    state: frozenset(after) | (ENDED - {state} if state in FAILED else FAILED)
    for state, after in FORWARD.items()
}
"""Maps each state to the states that may follow it."""

_RETRIED: Final = {
    # The upstream is not ready yet, or its configuration may be corrected while we retry.
    errors.Loading.code: _State.LOADING,
    errors.SyncQuorumTimeout.code: _State.LOADING,
    errors.SyncRollback.code: _State.LOADING,
    errors.Cfg.code: _State.LOADING,
    errors.AccessDenied.code: _State.LOADING,
    errors.NoSuchUser.code: _State.LOADING,
    errors.CredsMismatch.code: _State.LOADING,
    errors.System.code: _State.DISCONNECTED,
    errors.ConnectionToSelf.code: _State.OFF,
    # Raised by our side: a peer that greets with a nil UUID is not configured yet. 2.6 does not check the UUID.
    errors.NilUuid.code: _State.DISCONNECTED,
}
_RETRIED_SINCE_2_6_1: Final = {
    errors.TooEarlySubscribe.code: _State.LOADING,
    errors.XlogGap.code: _State.LOADING,
    errors.Ssl.code: _State.DISCONNECTED,
}
_CLASSES: Final = {
    # For these classes of error, the codes differ between versions, so the class at the top of the error stack decides.
    "SocketError": errors.System.code,
    "SystemError": errors.System.code,
    "TimedOut": errors.System.code,
    "XlogGapError": errors.XlogGap.code,
}


class ConnectionLost(FlowstoneError):
    """The connection could not be opened, was closed, or timed out. A retry may help."""


def reaction(error: FlowstoneError | OSError, *, is_2_6: bool, has_data: bool = True) -> ApplierState:
    """Return the state of an applier after `error`, raised by either side (docs/spec/replication.md#error-reactions).

    `is_2_6` selects the rules of the 2.6 dialect. `has_data` is False for an instance that has not joined yet.

    Real instances without data give up if no member is writable; ours wait for an election. Real instances also stop
    permanently at an expelled peer; ours retry, because another member, or the peer itself, may join at that address.
    """
    if isinstance(error, OSError | ConnectionLost | OwnRowRefused):
        return _State.DISCONNECTED
    if isinstance(error, errors.Readonly) and not has_data:
        return _State.LOADING
    if _is_of_no_member(error):
        return _State.LOADING
    if isinstance(error, NotAMember | VClockLags) or (isinstance(error, TailLost) and error.may_come_back):
        return _State.LOADING
    code = code_of(error)
    after = _RETRIED.get(code)
    if after is None and not is_2_6:
        after = _RETRIED_SINCE_2_6_1.get(code)
    return after or _State.STOPPED


def code_of(error: FlowstoneError) -> int:
    """Return the error code that decides about the state; 0 if `error` is not a Tarantool error."""
    if not isinstance(error, TarantoolError):
        return 0
    stack = error.stack.errors if error.stack is not None else ()
    return _CLASSES.get(stack[0].type, error.code) if stack else error.code


DOES_NOT_KNOW_US: Final = (errors.UnknownReplica, errors.TooEarlySubscribe)
"""Errors of a peer whose `_cluster` does not list us, or not yet: from 2.6.0, and from newer servers."""

ON_ITS_WAY: Final = "the row that registers this instance may not have reached it yet"
NOT_A_MEMBER: Final = (
    "it was expelled, or is an anonymous replica: remove it from replication here, or rejoin it "
    "with `flowstone rebootstrap`"
)
REMOVED: Final = (
    "it does not know us: if this instance was removed from the replica set, delete its data and let it join again"
)

UNKNOWN_MAX: Final = 10
"""Retries with a peer that does not know us although it has all rows that other members sent us."""


def lacks_rows(theirs: VClock, ours: VClock, *, besides: int) -> bool:
    """Return True if a peer at `theirs` lacks rows of other members that we, at `ours`, have.

    The row that registers us may be one of them, so such a peer may learn of us later. Rows of `besides`, our own id,
    do not count: if we were removed from the replica set, other members never get them.
    """
    return any(lsn > theirs.get(number) for number, lsn in ours if number not in (0, besides))


DUPLICATE: Final = "duplicate connection with the same replica UUID"
DUPLICATE_MAX: Final = 10
"""Failures in a row up to which DUPLICATE is ordinary: a peer notices late that our last connection was lost."""

MESSAGE_MAX: Final = 1024
"""Characters of an error message that are kept. Real servers truncate messages to 512 bytes."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def other_replica_set(error: FlowstoneError, ours: UUID | None) -> str | None:
    """Return advice if `error` shows that the peer belongs to a replica set other than `ours`; else None."""
    if ours is None or not isinstance(error, errors.UnknownReplica | errors.ReplicasetUuidMismatch):
        return None
    named = [UUID(text) for text in _UUID.findall(error.message)]
    if isinstance(error, errors.UnknownReplica):
        named = named[1:]  # the first UUID is that of the unknown instance
    other = next((uuid for uuid in named if uuid != ours), None)
    return None if other is None else f"that is another replica set ({other}, ours is {ours}): correct the URI"


def advice_about_peer(error: FlowstoneError, ours: UUID | None) -> str | None:
    """Return advice about a peer that is not a member, or is in another replica set than `ours`; None if neither."""
    return NOT_A_MEMBER if _is_of_no_member(error) else other_replica_set(error, ours)


def _is_of_no_member(error: FlowstoneError | OSError) -> bool:
    return isinstance(error, errors.Unsupported) and error.message in (NO_FOLLOWERS, NO_MEMBERS)


def is_ordinary(error: FlowstoneError, failures: int) -> bool:
    """Return True if `error` is expected during a start or reconnect and passes without action.

    `failures` is the number of failures in a row.
    """
    if isinstance(error, errors.Cfg):
        # Code 59 has many other reasons, which need an operator.
        return DUPLICATE in error.message and failures < DUPLICATE_MAX
    return isinstance(error, errors.Loading)


_DOING: Final = {
    _State.CONNECT: "cannot connect to",
    _State.AUTH: "cannot log in to",
    _State.CONNECTED: "cannot join or follow",
    _State.READY: "cannot join or follow",
}


def shortened(message: str) -> str:
    """Return `message` truncated to MESSAGE_MAX: the log and `box.info` show it, and its length is up to the peer."""
    return message if len(message) <= MESSAGE_MAX else f"{message[:MESSAGE_MAX]}… ({len(message)} characters)"


def doing(state: ApplierState, *, has_data: bool) -> str:
    """Return the words for what failed when the peer answers with an error in `state`.

    An instance that has data does not join.
    """
    if has_data and state in (_State.CONNECTED, _State.READY):
        return "cannot follow"
    return _DOING.get(state, "cannot read from")


class UnsupportedPeer(FlowstoneError):
    """The peer runs a version that cannot be followed."""
