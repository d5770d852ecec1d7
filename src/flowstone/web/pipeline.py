"""The tables in the lakes of `flowstone mirror`: the position and the age of each.

Reads the Delta logs with deltalake; needs no Spark and reads no data. A table's position tells which changes the table
contains. The caller passes the positions of the watched replica sets, which tell whether changes are missing. Calls
block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from deltalake.exceptions import DeltaError

from flowstone.errors import FlowstoneError
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.misfit_findings import misfit_findings
from flowstone.lake.quarantine import Quarantine
from flowstone.observation.findings.finding import Finding
from flowstone.observation.replica_set import missing_row_count
from flowstone.observation.report import VClock as Lsns
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake, LakeProgress, is_living
from flowstone.web.feed_state import PipelineTable

TABLES_MAX: Final = 500
"""Maximum number of tables shown per lake."""

FRESH_SECONDS: Final = 10.0
"""A table whose newest change is younger than this is current even if rows are missing: they are still in transit."""


class Pipeline:
    """The watched lakes. Their tables stay open between polls."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._lakes = [_WatchedLake(path) for path in paths]

    def look(self, now: float, positions: Mapping[str, Lsns]) -> tuple[PipelineTable, ...]:
        """Return the current state of all tables. `positions` are the positions of the watched replica sets, by
        UUID."""
        return tuple(table for lake in self._lakes for table in lake.look(now, positions))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings about the lakes, as of the last look."""
        return tuple(finding for lake in self._lakes for finding in lake.findings)


class _WatchedLake:
    def __init__(self, path: str) -> None:
        self._path = path
        self._lake = Lake.open(path, engine="deltalake")
        self._tables: dict[str, EmbeddedTable] = {}
        self._quarantine = Quarantine(self._lake.path, {})
        self._quarantine_version = -1
        self.findings: tuple[Finding, ...] = ()

    def look(self, now: float, positions: Mapping[str, Lsns]) -> list[PipelineTable]:
        try:
            progress, names = self._lake.progress, self._lake.directories()[:TABLES_MAX]
        except (FlowstoneError, DeltaError, OSError, ValueError):
            return [PipelineTable(lake=self._path, table="", status="damaged")]
        for gone in [name for name in self._tables if name not in names]:
            del self._tables[gone]
        self._look_at_quarantine()
        found = [self._table(name, progress, now, positions) for name in names]
        return [table for table in found if table is not None]

    def _look_at_quarantine(self) -> None:
        """Update the findings if the quarantine has changed."""
        try:
            version = self._quarantine.version
            if version != self._quarantine_version:
                self.findings = misfit_findings(self._path, self._quarantine)
                self._quarantine_version = version
        except (FlowstoneError, DeltaError, OSError, ValueError):
            self._quarantine_version = -1

    def _table(
        self, name: str, progress: Mapping[str, LakeProgress], now: float, positions: Mapping[str, Lsns]
    ) -> PipelineTable | None:
        """Return the state of a table; None if the directory is not a table, or belongs to a dropped space."""
        try:
            table = self._opened(name)
            return None if table is None else self._told(name, table, progress, now, positions)
        except (FlowstoneError, DeltaError, OSError, ValueError):
            self._tables.pop(name, None)
            return PipelineTable(lake=self._path, table=name, status="damaged")

    def _opened(self, name: str) -> EmbeddedTable | None:
        table = self._tables.get(name)
        if table is not None:
            table.refresh()
        else:
            table = EmbeddedTable.open(f"{self._lake.path}/{name}", {})
            if table is not None:
                self._tables[name] = table
        return table if table is not None and is_living(table.schema) else None

    def _told(
        self,
        name: str,
        table: EmbeddedTable,
        progress: Mapping[str, LakeProgress],
        now: float,
        positions: Mapping[str, Lsns],
    ) -> PipelineTable:
        # The lake's progress may be ahead of the table's position: a table is written only if its space has changed.
        reached = {
            uuid: own.merged(progress[uuid].position) if uuid in progress else own
            for uuid, own in table.positions.items()
        }
        stamps = [progress[uuid].stamp / 1e6 for uuid in reached if uuid in progress and progress[uuid].stamp]
        settled_at = min(stamps, default=None)
        is_whole = _is_whole(reached, positions)
        age = None if settled_at is None else max(0.0, now - settled_at)
        age = 0.0 if is_whole else age
        return PipelineTable(
            lake=self._path,
            table=name,
            space=table.schema.space.name,
            rows=table.row_count,
            version=table.version,
            position={uuid: vclock.to_mapping() for uuid, vclock in reached.items()},
            settled_at=settled_at,
            age_seconds=age,
            status=_status(is_whole, age),
        )


def _is_whole(reached: Mapping[str, VClock], positions: Mapping[str, Lsns]) -> bool | None:
    """Return True if no rows of the logs are missing; None if a set is not watched."""
    if not reached or any(uuid not in positions for uuid in reached):
        return None
    return all(missing_row_count(positions[uuid], vclock.to_mapping()) == 0 for uuid, vclock in reached.items())


def _status(is_whole: bool | None, age: float | None) -> str:
    if is_whole is None:
        return "unknown"
    return "current" if is_whole or (age is not None and age < FRESH_SECONDS) else "behind"
