"""The states of an applier, what may follow what, and what an error does to it.

All that decides about states is here, in tables. The protocol that moves through them is `applier_protocol.py`;
`node/applier.py` runs it. Reference sections 7 and 11.1.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.lost_tail import TailLost
from flowstone.replication.membership import NO_FOLLOWERS, NO_MEMBERS, NotAMember, VClockLags
from flowstone.replication.received_rows import OwnRowRefused
from flowstone.replication.vclock import VClock


class ApplierState(Enum):
    """Where an applier is; the values are what `box.info.replication[n].upstream.status` shows."""

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
"""Without a connection. From LOADING and DISCONNECTED it tries again; OFF and STOPPED are the end."""

ENDED: Final = frozenset({_State.OFF, _State.STOPPED})

_FORWARD: Final = {
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

TRANSITIONS: Final[dict[ApplierState, frozenset[ApplierState]]] = {
    # Whatever it is doing, it may fail or be told to stop; while it does nothing, it can only be told.
    state: frozenset(after) | (ENDED - {state} if state in FAILED else FAILED)
    for state, after in _FORWARD.items()
}
"""State → the states that may come next."""

_RETRIED: Final = {
    # Not ready yet, or a matter of configuration that somebody may put right meanwhile.
    errors.Loading.code: _State.LOADING,
    errors.SyncQuorumTimeout.code: _State.LOADING,
    errors.SyncRollback.code: _State.LOADING,
    errors.Cfg.code: _State.LOADING,
    errors.AccessDenied.code: _State.LOADING,
    errors.NoSuchUser.code: _State.LOADING,
    errors.CredsMismatch.code: _State.LOADING,
    errors.System.code: _State.DISCONNECTED,
    errors.ConnectionToSelf.code: _State.OFF,
    # Our own word on a peer without a name: what is there now stands in for a server. 2.6 does not look.
    errors.NilUuid.code: _State.DISCONNECTED,
}
_RETRIED_SINCE_2_6_1: Final = {
    errors.TooEarlySubscribe.code: _State.LOADING,
    errors.XlogGap.code: _State.LOADING,
    errors.Ssl.code: _State.DISCONNECTED,
}
_CLASSES: Final = {
    # The class at the top of a stack of errors counts before the code, which of these differs between versions.
    "SocketError": errors.System.code,
    "SystemError": errors.System.code,
    "TimedOut": errors.System.code,
    "XlogGapError": errors.XlogGap.code,
}


class ConnectionLost(FlowstoneError):
    """The connection could not be made, broke, or nothing was heard for too long. Trying again may help."""


def reaction(error: FlowstoneError | OSError, *, is_2_6: bool, has_data: bool = True) -> ApplierState:
    """The state that an applier of our age is in after `error`, its own or the peer's (reference 11.1).

    Real instances without data give up if no member is writable; ours wait for an election. Real instances also stop
    for good at an expelled peer; ours retry, because another member, or the peer itself, may join at that address.
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
    """What an applier goes by; 0 for an error that is not Tarantool's."""
    if not isinstance(error, TarantoolError):
        return 0
    stack = error.stack.errors if error.stack is not None else ()
    return _CLASSES.get(stack[0].type, error.code) if stack else error.code


DOES_NOT_KNOW_US: Final = (errors.UnknownReplica, errors.TooEarlySubscribe)
"""What a member hears from a peer in whose `_cluster` it is not, or not yet: the first from 2.6.0, else the second."""

ON_ITS_WAY: Final = "the row that registers us may be on its way to it"
NOT_A_MEMBER: Final = (
    "it was expelled, or is an anonymous replica: take it out of replication here, or let it join again "
    "(`flowstone rebootstrap`)"
)
REMOVED: Final = (
    "it does not know us (any more): if this instance was removed from the replica set, "
    "delete its data and let it join again"
)

UNKNOWN_MAX: Final = 10
"""How often a peer is asked again that does not know us, although it has all that others gave us."""


def lacks_rows(theirs: VClock, ours: VClock, *, besides: int) -> bool:
    """Whether a peer lacks rows that others gave us: of whoever may not know us yet, the one that registers us.

    Rows of our own, those of `besides`, it may lack for ever: nobody has them of a member that was removed.
    """
    return any(lsn > theirs.get(number) for number, lsn in ours if number not in (0, besides))


DUPLICATE: Final = "duplicate connection with the same replica UUID"
DUPLICATE_MAX: Final = 10
"""How often a peer may say that we are connected already: it notices late that a connection of ours was lost."""

MESSAGE_MAX: Final = 1024
"""Characters of an error's text. Real servers cut theirs off at 512 bytes."""

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def other_replica_set(error: FlowstoneError, ours: UUID | None) -> str | None:
    """What to do about a peer whose words show that it is of another replica set than `ours`; None: they do not."""
    if ours is None or not isinstance(error, errors.UnknownReplica | errors.ReplicasetUuidMismatch):
        return None
    named = [UUID(text) for text in _UUID.findall(error.message)]
    if isinstance(error, errors.UnknownReplica):
        named = named[1:]  # the first is the instance that it does not know
    other = next((uuid for uuid in named if uuid != ours), None)
    return None if other is None else f"that is another replica set ({other}, ours is {ours}): correct the URI"


def advice_about_peer(error: FlowstoneError, ours: UUID | None) -> str | None:
    """Return advice about a peer that is not a member, or is in another replica set than `ours`; None if neither."""
    return NOT_A_MEMBER if _is_of_no_member(error) else other_replica_set(error, ours)


def _is_of_no_member(error: FlowstoneError | OSError) -> bool:
    return isinstance(error, errors.Unsupported) and error.message in (NO_FOLLOWERS, NO_MEMBERS)


def is_ordinary(error: FlowstoneError, failures: int) -> bool:
    """Whether it belongs to a good start, or a good return, and passes by itself; after so many `failures` in a row."""
    if isinstance(error, errors.Cfg):
        return DUPLICATE in error.message and failures < DUPLICATE_MAX
    return isinstance(error, errors.Loading)


_DOING: Final = {
    _State.CONNECT: "cannot connect to",
    _State.AUTH: "cannot log in at",
    _State.CONNECTED: "cannot join or follow",
    _State.READY: "cannot join or follow",
}


def shortened(message: str) -> str:
    """For the log and `box.info`, which show it for as long as the peer is not followed: a peer may say anything."""
    return message if len(message) <= MESSAGE_MAX else f"{message[:MESSAGE_MAX]}… ({len(message)} characters)"


def doing(state: ApplierState, *, has_data: bool) -> str:
    """Return what failed when the peer answers with an error in `state`. An instance that has data does not join."""
    if has_data and state in (_State.CONNECTED, _State.READY):
        return "cannot follow"
    return _DOING.get(state, "cannot go on reading from")


class UnsupportedPeer(FlowstoneError):
    """A server that we cannot follow, whatever it answers."""
