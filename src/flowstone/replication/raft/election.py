"""Elections: their theory of operation, and the parts they consist of (states, modes, output, votes, healthy peers).

The machine that follows these rules is `Raft` in `raft.py`, which builds on this module. Nothing here keeps a term or
the time.

Theory of operation
-------------------

An election chooses the leader of a term: the only member that may write while elections are on. Each member runs one
`Raft` machine, as Tarantool 2.11 does. Members exchange RAFT rows, each of which carries the whole state of its sender:
term, vote, state, leader, and the vclock of a candidate.

Input: RAFT rows (`message`), terms in ACKs (`heard_term`), heartbeats, connections, the members and the quorum,
options, commands (`promote`, `begin_term`, `resign`), the time (`tick`), and completed writes (`written`). Output:
`ready()` returns a `Ready`, which says what to write, broadcast and do; `deadline` says when `tick` is due.

States, per term:

- FOLLOWER: every term starts here. The member may vote for one candidate, if that candidate has all rows that the
  member has.
- CANDIDATE: the member has voted for itself, and the vote is on disk. With enough votes for a quorum it becomes LEADER.
  If the quorum is 1, it becomes LEADER directly.
- LEADER: the member may write once it owns the limbo (`Ready.promote_term`).

A CANDIDATE or LEADER becomes FOLLOWER when it sees a newer term. A CANDIDATE does so as well when another member leads
the term; a LEADER when it resigns, loses its quorum of healthy peers (`Fencing`), or elections are switched off.

Timers (`Wait`). A follower that hears the leader waits for LEADER_DEATH, and each heartbeat restarts that timer. A
candidate by configuration waits for LEADER_FOUND while it knows no leader, and for ELECTION_END once an election is
under way. If the votes are split so that no candidate can win, SPLIT_VOTE shortens that wait. When a timer expires, the
member starts an election in the next term, unless another member reports that it still hears the leader (pre-vote).
Only `election_mode` CANDIDATE, with a quorum of healthy peers, starts elections this way. MANUAL starts one per
`promote`, VOTER only votes, and OFF only keeps up with terms.

Persistence. A term and a vote count only once they are on disk. Decisions use the volatile term and vote, which may be
ahead; other members see the written ones. Until a write completes, the member is a follower without a timer. A vote
for another member takes two writes: after the term is on disk, the vclock includes all rows that were being written,
and the candidate's vclock is compared again before the vote is written.

Invariants:

- A member votes at most once per term, and never for a candidate that lacks a row which the member wrote before that
  term. Rows that the voter wrote later need not count: its ACKs for these rows carry the term, which stops the waiting
  leader.
- A leader has the votes of a quorum. If a quorum is more than half of the members, a term has at most one leader, and
  the leader has every row that a quorum has acknowledged.
- A term or vote is shown to other members only after it is on disk.
- A CANDIDATE or LEADER has its term, and its vote for itself, on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.replication.limbo.control_rows import RaftState


class RaftError(RemoteProtocolError):
    """A peer sent an invalid RAFT row."""


class ElectionState(IntEnum):
    """The state of an instance in the current term; the numbers are the same as in RAFT rows."""

    FOLLOWER = 1
    CANDIDATE = 2
    LEADER = 3


TRANSITIONS: Final[dict[ElectionState, frozenset[ElectionState]]] = {
    # With a quorum of 1, a follower wins by its own vote.
    ElectionState.FOLLOWER: frozenset({ElectionState.CANDIDATE, ElectionState.LEADER}),
    ElectionState.CANDIDATE: frozenset({ElectionState.LEADER, ElectionState.FOLLOWER}),
    ElectionState.LEADER: frozenset({ElectionState.FOLLOWER}),
}
"""Maps each state to the states that may follow it. A new term makes every member a follower."""


class ElectionMode(Enum):
    """`election_mode`."""

    OFF = "off"
    VOTER = "voter"
    CANDIDATE = "candidate"
    MANUAL = "manual"


class Fencing(Enum):
    """`election_fencing_mode`: whether a leader that has lost its quorum of healthy peers resigns.

    STRICT also halves the timeout after which a peer counts as disconnected, so that the leader resigns before the
    other members can elect another one.
    """

    OFF = "off"
    SOFT = "soft"
    STRICT = "strict"


class Wait(Enum):
    """The event that the member awaits until the deadline; notes contain the values."""

    LEADER_DEATH = "a heartbeat of the leader"
    LEADER_FOUND = "a leader"
    ELECTION_END = "the election to end"
    SPLIT_VOTE = "another candidate"


@dataclass(frozen=True, slots=True)
class Config:
    """The election options of `box.cfg`; times in seconds. `death_timeout` is four times `replication_timeout`."""

    mode: ElectionMode = ElectionMode.OFF
    election_timeout: float = 5.0
    death_timeout: float = 4.0
    fencing: Fencing = Fencing.SOFT


@dataclass(frozen=True, slots=True)
class Ready:
    """The actions that the owner of the machine must perform, in any order. False if there is nothing to do."""

    write: RaftState | None = None
    """Term and vote to write to the log, as a local row that is synced. Call `written` when they are on disk; until
    then no further write is requested. If the write fails, the instance takes no part in elections until it succeeds.
    """
    broadcast: RaftState | None = None
    """The state to send to every replica that is not anonymous. A newer state replaces one that is not sent yet."""
    promote_term: int = 0
    """If not 0: this member leads in this term, and must write PROMOTE once a quorum has the old owner's queue."""
    fence: bool = False
    """True if the queue must not be confirmed or rolled back until a PROMOTE of a newer term."""
    is_changed: bool = False
    """True if `info`, `is_read_only` or the state shown to new replicas has changed."""
    notes: tuple[str, ...] = ()
    """Lines for the log; this member is the subject of each line."""

    def __bool__(self) -> bool:
        return self != _NOTHING


