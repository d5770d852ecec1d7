"""A node's statistics: `box.stat`, and the values behind its metrics."""

from __future__ import annotations

from pathlib import Path

import asynctnt

from flowstone import Node
from flowstone.node.statistics import DiskUsage


async def test_statistics_count_client_requests(tmp_path: Path) -> None:
    async with Node(tmp_path, listen="127.0.0.1:0", user=("app", "secret")) as node:
        space = await node.create_space("orders")
        await space.create_index("pk")
        await node.create_space("_hidden")
        port = int(str(node.address).rpartition(":")[2])
        connection = asynctnt.Connection(host="127.0.0.1", port=port, username="app", password="secret")
        await connection.connect()
        for key in range(3):
            await connection.insert("orders", [key])
        await connection.select("orders", [1])
        seen = node.statistics()
        assert (seen.operations["INSERT"], seen.operations["AUTH"], seen.connections) == (3, 1, 1)
        assert seen.operations["SELECT"] >= 1
        assert seen.requests > 4
        assert min(seen.received_bytes, seen.sent_bytes) > 0
        assert [(each.name, each.len) for each in seen.spaces] == [("orders", 3)]
        assert seen.wal.rows == node.info()["lsn"]
        assert seen.wal.write_seconds.count + seen.wal.synced_seconds.count > 0
        stat = (await connection.call("box.stat"))[0]
        assert stat["INSERT"]["total"] == 3
        assert stat["ERROR"]["total"] == 0
        net = (await connection.call("box.stat.net"))[0]
        assert net["CONNECTIONS"] == {"current": 1, "total": 1}
        assert net["RECEIVED"]["total"] > seen.received_bytes
        await connection.disconnect()


async def test_rows_sent_to_a_replica_are_counted(tmp_path: Path) -> None:
    async with Node(tmp_path / "a", listen="127.0.0.1:0", user=("app", "secret")) as master:
        space = await master.create_space("orders")
        await space.create_index("pk")
        upstream = f"app:secret@{master.address}"
        async with Node(tmp_path / "b", replication=[upstream]) as replica:
            await replica.wait_rw(10)
            before = master.statistics().followers[0]
            for key in range(5):
                await space.insert([key])
            signature = master.info()["signature"]
            while replica.info()["signature"] < signature:
                await replica._instance.outside.clock.sleep(0.01)
            sent = master.statistics().followers[0]
            assert (sent.id, sent.uuid, sent.rows - before.rows) == (2, replica.info()["uuid"], 5)
            assert sent.bytes > before.bytes


async def test_disk_usage_reports_logs_snapshots_and_free_space(tmp_path: Path) -> None:
    async with Node(tmp_path) as node:
        await node.create_space("orders")
        seen = await node.disk_usage()
        assert seen.logs[0][1] > 0
        assert seen.snapshots_bytes > 0
        assert min(seen.wal_free_bytes, seen.memtx_free_bytes) > 0


def test_disk_usage_counts_log_bytes_from_a_position_on() -> None:
    usage = DiskUsage(
        wal_dir="w",
        memtx_dir="m",
        wal_free_bytes=1,
        memtx_free_bytes=1,
        logs=((0, 10), (100, 20), (250, 40)),
        snapshots_bytes=0,
    )
    assert [usage.held_from(signature) for signature in (0, 99, 100, 200, 250, 999)] == [70, 70, 60, 60, 40, 40]
