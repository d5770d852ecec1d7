"""Liveness and readiness of a node, with the reasons if it is not ready."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from flowstone import Node
from flowstone.iproto.uri import parse_uri
from flowstone.node.statistics import DiskUsage, Durations, Statistics, WalStatistics
from flowstone.observation.explanation import explain
from flowstone.observation.findings.disk_findings import FREE_BYTES_MIN
from flowstone.observation.findings.finding import Severity
from flowstone.observation.own_report import own_report
from flowstone.observation.query import Asking
from flowstone.observation.replica_set import replica_sets
from flowstone.observation.report import Election, Report, ReportedDownstream, ReportedPeer, ReportedUpstream
from flowstone.outside import production
from flowstone.web.health import node_health, starting_health
from flowstone.web.node_metrics import NodeMetrics
from flowstone.web.peer_complaints import Complaint
from tests.interop.cluster import Cluster
from tests.interop.member import REPLICATOR, SECONDS, Member, eventually
from tests.interop.mesh import Mesh, election
from tests.node.upstream.test_applier import until
from tests.real_tarantool import free_port
from tests.web.live_sets import NODES

GIB = 1024**3


def report(**changed: Any) -> Report:
    facts: dict[str, Any] = {
        "address": "a:1",
        "package": "Flowstone",
        "version": "2.11.9",
        "id": 1,
        "uuid": "u",
        "status": "running",
        "ro": False,
        "cfg": {"election_mode": "candidate"},
        "election": Election(state="leader", term=3, leader=1),
        "replication": (
            ReportedPeer(id=2, uuid="v", upstream=ReportedUpstream(status="disconnected", message="no route")),
        ),
    }
    return Report(**(facts | changed))


def statistics(failure: str | None = None) -> Statistics:
    nothing = Durations((), (0,), 0.0)
    wal = WalStatistics(
        rows=0, bytes=0, rotations=0, failures=0, failure=failure, write_seconds=nothing, synced_seconds=nothing
    )
    return Statistics(
        operations={},
        requests=0,
        errors=0,
        received_bytes=0,
        sent_bytes=0,
        connections=0,
        connections_total=0,
        requests_in_progress=0,
        auth_failures=0,
        auth_delays=0,
        wal=wal,
        followers=(),
        spaces=(),
    )


def usage(wal_free: int = GIB, memtx_free: int = GIB) -> DiskUsage:
    return DiskUsage(
        wal_dir="w", memtx_dir="m", wal_free_bytes=wal_free, memtx_free_bytes=memtx_free, logs=(), snapshots_bytes=0
    )


def test_running_node_is_ready_while_peers_are_down() -> None:
    found = node_health(report(), statistics(), usage())
    assert (found.is_well, found.is_ready, found.reasons) == (True, True, ())


@pytest.mark.parametrize(
    ("node", "is_ready", "reason"),
    [
        (report(status="orphan", ro=True), False, "node is an orphan: it is not in sync"),
        (report(status="loading", ro=True), False, "node is loading"),
        (report(election=Election(state="follower", term=7)), True, "no leader in term 7"),
        (
            report(
                replication=(
                    ReportedPeer(id=2, uuid="v", upstream=ReportedUpstream(status="stopped", message="Duplicate key")),
                )
            ),
            True,
            "replication from replica 2 is stopped: Duplicate key",
        ),
    ],
)
def test_health_lists_the_problems_of_a_node(node: Report, is_ready: bool, reason: str) -> None:
    found = node_health(node, statistics(), usage())
    assert not found.is_well
    assert found.is_ready is is_ready
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith(reason)


@pytest.mark.parametrize("status", ["follow", "sync"])
def test_leader_counts_only_while_it_sends_heartbeats(status: str) -> None:
    election = Election(state="follower", term=3, leader=2)
    follows = report(
        election=election, replication=(ReportedPeer(id=2, uuid="v", upstream=ReportedUpstream(status=status)),)
    )
    assert node_health(follows, statistics(), usage()).is_well
    found = node_health(report(election=election), statistics(), usage())
    assert found.reasons == ("no connection to the leader of term 3, replica 2",)
    assert found.is_ready


def test_health_reports_a_lost_connection_to_the_leader(tmp_path: Path) -> None:
    nodes = Cluster(tmp_path, NODES)
    try:
        mesh = Mesh(nodes, ("ours", "ours"), direct=True)
        mesh.set_modes("candidate")
        leader = mesh.wait_leader()
        (survivor,) = mesh.others(leader)
        number = leader.id
        eventually("all is well", lambda: node_health(asked(survivor), statistics(), usage()).is_well)
        leader.kill()
        found = eventually("it is missed", lambda: node_health(asked(survivor), statistics(), usage()).reasons)
        assert found == (f"no connection to the leader of term {election(survivor)['term']}, replica {number}",)
        idle = election(survivor)["leader_idle"]
        eventually("its silence is measured", lambda: election(survivor)["leader_idle"] > idle)
    finally:
        nodes.close()


def asked(member: Member) -> Report:
    async def ask() -> Report:
        asking = Asking(production(), parse_uri(member.address), timeout=SECONDS)
        try:
            return await asking.report()
        finally:
            await asking.close()

    return asyncio.run(ask())


ORPHAN = "node is an orphan: it is not in sync with enough peers and accepts no writes"


@pytest.mark.parametrize(
    ("has_data", "state", "first"), [(False, "starting", "node has not started yet"), (True, "orphan", ORPHAN)]
)
def test_starting_node_reports_its_progress_and_the_reason_for_waiting(has_data: bool, state: str, first: str) -> None:
    complaints = [Complaint(address=f"db{number}:1", text="cannot connect to db1:1, db2:1") for number in (1, 2)]
    found = starting_health(has_data=has_data, complaints=complaints)
    assert (found.state, found.is_ready) == (state, False)
    assert found.reasons == (first, "cannot connect to db1:1, db2:1")


@pytest.mark.parametrize(
    ("status", "upstream", "is_final", "is_told"),
    [
        ("running", None, True, True),
        ("running", None, False, False),
        ("running", "disconnected", True, False),
        ("orphan", None, False, True),
        ("orphan", "loading", False, True),
        ("orphan", "follow", False, False),
        ("orphan", "stopped", True, False),
    ],
)
def test_peer_complaint_is_a_reason_where_the_report_has_none(
    status: str, upstream: str | None, is_final: bool, is_told: bool
) -> None:
    """A missing peer is no reason for a running node, and facts in the report are not repeated."""
    side = ReportedUpstream(status=upstream, peer="u@db2:1") if upstream is not None else None
    node = report(status=status, replication=(ReportedPeer(id=2, uuid="v", upstream=side),))
    complaint = Complaint(address="db2:1", text="no more of db2:1", is_final=is_final)
    assert ("no more of db2:1" in node_health(node, statistics(), usage(), [complaint]).reasons) is is_told


def test_missing_leader_is_not_a_problem_without_elections() -> None:
    quiet = report(cfg={"election_mode": "off"}, election=Election(state="follower", term=1))
    assert node_health(quiet, statistics(), usage()).is_well


def test_failing_log_makes_the_node_unready() -> None:
    found = node_health(report(), statistics(failure="x.xlog: No space left on device"), usage())
    assert (found.is_ready, found.reasons) == (False, ("WAL write failed: x.xlog: No space left on device",))


def test_nearly_full_disk_is_a_warning() -> None:
    found = node_health(report(), statistics(), usage(wal_free=FREE_BYTES_MIN - 1))
    assert found.is_ready
    assert found.reasons == ("disk of wal_dir is nearly full: 255 MiB free",)


def test_unreadable_directory_is_a_warning() -> None:
    found = node_health(report(), statistics(), OSError(errno.EIO, "Input/output error", "/data/wal"))
    assert found.is_ready
    assert found.reasons == ("cannot read the data directory: /data/wal: Input/output error",)


OFF: dict[str, Any] = {"cfg": {"election_mode": "off"}, "election": None}
ALONE = "node follows no other member and has no followers"


def test_isolated_read_only_node_is_not_ready() -> None:
    alone = report(ro=True, replication=(ReportedPeer(id=1, uuid="u"), ReportedPeer(id=2, uuid="v")), **OFF)
    found = node_health(alone, statistics(), usage())
    assert (found.is_ready, found.reasons) == (False, (f"{ALONE}: it gets no rows",))


@pytest.mark.parametrize("is_read_only", [True, False])
def test_node_with_followers_is_ready_without_upstreams(is_read_only: bool) -> None:
    followed = ReportedPeer(id=2, uuid="v", lsn=7, downstream=ReportedDownstream(status="follow"))
    master = report(
        ro=is_read_only, replication=(ReportedPeer(id=1, uuid="u"), followed, ReportedPeer(id=3, uuid="w")), **OFF
    )
    assert node_health(master, statistics(), usage()).is_well


@pytest.mark.parametrize("is_read_only", [True, False])
def test_node_without_upstreams_is_not_ready_when_a_follower_has_rows_that_it_lacks(is_read_only: bool) -> None:
    for acknowledged, is_ready in (({1: 5, 2: 7}, True), ({1: 5, 2: 8}, False)):
        follower = ReportedPeer(
            id=2, uuid="v", lsn=7, downstream=ReportedDownstream(status="follow", vclock=acknowledged)
        )
        node = report(ro=is_read_only, vclock={1: 5, 2: 7}, replication=(ReportedPeer(id=1, uuid="u"), follower), **OFF)
        found = node_health(node, statistics(), usage())
        assert (found.is_ready, found.is_well) == (is_ready, is_ready)
        reason = "node follows no other member and lacks rows that its followers have"
        assert found.reasons == (() if is_ready else (reason,))


@pytest.mark.parametrize(
    ("others", "is_ready"),
    [
        ([ReportedPeer(id=1, uuid="v", lsn=600)], False),
        ([ReportedPeer(id=1, uuid="v", lsn=600), ReportedPeer(id=2, uuid="w")], False),
        ([ReportedPeer(id=2, uuid="v")], True),
        ([ReportedPeer(id=2, uuid="v", lsn=7, downstream=ReportedDownstream(status="stopped"))], True),
    ],
    ids=["has rows of another", "has rows of one of two", "has its own rows alone", "was followed"],
)
def test_writable_isolated_node_is_ready_only_as_master_of_all_others(
    others: list[ReportedPeer], is_ready: bool
) -> None:
    """A node without rows of others is a single master whose replicas are down, and the only writable member."""
    found = node_health(report(id=3, replication=(ReportedPeer(id=3, uuid="u"), *others), **OFF), statistics(), usage())
    consequence = "no replica has its new rows" if is_ready else "it gets no rows"
    assert (found.is_ready, found.reasons) == (is_ready, (f"{ALONE}: {consequence}",))


async def test_writable_member_configured_without_upstreams_is_not_ready(tmp_path: Path) -> None:
    """Its master, which it no longer follows, is ready; `explain` agrees for both."""
    address = f"127.0.0.1:{free_port()}"
    uri = "{}:{}@{}".format(*REPLICATOR, address)
    async with (
        Node(tmp_path / "1", listen=address, user=REPLICATOR) as master,
        Node(tmp_path / "2", replication=[uri]) as member,
    ):
        await member.wait_rw(SECONDS)
        assert (await NodeMetrics(member).health()).is_well
        await member.reconfigure(replication=[])
        space = await master.create_space("orders")
        await until(lambda: master.info()["replication"][2].get("downstream", {}).get("status") == "stopped")
        found, masters = [await NodeMetrics(node).health() for node in (member, master)]
        assert (found.is_ready, found.reasons) == (False, (f"{ALONE}: it gets no rows",))
        assert (masters.is_ready, masters.reasons) == (True, (f"{ALONE}: no replica has its new rows",))
        findings = explain(replica_sets([await own_report(node) for node in (member, master)]))
        assert space.id
        stopped = [finding.member for finding in findings if finding.severity is Severity.STOPPED]
        assert stopped == [member.info()["uuid"]]


async def test_member_that_restarts_while_all_others_are_down_is_ready(tmp_path: Path) -> None:
    """Its upstream is configured and has not answered yet, so it is not in `box.info.replication`."""
    address, other = (f"127.0.0.1:{free_port()}" for _ in range(2))
    uris = ["{}:{}@{}".format(*REPLICATOR, each) for each in (address, other)]
    async with (
        Node(tmp_path / "1", listen=address, user=REPLICATOR) as first,
        Node(tmp_path / "2", listen=other, replication=[uris[0]]) as second,
    ):
        await second.wait_rw(SECONDS)
        await first.reconfigure(replication=uris)
        space = await second.create_space("orders")
        await until(lambda: space.id in first.box.spaces)
    options: dict[str, Any] = {"replication": uris, "replication_connect_timeout": 1, "replication_connect_quorum": 1}
    async with Node(tmp_path / "1", listen=address, **options) as survivor:
        await survivor.wait_rw(SECONDS)
        assert "upstream" not in survivor.info()["replication"][2]
        assert (await NodeMetrics(survivor).health()).is_well


def test_expelled_node_is_not_ready_and_anonymous_node_is_ready() -> None:
    for is_anonymous in (True, False):
        cfg = {"election_mode": "off", "replication_anon": is_anonymous}
        found = node_health(report(id=0, ro=True, election=None, cfg=cfg), statistics(), usage())
        assert found.is_ready == is_anonymous


def test_follower_with_an_unknown_election_mode_does_not_make_the_node_unready() -> None:
    peers = (ReportedPeer(id=1, uuid="u"), ReportedPeer(id=2, uuid="v", downstream=ReportedDownstream(status="follow")))
    assert node_health(report(replication=peers), statistics(), usage()).is_well


async def test_leader_with_an_unlisted_read_replica_is_ready(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    uri = "{}:{}@{}".format(*REPLICATOR, address)
    async with (
        Node(tmp_path / "1", listen=address, user=REPLICATOR, election_mode="candidate") as leader,
        Node(tmp_path / "2", election_mode="off", read_only=True, replication=[uri]) as replica,
    ):
        number = replica.info()["id"]
        await until(lambda: leader.info()["replication"][number].get("downstream", {}).get("status") == "follow")
        found = await NodeMetrics(leader).health()
        assert (found.is_well, found.reasons) == (True, ())


def test_voter_without_upstreams_is_not_ready_despite_followers() -> None:
    follower = ReportedPeer(id=2, uuid="v", downstream=ReportedDownstream(status="follow"))
    facts: dict[str, Any] = {
        "ro": True,
        "replication": (ReportedPeer(id=1, uuid="u"), follower),
        "upstreams_configured": 0,
    }
    voter = report(cfg={"election_mode": "voter"}, election=Election(state="follower", term=3, leader=2), **facts)
    found = node_health(voter, statistics(), usage())
    assert not found.is_ready
    assert "node follows no other member: it gets no rows" in found.reasons
