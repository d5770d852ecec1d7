"""Lost quorums, missing leaders and queues without an owner are distinguished."""

from __future__ import annotations

from typing import Any

from flowstone.observation.explanation import explain
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable
from tests.observation.reports import address, downstream, report, upstream, uuid


def _synchro(owner: int = 1, waiting: int = 0, *, term: int = 2, quorum: int = 2, age: float = 0.0) -> dict[str, Any]:
    queue = {"len": waiting, "owner": owner, "term": term, "age": age}
    return {"synchro": {"queue": queue, "quorum": quorum}}


VOTER = {"election_mode": "voter"}


def _of(kind: Kind, *answers: Report | Unreachable) -> list[Finding]:
    return [finding for finding in explain(replica_sets(answers)) if finding.kind is kind]


def test_existing_quorum_has_no_finding() -> None:
    leader = report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}, 3: {}}, **_synchro(waiting=3))
    assert _of(Kind.QUORUM_LOST, leader) == []


def test_owner_without_followers_has_lost_its_quorum() -> None:
    gone = downstream({1: 5}, "stopped", message="unexpected EOF")
    leader = report(1, {1: 9}, {2: {"downstream": gone}, 3: {}}, **_synchro(waiting=4, age=12.5))
    (finding,) = _of(Kind.QUORUM_LOST, leader)
    assert (finding.severity, finding.member) == (Severity.STOPPED, uuid(1))
    assert "4 transactions are pending, the oldest for 12 s" in finding.what
    assert "missing: replica 2, replica 3" in finding.why
    assert finding.advice == (
        "bring replica 2 and replica 3 back. Only if gone for good and never to be started again, in this order: "
        "lower the quorum to the remaining members, on db1:3301: "
        "`flowstone config db1:3301 replication_synchro_quorum=1`; then expel "
        "the missing members: `flowstone expel db1:3301 2` and `flowstone expel db1:3301 3`; then set the quorum back: "
        "`flowstone config db1:3301 'replication_synchro_quorum=N / 2 + 1'`. "
        "With a lowered quorum, committed transactions can be lost"
    )


def test_lost_quorum_of_stopped_followers_advises_no_expulsion() -> None:
    told = upstream(1, "stopped", message="Duplicate key exists in unique index 'pk' in space 's'")
    leader = report(1, {1: 9}, {2: {"downstream": downstream({1: 5}, "stopped")}}, **_synchro(waiting=1, age=3.0))
    first, *_ = explain(replica_sets([leader, report(2, {1: 5}, {1: {"upstream": told}}, ro=True)]))
    assert first.kind is Kind.QUORUM_LOST
    assert first.advice == "let db2:3301 follow db1:3301 again: another finding says why replication stopped"


def test_read_only_former_leader_is_not_reported_as_second_owner() -> None:
    follower, leader = ({"state": state, "term": 10, "leader": 2} for state in ("follower", "leader"))
    stale = report(1, {1: 9}, {2: {}}, ro=True, election=follower, **_synchro(1, term=9))
    assert _of(Kind.TWO_OWNERS, stale, report(2, {1: 9}, {1: {}}, election=leader, **_synchro(2, term=10))) == []


def test_quorum_of_a_2_6_server_is_its_option() -> None:
    alone = report(1, {1: 9}, {2: {}}, version="2.6.0", cfg={"replication_synchro_quorum": 2})
    (finding,) = _of(Kind.QUORUM_LOST, alone)
    assert "the quorum is 2, but only 1 member is available" in finding.why
    assert "`flowstone expel db1:3301 2`. With" in finding.advice  # nothing needs to be reset
    peers = {2: {"downstream": downstream({1: 9})}, 3: {"downstream": downstream({1: 9})}, 4: {}, 5: {}}
    (finding,) = _of(Kind.QUORUM_LOST, report(1, {1: 9}, peers, version="2.6.0", cfg={"replication_synchro_quorum": 5}))
    assert "back: `flowstone config db1:3301 replication_synchro_quorum=2`. With" in finding.advice
    assert _of(Kind.QUORUM_LOST, report(1, {1: 9}, {2: {}}, cfg={"replication_synchro_quorum": 1})) == []


