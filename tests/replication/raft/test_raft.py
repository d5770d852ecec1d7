"""Elections: whole stories, and single rules that no story shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import Config, ElectionMode, ElectionState, Fencing, RaftError, Ready
from flowstone.replication.raft.raft import Raft
from flowstone.replication.vclock import VClock
from tests.places import TRANSCRIPTS
from tests.replication.raft_stories import Story

HERE = VClock({1: 10})
CANDIDATE = Config(mode=ElectionMode.CANDIDATE)


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("raft_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    story, lines = Story(), []
    for line in path.read_text().splitlines():
        if not line.startswith("  "):
            lines.append(line)
        if line.startswith("> "):
            lines += [f"  {answer}" for answer in story.tell(line[2:])]
    assert "\n".join(lines) + "\n" == path.read_text()


def machine(
    config: Config = CANDIDATE,
    *,
    members: int = 3,
    connected: bool = True,
    vclock: Callable[[], VClock] = lambda: HERE,
    random: Callable[[], float] = lambda: 0.0,
    term: int = 1,
    vote: int = 0,
) -> Raft:
    """Return instance 1 of `members` at time 0."""
    raft = Raft(1, vclock=vclock, random=random, now=0.0, term=term, vote=vote)
    raft.set_quorum(members // 2 + 1, range(1, members + 1), 0.0)
    if connected:
        for peer_id in range(2, members + 1):
            raft.connection(peer_id, upstream=True, downstream=True, now=0.0)
    raft.configure(config, 0.0)
    return raft


def settle(raft: Raft, now: float = 0.0) -> list[Ready]:
    """Complete all writes immediately; return the requested actions."""
    done = []
    while ready := raft.ready():
        done.append(ready)
        if ready.write is not None:
            raft.written(ready.write.term, ready.write.vote, now)
    return done


def leader(members: int = 3, config: Config = CANDIDATE) -> Raft:
    """Return instance 1 as the leader of term 2."""
    raft = machine(config, members=members)
    settle(raft)
    raft.tick(4.0)
    settle(raft, 4.0)
    for voter_id in range(2, members // 2 + 2):
        raft.message(voter_id, RaftState(term=2, vote=1, state=1), 4.0)
    settle(raft, 4.0)
    assert raft.state is ElectionState.LEADER
    return raft


def asks(candidate_id: int, term: int, vclock: VClock = HERE) -> RaftState:
    return RaftState(term=term, vote=candidate_id, state=2, vclock=vclock)


def leads(leader_id: int, term: int) -> RaftState:
    return RaftState(term=term, vote=leader_id, state=3, leader_id=leader_id)


def test_invalid_message_changes_nothing() -> None:
    raft = machine()
    settle(raft)
    with pytest.raises(RaftError):
        raft.message(2, RaftState(term=5, vote=3, state=2, vclock=HERE), 1.0)
    assert not raft.ready()


def test_state_is_not_broadcast_while_it_is_being_written() -> None:
    raft = machine(Config(mode=ElectionMode.VOTER))
    settle(raft)
    raft.message(2, leads(2, 7), 1.0)
    assert raft.ready().write == RaftState(term=7)
    assert raft.shown == RaftState(term=1, state=1)
    assert raft.info(1.0).term == 7
    raft.message(3, RaftState(term=7, vote=2, state=1), 1.0)
    assert raft.ready().broadcast is None
    raft.written(7, 0, 1.0)
    assert raft.ready().broadcast == RaftState(term=7, state=1, leader_id=2, is_leader_seen=True)


def test_only_the_requested_state_counts_as_written() -> None:
    raft = machine()
    settle(raft)
    with pytest.raises(LocalProtocolError, match="unexpected write completion: term 2, vote 1"):
        raft.written(2, 1, 1.0)
    raft.tick(4.0)
    assert raft.ready().write == RaftState(term=2, vote=1)
    with pytest.raises(LocalProtocolError, match="unexpected write completion: term 2, vote 2"):
        raft.written(2, 2, 4.0)


def test_newer_term_received_during_a_write_is_written_next() -> None:
    raft = machine(Config(mode=ElectionMode.VOTER))
    settle(raft)
    raft.message(2, asks(2, 2), 1.0)
    assert raft.ready().write == RaftState(term=2)
    raft.message(3, asks(3, 5), 1.0)
    assert raft.ready().write is None
    raft.written(2, 0, 1.0)
    ready = raft.ready()
    assert (ready.broadcast, ready.write) == (RaftState(term=2, state=1), RaftState(term=5))
    raft.written(5, 0, 1.0)
    assert raft.ready().write == RaftState(term=5, vote=3)


def test_rows_that_reached_the_log_before_the_term_revoke_the_vote() -> None:
    vclocks = [HERE]
    raft = machine(vclock=lambda: vclocks[-1])
    settle(raft)
    raft.message(2, asks(2, 2), 1.0)
    assert raft.ready().write == RaftState(term=2)
    vclocks.append(VClock({1: 11}))
    raft.written(2, 0, 1.0)
    # A candidate then votes for itself: in this term no other candidate has its vote.
    assert raft.ready().write == RaftState(term=2, vote=1)


def test_own_rows_do_not_revoke_a_vote_for_ourselves() -> None:
    vclocks = [HERE]
    raft = machine(vclock=lambda: vclocks[-1])
    settle(raft)
    raft.tick(4.0)
    assert raft.ready().write == RaftState(term=2, vote=1)
    vclocks.append(VClock({0: 3, 1: 11}))
    raft.written(2, 1, 4.0)
    assert raft.ready().broadcast == asks(1, 2, VClock({1: 11}))


@pytest.mark.parametrize(
    ("theirs", "is_granted"),
    [
        ({1: 10}, True),
        ({1: 10, 2: 1}, True),
        ({1: 9}, False),
        ({1: 9, 2: 5}, False),
        ({}, False),
    ],
)
def test_vote_goes_only_to_a_candidate_with_all_our_rows_except_local_ones(
    theirs: dict[int, int], is_granted: bool
) -> None:
    raft = machine(Config(mode=ElectionMode.VOTER), vclock=lambda: VClock({0: 100, 1: 10}))
    raft.message(2, asks(2, 2, VClock(theirs)), 1.0)
    settle(raft)
    assert raft.persisted == RaftState(term=2, vote=2 if is_granted else 0)


def test_vote_is_cast_once_per_term_and_not_while_a_leader_is_known() -> None:
    raft = machine(Config(mode=ElectionMode.VOTER))
    raft.message(2, asks(2, 2), 1.0)
    raft.message(3, asks(3, 2), 1.0)
    settle(raft)
    assert raft.persisted == RaftState(term=2, vote=2)
    raft.message(3, leads(3, 3), 1.0)
    raft.message(2, asks(2, 3), 1.0)
    settle(raft)
    assert raft.persisted == RaftState(term=3)


def test_vote_from_an_older_term_does_not_count_in_the_new_term() -> None:
    """2 voted for us in term 2, which 3 won. We run because no member sees 3 any more; 2 has not voted in that term."""
    raft = machine(members=5)
    settle(raft)
    raft.tick(4.0)
    settle(raft, 4.0)
    raft.message(3, leads(3, 2), 4.1)
    raft.message(2, RaftState(term=2, vote=1, state=1, leader_id=3, is_leader_seen=True), 4.1)
    raft.tick(8.1)
    settle(raft, 8.1)
    raft.message(2, RaftState(term=2, vote=1, state=1, leader_id=3), 8.2)
    settle(raft, 8.2)
    assert (raft.state, raft.term) == (ElectionState.CANDIDATE, 3)
    raft.message(4, RaftState(term=3, vote=1, state=1), 8.3)
    assert raft.state is ElectionState.CANDIDATE
    raft.message(2, RaftState(term=3, vote=1, state=1), 8.3)
    assert raft.leader == 1


def test_a_second_leader_in_a_term_is_only_logged() -> None:
    raft = machine(Config(mode=ElectionMode.VOTER))
    raft.message(2, leads(2, 2), 1.0)
    settle(raft)
    raft.message(3, leads(3, 2), 1.0)
    (ready,) = settle(raft)
    assert ready.notes == ("ignores leader 3: term 2 is led by 2",)
    assert raft.leader == 2
    other = leader()
    other.message(2, leads(2, 2), 5.0)
    assert (other.state, other.leader) == (ElectionState.LEADER, 1)


def test_only_heartbeats_of_the_leader_reset_its_timeout() -> None:
    raft = machine()
    raft.message(2, leads(2, 2), 1.0)
    settle(raft, 1.0)
    assert raft.deadline == 5.0
    raft.heartbeat(3, 2.0)
    assert raft.deadline == 5.0
    raft.heartbeat(2, 2.0)
    assert raft.deadline == 6.0
    raft.tick(5.9)
    assert raft.leader == 2
    assert raft.info(5.9).leader_idle == pytest.approx(3.9)


def test_report_of_a_leader_lost_with_its_connection_does_not_block_candidates() -> None:
    """Either direction of the connection may be lost first."""
    for first in ({"upstream": False, "downstream": True}, {"upstream": True, "downstream": False}):
        raft = machine(members=3)
        raft.message(2, leads(2, 2), 1.0)
        raft.message(3, RaftState(term=2, vote=2, state=1, leader_id=2, is_leader_seen=True), 1.0)
        settle(raft, 1.0)
        raft.connection(3, **first, now=2.0)
        raft.connection(3, upstream=False, downstream=False, now=2.0)
        raft.tick(5.0)
        settle(raft, 5.0)
        assert raft.state is ElectionState.CANDIDATE


def test_report_of_a_removed_member_is_dropped() -> None:
    raft = machine(members=3)
    raft.message(2, leads(2, 2), 1.0)
    raft.message(3, RaftState(term=2, vote=2, state=1, leader_id=2, is_leader_seen=True), 1.0)
    settle(raft, 1.0)
    raft.tick(5.0)
    settle(raft, 5.0)
    assert raft.term == 2
    raft.set_quorum(2, [1, 2], 9.0)
    settle(raft, 9.0)
    assert (raft.term, raft.state) == (3, ElectionState.CANDIDATE)


def test_smaller_quorum_can_decide_a_running_election() -> None:
    raft = machine(members=5)
    settle(raft)
    raft.tick(4.0)
    settle(raft, 4.0)
    raft.message(2, RaftState(term=2, vote=1, state=1), 4.0)
    assert raft.state is ElectionState.CANDIDATE
    raft.set_quorum(2, [1, 2, 3], 4.0)
    assert raft.leader == 1
    assert raft.ready().promote_term == 2


def test_vote_of_an_expelled_member_does_not_decide_an_election() -> None:
    raft = machine(members=4)
    settle(raft)
    raft.tick(4.0)
    settle(raft, 4.0)
    raft.message(4, RaftState(term=2, vote=1, state=ElectionState.FOLLOWER), 4.1)
    raft.set_quorum(2, [1, 2, 3], 4.2)
    assert raft.leader == 0
    raft.message(3, RaftState(term=2, vote=1, state=ElectionState.FOLLOWER), 4.3)
    assert raft.leader == 1


def test_leadership_that_ended_at_once_requests_no_promote() -> None:
    raft = machine(members=1)
    settle(raft)
    raft.tick(4.0)
    assert raft.ready().write == RaftState(term=2, vote=1)
    raft.written(2, 1, 4.0)
    assert raft.state is ElectionState.LEADER
    raft.heard_term(2, 9, 4.0)
    assert not any(ready.promote_term == 2 for ready in settle(raft, 4.0))


@pytest.mark.parametrize("random", [0.0, 0.5, 1.0])
def test_election_timeout_is_randomized_by_up_to_a_tenth(random: float) -> None:
    raft = machine(random=lambda: random)
    settle(raft)
    raft.tick(4.0)
    settle(raft, 4.0)
    assert raft.deadline == pytest.approx(9.0 + random / 2)


def test_a_split_vote_shortens_the_wait_once() -> None:
    numbers = iter([0.0, 0.4, 0.0])
    raft = machine(random=lambda: next(numbers))
    settle(raft)
    raft.tick(4.0)
    settle(raft, 4.0)
    raft.message(2, asks(2, 2), 4.0)
    raft.message(3, asks(3, 2), 4.0)
    assert raft.deadline == pytest.approx(4.2)
    raft.message(3, asks(3, 2), 4.1)
    assert raft.deadline == pytest.approx(4.2)


def test_changed_timeouts_move_the_running_deadline() -> None:
    raft = machine()
    settle(raft)
    raft.configure(replace(CANDIDATE, death_timeout=10.0), 1.0)
    assert raft.deadline == 10.0
    raft.configure(replace(CANDIDATE, death_timeout=0.5), 2.0)
    assert raft.deadline == 2.0
    raft.tick(2.0)
    settle(raft, 2.0)
    assert raft.deadline == 7.0
    raft.configure(replace(CANDIDATE, election_timeout=1.0), 2.5)
    assert raft.deadline == 3.0


def test_leader_stays_when_its_mode_changes_from_candidate_to_manual() -> None:
    raft = leader()
    raft.configure(Config(mode=ElectionMode.MANUAL), 5.0)
    assert raft.state is ElectionState.LEADER
    raft.configure(Config(mode=ElectionMode.OFF), 5.0)
    assert raft.leader == 0
    assert not raft.is_read_only
    assert raft.info(5.0).leader_idle is None
    assert raft.shown == RaftState(term=2, vote=1, state=1)


@pytest.mark.parametrize("fencing", Fencing)
def test_leader_without_a_quorum_is_fenced(fencing: Fencing) -> None:
    raft = leader(config=Config(mode=ElectionMode.CANDIDATE, fencing=fencing))
    assert raft.disconnect_timeout == (2.0 if fencing is Fencing.STRICT else 4.0)
    raft.connection(2, upstream=True, downstream=False, now=5.0)
    assert raft.state is ElectionState.LEADER
    raft.connection(3, upstream=False, downstream=True, now=5.0)
    assert (raft.state is ElectionState.LEADER) == (fencing is Fencing.OFF)
    assert raft.ready().fence == (fencing is not Fencing.OFF)
    assert raft.disconnect_timeout == 4.0


@pytest.mark.parametrize("quorum", [2, 3, 31])
def test_leader_of_one_is_not_fenced_until_joining_members_are_connected(quorum: int) -> None:
    raft = leader(members=1)
    raft.set_quorum(quorum, (1,), 5.0)
    for count in (2, 3):
        raft.set_quorum(quorum, range(1, count + 1), 5.0)
        assert raft.state is ElectionState.LEADER
        raft.connection(count, upstream=True, downstream=True, now=5.0)
    for peer_id in (2, 3):
        raft.connection(peer_id, upstream=False, downstream=False, now=6.0)
    assert raft.state is ElectionState.FOLLOWER


def test_enabling_fencing_checks_the_quorum_at_once() -> None:
    raft = leader(config=Config(mode=ElectionMode.CANDIDATE, fencing=Fencing.OFF))
    for peer_id in (2, 3):
        raft.connection(peer_id, upstream=False, downstream=False, now=5.0)
    raft.configure(CANDIDATE, 6.0)
    assert raft.state is ElectionState.FOLLOWER


def test_an_anonymous_instance_follows_terms_until_it_has_an_id() -> None:
    raft = Raft(0, vclock=VClock, random=lambda: 0.0, now=0.0)
    raft.message(2, leads(2, 4), 1.0)
    settle(raft)
    assert raft.shown == RaftState(term=4, state=1, leader_id=2)
    raft.register(1)
    with pytest.raises(LocalProtocolError):
        raft.register(3)


def test_promotion_errors_equal_those_of_real_servers() -> None:
    with pytest.raises(errors.Unsupported):
        machine(Config(mode=ElectionMode.VOTER)).promote(1.0)
    raft = machine(Config(mode=ElectionMode.MANUAL))
    term = raft.promote(1.0)
    assert not raft.promoted(term)
    raft.heard_term(2, 9, 1.0)
    with pytest.raises(errors.OldTerm, match="old - 2, new - 9"):
        raft.promoted(term)
    term = raft.promote(2.0)
    raft.configure(Config(mode=ElectionMode.OFF), 2.0)
    with pytest.raises(errors.ElectionDisabled):
        raft.promoted(term)


def test_leader_is_known_to_all_when_every_connected_member_reports_it() -> None:
    raft = machine(replace(CANDIDATE, mode=ElectionMode.VOTER), members=4)
    assert not raft.is_leader_known_to_all
    raft.message(2, RaftState(term=2, vote=2, state=ElectionState.LEADER, leader_id=2), 0.0)
    settle(raft)
    assert not raft.is_leader_known_to_all
    raft.message(3, RaftState(term=2, vote=2, state=ElectionState.FOLLOWER, leader_id=2, is_leader_seen=True), 0.0)
    assert not raft.is_leader_known_to_all
    raft.connection(4, upstream=False, downstream=True, now=0.0)
    assert raft.is_leader_known_to_all
