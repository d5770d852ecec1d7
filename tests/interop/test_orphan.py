"""Orphan mode: a member is read-only while it may lack rows, and leaves the mode once it is in sync."""

from __future__ import annotations

import pytest

from flowstone.iproto.errors import TarantoolError
from tests.interop import ledger
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged, assert_same_log
from tests.interop.member import Member, eventually
from tests.interop.versions import fits
from tests.real_tarantool import free_port


def _pair(cluster: Cluster) -> tuple[Member, Member]:
    real = cluster.real("real")
    ledger.define(real)
    ours = cluster.ours("ours", replication=[real.uri])
    ours.wait_writable()
    return real, ours


@fits("2.6")
def test_member_without_enough_peers_starts_as_an_orphan_until_they_connect(cluster: Cluster) -> None:
    real, ours = _pair(cluster)
    real.stop()
    ours.restart(replication_connect_timeout=1)
    info = ours.info()
    assert (info["status"], info["ro"]) == ("orphan", True)
    with pytest.raises(TarantoolError, match="read-only"):
        ours.call("interop.transaction", ledger.transaction(1))
    real.start()
    ours.wait_writable()
    assert ours.info()["status"] == "running"
    ours.call("interop.transaction", ledger.transaction(1))


@fits("2.6")
def test_quorum_of_zero_is_reached_at_once(cluster: Cluster) -> None:
    real, ours = _pair(cluster)
    real.stop()
    ours.restart(replication_connect_timeout=1, replication_connect_quorum=0)
    info = ours.info()
    assert (info["status"], info["ro"]) == ("running", False)


@fits("2.6")
def test_unreachable_peers_make_a_reconfigured_member_an_orphan_unless_the_quorum_is_zero(
    cluster: Cluster,
) -> None:
    real, ours = _pair(cluster)
    nobody = f"replicator:secret@127.0.0.1:{free_port()}"
    ours.configure(replication_connect_timeout=0.5)
    ours.configure(replication=[real.uri, nobody])
    assert (ours.info()["status"], ours.info()["ro"]) == ("orphan", True)
    ours.configure(replication_connect_quorum=1)
    ours.configure(replication=[nobody, real.uri])
    ours.wait_writable()
    ours.configure(replication_connect_quorum=0)
    ours.configure(replication=[nobody])
    assert (ours.info()["status"], ours.info()["ro"]) == ("running", False)
    ours.configure(replication=[real.uri])
    ours.wait_follow(real)
    assert_converged(real, ours)


def test_replication_can_be_changed_and_disabled_at_run_time(cluster: Cluster) -> None:
    real, ours = _pair(cluster)
    ours.configure(replication=[])
    eventually("the connection ends", lambda: not ours.upstream(1))
    eventually("the master sees it", lambda: real.downstream(2).get("status") == "stopped")
    real.call("interop.transaction", ledger.transaction(1))
    ours.configure(replication=[real.uri])
    ours.wait_follow(real)
    ours.wait_writable()
    assert_converged(real, ours)


@pytest.mark.parametrize("loser_kind", ["real", "ours"])
def test_member_that_lost_its_newest_log_recovers_its_own_rows(cluster: Cluster, loser_kind: str) -> None:
    keeper: Member = getattr(cluster, "ours" if loser_kind == "real" else "real")("keeper")
    ledger.define(keeper)
    loser: Member = getattr(cluster, loser_kind)("loser", replication=[keeper.uri])
    keeper.configure(replication=[loser.uri])
    keeper.wait_follow(loser)
    loser.wait_writable()
    loser.call("interop.transaction", ledger.transaction(1))
    loser.snapshot()
    for number in range(2, 6):
        loser.call("interop.transaction", ledger.transaction(number))
    keeper.catch_up(loser)
    own = loser.id
    before = loser.vclock()[own]
    loser.kill()
    newest = loser.files("xlog")[-1]
    newest.unlink()
    loser.start()
    loser.wait_writable()
    assert loser.vclock()[own] == before
    loser.call("interop.transaction", ledger.transaction(6))
    keeper.wait_follow(loser)
    assert_converged(keeper, loser)
    ledger.assert_whole(keeper, list(range(1, 7)))
    assert_same_log(keeper, loser, origins=[own])