def test_writable_2_6_replica_without_followers_needs_no_quorum() -> None:
    options: dict[str, Any] = {"version": "2.6.0", "cfg": {"replication_synchro_quorum": 2}}
    replica = report(2, {1: 9}, {1: {"upstream": upstream(1)}}, **options)
    master = report(1, {1: 9}, {2: {"downstream": downstream({1: 9})}}, **options)
    assert _of(Kind.QUORUM_LOST, master, replica) == []
    gone = report(1, {1: 9}, {2: {"downstream": downstream({1: 9}, "stopped")}}, **options)
    (finding,) = _of(Kind.QUORUM_LOST, gone, replica)
    assert finding.member == uuid(1)


def _voter(number: int, *, state: str = "follower", leader: int = 0, lsn: int = 5, **more: Any) -> Report:
    peers = {other: {"upstream": upstream(other), "downstream": downstream({1: 5})} for other in (1, 2, 3)}
    del peers[number]
    election = {"state": state, "term": 3, "leader": leader, "vote": 0}
    defaults: dict[str, Any] = _synchro(owner=0) | {"ro": True, "cfg": {"election_mode": "candidate"}}
    return report(number, {1: lsn}, peers, election=election, **(defaults | more))


def test_minority_without_a_leader_has_lost_its_quorum() -> None:
    lost = [Unreachable(address=address(number), reason="connection refused") for number in (2, 3)]
    (finding,) = _of(Kind.QUORUM_LOST, _voter(1), *lost)
    assert "only 1 member is available" in finding.why
    assert "and wait until it is elected; then expel the missing members" in finding.advice


def test_quorum_lost_advice_names_a_member_that_may_lead() -> None:
    lost = [Unreachable(address=address(number), reason="connection refused") for number in (2, 3)]
    for mode, member, how in (
        ("candidate", 1, "wait until it is elected"),
        ("manual", 1, "promote it: `flowstone promote db1:3301`"),
        ("voter", 2, "wait until it is elected"),
    ):
        first = _voter(1, cfg={"election_mode": mode}, lsn=9, **_synchro(owner=0, quorum=3))
        (finding,) = _of(Kind.QUORUM_LOST, first, _voter(2, **_synchro(owner=0, quorum=3)), lost[1])
        assert finding.member == uuid(member)
        assert how in finding.advice
    (finding,) = _of(Kind.QUORUM_LOST, _voter(1, cfg={"election_mode": "voter"}), *lost)
    assert "with `election_mode` set to candidate" in finding.advice


def test_dead_leader_does_not_count() -> None:
    cut = {"upstream": upstream(1, "disconnected", message="connection refused")}
    lost = Unreachable(address=address(1), reason="connection refused")
    election = {"state": "follower", "term": 3, "leader": 1, "vote": 1}
    synchro = _synchro(owner=1)
    cfg = {"election_mode": "candidate"}
    alone = report(2, {1: 5}, {1: cut}, election=election, cfg=cfg, ro=True, **synchro)
    (finding,) = _of(Kind.QUORUM_LOST, lost, alone)
    assert finding.member == uuid(2)
    follows = report(2, {1: 5}, {1: {"upstream": upstream(1)}}, election=election, cfg=cfg, ro=True, **synchro)
    assert _of(Kind.QUORUM_LOST, lost, follows) == [], "it does not answer us, but it leads"


def test_quorum_larger_than_the_set_is_to_be_corrected() -> None:
    alone = report(1, {1: 9}, {2: {"downstream": downstream({1: 9})}}, **_synchro(quorum=3))
    (finding,) = _of(Kind.QUORUM_LOST, alone)
    assert finding.advice == (
        "all members are available: lower the quorum on db1:3301: "
        "`flowstone config db1:3301 'replication_synchro_quorum=N / 2 + 1'`"
    )


