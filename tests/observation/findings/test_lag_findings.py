"""Members that lack rows are named, whatever servers are down; rows in transit are not reported."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from flowstone.observation.explanation import explain
from flowstone.observation.findings import lag_findings
from flowstone.observation.findings.connection_findings import is_cut_off
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import Member, ReplicaSet, missing_row_count, replica_sets
from flowstone.observation.report import Report, ReportedPeer, ReportedUpstream, Unreachable
from tests.observation.promise import (
    IF_STOPPED,
    OF_FOLLOWERS,
    OF_PAIRS,
    false_alarms,
    is_explained,
    is_whole,
    target_of,
)
from tests.observation.random_sets import answers, answers_in_transit
from tests.observation.reports import address, downstream, report, upstream, uuid

LOADING = "Instance bootstrap hasn't finished yet"


def found(*told: Report | Unreachable) -> tuple[Finding, ...]:
    return explain(replica_sets(told))


def about(number: int, *told: Report | Unreachable) -> Finding:
    """Return the only finding that names the member."""
    (finding,) = (one for one in found(*told) if one.member == uuid(number))
    return finding


def starting(number: int) -> Unreachable:
    return Unreachable(address=address(number), reason=LOADING)


# --- lagging members in random replica sets ---


@given(answers())
def test_every_member_that_lacks_rows_for_long_is_named(told: list[Report | Unreachable]) -> None:
    findings = found(*told)
    for one in replica_sets(told):
        target = target_of(one)
        lacking = [member for member in one.members if member.id and missing_row_count(target, member.vclock)]
        unnamed = [m.label for m in lacking if not is_explained(one, m, findings) and not _is_not_looked_for(one, m)]
        assert not unnamed, [(f.kind.value, f.label, f.what) for f in findings]
        # Only members are checked: another server may lag in a healthy set.
        registered = {member.uuid for member in one.members if member.id}
        assert false_alarms(one, [finding for finding in findings if finding.member in registered]) == []


def _is_not_looked_for(one: ReplicaSet, member: Member) -> bool:
    """Only members with an empty `replication` were queried: findings.md promises nothing about others from that."""
    asked = [each for each in one.members if each.report is not None or each.unreachable is not None]
    return member.report is None and all(is_cut_off(each) for each in asked)


@given(answers())
def test_lagging_member_lacks_rows(told: list[Report | Unreachable]) -> None:
    sets = replica_sets(told)
    for finding in explain(sets):
        if finding.kind is Kind.BEHIND:
            one = next(each for each in sets if each.uuid == finding.replicaset)
            member, peer = one.member(finding.member), one.member(finding.peer or "")
            assert member is not None
            assert peer is not None
            assert missing_row_count(peer.vclock, member.vclock), finding


@given(answers_in_transit(is_whole=True))
def test_complete_set_has_no_findings(told: list[Report]) -> None:
    (one,) = replica_sets(told)
    assert is_whole(one)
    assert explain([one]) == ()


@given(answers_in_transit(is_whole=False))
def test_rows_in_transit_are_not_reported(told: list[Report]) -> None:
    assert found(*told) == ()


@given(answers_in_transit(is_whole=False), st.integers(0, 4))
def test_rows_in_transit_are_not_reported_when_one_member_was_not_queried(told: list[Report], number: int) -> None:
    """Its address is unknown, and its masters know its position."""
    left = [one for one in told if one.id != number + 1]
    assert not any(finding.kind is Kind.BEHIND for finding in found(*left))


def test_kinds_that_explain_a_lag_are_those_of_the_promise() -> None:
    assert lag_findings.EXPLAINING == OF_FOLLOWERS
    assert lag_findings.EXPLAINING_IF_STOPPED == IF_STOPPED
    assert lag_findings.EXPLAINING_BOTH == OF_PAIRS


# --- members that answer ---


def follows(number: int, vclock: dict[int, int], *masters: int, **more: Any) -> Report:
    """Return the report of one of four members that follows `masters` without lag."""
    peers: dict[int, dict[str, Any]] = {other: {} for other in (1, 2, 3, 4) if other != number}
    peers |= {master: {"upstream": upstream(master)} for master in masters}
    return report(number, vclock, peers, ro=number != 1, **more)


def test_member_is_named_if_the_only_member_with_its_rows_is_loading() -> None:
    """Member 3 follows member 2, which was queried, unlike member 3."""
    loading = report(1, {1: 90}, {2: {}, 3: {}, 4: {}}, status="loading", ro=True)
    refused = upstream(1, "loading", message=LOADING)
    second = report(2, {1: 80}, {1: {"upstream": refused}, 3: {}, 4: {}}, ro=True)
    finding = about(3, loading, second, follows(3, {1: 80}, 2), follows(4, {1: 80}, 2))
    assert (finding.kind, finding.severity, finding.peer) == (Kind.BEHIND, Severity.BEHIND, uuid(1))
    assert finding.what == "db3:3301 lags db1:3301 by 10 rows, and no link brings them in time"
    assert finding.why == "db1:3301 is starting and sends no rows yet; db2:3301 lacks these rows, too"
    assert finding.advice == "wait until db1:3301 has started"
    assert "db3:3301 is at {1: 80}" in finding.evidence


def test_member_is_named_if_its_only_upstream_is_starting_or_unreachable() -> None:
    lost = {"upstream": upstream(2, "disconnected", message="connection refused", idle=12.0)}
    third = report(3, {1: 80}, {1: {}, 2: lost}, ro=True)
    first = report(1, {1: 90}, {2: {"downstream": {"status": "stopped", "message": "unexpected EOF"}}, 3: {}})
    finding = about(3, first, third, starting(2))
    assert finding.kind is Kind.BEHIND
    assert finding.why == "db2:3301 is starting and sends no rows yet"
    assert finding.advice.startswith("wait until db2:3301 has started; add db1:3301 to `replication` of db3:3301")
    finding = about(3, first, third, Unreachable(address=address(2), reason="connection refused"))
    assert finding.kind is Kind.BEHIND
    assert finding.why == "db3:3301 does not follow db2:3301: connection refused"
    assert "make sure that db2:3301 runs" in finding.advice


def test_member_is_named_if_its_upstream_lags() -> None:
    """In a chain, the last member has all rows of its upstream."""
    slow = {"upstream": upstream(1, lag=12.0)}
    first = report(1, {1: 90}, {2: {"downstream": downstream({1: 80})}, 3: {}})
    finding = about(3, first, report(2, {1: 80}, {1: slow, 3: {}}, ro=True), follows(3, {1: 80}, 2))
    assert (finding.kind, finding.peer) == (Kind.BEHIND, uuid(1))
    assert finding.why == "db2:3301 lags db1:3301 by 10 rows and 12 s; db2:3301 lacks these rows, too"


def test_member_is_named_if_its_upstream_was_expelled() -> None:
    refused = upstream(1, "stopped", message=f"Replica {uuid(8)} is not registered with replica set")
    expelled = report(8, {1: 80}, {1: {"upstream": refused}, 3: {"downstream": downstream({1: 80})}}, ro=True)
    finding = about(3, report(1, {1: 90}, {3: {}}), expelled, report(3, {1: 80}, {1: {}}, ro=True))
    assert finding.kind is Kind.BEHIND
    assert "db8:3301 lacks these rows, too" in finding.why
    assert "add db1:3301 to `replication` of db3:3301" in finding.advice


def test_rows_that_may_arrive_through_an_unreachable_member_are_a_warning() -> None:
    """Member 4 may forward the rows of member 1 that member 2 receives: neither of the two could be queried."""
    denied = [
        Unreachable(address=address(number), reason="Execute access is denied", is_denied=True) for number in (2, 4)
    ]
    first = report(1, {1: 90}, {2: {"upstream": upstream(2), "downstream": downstream({1: 90})}, 3: {}, 4: {}})
    finding = about(3, first, *denied, follows(3, {1: 80}, 4))
    assert (finding.kind, finding.severity) == (Kind.BEHIND, Severity.WARNING)
    assert finding.what == "db3:3301 lags db1:3301 by 10 rows, and it is unknown whether they are on their way"
    assert finding.why == "db4:3301 denies access, so it is unknown whether it has these rows"
    assert finding.advice.startswith("give the user the right to query db4:3301; add db1:3301 to `replication`")


def test_rows_written_after_the_answer_of_their_member_are_no_lag() -> None:
    first = report(1, {1: 80}, {2: {"upstream": upstream(2), "downstream": downstream({1: 80})}})
    assert found(first, report(2, {1: 90}, {1: {"upstream": upstream(1)}}, ro=True)) == ()


# --- members that could not be queried ---


def test_members_with_unknown_addresses_are_listed_with_candidate_servers() -> None:
    """Member 1 has no upstreams, and two of its followers have restarted. Member 4 also waits for a member 5."""
    first = report(1, {1: 90}, {2: {}, 3: {}, 4: {"downstream": downstream({1: 90})}})
    loading, gone = starting(2), Unreachable(address=address(3), reason="connection refused")
    fourth = follows(4, {1: 90}, 1)
    fourth = msgspec.structs.replace(
        fourth,
        replication=(
            *fourth.replication,
            ReportedPeer(id=5, uuid=uuid(5), upstream=ReportedUpstream(status="connect")),
        ),
    )
    findings = {finding.member: finding for finding in found(first, fourth, loading, gone)}
    for number in (2, 3):
        finding = findings[uuid(number)]
        assert (finding.kind, finding.severity) == (Kind.UNREACHABLE, Severity.WARNING)
        assert finding.what == f"replica {number} could not be queried: no server that answered knows its address"
        assert "It may be the server at db2:3301 (starting) or db3:3301 (unreachable)" in finding.why
        assert "wait until db2:3301 has started; make sure that db3:3301 runs" in finding.advice
        assert f"`flowstone expel db1:3301 {number}`" in finding.advice
    assert findings[address(2)].kind is Kind.STARTING


def test_member_that_is_followed_at_an_unknown_address_runs() -> None:
    peers = {2: {"upstream": {"status": "follow", "idle": 0.1, "lag": 0.001}}}
    finding = about(2, report(1, {1: 90, 2: 5}, peers))
    assert (finding.kind, finding.severity) == (Kind.UNREACHABLE, Severity.WARNING)
    assert finding.why.endswith("it runs: db1:3301 follows it")
    assert finding.advice == "add the address of replica 2 to `flowstone explain`"


def test_servers_that_do_not_answer_are_members_if_their_uuids_are_known() -> None:
    first = report(1, {1: 90}, {2: {}, 3: {}})
    lost = [Unreachable(address=address(number), reason="connection refused", uuid=uuid(number)) for number in (2, 3)]
    assert [(one.kind, one.member, one.label) for one in found(first, *lost)] == [
        (Kind.UNREACHABLE, uuid(number), address(number)) for number in (2, 3)
    ]
