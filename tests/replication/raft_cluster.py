"""A member of a replica set reduced to elections, and the checker of their invariants.

`Member` is a Raft machine with a vclock and a disk that survives `crash`. Its owner delivers its broadcasts and
completes its writes: `raft_stories.py` in order, `test_raft_model.py` in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import Config, ElectionMode, ElectionState, Ready
from flowstone.replication.raft.raft import Raft
from flowstone.replication.vclock import VClock


class Electable(Protocol):
    """The part that the checker reads; `disk` is the term and vote that survive a crash."""

    id: int
    raft: Raft
    disk: RaftState


class Checker:
    """Inspects every machine after every step; raises on two leaders in a term, a leader without a quorum, or two
    votes of one member."""

    def __init__(self) -> None:
        self.leaders: dict[int, int] = {}
        self._votes: dict[tuple[int, int], int] = {}

    def look(self, member: Electable, ready: Ready) -> None:
        raft, disk = member.raft, member.disk
        if disk.vote:
            voted = self._votes.setdefault((member.id, disk.term), disk.vote)
            assert voted == disk.vote, f"{member.id} votes for {voted} and {disk.vote} in term {disk.term}"
        if raft.state is ElectionState.LEADER:
            if raft.term not in self.leaders:
                voters = [
                    voter for (voter, term), vote in self._votes.items() if (term, vote) == (raft.term, member.id)
                ]
                assert len(voters) >= raft.peers.quorum, f"{member.id} leads term {raft.term} by the votes of {voters}"
            leader = self.leaders.setdefault(raft.term, member.id)
            assert leader == member.id, f"{leader} and {member.id} lead term {raft.term}"
        for shown in (raft.shown, ready.broadcast):
            assert shown is None or (shown.term, shown.vote) == (disk.term, disk.vote), "shown, but not on disk"
        if raft.state is not ElectionState.FOLLOWER:
            assert raft.volatile_term == disk.term
            assert disk.vote == member.id
        if ready.promote_term:
            assert raft.state is ElectionState.LEADER
            assert ready.promote_term == disk.term


class Member:
    """One machine. `disk` survives a crash; a write from `drain` is on disk after `write_ends`."""

    def __init__(self, member_id: int, random: Callable[[], float], checker: Checker) -> None:
        self.id = member_id
        self.disk = RaftState(term=1)
        self.vclock = VClock()
        self.config = Config()
        self.writing: RaftState | None = None
        self.is_up = False
        self._random = random
        self._checker = checker
        self.raft = self._new(0.0)

    def _new(self, now: float) -> Raft:
        return Raft(
            self.id, vclock=lambda: self.vclock, random=self._random, now=now, term=self.disk.term, vote=self.disk.vote
        )

    def start(self, now: float, quorum: int, members: list[int]) -> None:
        self.raft = self._new(now)
        self.is_up = True
        self.raft.set_quorum(quorum, members, now)
        self.raft.configure(self.config, now)

    def set_mode(self, mode: ElectionMode, now: float) -> None:
        self.configure(Config(mode, self.config.election_timeout, self.config.death_timeout, self.config.fencing), now)

    def configure(self, config: Config, now: float) -> None:
        self.config = config
        self.raft.configure(config, now)

    def crash(self, *, is_written: bool = False) -> None:
        """`is_written`: the write in flight has reached the disk, without a callback."""
        if is_written and self.writing is not None:
            self.disk = self.writing
        self.writing = None
        self.is_up = False

    def write_ends(self, now: float) -> None:
        assert self.writing is not None
        self.disk, self.writing = self.writing, None
        self.raft.written(self.disk.term, self.disk.vote, now)

    def drain(self) -> list[Ready]:
        """Return all pending actions. The caller completes their writes."""
        done = []
        while ready := self.raft.ready():
            if ready.write is not None:
                assert self.writing is None, "two writes at once"
                self.writing = ready.write
            self._checker.look(self, ready)
            done.append(ready)
        return done
