"""The judge of reports: it reports blind spots and false alarms, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowstone.observation.explanation import explain
from flowstone.observation.findings import connection_findings
from flowstone.observation.findings.disk_findings import FREE_BYTES_MIN
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, ReportedDisk, ReportedWal, Unreachable
from tests.observation.promise import (
    IF_STOPPED,
    LOOKS,
    NEVER,
    OF_FOLLOWERS,
    OF_PAIRS,
    PROMISE_SECONDS,
    Promise,
    false_alarms,
    false_readiness,
    is_explained,
    is_whole,
)
from tests.observation.reports import address, downstream, report, upstream, uuid


def lonely(lsn: int) -> list[Report]:
    """Return two members that follow each other, and a third without upstreams."""
    one = report(1, {1: 1000}, {2: {"upstream": upstream(2), "downstream": downstream({1: 1000})}, 3: {}})
    two = report(2, {1: 1000}, {1: {"upstream": upstream(1), "downstream": downstream({1: 1000})}, 3: {}}, ro=True)
    return [one, two, report(3, {1: lsn}, {1: {}, 2: {}}, ro=True)]


def looked(*answers: Report | Unreachable, seconds: float, without: Kind | None = None) -> list[str]:
    """Return the broken promises after polls for that long; `without` is a kind of finding to suppress."""
    promise = Promise()
    sets = replica_sets(answers)
    findings = tuple(finding for finding in explain(sets) if finding.kind is not without)
    for second in range(int(seconds)):
        promise.look(sets, findings, float(second))
    return promise.broken


def test_lag_explained_by_a_finding_is_kept_and_a_blind_spot_reported_once() -> None:
    long = 3 * PROMISE_SECONDS
    assert looked(*lonely(600), seconds=long) == []
    (broken, *more) = looked(*lonely(600), seconds=long, without=Kind.NOT_FOLLOWING)
    assert broken.startswith("no finding explains db3:3301, which lacks 400 rows for 31 s (found: nothing)")
    assert len(more) <= 2


def test_lag_explained_only_by_a_finding_is_counted() -> None:
    promise, sets = Promise(), replica_sets(lonely(600))
    for second in range(int(PROMISE_SECONDS) + 3):
        promise.look(sets, explain(sets), float(second))
    assert (promise.explained, promise.broken) == (2, [])


def test_full_disk_explains_a_lag_and_a_nearly_full_one_does_not() -> None:
    """Every node of a chaos run has less than `FREE_BYTES_MIN`, and therefore a permanent warning."""
    small = ReportedDisk(wal_free_bytes=FREE_BYTES_MIN - 1, memtx_free_bytes=FREE_BYTES_MIN - 1)
    answers = [msgspec.structs.replace(one, disk=small) for one in lonely(600)]
    blind = looked(*answers, seconds=3 * PROMISE_SECONDS, without=Kind.NOT_FOLLOWING)
    assert blind[0].startswith("no finding explains db3:3301, which lacks 400 rows for 31 s (found: disk_full db1:3301")
    assert looked(*answers, seconds=3 * PROMISE_SECONDS) == []
    answers[2] = msgspec.structs.replace(answers[2], wal=ReportedWal(failure="No space left on device"))
    assert looked(*answers, seconds=3 * PROMISE_SECONDS, without=Kind.NOT_FOLLOWING) == []


def test_disk_with_unknown_free_space_does_not_explain_a_lag() -> None:
    answers = lonely(600)
    answers[2] = msgspec.structs.replace(answers[2], disk=ReportedDisk(failure="Input/output error"))
    blind = looked(*answers, seconds=3 * PROMISE_SECONDS, without=Kind.NOT_FOLLOWING)
    assert "found: log_failing db3:3301" in blind[0]


def test_every_kind_of_finding_either_explains_a_lag_or_never_does() -> None:
    assert frozenset(Kind) == OF_FOLLOWERS | NEVER
    assert not OF_FOLLOWERS & NEVER
    assert IF_STOPPED | OF_PAIRS <= OF_FOLLOWERS
    sets = replica_sets(lonely(600))
    third = sets[0].members[2]
    for kind in Kind:
        finding = Finding(
            kind=kind, severity=Severity.STOPPED, member=uuid(3), label=address(3), what="", why="", advice=""
        )
        assert is_explained(sets[0], third, (finding,)) is (kind in OF_FOLLOWERS), kind
        about_another = msgspec.structs.replace(finding, member=uuid(1))
        assert not is_explained(sets[0], third, (about_another,)), kind


@pytest.mark.parametrize("back", ["follow", "disconnected"])
def test_link_that_fails_does_not_explain_a_lag_of_the_upstream_unless_both_directions_fail(back: str) -> None:
    """Member 1 does not reach member 2, which lacks rows."""
    lost = {"status": "disconnected", "message": "connection refused"}
    one = report(1, {1: 1000}, {2: {"upstream": upstream(2) | lost, "downstream": downstream({1: 600})}})
    told = upstream(1) | (lost if back == "disconnected" else {})
    two = report(2, {1: 600}, {1: {"upstream": told}}, ro=True)
    sets = replica_sets([one, two])
    (finding,) = explain(sets)
    assert (finding.kind, finding.member, finding.peer) == (Kind.UNREACHABLE, uuid(1), uuid(2))
    assert is_explained(sets[0], sets[0].members[1], (finding,)) is (back == "disconnected")


def test_lag_may_last_as_long_as_promised() -> None:
    assert looked(*lonely(600), seconds=PROMISE_SECONDS, without=Kind.NOT_FOLLOWING) == []


def test_member_that_makes_progress_is_not_due_and_a_lost_member_is_named() -> None:
    promise = Promise()
    for second in range(200):
        rows: list[Any] = [
            report(1, {1: 1000 + second}, {2: {"upstream": upstream(2), "downstream": downstream({1: 1})}}),
            report(2, {1: 990 + second}, {1: {"upstream": upstream(1)}}, ro=True),
        ]
        promise.look(replica_sets(rows), (), float(second))
    assert promise.broken == []
    gone = Unreachable(address=address(3), reason="connection refused")
    assert looked(*lonely(600)[:2], gone, seconds=3 * PROMISE_SECONDS) == []


def test_set_with_a_running_expelled_member_or_an_empty_replication_is_not_whole() -> None:
    one = report(1, {1: 9}, {2: {"downstream": downstream({1: 9})}}, upstreams_configured=0)
    two = report(2, {1: 9}, {1: {"upstream": upstream(1)}}, ro=True, upstreams_configured=1)
    assert is_whole(replica_sets([one, two])[0])
    assert not is_whole(replica_sets([one, two, report(3, {1: 8}, {1: {}, 2: {}}, ro=True)])[0])
    assert not is_whole(replica_sets([one, report(2, {1: 9}, {1: {}}, ro=True, upstreams_configured=0)])[0])


def test_finding_about_a_whole_set_is_a_false_alarm() -> None:
    sets = replica_sets(lonely(1000))
    assert is_whole(sets[0])
    (alarm,) = explain(replica_sets(lonely(600)))
    assert isinstance(alarm, Finding)
    promise = Promise()
    for second in range(LOOKS):
        assert promise.broken == []
        promise.look(sets, (alarm,), float(second))
    assert [text.partition(":")[0] for text in promise.broken] == ["false alarm not_following"]


def electing(number: int, mode: str) -> Report:
    """Two voters that follow each other, and a third member that follows both and that neither of them lists."""
    others = [other for other in (1, 2, 3) if other != number]
    peers: dict[int, dict[str, Any]] = {other: {} for other in others}
    for other in others:
        if other != 3:
            peers[other]["upstream"] = upstream(other)
        if number != 3:
            peers[other]["downstream"] = downstream({1: 9})
    state = "leader" if number == 1 else "follower"
    election = {"state": state, "term": 3, "leader": 1, "vote": 1}
    return report(number, {1: 9}, peers, cfg={"election_mode": mode}, election=election, ro=number != 1)


def test_alarm_about_a_member_that_does_not_vote_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    voters = [electing(1, "candidate"), electing(2, "candidate")]
    for answers in ([*voters, electing(3, "candidate")], [*voters, electing(3, "off")], voters):
        assert looked(*answers, seconds=LOOKS) == []
    monkeypatch.setattr(connection_findings, "_mode", lambda member: "candidate")
    broken = looked(*voters, electing(3, "off"), seconds=LOOKS)
    assert {text.partition(":")[0] for text in broken} == {"false alarm not_followed"}


def test_alarm_about_a_member_that_is_loading_is_false() -> None:
    answers = [electing(1, "candidate"), electing(2, "candidate"), electing(3, "candidate")]
    (alarm,) = explain(replica_sets(answers))
    loading = [msgspec.structs.replace(one, status="loading") for one in answers]
    assert [bool(false_alarms(replica_sets(each)[0], (alarm,))) for each in (answers, loading)] == [False, True]


# --- `/health/ready` ---


def test_ready_node_that_is_isolated_is_reported_after_some_polls() -> None:
    answers = [msgspec.structs.replace(one, upstreams_configured=int(one.id != 3)) for one in lonely(600)]
    sets, ready = replica_sets(answers), {address(number): True for number in (1, 2, 3)}
    findings, promise = explain(sets), Promise()
    for second in range(LOOKS):
        assert promise.broken == []
        promise.look(sets, findings, float(second), ready)
    (broken,) = promise.broken
    assert broken.startswith("db3:3301 is ready, but found is not_following: db3:3301 follows no other member")
    assert false_readiness(sets[0], findings, ready | {address(3): False}) == []


def test_ready_node_that_cannot_write_is_an_orphan_or_does_not_answer_is_reported() -> None:
    one, two, three = lonely(1000)
    gone = Unreachable(address=address(3), reason="connection refused")
    for third in (
        msgspec.structs.replace(three, wal=ReportedWal(failure="Input/output error")),
        msgspec.structs.replace(three, status="orphan"),
        gone,
    ):
        sets = replica_sets([one, two, third])
        found = [false_readiness(sets[0], explain(sets), {address(3): is_ready}) for is_ready in (True, False)]
        assert [len(each) for each in found] == [1, 0], found


def test_node_with_an_unreachable_peer_may_be_ready() -> None:
    lost = {"status": "disconnected", "message": "connection refused"}
    one = report(1, {1: 9}, {2: {"upstream": upstream(2) | lost}})
    sets = replica_sets([one, Unreachable(address=address(2), reason="connection refused")])
    assert false_readiness(sets[0], explain(sets), {address(1): True}) == []


def test_unready_node_in_a_healthy_set_is_reported() -> None:
    sets = replica_sets(lonely(1000))
    assert is_whole(sets[0])
    assert false_readiness(sets[0], (), {address(1): True, address(2): False}) == [
        "db2:3301 is not ready, and its replica set is whole"
    ]
