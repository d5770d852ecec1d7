"""The stream between a master and its replicas: status, transaction boundaries, local rows, order, liveness."""

from __future__ import annotations

import time
from functools import partial
from itertools import count, product
from typing import Any

import pytest

from tests.interop import ledger, workload
from tests.interop.cluster import QUICK, Cluster, not_for_stand_ins
from tests.interop.compare import assert_converged, assert_same_data, assert_same_log, transactions
from tests.interop.ledger import LEDGER, Scribe
from tests.interop.member import Member, by_id, eventually
from tests.interop.versions import fits

BOTH_WAYS = pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
GLOBAL, LOCAL, TEMPORARY = 710, 711, 712
BYTES_FAR_BEHIND = 600_000
"""Fewer bytes than 20,000 small rows."""

PATIENT_TIMEOUT = 1.25
"""`replication_timeout`: a peer that is silent for four times as long counts as lost, on a busy machine, too."""


def _pair(cluster: Cluster, master_kind: str, replica_kind: str, **options: Any) -> tuple[Member, Member]:
    master: Member = getattr(cluster, master_kind)("master", **options)
    _define(master)
    replica: Member = getattr(cluster, replica_kind)("replica", replication=[master.uri], **options)
    replica.wait_follow(master)
    return master, replica


def _define(master: Member) -> None:
    """Define a space of each scope."""
    kinds: dict[str, dict[str, Any]] = {
        "world": {"id": GLOBAL},
        "own": {"id": LOCAL, "is_local": True},
        "passing": {"id": TEMPORARY, "temporary": True},
    }
    for name, options in kinds.items():
        create = ["call", "box.schema.space.create", [name, options]]
        index = ["call", f"box.space.{name}:create_index", ["pk", {"parts": [1, "unsigned"]}]]
        workload.run(master, [create, index])


@BOTH_WAYS
def test_box_info_shows_both_sides_of_a_pair(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind, replication_timeout=PATIENT_TIMEOUT)
    master.client.insert(GLOBAL, 1)
    replica.catch_up(master)
    eventually("the master knows", partial(_is_acked, master, replica))
    here, there = master.info(), replica.info()
    assert (here["id"], there["id"]) == (1, 2)
    assert here["lsn"] == by_id(here["vclock"])[1] == by_id(there["vclock"])[1]
    assert there["lsn"] == 0
    assert here["status"] == there["status"] == "running"
    assert not here["ro"]
    of_master, of_replica = master.replication(), replica.replication()
    assert sorted(of_master) == sorted(of_replica) == [1, 2]
    for table in (of_master, of_replica):
        assert [table[number]["uuid"] for number in (1, 2)] == [here["uuid"], there["uuid"]]
        assert [table[number]["lsn"] for number in (1, 2)] == [here["lsn"], 0]
        assert [table[number]["id"] for number in (1, 2)] == [1, 2]
    assert "upstream" not in of_master[1]
    assert "downstream" not in of_master[1]
    assert "upstream" not in of_master[2]
    down = of_master[2]["downstream"]
    assert down["status"] == "follow"
    assert 0 <= down["idle"] < 4 * PATIENT_TIMEOUT
    assert by_id(down["vclock"]) == master.vclock()
    up = of_replica[1]["upstream"]
    assert up["status"] == "follow"
    assert up["peer"] == f"replicator@{master.address}"
    assert 0 <= up["idle"] < 4 * PATIENT_TIMEOUT
    assert abs(up["lag"]) < 10
    assert "message" not in up
    assert "downstream" not in of_replica[1]
    assert not {"upstream", "downstream"} & set(of_replica[2])


def _is_acked(master: Member, replica: Member) -> bool:
    return by_id(master.downstream(replica).get("vclock", {})) == master.vclock()


