"""Elections among real servers and nodes: either may win, either votes for the other, and decided rows stay decided.

A mixed set must behave like a set of real servers.
"""

from __future__ import annotations

from functools import partial

import pytest

from flowstone.iproto.msgpack import unpack
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged, assert_same_log, local_rows
from tests.interop.member import Member, eventually
from tests.interop.mesh import (
    LSN,
    PLAIN,
    RAFT,
    REPLICATION_TIMEOUT,
    SYNC_ROLLBACK,
    SYNCHRONOUS,
    TERM,
    Mesh,
    Pending,
    demote,
    election,
    keys,
    promote,
    queue,
    refusal,
    verdicts,
    wait_until,
    write,
)
from tests.interop.versions import fits

has_elections = fits(">=2.11")
SEATS = pytest.mark.parametrize("kinds", [("real", "ours", "real"), ("ours", "real", "ours")], ids="-".join)
FIRST = pytest.mark.parametrize(
    "kinds", [("ours", "real", "real"), ("real", "ours", "ours")], ids=("ours first", "real first")
)
"""One against two others: neither wins without the other kind."""

READ_ONLY, UNSUPPORTED, NO_QUORUM = 7, 5, 242
DEATH_SECONDS = 4 * REPLICATION_TIMEOUT


def _elect(mesh: Mesh, *, mode: str = "manual") -> Member:
    """All members take part; the first leads."""
    mesh.set_modes(mode)
    leader = mesh.members[0]
    if mode == "manual":
        promote(leader)
    else:
        mesh.wait_leader()
        promote(leader)
    assert mesh.wait_leader() is leader
    return leader


def _assert_read_only(member: Member) -> None:
    info = member.info()
    reasons = {"election", "synchro"} if info["version"].startswith("3.") else {"election"}
    assert info["ro"]
    assert info["ro_reason"] in reasons


def _assert_one_history(mesh: Mesh) -> None:
    for member in mesh:
        member.wait_follow(*mesh.others(member))
    assert_converged(*mesh)
    first, *others = mesh.members
    origins = sorted({number for _, number, _ in verdicts(first)})
    for other in others:
        assert_same_log(first, other, origins=origins)
        assert verdicts(other) == verdicts(first)


# --- elections -----------------------------------------------------------------------------------------------


@SEATS
@has_elections
def test_candidates_of_both_kinds_elect_a_leader_and_replace_a_lost_one(
    cluster: Cluster, kinds: tuple[str, ...]
) -> None:
    mesh = Mesh(cluster, kinds)
    mesh.set_modes("candidate")
    leader = mesh.wait_leader()
    for follower in mesh.others(leader):
        _assert_read_only(follower)
        assert refusal(partial(write, follower, 1)) == READ_ONLY
    write(leader, 1)
    mesh.wait_same(leader)
    term = election(leader)["term"]
    leader.stop()
    successor = mesh.wait_leader(*mesh.others(leader))
    assert election(successor)["term"] > term
    write(successor, 2)
    leader.start()
    assert mesh.wait_leader() is successor, "a returning member follows"
    write(successor, 3)
    assert keys(successor) == [1, 2, 3]
    _assert_one_history(mesh)


@SEATS
@has_elections
def test_every_candidate_can_be_promoted_in_one_term_and_the_previous_leader_steps_down(
    cluster: Cluster, kinds: tuple[str, ...]
) -> None:
    mesh = Mesh(cluster, kinds)
    mesh.set_modes("candidate")
    before = mesh.wait_leader()
    for number, member in enumerate([*mesh.others(before), before]):
        term = election(before)["term"]
        mesh.wait_same(before)  # a candidate cannot win if it lacks rows of its voters
        promote(member)
        assert mesh.wait_leader() is member
        assert [election(one)["term"] for one in mesh] == [term + 1] * 3
        assert mesh.wait_owner(member) == term + 1
        assert refusal(partial(write, before, 0)) == READ_ONLY
        write(member, number)
        before = member
    _assert_one_history(mesh)


