"""Conditions under which a replica set needs attention."""

from __future__ import annotations

from typing import Any

import msgspec

from flowstone.observation.explanation import explain
from flowstone.observation.findings.finding import Kind
from flowstone.observation.health import complaints
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable
from tests.observation.reports import address, downstream, pair, report, upstream, uuid


def of(*answers: Report | Unreachable) -> tuple[str, ...]:
    (found,) = replica_sets(answers)
    return complaints(found)


def test_healthy_set_has_no_problems() -> None:
    assert of(*pair({1: 5}, {1: 5}, {})) == ()
    assert of(*pair({1: 9}, {1: 5}, {"lag": 0.2})) == ()


def test_health_names_an_unreachable_member_once() -> None:
    lost = Unreachable(address=address(2), reason=f"cannot connect to {address(2)}: connection refused")
    master = report(1, {1: 5}, {2: {"upstream": upstream(2, "disconnected"), "downstream": {"status": "stopped"}}})
    assert of(master, lost) == ("db2:3301 is unreachable: connection refused",)


def test_health_reports_denied_access() -> None:
    denied = Unreachable(address=address(1), reason="Execute access is denied", is_denied=True)
    assert of(denied) == ("db1:3301 denies access: Execute access is denied",)


def test_stopped_link_is_reported_with_its_message() -> None:
    found = of(*pair({1: 9}, {1: 5}, {"status": "stopped", "message": "Duplicate key"}))
    assert found == ("db2:3301 does not follow db1:3301: stopped, Duplicate key",)


def test_connecting_link_is_not_a_problem() -> None:
    assert of(*pair({1: 9}, {}, {"status": "wait_snapshot", "lag": None})) == ()


def test_health_names_a_lagging_member_with_seconds_and_rows() -> None:
    assert of(*pair({1: 900}, {1: 5}, {"lag": 34.4})) == ("db2:3301 lags db1:3301 by 895 rows and 34 s",)


def test_explain_and_status_agree_on_lag_and_list_each_follower_once() -> None:
    """A slow member is slow for all clients."""
    for lag, count in ((4.0, 0), (7.0, 1)):
        slow = {1: 10, 2: 5}
        masters = [
            report(n, {1: 1000, 2: 5 + n}, {4: {"downstream": downstream(slow)}} | _followed(*{1, 2, 3} - {n}))
            for n in (1, 2, 3)
        ]
        sides = {n: {"upstream": upstream(n, lag=lag)} for n in (1, 2, 3)}
        sets = replica_sets([*masters, report(4, slow, sides, ro=True)])
        found = [one for one in explain(sets) if one.kind is Kind.BEHIND]
        assert [(one.member, one.peer) for one in found] == [(uuid(4), uuid(3))] * count
        said = [line for line in complaints(sets[0]) if " lags " in line]
        assert said == ["db4:3301 lags db3:3301 by 993 rows and 7 s"] * count


def _followed(*numbers: int) -> dict[int, dict[str, Any]]:
    return {number: {"upstream": upstream(number), "downstream": downstream({})} for number in numbers}


def test_member_known_only_to_others_must_be_connected() -> None:
    assert of(report(1, {1: 5}, {2: {"downstream": downstream({1: 5})}})) == ()
    assert of(report(1, {1: 5}, {2: {}})) == ("replica 2 has no connection to any other member",)
    stopped = {"status": "stopped", "message": "unexpected EOF when reading from socket"}
    assert of(report(1, {1: 5}, {2: {"downstream": stopped}})) == ("replica 2 has no connection to any other member",)


def test_orphan_does_not_count_as_running() -> None:
    (text,) = of(report(1, {1: 5}, status="orphan"))
    assert text == "db1:3301 has status orphan, not running"


def test_set_without_a_writable_member_is_reported() -> None:
    assert of(report(1, {1: 5}, ro=True)) == ("no member is writable",)


def test_missing_leader_of_an_election_is_reported() -> None:
    election = {"state": "follower", "term": 7, "leader": 0, "vote": 1}
    found = of(report(1, {1: 5}, election=election, ro=True, cfg={"election_mode": "candidate"}))
    assert found == ("no leader in term 7",)


def test_stalled_queue_is_reported() -> None:
    def waiting(age: float) -> dict[str, Any]:
        return {"synchro": {"queue": {"len": 3, "owner": 1, "age": age}}}

    assert of(report(1, {1: 5}, **waiting(2.0))) == ()
    assert of(report(1, {1: 5}, **waiting(33.3))) == ("synchronous transactions pending: 3, the oldest for 33 s",)


def test_running_copy_is_reported_with_both_addresses() -> None:
    one, copy = report(1, {1: 5}, pid=1), msgspec.structs.replace(report(1, {1: 5}, pid=2), address="db9:3301")
    assert of(one, copy) == ("two processes run as one member: db1:3301 and db9:3301",)
    assert of(one, msgspec.structs.replace(one, address="localhost:3301")) == ()