def test_majority_without_a_leader_is_reported() -> None:
    (finding,) = _of(Kind.NO_LEADER, _voter(1), _voter(2), _voter(3))
    assert "election is in progress" in finding.why
    assert len(finding.evidence) == 3
    followers = [_voter(number, leader=1) for number in (2, 3)]
    assert _of(Kind.NO_LEADER, _voter(1, state="leader", leader=1, ro=False), *followers) == []


def test_queue_of_a_dead_owner_is_abandoned() -> None:
    lost = Unreachable(address=address(1), reason="connection refused")
    cut = {"upstream": upstream(1, "disconnected", message="timed out")}
    (finding,) = _of(Kind.QUEUE_ABANDONED, lost, report(2, {1: 5}, {1: cut}, **_synchro(waiting=2)))
    assert (finding.member, finding.peer) == (uuid(2), uuid(1))
    assert "2 transactions are pending" in finding.what
    follows = {"upstream": upstream(1)}
    assert _of(Kind.QUEUE_ABANDONED, report(2, {1: 5}, {1: follows}, **_synchro(waiting=2))) == []


def test_promotion_is_advised_for_the_eligible_member_with_the_most_rows() -> None:
    def advised(kind: Kind, *reports: Report | Unreachable) -> Finding:
        (finding,) = _of(kind, *reports)
        assert finding.member == uuid(2)
        return finding

    for mode in ("candidate", "manual"):
        members = [_voter(1), _voter(2, lsn=90, cfg={"election_mode": mode}), _voter(3, lsn=100, cfg=VOTER)]
        finding = advised(Kind.NO_LEADER, *members)
        assert "promote the member with the most rows: `flowstone promote db2:3301`" in finding.advice
    voters = [_voter(1, cfg=VOTER), _voter(2, lsn=90, cfg=VOTER), _voter(3, cfg=VOTER)]
    finding = advised(Kind.NO_LEADER, *voters)
    assert "set `election_mode` to candidate on db2:3301" in finding.advice
    assert "(`flowstone config db2:3301 election_mode=candidate`)" in finding.advice
    assert "promote" not in finding.advice

    lost = Unreachable(address=address(1), reason="connection refused")
    cut = {"upstream": upstream(1, "disconnected", message="timed out")}
    ahead = report(2, {1: 10}, {1: cut, 3: {}}, **_synchro(waiting=1))
    lagging = report(3, {1: 6}, {1: cut, 2: {}}, **_synchro(waiting=4))
    assert "`flowstone promote db2:3301`" in advised(Kind.QUEUE_ABANDONED, lost, ahead, lagging).advice

    unclaimed = {"ro": True, "ro_reason": "synchro"} | _synchro(owner=0, quorum=1)
    members = [report(1, {1: 5}, {2: {}}, **unclaimed), report(2, {1: 5000}, {1: {}}, **unclaimed)]
    assert "`flowstone promote db2:3301`" in advised(Kind.READ_ONLY, *members).advice


def test_two_owners_are_found_before_they_connect() -> None:
    old = report(1, {1: 9}, {2: {}}, **_synchro(1, quorum=1))
    new = report(2, {2: 4}, {1: {}}, **_synchro(2, term=5, quorum=1))
    (finding,) = _of(Kind.TWO_OWNERS, old, new)
    assert (finding.member, finding.peer) == (uuid(1), uuid(2))
    assert "newer term 5" in finding.why


def test_read_only_set_is_reported_with_the_reason() -> None:
    members = [report(number, {}, {3 - number: {}}, ro=True, ro_reason="config") for number in (1, 2)]
    (finding,) = _of(Kind.READ_ONLY, *members)
    assert "`read_only` is set" in finding.why
    unclaimed = report(1, {}, ro=True, ro_reason="synchro", **_synchro(owner=0))
    assert "no member owns the queue" in _of(Kind.READ_ONLY, unclaimed)[0].why
    assert _of(Kind.READ_ONLY, members[0]) == []


def test_stalled_queue_with_a_quorum_is_reported_as_lag() -> None:
    leader = report(1, {1: 5}, {2: {"downstream": downstream({1: 3})}}, **_synchro(waiting=3, age=4.0))
    (finding,) = _of(Kind.QUEUE_WAITS, leader)
    assert finding.severity is Severity.BEHIND
