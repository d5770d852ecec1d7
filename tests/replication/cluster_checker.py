"""Invariants of a replica set, seen from outside: `ClusterChecker` receives every decision.

It knows the logs of all members, their decisions on every transaction, and the answers to clients. Two histories are
allowed only if one side raises ER_SPLIT_BRAIN, which it may only if there are two.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowstone.iproto import errors
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.control_rows import Demote, Promote, Rollback
from flowstone.replication.raft.election import ElectionState, Ready
from tests.replication.cluster_member import LogRow, Member
from tests.replication.raft_cluster import Checker as LeaderChecker


class ClusterChecker:
    def __init__(self, members: Mapping[int, Member]) -> None:
        self._members = members
        self._leaders = LeaderChecker()
        self._majority = len(members) // 2 + 1
        self._promoted: dict[int, int] = {}
        self.synchronous: set[str] = set()
        self.promised: set[str] = set()
        """Synchronous transactions that were acknowledged to clients."""
        self.denied: set[str] = set()
        """Transactions that were rejected to clients."""
        self.doubtful: set[str] = set()
        """Transactions once decided without a quorum: by an owner after its timeout, or by a PROMOTE that few
        members had read."""
        self._facts: dict[str, tuple[bool, str]] = {}

    # --- after every step ---

    def look(self, member: Member, ready: Ready) -> None:
        self._leaders.look(member, ready)
        if ready.promote_term:
            self._check_complete(member, self.promised)

    def _check_complete(self, leader: Member, names: set[str]) -> None:
        """Check that a leader has everything promised in older terms in its log, not as a NOP."""
        missing = names - {row.name for row in leader.log.rows}
        assert not missing, f"{leader.id} leads term {leader.raft.term} without {sorted(missing)}"

    def decided(self, member: Member, name: str, term: int, *, kept: bool) -> None:
        if name not in self.synchronous:
            return
        if self._holder_count(term) < self._majority:
            # Only a few members have read the PROMOTE. The next leader may decide otherwise, and one side finds a split
            # brain.
            self.doubtful.add(name)
        elif kept or name not in self.doubtful:
            self._note_fact(name, kept, f"on {member.id}")

    def _note_fact(self, name: str, kept: bool, where: str) -> None:
        fact, who = self._facts.setdefault(name, (kept, where))
        assert fact == kept, f"{name} is {_verdict(kept)} {where} and {_verdict(fact)} {who}"

    def made_anew(self, donor: Member) -> None:
        """A split brain was resolved in favour of `donor`: rows that only the other side rolled back are committed
        after all."""
        kept = {name for name, is_kept in donor.fates.items() if is_kept}
        self.doubtful |= {name for name, (fact, _) in self._facts.items() if not fact and name in kept}
        self._facts = {name: fact for name, fact in self._facts.items() if fact[0] or name not in kept}

    def answered(self, member: Member, name: str, error: TarantoolError | None) -> None:
        if error is None:
            if name in self.synchronous:
                holders = [each.id for each in self._members.values() if any(row.name == name for row in each.log.rows)]
                assert len(holders) >= self._majority, f"{name} is promised, and only {holders} have it"
                self.promised.add(name)
                self._note_fact(name, True, "for its client")
                for other in self._members.values():
                    if other.is_up and other.raft.state is ElectionState.LEADER and other.raft.term > member.limbo.term:
                        self._check_complete(other, {name})
        else:
            self.denied.add(name)

    def _holder_count(self, term: int) -> int:
        """Return the number of members with the PROMOTE or DEMOTE of `term`; term 0 has none."""
        bodies = ([row.body for row in each.log.rows] for each in self._members.values())
        return sum(any(isinstance(body, Promote | Demote) and body.term == term for body in each) for each in bodies)

    def written(self, member: Member, row: LogRow) -> None:
        if isinstance(row.body, Rollback) and row.origin_id == member.id:
            self.doubtful |= {entry.transaction.name for entry in member.limbo.pending if entry.lsn >= row.body.lsn}
        if isinstance(row.body, Promote | Demote):
            owner = self._promoted.setdefault(row.body.term, row.origin_id)
            assert owner == row.origin_id, f"{owner} and {row.origin_id} were promoted in term {row.body.term}"

    def refused(self, member: Member, source: Member, row: LogRow, error: TarantoolError) -> None:
        """`member` stopped following `source` because of `row`: check that they have two histories."""
        assert isinstance(error, errors.SplitBrain), f"{member.id} rejects {row} of {source.id}: {error}"
        if member.log.snapshot is not None or (member.life and any(each.was_transfer for each in member.log.rows)):
            return  # neither a snapshot nor a NOP tells enough to distinguish a conflict from missing knowledge
        assert self._is_conflict(member, source, row), f"{member.id} rejects {row} of {source.id} without need: {error}"

    def _is_conflict(self, member: Member, source: Member, row: LogRow) -> bool:
        ours, theirs = member.fates, source.fates
        if row.name and theirs.get(row.name, True):
            return True
        if any(theirs.get(name, kept) != kept for name, kept in ours.items()):
            return True
        logged = {each.name for each in source.log.rows}
        return any(kept and name not in logged for name, kept in ours.items())

    # --- at the end ---

    def check_divergence(self, follows: Mapping[tuple[int, int], bool]) -> None:
        """Check, after all acceptable rows are delivered, that members that follow each other have one history."""
        for one in self._members.values():
            for other in self._members.values():
                if one.id < other.id and follows[one.id, other.id] and follows[other.id, one.id]:
                    self._check_same(one, other)

    def _check_same(self, one: Member, other: Member) -> None:
        for name in one.fates.keys() | other.fates.keys():
            ours, theirs = one.fates.get(name), other.fates.get(name)
            assert bool(ours) == bool(theirs), (
                f"{name} is {_verdict(ours)} on {one.id}, {_verdict(theirs)} on {other.id}"
            )
        assert one.data == other.data, f"{one.id} has {one.data}, {other.id} has {other.data}"
        assert one.vclock.vclock().without_zero() == other.vclock.vclock().without_zero()

    def check_end(self, leader: Member) -> None:
        """Check that `leader` has everything promised, and nothing rejected, unless its owner was in doubt."""
        kept = {name for name, is_kept in leader.fates.items() if is_kept}
        assert self.promised <= kept, f"lost: {sorted(self.promised - kept)}"
        wrong = (self.denied & kept) - self.doubtful
        assert not wrong, f"present although rejected to their clients: {sorted(wrong)}"
        for member in self._members.values():
            assert not member.limbo.pending, f"{member.id} has {member.limbo.pending} pending"
            assert member.limbo.checkpoint() == leader.limbo.checkpoint()
            assert set(member.data.values()) <= kept
            self._check_same(leader, member)


def _verdict(kept: bool | None) -> str:
    return "unknown" if kept is None else "kept" if kept else "rolled back"
