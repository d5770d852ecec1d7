"""What elections are made of: modes and states, what a member is told to do, votes and healthy peers counted.

The rules by which all this moves are in `raft.py`. Nothing here knows time or terms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.replication.synchro import RaftState


class RaftError(RemoteProtocolError):
    """A peer said something of an election that nobody may say."""


class State(IntEnum):
    """What an instance is in the current term; the numbers are those of RAFT rows."""

    FOLLOWER = 1
    CANDIDATE = 2
    LEADER = 3


class Mode(Enum):
    """`election_mode`."""

    OFF = "off"
    VOTER = "voter"
    CANDIDATE = "candidate"
    MANUAL = "manual"


class Fencing(Enum):
    """`election_fencing_mode`: does a leader without a quorum of healthy peers resign, and does it hurry?"""

    OFF = "off"
    SOFT = "soft"
    STRICT = "strict"


class Wait(Enum):
    """What a deadline is for."""

    LEADER_DEATH = "a sign of the leader"
    LEADER_FOUND = "a leader to show up"
    ELECTION_END = "the election to end"
    SPLIT_VOTE = "the others to stand first"


@dataclass(frozen=True, slots=True)
class Config:
    """What `box.cfg` says of elections; times in seconds. `death_timeout` is four times `replication_timeout`."""

    mode: Mode = Mode.OFF
    election_timeout: float = 5.0
    death_timeout: float = 4.0
    fencing: Fencing = Fencing.SOFT


@dataclass(frozen=True, slots=True)
class Ready:
    """What is to be done, in any order. Falsy where nothing is."""

    write: RaftState | None = None
    """Term and vote for the log, as a local row. Then `written`; before that there is no second one. If the log
    refuses, the instance cannot take part any longer: it must stop."""
    broadcast: RaftState | None = None
    """For every replica that is not anonymous. A newer one makes an unsent one superfluous."""
    promote_term: int = 0
    """We lead in this term: when the queue of the old owner has its quorum, PROMOTE is to be written."""
    fence: bool = False
    """The queue must not be confirmed or rolled back from here on, until a PROMOTE of a newer term."""
    is_changed: bool = False
    """`info`, `is_read_only` or the state shown to new replicas has changed."""
    notes: tuple[str, ...] = ()
    """Lines for the instance's log."""

    def __bool__(self) -> bool:
        return self != _NOTHING


_NOTHING: Final = Ready()


@dataclass(frozen=True, slots=True)
class ElectionInfo:
    """`box.info.election`. Term and vote may still be on their way to the disk."""

    state: str
    term: int
    vote: int
    leader: int
    leader_idle: float | None
    """Seconds since the leader was heard, 0 on the leader itself; None while elections are off."""


def check(instance_id: int, source_id: int, told: RaftState) -> None:
    """Refuses what `instance_id` can be told by nobody."""
    if not 0 < source_id < VCLOCK_MAX or source_id == instance_id:
        raise RaftError(f"a RAFT row from {source_id}, which is no other member")
    if not told.term or told.state not in tuple(State) or told.vote >= VCLOCK_MAX:
        said = f"term {told.term}, state {told.state}, vote {told.vote}"
        raise RaftError(f"RAFT of {source_id}: {said}, which is no state of a member")
    if told.state == State.CANDIDATE and (told.vote != source_id or told.vclock is None):
        raise RaftError(f"RAFT of {source_id}: a candidate must vote for itself and say its vclock")


class Votes:
    """Who votes for whom in one term. The first word of a member counts."""

    def __init__(self) -> None:
        self._votes: dict[int, int] = {}

    def add(self, voter_id: int, candidate_id: int) -> bool:
        """False if the member had voted."""
        if voter_id in self._votes:
            return False
        self._votes[voter_id] = candidate_id
        return True

    def revoke(self, voter_id: int) -> None:
        """Takes back a vote that nobody has seen."""
        del self._votes[voter_id]

    def forget(self, voter_ids: Collection[int]) -> None:
        """Drop the votes of former members. 2.11.9 keeps them: with the smaller quorum, two leaders are possible."""
        for voter_id in voter_ids:
            self._votes.pop(voter_id, None)

    def clear(self) -> None:
        self._votes.clear()

    def count(self, candidate_id: int) -> int:
        return Counter(self._votes.values())[candidate_id]

    def is_split(self, quorum: int, member_count: int) -> bool:
        """Can nobody win any more? Unknown while members are missing to make a quorum, or more voted than there are."""
        open_count = member_count - len(self._votes)
        if member_count < quorum or open_count < 0:
            return False
        return max(Counter(self._votes.values()).values(), default=0) + open_count < quorum

    def __str__(self) -> str:
        scores = Counter(self._votes.values())
        return ", ".join(f"{count} for {candidate_id}" for candidate_id, count in sorted(scores.items()))


class Peers:
    """The members, which of them are connected with the one called `instance_id`, and how many make a quorum."""

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id
        self.synchro_quorum = 1
        self._members: frozenset[int] = frozenset()
        self._upstreams: set[int] = set()
        self._downstreams: set[int] = set()

    def replace(self, synchro_quorum: int, members: Collection[int]) -> list[int]:
        """Gives the ids that are no longer members."""
        gone = sorted(self._members - frozenset(members) - {self.instance_id})
        self.synchro_quorum, self._members = synchro_quorum, frozenset(members)
        return gone

    def connect(self, peer_id: int, *, upstream: bool, downstream: bool) -> bool:
        """True if we followed the peer and do not any more."""
        was_followed = peer_id in self._upstreams
        for peers, is_connected in ((self._upstreams, upstream), (self._downstreams, downstream)):
            if is_connected:
                peers.add(peer_id)
            else:
                peers.discard(peer_id)
        return was_followed and not upstream

    @property
    def member_count(self) -> int:
        """Before the first is registered, one: ourselves."""
        return max(1, len(self._members))

    @property
    def healthy_count(self) -> int:
        """Members with a connection in each direction, and ourselves."""
        return 1 + len((self._upstreams & self._downstreams & self._members) - {self.instance_id})

    @property
    def quorum(self) -> int:
        """For elections: below the synchronous one while a set is being built and is smaller than that."""
        return min(self.synchro_quorum, self.member_count)

    @property
    def has_healthy_quorum(self) -> bool:
        return self.healthy_count >= self.quorum
