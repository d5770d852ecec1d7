"""Each error is reported once, clearly: in the log, in box.info.replication, and by the failing command."""

from __future__ import annotations

import shutil
from typing import Any
from uuid import UUID

import pytest

from tests.interop import ledger, workload
from tests.interop.cluster import IS_OURS_REAL, Cluster, not_for_stand_ins
from tests.interop.member import SECONDS, Member, RealMember, eventually, let_replicate
from tests.interop.proxy import Proxy
from tests.interop.versions import ANY, fits
from tests.real_tarantool import free_port

CLUSTER = 320
REPLICAS_MAX = 31


def _pair(cluster: Cluster) -> tuple[Member, Member]:
    """Return a real master and our registered replica."""
    master = cluster.real("master")
    ledger.define(master)
    replica = cluster.ours("replica", replication=[master.uri])
    replica.wait_follow(master)
    return master, replica


def _assert_upstream(replica: Member, of: int, status: str, message: str) -> None:
    """Check the status in box.info.replication, and that the log reports it once."""

    def upstream() -> bool:
        found = replica.upstream(of)
        assert found.get("status") != "follow", found
        return found.get("status") == status and message in found.get("message", "")

    eventually(f"{replica} is {status} because of {message!r}", upstream, seconds=SECONDS)
    assert message in replica.log()
    if not IS_OURS_REAL:
        lines = [line for line in replica.log().splitlines() if message in line]
        assert len(lines) <= 2, lines


def _restart_with(replica: Member, uri: str) -> None:
    replica.restart(replication=[uri], replication_connect_quorum=0)


def test_wrong_password_is_reported_and_retried(cluster: Cluster) -> None:
    master, replica = _pair(cluster)
    _restart_with(replica, f"replicator:wrong@{master.address}")
    message = "Incorrect password supplied for user 'replicator'"
    if cluster.binary.dialect != "2.6":
        message = "User not found or supplied credentials are invalid"
    _assert_upstream(replica, 1, "loading", message)
    workload.run(master, [["call", "box.schema.user.passwd", ["replicator", "wrong"]]])
    replica.wait_follow(master)


@fits("2.6")
def test_unknown_user_is_reported(cluster: Cluster) -> None:
    master, replica = _pair(cluster)
    _restart_with(replica, f"stranger:secret@{master.address}")
    _assert_upstream(replica, 1, "loading", "User 'stranger' is not found")


def test_user_without_privileges_is_reported(cluster: Cluster) -> None:
    master, replica = _pair(cluster)
    workload.run(master, [["call", "box.schema.user.create", ["nobody", {"password": "secret"}]]])
    _restart_with(replica, f"nobody:secret@{master.address}")
    _assert_upstream(replica, 1, "loading", "Read access to universe '' is denied for user 'nobody'")
    let_replicate(master.client, "nobody")
    replica.wait_follow(master)


def test_master_of_another_replica_set_is_rejected(cluster: Cluster) -> None:
    _, replica = _pair(cluster)
    stranger = cluster.real("stranger")
    _restart_with(replica, stranger.uri)
    theirs = stranger.info()
    uuid = (theirs.get("replicaset") or theirs["cluster"])["uuid"]
    # A 2.6 checks only registration; its replicas judge our answer themselves.
    said_by_2_6 = f"Replica {replica.uuid} is not registered with replica set {uuid}"
    message = said_by_2_6 if cluster.binary.dialect == "2.6" else f"Replica set UUID mismatch: expected {uuid}"
    replica.wait_log(message)

    def is_shown() -> bool:
        found = [one["upstream"] for one in replica.replication().values() if "upstream" in one]
        return all(one["status"] == "stopped" and message in one["message"] for one in found)

    eventually("the refusal is shown", is_shown)


