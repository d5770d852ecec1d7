"""Metrics of a node about itself: its work, its files, its process."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from flowstone import Node
from flowstone.client.connection import Connection
from flowstone.iproto.uri import parse_uri
from flowstone.outside import production
from flowstone.outside.disk import SystemDisk
from flowstone.web.metrics import encode
from flowstone.web.monitoring import monitoring
from flowstone.web.node_metrics import NodeMetrics
from flowstone.web.server import WebServer
from tests.node.hanging_disk import HangingDisk
from tests.web.exposition import Exposition, checked
from tests.web.http_client import get

OURS: Final = {
    "tnt_net_sent_total": {"alias"},
    "tnt_net_received_total": {"alias"},
    "tnt_net_connections_total": {"alias"},
    "tnt_net_connections_current": {"alias"},
    "tnt_net_requests_total": {"alias"},
    "tnt_net_requests_current": {"alias"},
    "tnt_stats_op_total": {"alias", "operation"},
    "tnt_space_len": {"alias", "name", "engine"},
    "tnt_cpu_user_time": {"alias"},
    "tnt_cpu_system_time": {"alias"},
    "tnt_memory": {"alias"},
    "tnt_memory_virt": {"alias"},
    "tnt_cfg_current_time": {"alias"},
}
"""Names of `tarantool/metrics` beyond replication that a node exports, with their labels."""


async def shown(node: Node) -> Exposition:
    return checked(encode(await NodeMetrics(node).metrics(), "")[0].decode())


async def test_node_metrics_count_its_work(tmp_path: Path) -> None:
    async with Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        space = await node.create_space("orders")
        await space.create_index("pk")
        await space.insert([1])
        before = await shown(node)
        async with await Connection.open(production(), parse_uri(f"app:secret@{node.address}")):
            found = await shown(node)
        for name, labels in OURS.items():
            assert all(given.keys() == labels for given in found.labels(name)), name
            assert found.labels(name), name
        assert found.value("tnt_space_len", name="orders", engine="memtx") == 1
        assert found.value("tnt_stats_op_total", operation="auth") == 1
        assert found.value("tnt_net_connections_current") == 1
        assert before.value("tnt_net_connections_current") == 0
        assert found.value("flowstone_wal_rows_total") == node.info()["lsn"]
        writes = sum(found.value("flowstone_wal_write_seconds_count", mode=mode) for mode in ("write", "fsync"))
        assert writes >= 3
        assert found.value("flowstone_wal_files") == 1
        assert found.value("flowstone_wal_failing") == 0
        assert found.value("flowstone_disk_free_bytes", directory="wal_dir") > 0
        assert found.labels("tnt_info_lsn") == [{"alias": node.address}]
        assert (await NodeMetrics(node).health()).is_ready


async def test_metrics_show_held_logs_and_sent_bytes_per_replica(tmp_path: Path) -> None:
    async with (
        Node(tmp_path / "a", listen="127.0.0.1:0", user=("app", "secret")) as master,
        Node(tmp_path / "b", replication=[f"app:secret@{master.address}"]) as replica,
    ):
        await replica.wait_rw(60)
        uuid = replica.info()["uuid"]
        found = await shown(master)
        assert found.value("flowstone_relay_bytes_total", id="2", uuid=uuid) >= 0
        assert found.value("flowstone_gc_held_bytes", consumer=f"replica {uuid}") > 0
        assert found.value("flowstone_replication_lag_rows", id="2", master="1") >= 0


class FailingDisk(SystemDisk):
    """A disk that is writable until it fails; then neither its directories nor its free space are exported."""

    is_failing = False

    def list_directory(self, path: str) -> list[str]:
        self._fail(path)
        return super().list_directory(path)

    def free_space(self, path: str) -> int:
        self._fail(path)
        return super().free_space(path)

    def _fail(self, path: str) -> None:
        if self.is_failing:
            raise OSError(errno.EIO, "Input/output error", path)


async def test_failing_disk_removes_only_its_own_metrics(tmp_path: Path) -> None:
    disk = FailingDisk()
    node = Node(tmp_path, outside=replace(production(), disk=disk))
    async with node, WebServer(monitoring(NodeMetrics(node)), "127.0.0.1:0") as web:
        before = await shown(node)
        disk.is_failing = True
        metrics, health, ready = [await get(web, path) for path in ("/metrics", "/health", "/health/ready")]
        assert (metrics.status, health.status, ready.status) == (200, 503, 200)
        found = checked(metrics.body.decode())
        assert found.value("flowstone_wal_failing") == 0
        gone = {"flowstone_wal_files", "flowstone_wal_files_bytes", "flowstone_snapshots_bytes"}
        assert before.families.keys() - found.families.keys() == gone | {"flowstone_disk_free_bytes"}
        reason = f"cannot read the data directory: {tmp_path}: Input/output error"
        assert msgspec.json.decode(health.body) == {"status": "unwell", "state": "running", "reasons": [reason]}
        disk.is_failing = False
        assert (await get(web, "/health")).status == 200


async def test_hanging_disk_does_not_delay_probes_and_metrics(tmp_path: Path) -> None:
    disk = HangingDisk()
    node = Node(tmp_path, outside=replace(production(), disk=disk))
    async with node, WebServer(monitoring(NodeMetrics(node)), "127.0.0.1:0") as web:
        with disk.hanging():
            metrics, health, ready = [await get(web, path) for path in ("/metrics", "/health", "/health/ready")]
            assert (metrics.status, health.status, ready.status) == (200, 503, 200)
            assert checked(metrics.body.decode()).value("flowstone_wal_failing") == 0
            assert disk.waiting == 1
        reason = "cannot read the data directory: the disk does not answer"
        assert msgspec.json.decode(health.body)["reasons"] == [reason]


async def test_node_has_no_metrics_and_is_not_ready_before_its_start(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert list((await NodeMetrics(node).metrics()).collect()) == []
    health = await NodeMetrics(node).health()
    assert (health.state, health.is_ready) == ("starting", False)
