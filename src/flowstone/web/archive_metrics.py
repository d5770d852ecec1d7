"""Metrics and health of a running archive, built from its events; they are at most one second old."""

from __future__ import annotations

from flowstone.archive import events as events
from flowstone.observation.replica_set import FOLLOWING
from flowstone.web.health import Health
from flowstone.web.metrics import Families


class ArchiveMetrics:
    """`monitoring.Monitored` for the archive in `directory`. Pass each of its events to `note`."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._progress: events.Progress | None = None
        self._trouble: str | None = None
        self._is_connected = False
        self._snapshots = self._snapshot_failures = self._gaps = self._missing_rows = self._disconnects = 0

    def note(self, event: events.ArchiveEvent) -> None:
        match event:
            case events.Progress():
                self._progress = event
            case events.Connected():
                self._is_connected, self._trouble = True, None
            case events.Disconnected():
                self._is_connected, self._trouble = False, event.error
                self._disconnects += 1
            case events.Snapshotted():
                self._snapshots += 1
            case events.SnapshotFailed():
                self._snapshot_failures += 1
            case events.GapFound():
                self._gaps += 1
                self._missing_rows += sum(last - first + 1 for _, first, last in event.missing)

    async def metrics(self) -> Families:
        families, archive = Families(), self._directory
        following = int(self._is_following)
        families.gauge("flowstone_archive_following", "Whether the archive receives rows", following, archive=archive)
        progress = self._progress
        if progress is not None:
            for replica_id, lsn in progress.position.items():
                text = "LSN up to which rows of this replica are durable in the archive"
                families.gauge("flowstone_archive_position", text, lsn, archive=archive, id=replica_id)
            for replica_id, lsn in progress.settled.items():
                text = "LSN up to which rows of this replica are settled and cannot be rolled back"
                families.gauge("flowstone_archive_settled_position", text, lsn, archive=archive, id=replica_id)
            text = "Rows written since the archive started"
            families.counter("flowstone_archive_rows_total", text, progress.rows, archive=archive)
            text = "Bytes written to logs since the archive started"
            families.counter("flowstone_archive_bytes_total", text, progress.bytes, archive=archive)
            text = "Seconds between the write of the last row on the server and in the archive"
            families.gauge("flowstone_archive_lag_seconds", text, progress.lag, archive=archive)
        self._add_counts(families)
        return families

    def _add_counts(self, families: Families) -> None:
        for name, text, count in (
            ("flowstone_archive_snapshots_total", "Snapshots taken", self._snapshots),
            ("flowstone_archive_snapshot_failures_total", "Snapshots that failed", self._snapshot_failures),
            ("flowstone_archive_gaps_total", "Times the server no longer had the next rows", self._gaps),
            (
                "flowstone_archive_missing_rows_total",
                "Rows that the server no longer had and that a snapshot replaces",
                self._missing_rows,
            ),
            ("flowstone_archive_disconnects_total", "Times the connection to the server was lost", self._disconnects),
        ):
            families.counter(name, text, count, archive=self._directory)

    @property
    def _is_following(self) -> bool:
        return self._is_connected and self._progress is not None and self._progress.state in FOLLOWING

    async def health(self) -> Health:
        """Return the health; the archive is ready while it receives rows."""
        state = self._progress.state if self._progress is not None else "starting"
        if self._is_following:
            return Health(state=state, is_ready=True)
        reason = self._trouble or "archive does not follow the server yet"
        return Health(state=state, is_ready=False, reasons=(reason,))