def test_unreachable_master_is_reported_and_a_new_member_times_out(cluster: Cluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    replica = cluster.ours("replica", start=False, replication=[f"replicator:secret@{address}"])
    replica.launch(replication_connect_timeout=1)
    assert replica.exit_code() != 0
    log = replica.log()
    assert address in log
    assert "failed to connect to one or more replicas" in log
    assert "onnection refused" in log
    assert "Traceback" not in log
    assert "secret" not in log


def test_lost_master_is_reported_until_it_returns(cluster: Cluster) -> None:
    master, replica = _pair(cluster)
    master.stop()
    eventually("the loss shows", lambda: replica.upstream(1).get("status") == "disconnected")

    def refused() -> dict[str, Any] | None:
        upstream = replica.upstream(1)
        return upstream if "refused" in str(upstream) else None

    upstream = eventually("the reason shows", refused)
    assert upstream["message"]
    assert "efused" in upstream["system_message"]
    master.start()
    replica.wait_follow(master)


@fits("<3.0")  # newer masters never forget the replicas for which they keep logs
def test_gap_in_the_logs_of_the_master_is_reported(cluster: Cluster) -> None:
    master = cluster.real("master", checkpoint_count=1)
    ledger.define(master)
    wire = cluster.proxy(master)
    replica = cluster.ours("replica", replication=[wire.uri])
    replica.wait_follow(master)
    _cut(wire, replica)
    _lose_logs(cluster, master)
    wire.mend()
    status = "stopped" if cluster.binary.dialect == "2.6" else "loading"
    _assert_upstream(replica, 1, status, "Missing .xlog file between LSN")


@fits("<3.0" if IS_OURS_REAL else ANY)
def test_gap_in_our_logs_is_reported_to_a_real_replica(cluster: Cluster) -> None:
    master = cluster.ours("master", checkpoint_count=1)
    ledger.define(master)
    wire = cluster.proxy(master)
    replica = cluster.real("replica", replication=[wire.uri])
    replica.wait_follow(master)
    _cut(wire, replica)
    _lose_logs(cluster, master)
    wire.mend()

    def is_said() -> bool:
        upstream = replica.upstream(1)
        assert upstream["status"] != "follow" or "vclock" not in upstream
        return "Missing .xlog file between LSN" in upstream.get("message", "")

    eventually("the gap is named", is_said)
    eventually("and shown", lambda: "Missing .xlog file between LSN" in master.downstream(2).get("message", ""))


def _cut(wire: Proxy, replica: Member) -> None:
    """Wait until the replica has noticed the cut: its later status belongs to the time after it."""
    wire.cut()
    eventually("the cut shows", lambda: replica.upstream(1).get("status") != "follow")


def _lose_logs(cluster: Cluster, master: Member) -> None:
    """Delete the logs that a disconnected replica needs, by a restart of the master."""
    knows_no_delay = isinstance(master, RealMember) and cluster.binary.dialect == "2.6"
    master.restart(**({} if knows_no_delay else {"wal_cleanup_delay": 0}))
    oldest = min(path.name for path in master.files("xlog"))
    for number in (1, 2, 3):
        master.call("interop.transaction", ledger.transaction(number))
        master.snapshot()
    master.call("interop.transaction", ledger.transaction(4))
    eventually("logs are collected", lambda: min(path.name for path in master.files("xlog")) > oldest)


@pytest.mark.parametrize(("master_kind", "replica_kind"), [("real", "ours"), ("ours", "real")])
def test_member_beyond_the_limit_is_rejected(cluster: Cluster, master_kind: str, replica_kind: str) -> None:
    master: Member = getattr(cluster, master_kind)("master")
    for number in range(2, REPLICAS_MAX + 1):
        master.client.insert(CLUSTER, number, str(UUID(int=number)))
    replica: Member = getattr(cluster, replica_kind)("replica", start=False, replication=[master.uri])
    replica.launch()
    try:
        replica.wait_log("Replica count limit reached: 32")
        assert replica.exit_code() != 0
    finally:
        replica.kill()
    assert "Traceback" not in replica.log() + master.log()
    master.client.delete(CLUSTER, REPLICAS_MAX)
    other: Member = getattr(cluster, replica_kind)("other", replication=[master.uri])
    assert other.id == REPLICAS_MAX


@not_for_stand_ins  # a real server does not notice
def test_master_that_lost_its_tail_is_reported_with_the_lost_rows(cluster: Cluster) -> None:
    master, replica = _pair(cluster)
    master.call("interop.transaction", ledger.transaction(1))
    replica.catch_up(master)
    master.stop()
    saved = cluster.directory / "saved"
    saved.mkdir()
    for suffix in ("snap", "xlog"):
        for path in master.files(suffix):
            shutil.copy(path, saved)
    master.start()
    kept = master.vclock()[1]
    master.call("interop.transaction", ledger.transaction(2))
    replica.catch_up(master)
    lost = master.vclock()[1]
    replica.pause()
    master.kill()
    for suffix in ("snap", "xlog"):
        for path in master.files(suffix):
            path.unlink()
    for path in saved.iterdir():
        shutil.copy(path, master.directory)
    master.launch()
    master.wait_ready()
    replica.resume()
    replica.wait_log(f"{kept + 1}")
    eventually("it is left", lambda: replica.upstream(1)["status"] == "stopped")
    upstream = replica.upstream(1)
    assert str(kept) in upstream["message"]
    assert str(lost) in upstream["message"]
    assert replica.vclock()[1] == lost
