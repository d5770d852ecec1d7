"""Metrics and probes of an archive."""

from __future__ import annotations

from pathlib import Path

from flowstone import Node
from flowstone.archive import events as events
from flowstone.archive.archive import Archive
from flowstone.web.archive_metrics import ArchiveMetrics
from flowstone.web.metrics import encode
from tests.node.upstream.test_applier import until
from tests.web.exposition import Exposition, checked

SECONDS = 60.0


async def shown(metrics: ArchiveMetrics) -> Exposition:
    return checked(encode(await metrics.metrics(), "")[0].decode())


async def test_archive_is_not_ready_before_its_first_rows() -> None:
    metrics = ArchiveMetrics("backup")
    assert (await shown(metrics)).value("flowstone_archive_following", archive="backup") == 0
    health = await metrics.health()
    assert (health.state, health.is_ready, health.reasons) == (
        "starting",
        False,
        ("archive does not follow the server yet",),
    )


async def test_lost_server_is_a_reason_until_it_returns() -> None:
    metrics = ArchiveMetrics("backup")
    connected = events.Connected("db1:3301", "uuid", "2.11.0", {1: 5}, {1: 9})
    for event in (connected, events.Progress({1: 9}, {1: 8}, 4, 2.0, 0.5, "follow", 300)):
        metrics.note(event)
    assert (await metrics.health()).is_well
    metrics.note(events.Disconnected("db1:3301", "Connection refused"))
    assert (await metrics.health()).reasons == ("Connection refused",)
    metrics.note(connected)
    assert (await metrics.health()).is_well
    found = await shown(metrics)
    assert found.value("flowstone_archive_position", id="1") == 9
    assert found.value("flowstone_archive_settled_position", id="1") == 8
    assert found.value("flowstone_archive_rows_total") == 4
    assert found.value("flowstone_archive_bytes_total") == 300
    assert found.value("flowstone_archive_lag_seconds") == 0.5
    assert found.value("flowstone_archive_disconnects_total") == 1


async def test_gaps_and_snapshots_are_counted() -> None:
    metrics = ArchiveMetrics("backup")
    metrics.note(events.GapFound(((1, 5, 9), (2, 1, 1)), {}, {}, "they were collected"))
    metrics.note(events.Snapshotted("x.snap", {1: 9}, 100, "gap"))
    metrics.note(events.SnapshotFailed("no room"))
    found = await shown(metrics)
    names = ("gaps", "missing_rows", "snapshots", "snapshot_failures")
    assert [found.value(f"flowstone_archive_{name}_total") for name in names] == [1, 6, 1, 1]


async def test_archive_of_a_node_shows_its_position(tmp_path: Path) -> None:
    metrics, positions = ArchiveMetrics("backup"), [0]

    def note(event: events.ArchiveEvent) -> None:
        metrics.note(event)
        if isinstance(event, events.Progress):
            positions.append(event.position.get(1, 0))

    async with Node(tmp_path / "node", listen="127.0.0.1:0", user=("app", "secret")) as node:
        space = await node.create_space("orders")
        await space.create_index("pk")
        async with Archive(f"app:secret@{node.address}", tmp_path / "backup", on_event=note) as archive:
            await until(lambda: archive.position.get(1) >= node.info()["lsn"], SECONDS)
            for key in range(10):
                await space.insert([key])
            lsn = node.info()["lsn"]
            await until(lambda: positions[-1] >= lsn, SECONDS)
            found = await shown(metrics)
            assert (await metrics.health()).is_ready
    assert found.value("flowstone_archive_rows_total") >= 10
    assert found.value("flowstone_archive_bytes_total") > 0
    assert found.value("flowstone_archive_settled_position", id="1") == lsn
