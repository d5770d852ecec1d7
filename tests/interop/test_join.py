"""Joins despite writes, missing files, empty passwords and cut connections."""

from __future__ import annotations

from functools import partial

import pytest

from flowstone.iproto.msgpack import unpack
from tests.interop import ledger, workload
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged
from tests.interop.ledger import LEDGER, Scribe
from tests.interop.member import Member, eventually, let_replicate

BOTH_WAYS = pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
CLUSTER = 320
TIMEOUT = 1.25
"""`replication_timeout`: on a busy machine a delay of some seconds must not cause a timeout."""


def _make(cluster: Cluster, kind: str, name: str, **options: object) -> Member:
    member: Member = getattr(cluster, kind)(name, **options)
    return member


@BOTH_WAYS
def test_replica_that_joins_during_writes_has_every_row_once(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master = _make(cluster, master_kind, "master")
    ledger.define(master)
    with Scribe(master) as scribe:
        for number in range(3):
            before = len(scribe.answered)
            eventually("the scribe writes", partial(_has_written, scribe, before + 50))
            _make(cluster, replica_kind, f"replica{number}", replication=[master.uri], read_only=True)
    for replica in cluster.members[1:]:
        assert_converged(master, replica)
        ledger.assert_whole(replica, scribe.answered)


def _has_written(scribe: Scribe, count: int) -> bool:
    return len(scribe.answered) > count


@BOTH_WAYS
def test_join_needs_no_snapshot_file(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master = _make(cluster, master_kind, "master")
    ledger.define(master)
    master.snapshot()
    master.call("interop.transaction", ledger.transaction(1))
    for path in master.files("snap"):
        path.unlink()
    replica = _make(cluster, replica_kind, "replica", replication=[master.uri], read_only=True)
    assert_converged(master, replica)


@BOTH_WAYS
def test_user_without_password_can_replicate(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master = _make(cluster, master_kind, "master")
    workload.run(master, [["call", "box.schema.user.create", ["open", {"password": ""}]]])
    let_replicate(master.client, "open")
    replica = _make(cluster, replica_kind, "replica", replication=[f"open@{master.address}"])
    replica.wait_follow(master)
    other = _make(cluster, replica_kind, "other", replication=[f"open:@{master.address}"])
    other.wait_follow(master)


def _fill(master: Member, count: int) -> None:
    ledger.define(master)
    text = "x" * 1000
    workload.run(master, [["insert", LEDGER, [number, 1, 1, text]] for number in range(1, count)])


@BOTH_WAYS
def test_interrupted_join_leaves_no_partial_replica(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master = _make(cluster, master_kind, "master")
    _fill(master, 2000)
    wire = cluster.proxy(master)
    wire.cut_after(700_000)
    replica = _make(cluster, replica_kind, "replica", start=False, replication=[wire.uri])
    replica.launch()
    eventually("the join is cut", lambda: wire.connections == 0 and wire.passed >= 700_000)
    assert not replica.files("snap")
    wire.mend()
    if replica.kind == "tarantool":
        replica.kill()  # the reaction of a real server depends on its version

    def is_ready_or_gone() -> bool:
        try:
            return replica.check_ready()
        except AssertionError:
            return not replica.is_running

    eventually("the replica tries again or gives up", is_ready_or_gone)
    if not replica.is_running:
        replica.launch()
    replica.wait_ready()
    replica.wait_follow(master)
    assert_converged(master, replica)


@BOTH_WAYS
def test_join_over_a_slow_connection_succeeds(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master = _make(cluster, master_kind, "master", replication_timeout=TIMEOUT)
    _fill(master, 1000)
    wire = cluster.proxy(master)
    wire.delay(0.05)
    wire.clog(1_000_000 / (5 * TIMEOUT))  # a megabyte then takes longer than the timeout of a silent peer
    replica = _make(cluster, replica_kind, "replica", replication=[wire.uri], replication_timeout=TIMEOUT)
    wire.heal()
    replica.wait_follow(master)
    assert_converged(master, replica)


@BOTH_WAYS
def test_new_member_gets_a_free_id_from_a_real_master_and_an_unused_one_from_a_node(
    cluster: Cluster, master_kind: str, replica_kind: str
) -> None:
    master = _make(cluster, master_kind, "master")
    replicas = [_make(cluster, replica_kind, f"replica{number}", replication=[master.uri]) for number in (2, 3)]
    assert [replica.id for replica in replicas] == [2, 3]
    replicas[0].stop()
    master.client.delete(CLUSTER, 2)
    replicas[1].catch_up(master)
    fourth = _make(cluster, replica_kind, "fourth", replication=[master.uri])
    assert fourth.id == (2 if master.kind == "tarantool" else 4)
    ids = {number: uuid for number, uuid, *_ in map(unpack, master.tuples(CLUSTER))}
    assert ids[fourth.id] == fourth.uuid
    assert_converged(master, replicas[1], fourth)


@BOTH_WAYS
def test_read_only_master_accepts_a_known_replica(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master = _make(cluster, master_kind, "master")
    ledger.define(master)
    replica = _make(cluster, replica_kind, "replica", replication=[master.uri])
    uuid = replica.uuid
    replica.stop()
    for suffix in ("snap", "xlog"):
        for path in replica.files(suffix):
            path.unlink()
    master.configure(read_only=True)
    replica.start(instance_uuid=uuid)
    assert (replica.id, replica.uuid) == (2, uuid)
    assert_converged(master, replica)