_NOTHING: Final = Ready()


@dataclass(frozen=True, slots=True)
class ElectionInfo:
    """`box.info.election`. Term and vote may not be on disk yet."""

    state: str
    term: int
    vote: int
    leader: int
    leader_idle: float | None
    """Seconds since the last sign of life of the leader; 0 on the leader itself, None while elections are off."""


def check(instance_id: int, source_id: int, told: RaftState) -> None:
    """Raise RaftError if the RAFT row `told` from `source_id` is not valid for `instance_id`."""
    if not 0 < source_id < VCLOCK_MAX or source_id == instance_id:
        raise RaftError(f"unexpected RAFT row from {source_id}: not the id of another member")
    if not told.term or told.state not in tuple(ElectionState) or told.vote >= VCLOCK_MAX:
        said = f"term {told.term}, state {told.state}, vote {told.vote}"
        raise RaftError(f"invalid RAFT row from {source_id}: {said}")
    if told.state == ElectionState.CANDIDATE and (told.vote != source_id or told.vclock is None):
        raise RaftError(f"invalid RAFT row from {source_id}: a candidate must vote for itself and send its vclock")


class Votes:
    """The votes of one term, by voter. Only the first vote of a member counts."""

    def __init__(self) -> None:
        self._votes: dict[int, int] = {}

    def add(self, voter_id: int, candidate_id: int) -> bool:
        """Record a vote; return False if the member has voted already."""
        if voter_id in self._votes:
            return False
        self._votes[voter_id] = candidate_id
        return True

    def revoke(self, voter_id: int) -> None:
        """Remove a vote that no other member has seen."""
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
        """Return True if no candidate can win any more.

        Return False if undecidable: there are fewer members than a quorum, or more votes than members.
        """
        open_count = member_count - len(self._votes)
        if member_count < quorum or open_count < 0:
            return False
        return max(Counter(self._votes.values()).values(), default=0) + open_count < quorum

    def __str__(self) -> str:
        scores = Counter(self._votes.values())
        return ", ".join(f"{count} for {candidate_id}" for candidate_id, count in sorted(scores.items()))


class ElectionPeers:
    """The members, their connections with this member (`instance_id`), and the quorum."""

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id
        self.synchro_quorum = 1
        self._members: frozenset[int] = frozenset()
        self._upstreams: set[int] = set()
        self._downstreams: set[int] = set()

    def replace(self, synchro_quorum: int, members: Collection[int]) -> list[int]:
        """Set the quorum and the members; return the ids that are no longer members."""
        gone = sorted(self._members - frozenset(members) - {self.instance_id})
        self.synchro_quorum, self._members = synchro_quorum, frozenset(members)
        return gone

    def connect(self, peer_id: int, *, upstream: bool, downstream: bool) -> bool:
        """Record how `peer_id` is connected; return True if the connection by which we followed it has ended."""
        was_followed = peer_id in self._upstreams
        for peers, is_connected in ((self._upstreams, upstream), (self._downstreams, downstream)):
            if is_connected:
                peers.add(peer_id)
            else:
                peers.discard(peer_id)
        return was_followed and not upstream

    @property
    def member_count(self) -> int:
        """The number of members; at least 1, because this member counts before the first one is registered."""
        return max(1, len(self._members))

    @property
    def healthy_count(self) -> int:
        """The number of members connected in both directions, including this member."""
        return 1 + len(self.healthy)

    @property
    def healthy(self) -> set[int]:
        """The other members that are connected in both directions."""
        return (self._upstreams & self._downstreams & self._members) - {self.instance_id}

    @property
    def quorum(self) -> int:
        """The election quorum: `synchro_quorum`, or all members while there are fewer than that."""
        return min(self.synchro_quorum, self.member_count)

    @property
    def has_healthy_quorum(self) -> bool:
        return self.healthy_count >= self.quorum
