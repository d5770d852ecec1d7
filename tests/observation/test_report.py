"""Reports built from `box.info` of several versions, and from arbitrary answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.observation.report import TEXT_MAX, Report, ReportedQueue, printable, report_of, vclock_of
from tests.observation.reports import uuid

INFO_2_6: dict[str, Any] = {
    "version": "2.6.0-0-g47aa4e01e",
    "id": 1,
    "ro": False,
    "uuid": uuid(1),
    "package": "Tarantool",
    "cluster": {"uuid": uuid(9)},
    "listen": "127.0.0.1:3301",
    "replication_anon": {"count": 0},
    "replication": (
        {"id": 1, "uuid": uuid(1), "lsn": 8},
        {
            "id": 2,
            "uuid": uuid(2),
            "lsn": 0,
            "upstream": {"status": "follow", "idle": 0.01, "peer": "replicator@127.0.0.1:3302", "lag": 0.0002},
            "downstream": {"status": "follow", "idle": 0.02, "vclock": (8,)},
        },
    ),
    "signature": 8,
    "status": "running",
    "vclock": (8,),
    "uptime": 3,
    "lsn": 8,
    "sql": (),
    "gc": (),
    "vinyl": (),
    "memory": (),
    "pid": 10488,
}
"""As answered by a real server, whose tables count from 1."""

INFO_3: dict[str, Any] = {
    "version": "3.8.0-0-gabc",
    "id": 2,
    "uuid": uuid(2),
    "name": "storage-001-b",
    "package": "Tarantool",
    "cluster": {"name": "shop"},
    "replicaset": {"uuid": uuid(9), "name": "storage-001"},
    "ro": True,
    "ro_reason": "election",
    "status": "running",
    "listen": ("127.0.0.1:3302", "[::1]:3302"),
    "vclock": {0: 4, 1: 300, 2: 7},
    "lsn": 7,
    "uptime": 12.5,
    "pid": 7,
    "hostname": "db2",
    "schema_version": 91,
    "replication": {
        1: {
            "id": 1,
            "uuid": uuid(1),
            "name": "storage-001-a",
            "lsn": 300,
            "upstream": {
                "status": "stopped",
                "lag": 3153600000,
                "idle": 41.5,
                "peer": "replicator@db1:3301",
                "message": 'Duplicate key exists in unique index "pk"',
            },
            "downstream": {"status": "follow", "vclock": {0: 1, 1: 300, 2: 7}, "idle": 0.2, "lag": 0.0001},
        },
        2: {"id": 2, "uuid": uuid(2), "name": "storage-001-b", "lsn": 7},
    },
    "election": {
        "state": "follower",
        "term": 5,
        "vote": 0,
        "leader": 1,
        "leader_name": "storage-001-a",
        "leader_idle": 0.25,
    },
    "synchro": {
        "quorum": 2,
        "queue": {"len": 3, "size": 360, "owner": 1, "term": 5, "busy": False, "age": 1.5, "confirm_lag": 0.1},
    },
    "config": {"status": "ready"},
}


def test_report_of_2_6_has_the_fields_of_2_6() -> None:
    report = report_of("db1:3301", INFO_2_6, gc=(), anonymous=())
    assert (report.id, report.uuid, report.replicaset_uuid) == (1, uuid(1), uuid(9))
    assert report.vclock == {1: 8}
    assert report.replication[1].downstream is not None
    assert report.replication[1].downstream.vclock == {1: 8}
    assert report.replication[1].downstream.lag is None
    assert (report.election, report.queue, report.gc, report.cfg, report.ro_reason) == (None,) * 5
    assert not report.is_flowstone


def test_a_report_of_3_has_names_election_and_queue() -> None:
    report = report_of("db2:3301", INFO_3)
    assert (report.name, report.replicaset_name, report.replicaset_uuid) == ("storage-001-b", "storage-001", uuid(9))
    assert (report.vclock, report.signature) == ({1: 300, 2: 7}, 307)
    assert report.listen == "127.0.0.1:3302, [::1]:3302"
    assert report.election is not None
    assert (report.election.term, report.election.leader, report.election.leader_name) == (5, 1, "storage-001-a")
    assert report.queue == ReportedQueue(len=3, owner=1, term=5, age=1.5, size=360, confirm_lag=0.1, quorum=2)
    assert report.replication[0].downstream is not None
    assert report.replication[0].downstream.lag == 0.0001


def test_report_has_no_lag_before_the_first_row() -> None:
    stopped = report_of("db2:3301", INFO_3).replication[0].upstream
    assert stopped is not None
    assert (stopped.status, stopped.lag, stopped.idle) == ("stopped", None, 41.5)


def test_lag_since_1970_belongs_to_a_heartbeat_without_a_timestamp() -> None:
    peers = ({"id": 2, "uuid": uuid(2), "upstream": {"status": "follow", "lag": 1794786855.1}},)
    (peer,) = report_of("db1:3301", INFO_2_6 | {"replication": peers}).replication
    assert peer.upstream is not None
    assert peer.upstream.lag is None


def test_a_queue_of_2_8_has_only_a_length() -> None:
    report = report_of("db1:3301", INFO_2_6 | {"synchro": {"quorum": 1, "queue": {"len": 2}}})
    assert report.queue == ReportedQueue(len=2, quorum=1)


def test_logs_are_kept_for_the_slowest_consumer() -> None:
    consumers = (
        {"name": f"replica {uuid(2)}", "vclock": {1: 7}, "signature": 7},
        {"name": f"replica {uuid(3)}", "vclock": {1: 5}, "signature": 5},
    )
    gc = {"vclock": {1: 5}, "signature": 5, "checkpoints": ({"vclock": {1: 6}},), "consumers": consumers}
    report = report_of("db1:3301", INFO_2_6, gc=gc)
    assert report.gc is not None
    assert report.gc.checkpoints == ({1: 6},)
    assert report.gc.slowest is not None
    assert (report.gc.slowest.replica_uuid, report.gc.slowest.vclock) == (uuid(3), {1: 5})


@pytest.mark.parametrize(
    ("changes", "cfg", "why"),
    [
        ({"ro": False}, {"read_only": False}, None),
        ({"ro": True, "ro_reason": "election"}, {"read_only": True}, "election"),
        ({"ro": True}, {"read_only": True}, "config"),
        ({"ro": True, "status": "orphan"}, {"read_only": True}, "orphan"),
        ({"ro": True}, None, "unknown"),
    ],
)
def test_read_only_reason_is_reported_or_inferred(
    changes: dict[str, Any], cfg: dict[str, Any] | None, why: str | None
) -> None:
    assert report_of("db1:3301", INFO_2_6 | changes, cfg=cfg).why_read_only == why


@pytest.mark.parametrize(
    ("option", "quorum"), [(2, 2), ("N / 2 + 1", 3), ("math.max(2, N - 1)", 4), ("math.random(N)", None), (None, None)]
)
def test_quorum_is_computed_from_the_option_and_its_formula(option: int | str | None, quorum: int | None) -> None:
    cfg = {"replication_synchro_quorum": option}
    assert report_of("db1:3301", INFO_2_6, cfg=cfg).quorum_of(5) == quorum


def test_vclock_with_consecutive_ids_is_an_array() -> None:
    assert vclock_of((5, 0, 7)) == vclock_of([5, 0, 7]) == vclock_of({3: 7, 2: 0, 1: 5, 0: 9}) == {1: 5, 2: 0, 3: 7}
    assert vclock_of(()) == vclock_of(None) == vclock_of({"one": 1, 2: "two"}) == {}


DUPLICATE = "Duplicate key exists in unique index {0}name{0} in space {0}{1}{0}"
TUPLES = ' with old tuple - [32, 1, "app", "user", {"chap-sha1": "JHDAwG3uQv0WGLuZAFrcouydHhk="}] and new tuple - [33]'


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("side", ["upstream", "downstream"])
@pytest.mark.parametrize("field", ["message", "system_message"])
@pytest.mark.parametrize("space", ["_user", "_vuser"])
def test_tuples_of_users_in_a_link_message_are_removed(quote: str, side: str, field: str, space: str) -> None:
    words = DUPLICATE.format(quote, space)
    peer = {"id": 2, "uuid": uuid(2), side: {"status": "stopped", field: words + TUPLES}}
    report = report_of("db1:3301", INFO_2_6 | {"replication": {2: peer}}, anonymous=[peer])
    assert b"JHDAwG3" not in msgspec.json.encode(report)
    for found in (*report.replication, *report.anonymous):
        assert getattr(getattr(found, side), field) == words


def test_tuples_of_other_spaces_in_a_link_message_are_kept() -> None:
    words = DUPLICATE.format('"', "_users") + TUPLES
    peer = {"id": 2, "uuid": uuid(2), "upstream": {"status": "stopped", "message": words}}
    (found,) = report_of("db1:3301", INFO_2_6 | {"replication": {2: peer}}).replication
    assert found.upstream is not None
    assert found.upstream.message == words


def test_text_of_a_server_cannot_move_the_cursor_or_fill_the_screen() -> None:
    assert printable("stopped:\n\x1b[2Jkey\t'a'") == "stopped: �[2Jkey 'a'"
    assert printable("a `box.cfg{}`") == "a 'box.cfg{}'"
    assert len(printable("x" * 10_000)) == TEXT_MAX


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 3) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def _damaged(table: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return `table` with other values at some of its keys, at any depth."""
    keep = {key: st.just(value) if not isinstance(value, dict) else _damaged(value) for key, value in table.items()}
    return st.fixed_dictionaries({key: st.one_of(values, kept) for key, kept in keep.items()})


@given(info=_damaged(INFO_2_6) | _damaged(INFO_3), gc=values, anonymous=values, cfg=values)
def test_report_is_json_serializable_for_any_answer(info: dict[str, Any], gc: Any, anonymous: Any, cfg: Any) -> None:
    report = report_of("db1:3301", info, gc=gc, anonymous=anonymous, cfg=cfg)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_option_that_is_not_finite_is_omitted() -> None:
    """JSON has no infinity: the report would come back with null."""
    assert report_of("db1:3301", INFO_2_6, cfg={"a": float("inf"), "b": float("nan"), "c": 1.5}).cfg == {"c": 1.5}
