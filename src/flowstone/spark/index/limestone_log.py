"""A Limestone directory as the log that a mirror follows: durable epochs are settled positions, storages are spaces.

Fulfils `Log`, like `ArchiveIndex`. There is no snapshot file: the state at the durable epoch,
built from the log itself, takes its place.
"""

from __future__ import annotations

from flowstone.box.schema import SchemaTracker
from flowstone.limestone.tsurugi.definitions import SYSTEM_STORAGES
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.index.limestone_index import EpochLost, LimestoneIndex
from flowstone.spark.index.limestone_spaces import epoch_of, position_of, space_id_of
from flowstone.spark.index.limestone_tables import LimestoneTables, tables_at
from flowstone.spark.index.log import NEWEST_VERSION, BatchPlan
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.index.log_runs import SnapshotFile


class LimestoneLog:
    """A `LimestoneIndex` addressed by positions instead of epochs. `is_raw`: Tsurugi's tables are raw storages, too."""

    def __init__(self, index: LimestoneIndex, *, is_raw: bool = False) -> None:
        self.entries = index
        self.is_raw = is_raw
        self.disk = index.disk
        self.directory = index.directory
        self.replicaset_uuid = index.instance_uuid

    @classmethod
    def open(cls, disk: Disk, directory: str, *, is_raw: bool = False) -> LimestoneLog:
        return cls(LimestoneIndex.open(disk, directory), is_raw=is_raw)

    def refresh(self) -> None:
        self.entries.refresh()

    @property
    def settled(self) -> VClock:
        return position_of(self.entries.durable)

    @property
    def earliest(self) -> VClock:
        return position_of(self.entries.earliest)

    @property
    def snapshots(self) -> tuple[SnapshotFile, ...]:
        """The current state."""
        return (SnapshotFile(self.directory, self.settled, self.entries.size_between(-1, self.entries.durable)),)

    @property
    def has_times(self) -> bool:
        return False

    @property
    def server_version(self) -> tuple[int, ...]:
        return NEWEST_VERSION

    def plan(self, start: VClock, *, max_rows: int, max_bytes: int) -> BatchPlan:
        """Return the next batch.

        It never crosses the compaction horizon, because versions start over there. An epoch that defines, alters or
        drops tables is a batch of its own, so that tables are created and dropped one by one.
        """
        at, index = epoch_of(start), self.entries
        try:
            index.check_changes(at, max(at, index.durable))
        except EpochLost as error:
            raise DataLoss(error.message, hint=error.hint) from error
        end = index.cut(at, max_rows=max_rows, max_bytes=max_bytes)
        if at < index.horizon:
            end = min(end, index.horizon)
        defining = None if self.is_raw else index.definition_epoch(at)
        if defining is not None and defining <= end:
            end = defining if defining == at + 1 else defining - 1
        position = position_of(end)
        return BatchPlan(start, position, self.schema_at(position), index.row_count(at, end), 0)

    def schema_at(self, position: VClock) -> SchemaTracker:
        return self.tables_at(epoch_of(position)).tracker

    def tables_at(self, epoch: int) -> LimestoneTables:
        """Return the tables at an epoch."""
        return tables_at(self.entries, epoch, is_raw=self.is_raw)

    def emptied(self, start: VClock, end: VClock) -> set[int]:
        """Return the spaces whose storages are cleared or removed after `start` up to `end`."""
        at = epoch_of(start)
        clears = self.entries.clears(epoch_of(end), after=at, with_detached=at < self.entries.horizon)
        return {space_id_of(storage_id) for storage_id in clears if storage_id not in SYSTEM_STORAGES}

    def time_at(self, position: VClock) -> int:
        """Return 0: the log has no times."""
        return 0

    def time_of(self, snapshot: SnapshotFile) -> int:
        return 0
