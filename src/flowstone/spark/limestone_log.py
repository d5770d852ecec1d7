"""A Limestone directory as the log that a mirror follows: durable epochs as settled positions, storages as spaces.

Beside `ArchiveIndex` the other thing that `DirectorySource` can be of. There is no snapshot file: the state at the
durable epoch stands for one, and is made of the log itself.
"""

from __future__ import annotations

from flowstone.box.schema import SchemaTracker
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.archive_index import DataLoss
from flowstone.spark.archive_runs import SnapshotFile
from flowstone.spark.limestone_index import EpochLost, LimestoneIndex
from flowstone.spark.limestone_spaces import epoch_of, position_of, space_id_of, tracker_of


class LimestoneLog:
    """An index that speaks of positions."""

    def __init__(self, index: LimestoneIndex) -> None:
        self.entries = index
        self.disk = index.disk
        self.directory = index.directory
        self.replicaset_uuid = index.instance_uuid

    @classmethod
    def open(cls, disk: Disk, directory: str) -> LimestoneLog:
        return cls(LimestoneIndex.open(disk, directory))

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
        """The state of now."""
        return (SnapshotFile(self.directory, self.settled, self.entries.size_between(-1, self.entries.durable)),)

    def cut(
        self,
        start: VClock,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        at_definitions: bool = False,
    ) -> VClock:
        """As that of an archive. A batch does not go over what compaction has done: there versions begin anew."""
        at, index = epoch_of(start), self.entries
        try:
            index.check_changes(at, max(at, index.durable))
        except EpochLost as error:
            raise DataLoss(error.message, hint=error.hint) from error
        end = index.cut(at, max_rows=max_rows, max_bytes=max_bytes)
        return position_of(min(end, index.horizon) if at < index.horizon else end)

    def row_count(self, start: VClock, end: VClock) -> int:
        return self.entries.row_count(epoch_of(start), epoch_of(end))

    def schema_at(self, position: VClock) -> SchemaTracker:
        return tracker_of(tuple(self.entries.storages(epoch_of(position))))

    def emptied(self, start: VClock, end: VClock) -> set[int]:
        """The spaces whose storages are cleared or removed behind `start` up to `end`."""
        at = epoch_of(start)
        clears = self.entries.clears(epoch_of(end), behind=at, with_detached=at < self.entries.horizon)
        return {space_id_of(storage_id) for storage_id in clears}

    def time_at(self, position: VClock) -> int:
        """Nobody knows: the log has no times."""
        return 0

    def time_of(self, snapshot: SnapshotFile) -> int:
        return 0