@BOTH_WAYS
def test_lag_and_idle_stay_small_without_traffic(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    master.client.insert(GLOBAL, 1)
    replica.catch_up(master)
    idle: list[float] = []
    """The longest intervals without a heartbeat."""

    def several_heartbeats() -> bool:
        upstream = replica.upstream(1)
        is_small = upstream["idle"] < 2 * QUICK["replication_timeout"] and upstream["lag"] < 2
        if upstream["status"] != "follow" or not is_small:  # the machine was busy: start over
            idle.clear()
        elif not idle or upstream["idle"] < idle[-1]:
            idle.append(upstream["idle"])
        else:
            idle[-1] = upstream["idle"]
        return len(idle) > 4

    eventually("several heartbeats came", several_heartbeats)


@BOTH_WAYS
def test_transaction_boundaries_survive_every_mix_of_local_and_global_rows(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    for number, spaces in enumerate(product((GLOBAL, LOCAL), repeat=3)):
        steps = [["replace", space, [number * 10 + row]] for row, space in enumerate(spaces)]
        master.call("interop.transaction", steps)
    mixed = [["replace", space, [500]] for space in (TEMPORARY, GLOBAL, TEMPORARY, LOCAL, GLOBAL, TEMPORARY)]
    master.call("interop.transaction", mixed)
    replica.catch_up(master)
    replica.wait_follow(master)
    assert master.count(LOCAL) == 13
    assert replica.count(LOCAL) == replica.count(TEMPORARY) == 0
    assert_converged(master, replica)
    assert_same_log(master, replica, origins=[1])


@BOTH_WAYS
def test_transaction_that_ends_with_a_local_row_does_not_block_a_returning_replica(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    replica.stop()
    for number in range(20):
        steps = [["replace", GLOBAL, [number]], ["replace", GLOBAL, [number + 100]], ["replace", LOCAL, [number]]]
        master.call("interop.transaction", steps)
        master.client.replace(LOCAL, number)
    replica.start()
    replica.wait_follow(master)
    assert_converged(master, replica)
    master.client.replace(GLOBAL, 1000)
    replica.catch_up(master)


@BOTH_WAYS
def test_local_rows_count_in_component_zero_only(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind, checkpoint_count=1)
    before = master.vclock()
    for number in range(30):
        master.client.replace(LOCAL, number)
        replica.client.replace(LOCAL, number + 100)
    assert master.vclock() == before
    for member in (master, replica):
        assert by_id(member.info()["vclock"])[0] >= 30  # 3.x has local rows of its own
    acked = eventually("the master knows", lambda: master.downstream(replica).get("vclock"))
    assert 0 not in by_id(acked)
    for member in (master, replica):
        member.snapshot()
    replica.restart()
    master.restart()
    master.client.replace(GLOBAL, 1)
    replica.catch_up(master)
    replica.wait_follow(master)
    assert (master.count(LOCAL), replica.count(LOCAL)) == (30, 30)
    assert_same_data(master, replica)


@not_for_stand_ins
def test_local_rows_and_checkpoints_of_a_node_make_no_gap_for_a_returning_replica(cluster: Cluster) -> None:
    _go_away_while_local_rows_are_written(*_pair(cluster, "ours", "real"))


@fits(">=2.10")  # earlier real masters report a gap there
def test_local_rows_and_checkpoints_of_a_real_master_make_no_gap_for_a_returning_node(cluster: Cluster) -> None:
    _go_away_while_local_rows_are_written(*_pair(cluster, "real", "ours"))


def _go_away_while_local_rows_are_written(master: Member, replica: Member) -> None:
    replica.stop()
    for number in range(3):
        for row in range(10):
            master.client.replace(LOCAL, row)
        master.client.replace(GLOBAL, number)
        master.snapshot()
    replica.start()
    replica.wait_follow(master)
    assert_converged(master, replica)


@BOTH_WAYS
def test_dependent_rows_become_visible_in_the_order_of_the_master(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    ledger.define(master)
    replica.catch_up(master)
    last = 0
    with Scribe(master) as scribe:
        while len(scribe.answered) < 300:
            rows = {tuple(row[:2]): row[2] for row in replica.call("box.space.ledger:select") or ()}
            if not rows:
                continue
            newest = rows.pop((0, 0))
            assert newest >= last
            assert {number for number, _ in rows} == set(range(1, newest + 1)), "rows are out of order"
            assert sum(ledger.parts_of(number) for number in range(1, newest + 1)) == len(rows)
            last = newest
    assert_converged(master, replica)


@pytest.mark.parametrize("kinds", [("real", "ours", "real"), ("ours", "real", "ours")])
def test_chain_stays_connected_under_constant_changes(cluster: Cluster, kinds: tuple[str, ...]) -> None:
    """Heartbeats that are skipped while rows are sent cause no timeout."""
    options = {"replication_timeout": PATIENT_TIMEOUT}
    first: Member = getattr(cluster, kinds[0])("first", **options)
    ledger.define(first)
    middle: Member = getattr(cluster, kinds[1])("middle", replication=[first.uri], **options)
    last: Member = getattr(cluster, kinds[2])("last", replication=[middle.uri], **options)
    last.wait_follow(middle)
    marks = [len(member.log()) for member in (first, middle, last)]
    began = time.monotonic()
    with Scribe(first, pace=PATIENT_TIMEOUT / 50) as scribe:
        eventually("longer than anybody waits for a heartbeat", lambda: time.monotonic() > began + 5 * PATIENT_TIMEOUT)
    assert len(scribe.answered) > 20
    last.catch_up(first)
    for member, mark in zip((first, middle, last), marks, strict=True):
        for word in ("timed out", "exiting the relay loop", "disconnected", "can't read row"):
            assert word not in member.log()[mark:]
    ledger.assert_whole(last, scribe.answered)


@fits(">=2.11")
@BOTH_WAYS
def test_downstream_lag_is_the_duration_of_a_transaction(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master: Member = getattr(cluster, master_kind)("master")
    _define(master)
    wire = cluster.proxy(master)
    replica: Member = getattr(cluster, replica_kind)("replica", replication=[wire.uri])
    replica.wait_follow(master)
    wire.delay(0.2)
    master.client.insert(GLOBAL, 1)
    eventually("the lag shows", lambda: master.downstream(replica).get("lag", 0) > 0.15)
    wire.delay(0)
    # A piece that the proxy already holds, such as a heartbeat, still delays the next row, and an idle relay keeps the
    # lag of the last transaction (relay_process_ack in relay.cc). So each check has its own row.
    numbers = count(2)

    def lag_of_the_next_transaction() -> float:
        master.client.insert(GLOBAL, next(numbers))
        replica.catch_up(master)
        return float(master.downstream(replica)["lag"])

    eventually("the lag is gone", lambda: lag_of_the_next_transaction() < 0.15)


@BOTH_WAYS
def test_lagging_replica_does_not_time_out_during_catch_up(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind, replication_timeout=PATIENT_TIMEOUT)
    ledger.define(master)
    replica.stop()
    for start in range(0, 20_000, 2_000):
        workload.run(master, [["insert", LEDGER, [number, 1, 1]] for number in range(start + 1, start + 2_001)])
        master.snapshot()
    mark = len(master.log())
    wire = cluster.proxy(master)
    wire.clog(BYTES_FAR_BEHIND / (5 * PATIENT_TIMEOUT))  # so that it takes longer than the timeout of a silent peer
    replica.start(replication=[wire.uri])
    replica.wait_follow(master)
    wire.heal()
    assert wire.passed > BYTES_FAR_BEHIND
    assert_converged(master, replica)
    assert "timed out" not in master.log()[mark:]
    assert_same_log(master, replica, origins=[1])
    assert len(transactions(replica)) >= 20_000
