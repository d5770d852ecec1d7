"""Missing links: rows and votes that cannot reach a member, and servers that are not members."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowstone.observation.explanation import explain
from flowstone.observation.findings.connection_findings import connection_findings, is_alive
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.health import complaints
from flowstone.observation.query import upstreams_configured
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable
from tests.observation.reports import address, downstream, report, upstream, uuid


def found(*answers: Report | Unreachable) -> tuple[Finding, ...]:
    return explain(replica_sets(answers))


def mesh(
    number: int, vclock: dict[int, int], follows: tuple[int, ...], followed: tuple[int, ...], **more: Any
) -> Report:
    """Return one member of four, with some upstreams and followers."""
    peers: dict[int, dict[str, Any]] = {other: {} for other in (1, 2, 3, 4) if other != number}
    for other in follows:
        peers[other]["upstream"] = upstream(other)
    for other in followed:
        peers[other]["downstream"] = downstream(vclock)
    return report(number, vclock, peers, **more)


def trio(third: Report) -> list[Report]:
    one, two = {1: 1000}, {1: 1000}
    return [
        report(1, one, {2: {"upstream": upstream(2), "downstream": downstream(two)}, 3: {}}),
        report(2, two, {1: {"upstream": upstream(1), "downstream": downstream(one)}, 3: {}}, ro=True),
        third,
    ]


def test_member_without_upstreams_that_lacks_rows_is_found() -> None:
    answers = trio(report(3, {1: 600}, {1: {}, 2: {}}, ro=True))
    (finding,) = found(*answers)
    assert (finding.kind, finding.severity, finding.member) == (Kind.NOT_FOLLOWING, Severity.STOPPED, uuid(3))
    assert finding.what == "db3:3301 follows no other member, and lacks 400 rows of db1:3301"
    assert "to `replication` of db3:3301" in finding.advice
    assert complaints(replica_sets(answers)[0]) == (finding.what,)


def test_member_without_upstreams_that_has_all_rows_is_healthy() -> None:
    assert found(*trio(report(3, {1: 1000}, {1: {}, 2: {}}, ro=True))) == ()


def test_rows_relayed_by_another_member_are_not_missing() -> None:
    chain = report(3, {1: 990}, {1: {}, 2: {"upstream": upstream(2)}}, ro=True)
    assert found(*trio(chain)) == ()


def test_failed_link_explains_missing_rows_alone() -> None:
    stopped = upstream(1, "stopped", message="Duplicate key exists in unique index 'pk' in space 'ledger'")
    findings = found(*trio(report(3, {1: 600}, {1: {"upstream": stopped}, 2: {}}, ro=True)))
    assert [finding.kind for finding in findings] == [Kind.DUPLICATE_KEY]


def test_each_member_that_lacks_rows_of_an_unfollowed_member_is_named() -> None:
    one = report(1, {1: 5}, {2: {"upstream": upstream(2)}, 3: {}})
    two = report(2, {1: 5}, {1: {"upstream": upstream(1)}, 3: {}})
    three = report(3, {1: 5, 3: 7}, {1: {"upstream": upstream(1)}, 2: {}})
    findings = found(one, two, three)
    assert [(finding.kind, finding.member, finding.peer) for finding in findings] == [
        (Kind.NOT_FOLLOWING, uuid(1), uuid(3)),
        (Kind.NOT_FOLLOWING, uuid(2), uuid(3)),
    ]
    assert findings[1].what == "db2:3301 does not get the rows of db3:3301, and lacks 7 rows of db3:3301"
    assert findings[1].why.endswith(": db2:3301 follows only db1:3301")


def test_member_without_upstreams_lacks_rows_acknowledged_by_its_followers() -> None:
    """Only the member itself was queried."""
    follower = {"downstream": downstream({1: 1000, 3: 7})}
    alone = report(3, {1: 600, 3: 7}, {1: follower, 2: follower}, ro=True, upstreams_configured=0)
    (finding,) = found(alone)
    assert (finding.kind, finding.severity, finding.member) == (Kind.NOT_FOLLOWING, Severity.STOPPED, uuid(3))
    assert finding.what == "db3:3301 follows no other member, and lacks 400 rows of replica 1"
    assert finding.why == "`replication` of db3:3301 is empty"
    assert finding.what in complaints(replica_sets([alone])[0])


def test_rows_of_a_silent_member_may_arrive_through_another_silent_member() -> None:
    ahead = {"downstream": downstream({1: 1000})}
    assert found(report(3, {1: 999}, {1: {"upstream": upstream(1)}, 2: ahead}, ro=True)) == ()


def test_master_does_not_lack_rows_that_it_wrote_before_its_follower_answered() -> None:
    master = report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}}, upstreams_configured=0)
    assert found(master, report(2, {1: 8}, {1: {"upstream": upstream(1)}}, ro=True)) == ()


@pytest.mark.parametrize("followers", [(), (1, 2)])
def test_voter_with_an_empty_replication_has_only_that_finding(followers: tuple[int, ...]) -> None:
    """It has no connections: the others may run, have a quorum and a leader."""
    peers: dict[int, dict[str, Any]] = {number: {} for number in (1, 2, 4)}
    peers |= {number: {"downstream": downstream({1: 9})} for number in followers}
    voter = report(
        3,
        {1: 9},
        peers,
        cfg={"election_mode": "voter", "replication_synchro_quorum": "N / 2 + 1"},
        upstreams_configured=0,
        election={"state": "follower", "term": 9, "leader": 0, "vote": 0},
        synchro={"queue": {"owner": 3, "term": 3}, "quorum": 3},
        ro=True,
    )
    (finding,) = found(voter)
    assert (finding.kind, finding.severity, finding.member) == (Kind.NOT_FOLLOWING, Severity.STOPPED, uuid(3))
    assert finding.what == "db3:3301 follows no other member: it gets no rows and no votes"
    assert "its `replication` is empty" in finding.why
    command = "`flowstone config db3:3301 replication=URI,URI,…` with all upstreams"
    assert finding.advice == f"add the other members to `replication` of db3:3301: {command}"
    assert complaints(replica_sets([voter])[0]) == (finding.what,)


@pytest.mark.parametrize("configured", [None, 2])
def test_voter_without_a_working_upstream_has_lost_its_quorum(configured: int | None) -> None:
    cfg = {"election_mode": "voter", "replication_synchro_quorum": "N / 2 + 1"}
    election = {"state": "follower", "term": 9, "leader": 0, "vote": 0}
    voter = report(3, {1: 9}, {1: {}, 2: {}}, cfg=cfg, upstreams_configured=configured, election=election, ro=True)
    assert found(voter)[0].kind is Kind.QUORUM_LOST


def test_empty_replication_stops_a_replica_and_not_a_master() -> None:
    replica = report(2, {1: 9}, {1: {}}, upstreams_configured=0, ro=True)
    assert [finding.what for finding in found(replica)] == ["db2:3301 follows no other member: it gets no rows"]
    master = report(1, {1: 9}, {2: {"downstream": downstream({1: 9})}}, upstreams_configured=0)
    assert found(master) == ()


ELECTION = {"election": {"state": "follower", "term": 3, "leader": 1, "vote": 1}, "ro": True}
LEADER = {"election": {"state": "leader", "term": 3, "leader": 1, "vote": 1}}


def four(**more: Any) -> list[Report]:
    """Three that follow each other, and a fourth that follows them and that none of them lists."""
    three = (1, 2, 3)
    cfg = {"election_mode": "candidate"} | more
    return [
        mesh(
            number,
            {1: 9},
            tuple(other for other in three if other != number),
            tuple(other for other in (1, 2, 3, 4) if other != number and number != 4),
            cfg=cfg,
            **(LEADER if number == 1 else ELECTION),
        )
        for number in (1, 2, 3, 4)
    ]


def test_member_unlisted_by_the_others_is_found_before_an_election() -> None:
    (finding,) = found(*four())
    assert (finding.kind, finding.severity, finding.member) == (Kind.NOT_FOLLOWED, Severity.WARNING, uuid(4))
    assert finding.what == "db1:3301 and db2:3301 and db3:3301 do not follow db4:3301: its votes do not reach them"
    command = "`flowstone config URI replication=URI,URI,…` with all upstreams"
    assert finding.advice == f"add db4:3301 to `replication` of db1:3301 and db2:3301 and db3:3301: {command}"


@pytest.mark.parametrize("asked", [1, 3])
@pytest.mark.parametrize("is_denied", [False, True])
def test_unlisted_member_is_found_without_its_address(asked: int, is_denied: bool) -> None:
    denied = Unreachable(address=address(4), reason="Execute access is denied", is_denied=True)
    findings = found(*four()[:asked], *([denied] if is_denied else []))
    (finding,) = [finding for finding in findings if finding.kind is Kind.NOT_FOLLOWED]
    names = " and ".join(address(number) for number in range(1, asked + 1))
    does = "do" if asked > 1 else "does"
    label = address(4) if is_denied and asked == 3 else "replica 4"  # only one member can have this UUID
    assert (finding.member, finding.severity) == (uuid(4), Severity.WARNING)
    assert finding.what.startswith(f"{names} {does} not follow {label}: if it votes, its votes do not reach ")
    assert "counts for the quorum" in finding.why
    assert "`election_mode` could not be read" in finding.why
    assert finding.advice.startswith(f"add {label} to `replication` of {names}: `flowstone config ")
    assert "; if it only serves reads," in finding.advice


def test_read_replica_without_a_vote_need_not_be_listed_by_the_voters() -> None:
    *voters, replica = four()
    assert found(*voters, msgspec.structs.replace(replica, cfg={"election_mode": "off"})) == ()


def test_loading_voter_is_not_reported_as_missing_votes() -> None:
    """Its `replication` may list all of them: while it loads, it has no upstreams."""
    cfg = {"election_mode": "candidate"}
    loading = report(3, {1: 9}, {1: {}, 2: {}}, cfg=cfg, status="loading", **ELECTION)
    gone = {"upstream": upstream(3, "disconnected")}
    answers = [
        report(number, {1: 9}, {other: {"upstream": upstream(other)}, 3: gone}, cfg=cfg, **election)
        for number, other, election in ((1, 2, LEADER), (2, 1, ELECTION))
    ]
    kinds = {finding.kind for finding in found(*answers, loading)}
    assert Kind.STARTING in kinds
    assert Kind.NOT_FOLLOWED not in kinds


def test_one_way_replication_without_elections_has_no_findings() -> None:
    assert found(*four(election_mode="off")[1:1]) == ()
    master = report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}}, cfg={"election_mode": "off"})
    replica = report(2, {1: 5}, {1: {"upstream": upstream(1)}}, ro=True, cfg={"election_mode": "off"})
    assert found(master, replica) == ()


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "address unknown"])
def test_advice_after_a_death_does_not_expel_a_running_member(is_asked: bool) -> None:
    """Three voters of four run and the quorum is three, but no member receives the votes of the fourth."""
    dead = Unreachable(address=address(1), reason="cannot connect to db1:3301: connection refused")
    nobody = {"election": {"state": "follower", "term": 9, "leader": 0, "vote": 0}, "ro": True}
    cut = {"upstream": upstream(1, "disconnected", message="connection refused")}
    cfg, synchro = {"election_mode": "candidate"}, {"synchro": {"queue": {"owner": 1, "term": 3}, "quorum": 3}}
    answers: list[Report | Unreachable] = [dead]
    for number, other in ((2, 3), (3, 2)):
        peers = {
            1: cut,
            other: {"upstream": upstream(other), "downstream": downstream({1: 9})},
            4: {"downstream": downstream({1: 9})},
        }
        answers.append(report(number, {1: 9}, peers, cfg=cfg, **nobody, **synchro))
    if is_asked:
        peers = {1: cut, 2: {"upstream": upstream(2)}, 3: {"upstream": upstream(3)}}
        answers.append(report(4, {1: 9}, peers, cfg=cfg, **nobody, **synchro))
    findings = found(*answers)
    assert Kind.NOT_FOLLOWED in {finding.kind for finding in findings}
    assert Kind.NO_LEADER in {finding.kind for finding in findings}
    assert not any(" 4`" in finding.advice or "flowstone promote db4" in finding.advice for finding in findings)


def test_running_expelled_member_is_found() -> None:
    for third in (
        report(3, {1: 999}, {1: {"upstream": upstream(1)}, 2: {}}),
        report(3, {1: 1000}, {1: {}, 2: {}}, id=0, cfg={"replication_anon": False}),
    ):
        one, two = {1: 1000}, {1: 1000}
        findings = found(
            report(1, one, {2: {"upstream": upstream(2), "downstream": downstream(two)}}),
            report(2, two, {1: {"upstream": upstream(1), "downstream": downstream(one)}}, ro=True),
            third,
        )
        assert [(finding.kind, finding.member) for finding in findings] == [(Kind.NOT_REGISTERED, uuid(3))]


def expelled_trio() -> list[Report]:
    """Three voters; the third was expelled while it was down, and does not know it."""
    cfg = {"election_mode": "candidate", "replication_synchro_quorum": "N / 2 + 1"}
    queue = {"synchro": {"queue": {"owner": 1, "term": 14}, "quorum": 2}}
    leader = {"election": {"state": "leader", "term": 14, "leader": 1, "vote": 1}}
    follower = {"election": {"state": "follower", "term": 14, "leader": 1, "vote": 1}, "ro": True}
    alone = {"election": {"state": "candidate", "term": 15, "leader": 0, "vote": 3}, "ro": True}
    refused = f"Replica {uuid(3)} is not registered with replica set"
    old = {number: {"upstream": upstream(number, "stopped", message=refused)} for number in (1, 2)}
    return [
        report(1, {1: 9}, {2: {"upstream": upstream(2), "downstream": downstream({1: 9})}}, cfg=cfg, **leader, **queue),
        report(
            2, {1: 9}, {1: {"upstream": upstream(1), "downstream": downstream({1: 9})}}, cfg=cfg, **follower, **queue
        ),
        report(3, {1: 8}, {**old, 4: {}}, cfg=cfg, status="orphan", **alone, **queue),
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_expelled_member_that_lacks_its_expulsion_row_has_no_other_finding(order: tuple[int, ...]) -> None:
    answers = [expelled_trio()[number] for number in order]
    findings = found(*answers)
    assert {(finding.kind, finding.member) for finding in findings} == {(Kind.NOT_REGISTERED, uuid(3))}
    assert not any("flowstone expel" in finding.advice for finding in findings)


def test_member_is_not_considered_expelled_if_only_it_answers() -> None:
    third = expelled_trio()[2]
    assert replica_sets([third])[0].find("3") is not None


def test_term_and_members_are_not_taken_from_an_expelled_member() -> None:
    (one,) = replica_sets(expelled_trio())
    assert (one.term, one.leader, one.failover) == (14, 1, "election")
    assert [member.uuid for member in one.members if member.id] == [uuid(1), uuid(2)]
    assert [one.role(member) for member in one.members if member.report] == ["leader", "follower", "expelled"]
    assert not any("no leader" in text for text in complaints(one))
    assert not any("replica 4" in text for text in complaints(one))


def test_new_member_and_anonymous_replica_are_not_considered_expelled() -> None:
    one = report(1, {1: 10}, {2: {"upstream": upstream(2)}})
    two = report(2, {1: 10}, {1: {"upstream": upstream(1)}}, ro=True)
    new = report(3, {1: 11}, {1: {"upstream": upstream(1)}, 2: {}}, ro=True)
    assert all(finding.kind is not Kind.NOT_REGISTERED for finding in found(one, two, new))
    anonymous = report(3, {1: 10}, {1: {"upstream": upstream(1)}}, ro=True, id=0, cfg={"replication_anon": True})
    assert found(one, two, anonymous) == ()


def test_unreachable_member_is_not_alive_because_of_stale_links() -> None:
    peers = {2: {"upstream": upstream(2)}, 3: {"downstream": downstream({1: 5})}}
    (one,) = replica_sets([report(1, {1: 5}, peers), Unreachable(address=address(2), reason="connection refused")])
    assert [is_alive(one, member) for member in one.members] == [True, False, True]
    assert list(connection_findings(one)) == []


def test_members_that_expelled_each_other_are_both_reported() -> None:
    findings = found(report(1, {2: 1}, {}), report(2, {1: 1}, {}))
    told = {finding.member for finding in findings if finding.kind is Kind.NOT_REGISTERED}
    assert told == {uuid(1), uuid(2)}


def test_upstream_that_has_not_answered_is_not_reported_as_missing_from_replication() -> None:
    """After a restart, `box.info.replication` does not show upstreams that have not answered."""
    master = report(1, {1: 600}, {2: {}, 3: {"downstream": downstream({1: 600})}})
    other = report(3, {1: 600}, {1: {"upstream": upstream(1)}, 2: {}}, ro=True, upstreams_configured=1)
    for configured, is_certain in ((2, False), (0, True)):
        waiting = report(2, {1: 200}, {1: {}, 3: {}}, ro=True, upstreams_configured=configured)
        (finding,) = (each for each in found(master, other, waiting) if each.kind is Kind.NOT_FOLLOWING)
        assert finding.member == uuid(2)
        assert "lacks 400 rows" in finding.what
        assert ("has not answered db2:3301 yet" in finding.why) is not is_certain
        assert finding.advice.startswith("add" if is_certain else "check the network from db2:3301 to db1:3301")


def test_node_counts_the_other_servers_of_its_replication() -> None:
    options = {"replication": ["a@127.0.0.1:3301", "a@127.0.0.1:3302"], "listen": "127.0.0.1:3301"}
    assert upstreams_configured(options) == 1
    assert upstreams_configured(options | {"replication": ["a@localhost:3301"]}) == 0
    assert upstreams_configured({"replication": ["a@127.0.0.1:3301"]}) == 1
    assert upstreams_configured(options | {"replication": ["a@127.0.0.2:3301"]}) == 1
    assert upstreams_configured({}) == 0
    assert upstreams_configured({"replication": 3}) == 3
