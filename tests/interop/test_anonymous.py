"""Anonymous replicas between nodes and real servers, and their registration."""

from __future__ import annotations

import pytest

from flowstone.iproto.errors import TarantoolError
from tests.interop import ledger, workload
from tests.interop.cluster import Cluster, not_for_stand_ins
from tests.interop.compare import assert_converged, assert_same_data
from tests.interop.ledger import Scribe
from tests.interop.member import Member, by_id, eventually
from tests.interop.versions import fits

BOTH_WAYS = pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
CLUSTER = 320
OWN, PASSING = 720, 721


def _pair(cluster: Cluster, master_kind: str, replica_kind: str) -> tuple[Member, Member]:
    master: Member = getattr(cluster, master_kind)("master")
    ledger.define(master)
    for name, number, option in (("own", OWN, "is_local"), ("passing", PASSING, "temporary")):
        create = ["call", "box.schema.space.create", [name, {"id": number, option: True}]]
        workload.run(master, [create, ["call", f"box.space.{name}:create_index", ["pk", {"parts": [1, "unsigned"]}]]])
    options = {"replication": [master.uri], "replication_anon": True, "read_only": True}
    replica: Member = getattr(cluster, replica_kind)("replica", **options)
    replica.wait_follow(master)
    return master, replica


@BOTH_WAYS
def test_anonymous_replica_has_no_id_until_it_registers(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    assert replica.info()["id"] in (0, None)
    assert replica.info()["ro"]
    assert len(master.tuples(CLUSTER)) == 1
    assert sorted(master.replication()) == [1]
    eventually("the master counts it", lambda: master.info()["replication_anon"]["count"] == 1)
    for number in range(5):
        replica.client.replace(OWN, number)
        replica.client.replace(PASSING, number)
    with pytest.raises(TarantoolError, match="read-only"):
        replica.client.replace(ledger.LEDGER, 1, 1, 1)
    assert by_id(replica.info()["vclock"])[0] == 5
    master.call("interop.transaction", ledger.transaction(1))
    replica.catch_up(master)
    assert master.vclock() == replica.vclock()

    replica.configure(replication_anon=False)
    assert replica.id == 2
    replica.configure(read_only=False)
    assert len(master.tuples(CLUSTER)) == 2
    if master.kind == "flowstone":  # a real 2.6 may continue to count it
        eventually("the master counts it no more", lambda: master.info()["replication_anon"]["count"] == 0)
    eventually("the master knows it", lambda: master.downstream(2).get("status") == "follow")
    master.configure(replication=[replica.uri])
    master.wait_follow(replica)
    replica.wait_writable()  # one that has just registered is an orphan until it is in sync
    replica.call("interop.transaction", ledger.transaction(2))
    master.catch_up(replica)
    master.call("interop.transaction", ledger.transaction(3))
    assert_converged(master, replica)
    assert replica.count(OWN) == 5
    replica.restart(replication_anon=False, read_only=False)
    assert replica.id == 2
    assert_converged(master, replica)


@BOTH_WAYS
def test_anonymous_replica_reconnects_after_a_restart(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    master.call("interop.transaction", ledger.transaction(1))
    replica.catch_up(master)
    replica.stop()
    master.call("interop.transaction", ledger.transaction(2))
    replica.start()
    replica.wait_follow(master)
    assert_converged(master, replica)
    assert replica.info()["id"] in (0, None)


@fits(">=2.8")  # a 2.6 registers a replica at the master's position, skipping rows that the replica does not have yet
@pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
def test_no_row_is_lost_when_a_replica_registers_while_others_write(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master, replica = _pair(cluster, master_kind, replica_kind)
    with Scribe(master) as scribe:
        eventually("the scribe writes", lambda: len(scribe.answered) > 50)
        replica.configure(replication_anon=False)
        after = len(scribe.answered)
        eventually("the scribe goes on", lambda: len(scribe.answered) > after + 50)
    assert_converged(master, replica)
    ledger.assert_whole(replica, scribe.answered)


@BOTH_WAYS
def test_registration_cannot_be_undone(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    _, replica = _pair(cluster, master_kind, replica_kind)
    replica.configure(replication_anon=False)
    with pytest.raises(TarantoolError, match="cannot be turned on after bootstrap has finished"):
        replica.configure(replication_anon=True)
    assert replica.id == 2


def test_anonymous_node_serves_only_anonymous_replicas(cluster: Cluster) -> None:
    master = cluster.real("master")
    ledger.define(master)
    middle = cluster.ours("middle", replication=[master.uri], replication_anon=True, read_only=True)
    last = cluster.real("last", replication=[middle.uri], replication_anon=True, read_only=True)
    master.call("interop.transaction", ledger.transaction(1))
    last.catch_up(master)
    assert_same_data(master, middle, last)
    other = cluster.real("other", start=False, replication=[middle.uri])
    other.launch()
    eventually("it is refused", lambda: not other.is_running or "does not support" in other.log())
    assert not other.files("snap")
    assert len(master.tuples(CLUSTER)) == 1


@not_for_stand_ins  # a real 2.6 crashes then
def test_registration_without_a_capable_master_is_rejected(cluster: Cluster) -> None:
    master = cluster.real("master")
    replica = cluster.ours("replica", replication=[master.uri], replication_anon=True, read_only=True)
    master.configure(read_only=True)
    with pytest.raises(TarantoolError):
        replica.configure(replication_anon=False)
    assert replica.info()["id"] in (0, None)
    master.configure(read_only=False)
    replica.configure(replication_anon=False)
    assert replica.id == 2


@fits(">=3.0")
def test_synchronous_queue_of_an_anonymous_node_is_that_of_its_master(cluster: Cluster) -> None:
    master = cluster.real("master")
    workload.run(master, [["call", "box.ctl.promote", []]])
    replica = cluster.ours("replica", replication=[master.uri], replication_anon=True, read_only=True)
    theirs, queue = master.info()["synchro"]["queue"], replica.info()["synchro"]["queue"]
    assert (queue["owner"], queue["term"]) == (theirs["owner"], theirs["term"])