@FIRST
@has_elections
def test_a_candidate_is_elected_by_voters_of_the_other_kind(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    candidate, *voters = mesh.members
    mesh.set_modes("candidate", "voter", "voter")
    assert mesh.wait_leader() is candidate
    for voter in voters:
        shown = election(voter)
        assert (shown["state"], shown["leader"]) == ("follower", candidate.id)
        assert 0 <= shown["leader_idle"] < DEATH_SECONDS
        _assert_read_only(voter)
        assert refusal(partial(promote, voter)) == UNSUPPORTED
    assert election(candidate)["vote"] == candidate.id
    assert candidate.id in {election(voter)["vote"] for voter in voters}
    write(candidate, 1)
    mesh.wait_same(candidate)
    assert verdicts(voters[0])[-2][0] == "PROMOTE"
    assert verdicts(voters[0])[-1] == ("CONFIRM", candidate.id, {2: candidate.id, LSN: candidate.vclock()[1] - 1})
    _assert_one_history(mesh)


def _logged_term_and_vote(member: Member) -> tuple[int, int]:
    newest = [unpack(row.body) for row in local_rows(member) if row.type == RAFT][-1]
    return newest[0], newest.get(1, 0)


@FIRST
@has_elections
def test_term_and_vote_are_in_the_log_and_survive_a_crash(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    leader = _elect(mesh)
    term = election(leader)["term"]
    assert election(leader)["vote"] == leader.id
    before = {member: (term, election(member)["vote"]) for member in mesh}
    for member in mesh:
        wait_until(member, f"has written {before[member]}", lambda one: _logged_term_and_vote(one) == before[one])
    for member in mesh.members:
        member.kill()
    for member in mesh.members:
        member.launch()
    for member in mesh.members:
        member.wait_ready()
        shown = election(member)
        assert (shown["term"], shown["vote"], shown["leader"]) == (*before[member], 0)
        assert member.info()["ro"]
    leader.wait_follow(*mesh.others(leader))
    wait_until(leader, "is followed", lambda one: all(one.downstream(other) for other in mesh.others(one)))
    promote(leader)
    assert mesh.wait_leader() is leader
    assert election(leader)["term"] == term + 1
    write(leader, 1)
    _assert_one_history(mesh)


@FIRST
@has_elections
def test_election_needs_a_quorum_and_returning_member_learns_the_term(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    first, *others = mesh.members
    mesh.set_modes("manual", "off", "off")
    for other in others:
        other.stop()
    term = election(first)["term"]
    assert refusal(partial(promote, first)) == NO_QUORUM
    assert election(first)["state"] != "leader"
    assert election(first)["term"] > term
    for other in others:
        other.launch()
    for other in others:
        other.wait_ready()
        wait_until(other, "hears of the term", lambda one: election(one)["term"] == election(first)["term"])


# --- the queue ----------------------------------------------------------------------------------------------------


@FIRST
@has_elections
def test_next_leader_commits_transactions_of_a_dead_one(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds, replication_synchro_timeout=60)
    leader = _elect(mesh)
    leader.configure(replication_synchro_quorum=4)
    pending = Pending(leader, 1, "kept").wait_on(*mesh)
    dead_id, lsn = leader.id, leader.vclock()[leader.id]
    leader.kill()
    assert pending.outcome() == -1
    second, third = mesh.others(leader)
    for one in (second, third):
        one.configure(replication_synchro_timeout=1)
    promote(second)
    assert mesh.wait_leader(second, third) is second
    mesh.wait_owner(second, second, third)
    assert verdicts(third)[-1] == ("PROMOTE", second.id, {2: dead_id, LSN: lsn, TERM: election(second)["term"]})
    assert keys(second) == keys(third) == [1]
    leader.start()
    leader.wait_follow(second)
    mesh.wait_same(second)
    assert keys(leader) == [1]
    assert queue(leader)["len"] == 0
    _assert_one_history(mesh)


# --- fencing ------------------------------------------------------------------------------------------------------


@FIRST
@pytest.mark.parametrize("fencing", ["soft", "strict"])
@has_elections
def test_leader_without_a_quorum_is_fenced_and_the_next_decides_pending_transactions(
    cluster: Cluster, kinds: tuple[str, ...], fencing: str
) -> None:
    mesh = Mesh(cluster, kinds, replication_synchro_timeout=60, election_fencing_mode=fencing)
    leader = _elect(mesh)
    write(leader, 1)
    mesh.wait_same(leader)  # with the CONFIRM: else the others only have the next PROMOTE
    for wire in mesh.wires(leader):
        wire.hold()
    pending = Pending(leader, 2).wait_on(leader)
    eventually("the leader is fenced", lambda: election(leader)["state"] == "follower")
    _assert_read_only(leader)
    assert not pending.is_answered
    assert queue(leader)["len"] == 1
    second, third = mesh.others(leader)
    for member in (second, third):
        wait_until(member, "has lost the leader", lambda one: one.upstream(leader.id).get("status") != "follow")
        member.configure(replication_synchro_timeout=1)
    promote(second)
    assert mesh.wait_leader(second, third) is second
    write(second, 3)
    for wire in mesh.wires(leader):
        wire.release()
    assert mesh.wait_leader() is second
    assert pending.outcome() == SYNC_ROLLBACK
    mesh.wait_same(second)
    assert [keys(member) for member in mesh] == [[1, 3]] * 3
    assert_converged(*mesh)
    assert verdicts(leader) == verdicts(second) == verdicts(third)


@FIRST
@has_elections
def test_unfenced_leader_continues_alone_and_confirms_when_the_others_return(
    cluster: Cluster, kinds: tuple[str, ...]
) -> None:
    mesh = Mesh(cluster, kinds, replication_synchro_timeout=60, election_fencing_mode="off")
    leader = _elect(mesh)
    term = election(leader)["term"]
    mesh.isolate(leader)
    pending = Pending(leader, 1).wait_on(leader)
    for member in mesh.others(leader):
        wait_until(member, "is lost", lambda one: leader.upstream(one.id).get("status") != "follow")
        wait_until(member, "misses the leader", lambda one: election(one)["leader_idle"] > DEATH_SECONDS)
    assert (election(leader)["state"], leader.info()["ro"]) == ("leader", False)
    mesh.rejoin(leader)
    assert pending.outcome() == 0
    assert mesh.wait_leader() is leader
    assert election(leader)["term"] == term
    _assert_one_history(mesh)


@SEATS
@has_elections
def test_hanging_leader_is_replaced_and_follows_when_it_resumes(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    leader = _elect(mesh, mode="candidate")
    write(leader, 1)
    mesh.wait_same(leader)
    leader.pause()
    successor = mesh.wait_leader(*mesh.others(leader))
    write(successor, 2)
    leader.resume()
    assert mesh.wait_leader() is successor
    write(successor, 3)
    mesh.wait_same(successor)
    assert keys(leader) == [1, 2, 3]
    _assert_one_history(mesh)


@FIRST
@has_elections
def test_a_leader_that_resigns_is_followed_by_another_candidate(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    mesh = Mesh(cluster, kinds)
    leader = _elect(mesh, mode="candidate")
    demote(leader)
    successor = mesh.wait_leader(besides=leader)
    write(successor, 1)
    _assert_one_history(mesh)


# --- members that join later --------------------------------------------------------------------------------------


@pytest.mark.parametrize("joining", ["real", "ours"])
@has_elections
def test_joining_member_knows_owner_and_term_and_does_not_disturb_the_set(cluster: Cluster, joining: str) -> None:
    """It joins a member of the other kind."""
    mesh = Mesh(cluster, ("ours" if joining == "real" else "real", joining))
    leader = _elect(mesh, mode="candidate")
    for number in range(3):
        write(leader, number)
    term = election(leader)["term"]
    third = mesh.join(joining, election_mode="candidate")
    assert mesh.wait_leader() is leader
    assert election(third)["term"] == term
    assert mesh.wait_owner(leader) == term
    write(leader, 3)
    mesh.wait_same(leader)
    promote(third)
    assert mesh.wait_leader() is third
    write(third, 4)
    mesh.wait_same(third)
    assert [keys(member) for member in mesh] == [[0, 1, 2, 3, 4]] * 3
    for member in mesh:
        member.wait_follow(*mesh.others(member))
    assert_converged(*mesh)
    assert third.files("snap")
    assert queue(third)["len"] == 0
    assert third.count(PLAIN) == 0
    assert third.count(SYNCHRONOUS) == 5
