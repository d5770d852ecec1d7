"""Counts of votes and healthy peers, and invalid RAFT rows."""

from __future__ import annotations

import pytest

from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import ElectionPeers, RaftError, Ready, Votes, check
from flowstone.replication.vclock import VClock


@pytest.mark.parametrize(
    ("source_id", "told"),
    [
        (0, RaftState(term=1, state=1)),
        (1, RaftState(term=1, state=1)),
        (32, RaftState(term=1, state=1)),
        (2, RaftState(term=0, state=1)),
        (2, RaftState(term=1, state=0)),
        (2, RaftState(term=1, state=4)),
        (2, RaftState(term=1, state=1, vote=32)),
        (2, RaftState(term=5, state=2, vote=2)),
        (2, RaftState(term=5, state=2, vote=3, vclock=VClock())),
    ],
)
def test_invalid_raft_rows_are_rejected(source_id: int, told: RaftState) -> None:
    with pytest.raises(RaftError):
        check(1, source_id, told)


def test_candidate_broadcasts_its_vote_and_vclock() -> None:
    check(1, 2, RaftState(term=5, state=2, vote=2, vclock=VClock()))
    check(1, 31, RaftState(term=5, state=3, vote=31))


def test_ready_is_falsy_without_actions() -> None:
    assert not Ready()
    assert Ready(fence=True)
    assert Ready(notes=("resigns",))


def test_first_vote_of_a_member_counts_towards_the_quorum() -> None:
    votes = Votes()
    assert votes.add(1, 1)
    assert not votes.add(1, 2)
    assert votes.add(2, 2)
    assert (votes.count(1), votes.count(2), str(votes)) == (1, 1, "1 for 1, 1 for 2")
    assert not votes.is_split(quorum=2, member_count=3)
    assert votes.is_split(quorum=2, member_count=2)
    assert not votes.is_split(quorum=3, member_count=2), "members are missing"
    assert not votes.is_split(quorum=1, member_count=1), "more votes than members"
    votes.revoke(1)
    assert votes.add(1, 2)
    assert votes.count(2) == 2


def test_election_quorum_is_at_most_the_number_of_members() -> None:
    peers = ElectionPeers(1)
    assert (peers.quorum, peers.member_count, peers.healthy_count) == (1, 1, 1)
    peers.replace(3, [])
    assert peers.quorum == 1
    peers.replace(3, [1, 2])
    assert (peers.quorum, peers.has_healthy_quorum) == (2, False)
    assert not peers.connect(2, upstream=True, downstream=True)
    peers.connect(9, upstream=True, downstream=True)
    assert peers.healthy_count == 2, "9 is not a member"
    assert peers.connect(2, upstream=False, downstream=True)
    assert peers.replace(2, [1]) == [2]
