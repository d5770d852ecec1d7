"""Metrics and health of a running mirror, built from its events: tables, changes, batches and lag."""

from __future__ import annotations

from flowstone.spark.mirror import progress as events
from flowstone.web.health import Health
from flowstone.web.metrics import Families


class MirrorMetrics:
    """`monitoring.Monitored` for the mirror that writes to `lake`. Pass its events to `note`, from any thread."""

    def __init__(self, lake: str) -> None:
        self._lake = lake
        self._progress: events.MirrorProgress | None = None
        self._losses = 0
        self._snapshots = 0

    def note(self, event: events.MirrorEvent) -> None:
        match event:
            case events.MirrorProgress():
                self._progress = event
            case events.MirrorDataLoss():
                self._losses += 1
            case events.MirrorSnapshot() if event.rows is not None:
                self._snapshots += 1

    async def metrics(self) -> Families:
        families, lake, progress = Families(), self._lake, self._progress
        text = "Whether the mirror has started"
        families.gauge("flowstone_mirror_running", text, int(progress is not None), lake=lake)
        families.counter("flowstone_mirror_snapshots_total", "Snapshots loaded", self._snapshots, lake=lake)
        text = "Times that rows were lost because the source no longer had them"
        families.counter("flowstone_mirror_data_losses_total", text, self._losses, lake=lake)
        if progress is not None:
            _add_progress(families, lake, progress)
        return families

    async def health(self) -> Health:
        """Return the health; the mirror is ready once it has started. Its lag is for alerts on its metrics."""
        if self._progress is None:
            return Health(state="starting", is_ready=False, reasons=("mirror has not started yet",))
        return Health(state="running", is_ready=True)


def _add_progress(families: Families, lake: str, progress: events.MirrorProgress) -> None:
    for uuid, position in progress.positions.items():
        for replica_id, lsn in position.items():
            text = "LSN up to which settled changes of this replica are in the lake"
            families.gauge("flowstone_mirror_position", text, lsn, lake=lake, replicaset=uuid, id=replica_id)
    text = "Changes written to the lake since the mirror started"
    families.counter("flowstone_mirror_changes_total", text, progress.changes, lake=lake)
    text = "Batches written since the mirror started"
    families.counter("flowstone_mirror_batches_total", text, progress.batches, lake=lake)
    text = "Duration of the last batch in seconds"
    families.gauge("flowstone_mirror_batch_seconds", text, progress.batch_seconds, lake=lake)
    text = "Age of the newest change when it was committed to the lake; 0 if no changes are pending"
    families.gauge("flowstone_mirror_lag_seconds", text, progress.lag, lake=lake)
    text = "Log rows that are known and not yet in the lake"
    families.gauge("flowstone_mirror_lag_rows", text, progress.lag_lsn, lake=lake)
    text = "Tables changed since the mirror started"
    families.gauge("flowstone_mirror_tables", text, len(progress.tables), lake=lake)
    text = "Values in the quarantine of the lake that are not healed"
    families.gauge("flowstone_mirror_quarantine_rows", text, progress.quarantine_rows, lake=lake)
    for name, table in progress.tables.items():
        text = "Changes of this table since the mirror started"
        families.counter("flowstone_mirror_table_changes_total", text, table.changes, lake=lake, table=name)
        text = "Values of this table that did not fit their column since the mirror started"
        families.counter("flowstone_mirror_misfits_total", text, table.misfits, lake=lake, table=name)
        text = "Version of this table"
        families.gauge("flowstone_mirror_table_version", text, table.version, lake=lake, table=name)
