"""Rows that cannot be applied stop replication or are skipped, and no transaction is applied in part."""

from __future__ import annotations

from functools import partial

import pytest

from flowstone.iproto.constants import RequestType
from tests.interop import ledger
from tests.interop.cluster import Cluster
from tests.interop.compare import of_origin, transactions
from tests.interop.ledger import LEDGER
from tests.interop.member import Member, eventually

BOTH_WAYS = pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
TAKEN = "Duplicate key exists in unique index"


def _pair(cluster: Cluster, master_kind: str, replica_kind: str) -> tuple[Member, Member]:
    """Create a pair whose replica is writable, too, and has its own row [1, 1]."""
    master: Member = getattr(cluster, master_kind)("master")
    ledger.define(master)
    replica: Member = getattr(cluster, replica_kind)("replica", replication=[master.uri])
    replica.wait_writable()
    replica.catch_up(master)
    replica.client.insert(LEDGER, 1, 1, "mine")
    return master, replica


def _wait_stopped(replica: Member) -> None:
    def is_stopped() -> bool:
        upstream = replica.upstream(1)
        return upstream.get("status") == "stopped" and TAKEN in upstream["message"]

    eventually("the conflict stops the replica", is_stopped)
    assert TAKEN in replica.log()


def _is_stopped(member: Member, upstream: Member) -> bool:
    return member.upstream(upstream).get("status") == "stopped"


def _row(replica: Member, *key: int) -> object:
    return replica.call("box.space.ledger:get", list(key))


@BOTH_WAYS
def test_duplicate_key_stops_the_replica_and_changes_nothing(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    before = replica.vclock()
    master.client.insert(LEDGER, 1, 1, "theirs")
    master.client.insert(LEDGER, 2, 1, "theirs")
    _wait_stopped(replica)
    assert replica.vclock() == before
    replica.restart()
    _wait_stopped(replica)
    assert replica.vclock() == before
    assert _row(replica, 1, 1) == (1, 1, "mine")
    assert _row(replica, 2, 1) is None
    replica.configure(replication=[])
    replica.wait_writable()
    replica.client.delete(LEDGER, 1, 1)
    replica.configure(replication=[master.uri])
    replica.wait_follow(master)
    replica.catch_up(master)
    assert _row(replica, 2, 1) == (2, 1, "theirs")


@BOTH_WAYS
def test_conflict_inside_a_transaction_applies_none_of_it(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    before = replica.vclock()
    rows = [["insert", LEDGER, [number, 1, "theirs"]] for number in (10, 1, 11)]
    master.call("interop.transaction", rows)
    master.call("interop.transaction", [["insert", LEDGER, [20, 1, "theirs"]]])
    _wait_stopped(replica)
    assert replica.vclock() == before
    assert [_row(replica, number, 1) for number in (10, 11, 20)] == [None, None, None]
    replica.client.delete(LEDGER, 1, 1)
    replica.configure(replication=[])
    replica.configure(replication=[master.uri])
    replica.catch_up(master)
    assert _row(replica, 1, 1) == (1, 1, "theirs")
    assert of_origin(transactions(replica), 1)[-2:] == of_origin(transactions(master), 1)[-2:]


@BOTH_WAYS
def test_with_skip_conflict_only_the_conflicting_rows_become_nops(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    replica.configure(replication_skip_conflict=True)
    replica.configure(replication=[])
    replica.configure(replication=[master.uri])
    replica.wait_follow(master)
    rows = [["insert", LEDGER, [number, 1, "theirs"]] for number in (10, 1, 11)]
    master.call("interop.transaction", rows)
    master.client.insert(LEDGER, 20, 1, "theirs")
    replica.catch_up(master)
    replica.wait_follow(master)
    assert _row(replica, 1, 1) == (1, 1, "mine")
    assert [_row(replica, number, 1) for number in (10, 11, 20)] == [(n, 1, "theirs") for n in (10, 11, 20)]
    mixed, _ = of_origin(transactions(replica), 1)[-2:]
    assert [row.type for row in mixed] == [RequestType.INSERT, RequestType.NOP, RequestType.INSERT]
    there = of_origin(transactions(master), 1)[-2]
    assert [row.lsn for row in mixed] == [row.lsn for row in there]


def test_node_and_real_server_that_insert_the_same_key_stop_each_other(cluster: Cluster) -> None:
    real, ours = _pair(cluster, "real", "ours")
    real.configure(replication=[ours.uri])
    eventually("the row of the node arrives", lambda: _row(real, 1, 1))
    wires = [cluster.proxy(member) for member in (real, ours)]
    ours.configure(replication=[wires[0].uri])
    real.configure(replication=[wires[1].uri])
    real.wait_follow(ours)
    ours.wait_follow(real)
    for wire in wires:
        wire.cut()
    for member in (real, ours):
        member.client.insert(LEDGER, 5, 1, member.name)
    for wire in wires:
        wire.mend()
    for member in (real, ours):
        other = ours if member is real else real
        eventually(f"{member} stops", partial(_is_stopped, member, other))
        assert TAKEN in member.upstream(other)["message"]
