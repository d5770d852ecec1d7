"""Metrics and health of a running mirror, by the events that it tells: tables, changes, batches, and how fresh."""

from __future__ import annotations

from flowstone.spark import mirror_progress as events
from flowstone.web.health import Health
from flowstone.web.metrics import Families


class MirrorMetrics:
    """`monitoring.Monitored` of the mirror that writes to `lake`; `note` is told every event of it, by any thread."""

    def __init__(self, lake: str) -> None:
        self._lake = lake
        self._progress: events.Progress | None = None
        self._losses = 0
        self._snapshots = 0

    def note(self, event: events.Event) -> None:
        match event:
            case events.Progress():
                self._progress = event
            case events.Lost():
                self._losses += 1
            case events.Snapshot() if event.rows is not None:
                self._snapshots += 1

    async def metrics(self) -> Families:
        families, lake, progress = Families(), self._lake, self._progress
        families.gauge("flowstone_mirror_running", "Whether it has begun", int(progress is not None), lake=lake)
        families.counter("flowstone_mirror_snapshots_total", "Snapshots loaded", self._snapshots, lake=lake)
        families.counter("flowstone_mirror_data_losses_total", "Times that rows were gone", self._losses, lake=lake)
        if progress is not None:
            _add_progress(families, lake, progress)
        return families

    async def health(self) -> Health:
        """Ready is who mirrors; how far behind it is, is for alerts on its metrics."""
        if self._progress is None:
            return Health(state="starting", is_ready=False, reasons=("it has not begun to mirror yet",))
        return Health(state="running", is_ready=True)


def _add_progress(families: Families, lake: str, progress: events.Progress) -> None:
    for uuid, position in progress.positions.items():
        for replica_id, lsn in position.items():
            text = "LSN up to which settled changes of this replica are in the lake"
            families.gauge("flowstone_mirror_position", text, lsn, lake=lake, replicaset=uuid, id=replica_id)
    text = "Changes that went into the lake since the start"
    families.counter("flowstone_mirror_changes_total", text, progress.changes, lake=lake)
    families.counter("flowstone_mirror_batches_total", "Batches since the start", progress.batches, lake=lake)
    families.gauge("flowstone_mirror_batch_seconds", "How long the last one took", progress.batch_seconds, lake=lake)
    text = "How old the newest change was when it was in the lake; 0 where nothing waits"
    families.gauge("flowstone_mirror_lag_seconds", text, progress.lag, lake=lake)
    text = "Rows of the log that are known and not in the lake"
    families.gauge("flowstone_mirror_lag_rows", text, progress.lag_lsn, lake=lake)
    families.gauge("flowstone_mirror_tables", "Tables that have changed", len(progress.tables), lake=lake)
    for name, table in progress.tables.items():
        text = "Changes of this table since the start"
        families.counter("flowstone_mirror_table_changes_total", text, table.changes, lake=lake, table=name)
        text = "Version of this table"
        families.gauge("flowstone_mirror_table_version", text, table.version, lake=lake, table=name)
