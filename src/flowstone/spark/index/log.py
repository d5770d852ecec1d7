"""`Log`: what a mirror needs of the log of a replica set and of a Limestone directory alike.

Fulfilled by `ArchiveIndex` and `LimestoneLog`. Positions are vclocks; everything up to `settled` is final. A log plans
batches and knows definitions and times; it reads no rows for its caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowstone.box.schema import SchemaTracker
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_runs import SnapshotFile

NEWEST_VERSION = (2, 11)
"""The version that is assumed for a log that does not name its server."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows after `start` up to `end`, and what holds at `end`.

    `definitions` are shared: do not modify them. `row_count` is approximate. `time`, in microseconds, is a commit time
    that no later transaction precedes.
    """

    start: VClock
    end: VClock
    definitions: SchemaTracker
    row_count: int
    time: int

    def extended(self, following: BatchPlan) -> BatchPlan:
        """Return the plan of both batches; the other one starts at the end of this one."""
        count = self.row_count + following.row_count
        return BatchPlan(self.start, following.end, following.definitions, count, following.time)


class Log(Protocol):
    """The log of one replica set or Limestone instance, as of the last `refresh`."""

    @property
    def directory(self) -> str: ...

    @property
    def replicaset_uuid(self) -> str: ...

    @property
    def has_times(self) -> bool:
        """True if the log records when transactions were committed."""
        ...

    @property
    def server_version(self) -> tuple[int, ...]:
        """The version of the server that wrote the log; the semantics of UPSERT depend on it."""
        ...

    @property
    def settled(self) -> VClock:
        """The position up to which no row can be rolled back any more."""
        ...

    @property
    def earliest(self) -> VClock:
        """The position after which all changes are available."""
        ...

    @property
    def snapshots(self) -> tuple[SnapshotFile, ...]:
        """The available states, in ascending order."""
        ...

    def refresh(self) -> None:
        """Add what was written since the last call. Cheap if nothing was."""
        ...

    def plan(self, start: VClock, *, max_rows: int, max_bytes: int) -> BatchPlan:
        """Return the next batch after `start`, empty if there are no settled rows.

        At most one transaction of a batch changes definitions or truncates a space: the first one. Raise DataLoss if
        the rows after `start` are no longer available.
        """
        ...

    def schema_at(self, position: VClock) -> SchemaTracker:
        """Return the definitions at a settled position."""
        ...

    def time_at(self, position: VClock) -> int:
        """Return a commit time, in microseconds, that no transaction after `position` precedes."""
        ...

    def time_of(self, snapshot: SnapshotFile) -> int:
        """Return the commit time of a snapshot's rows, in microseconds."""
        ...
