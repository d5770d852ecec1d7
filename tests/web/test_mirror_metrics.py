"""Metrics and probes of a running mirror; tests/spark/test_mirror_kill.py queries a real one."""

from __future__ import annotations

from flowstone.spark.mirror.progress import MirrorDataLoss, MirrorProgress, MirrorSnapshot, TableProgress
from flowstone.web.metrics import encode
from flowstone.web.mirror_metrics import MirrorMetrics
from tests.web.exposition import Exposition, checked

UUID = "aaaaaaaa-0000-4000-8000-000000000001"
TABLES = {"orders": TableProgress(1000, 500.0, 12, misfits=3), "users": TableProgress(234, 117.0)}


async def shown(metrics: MirrorMetrics) -> Exposition:
    return checked(encode(await metrics.metrics(), "")[0].decode())


async def test_mirror_is_not_ready_before_its_start() -> None:
    metrics = MirrorMetrics("lake")
    assert (await shown(metrics)).value("flowstone_mirror_running", lake="lake") == 0
    assert not (await metrics.health()).is_ready


async def test_tables_changes_batches_and_freshness_are_shown() -> None:
    metrics = MirrorMetrics("lake")
    metrics.note(MirrorSnapshot(UUID, {1: 5}))
    metrics.note(MirrorSnapshot(UUID, {1: 5}, rows=10))
    metrics.note(MirrorDataLoss(UUID, "rows 6 to 9 are gone"))
    metrics.note(MirrorProgress({UUID: {1: 5, 2: 7}}, 1234, 617.0, 0.4, 7, TABLES, 0.25, 3, 5))
    found = await shown(metrics)
    assert found.value("flowstone_mirror_position", replicaset=UUID, id="2") == 7
    assert found.value("flowstone_mirror_changes_total") == 1234
    assert found.value("flowstone_mirror_batches_total") == 3
    assert found.value("flowstone_mirror_batch_seconds") == 0.25
    assert found.value("flowstone_mirror_lag_seconds") == 0.4
    assert found.value("flowstone_mirror_lag_rows") == 7
    assert found.value("flowstone_mirror_tables") == 2
    assert found.value("flowstone_mirror_table_changes_total", table="orders") == 1000
    assert found.value("flowstone_mirror_table_version", table="orders") == 12
    assert found.value("flowstone_mirror_misfits_total", table="orders") == 3
    assert found.value("flowstone_mirror_misfits_total", table="users") == 0
    assert found.value("flowstone_mirror_quarantine_rows") == 5
    assert found.value("flowstone_mirror_snapshots_total") == 1
    assert found.value("flowstone_mirror_data_losses_total") == 1
    assert (await metrics.health()).is_well


async def test_unknown_lag_is_omitted() -> None:
    metrics = MirrorMetrics("lake")
    metrics.note(MirrorProgress({}, 0, 0.0, None, 0, {}))
    assert "flowstone_mirror_lag_seconds" not in (await shown(metrics)).families
