"""The judge of reports: it tells blind spots and false alarms, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowstone.observation import connection_findings
from flowstone.observation.explanation import explain
from flowstone.observation.finding import Finding, Kind
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable
from tests.observation.promise import LOOKS, PROMISE_SECONDS, Promise, false_alarms, is_whole
from tests.observation.reports import address, downstream, report, upstream


def lonely(lsn: int) -> list[Report]:
    """Two that follow each other, and a third that follows nobody."""
    one = report(1, {1: 1000}, {2: {"upstream": upstream(2), "downstream": downstream({1: 1000})}, 3: {}})
    two = report(2, {1: 1000}, {1: {"upstream": upstream(1), "downstream": downstream({1: 1000})}, 3: {}}, ro=True)
    return [one, two, report(3, {1: lsn}, {1: {}, 2: {}}, ro=True)]


def looked(*answers: Report | Unreachable, seconds: float, without: Kind | None = None) -> list[str]:
    """What is broken after looks for so long; `without` is a kind of finding that is blind."""
    promise = Promise()
    sets = replica_sets(answers)
    findings = tuple(finding for finding in explain(sets) if finding.kind is not without)
    for second in range(int(seconds)):
        promise.look(sets, findings, float(second))
    return promise.broken


def test_lag_that_a_finding_explains_is_kept_and_a_blind_spot_is_told_once() -> None:
    long = 3 * PROMISE_SECONDS
    assert looked(*lonely(600), seconds=long) == []
    (broken, *more) = looked(*lonely(600), seconds=long, without=Kind.NOT_FOLLOWING)
    assert broken.startswith("no finding names db3:3301, which lacks 400 rows for 31 s (found: nothing)")
    assert len(more) <= 2


def test_lag_may_last_as_long_as_promised() -> None:
    assert looked(*lonely(600), seconds=PROMISE_SECONDS, without=Kind.NOT_FOLLOWING) == []


def test_member_that_moves_is_not_due_and_member_that_is_gone_is_named() -> None:
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


def test_set_with_an_expelled_member_that_runs_or_an_empty_replication_is_not_whole() -> None:
    one = report(1, {1: 9}, {2: {"downstream": downstream({1: 9})}}, upstreams_configured=0)
    two = report(2, {1: 9}, {1: {"upstream": upstream(1)}}, ro=True, upstreams_configured=1)
    assert is_whole(replica_sets([one, two])[0])
    assert not is_whole(replica_sets([one, two, report(3, {1: 8}, {1: {}, 2: {}}, ro=True)])[0])
    assert not is_whole(replica_sets([one, report(2, {1: 9}, {1: {}}, ro=True, upstreams_configured=0)])[0])


def test_finding_about_a_set_that_is_whole_is_a_false_alarm() -> None:
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
