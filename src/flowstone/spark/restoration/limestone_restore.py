"""The state of a Limestone directory at a durable epoch as files: a usable data directory, Delta tables, or Parquet.

As in `archive_restore.py`, the output is built beside its destination and renamed when it is complete. The data
directory has a compacted file, the blobs that its rows reference, and an instance UUID of its own.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import catalog, copying, epoch_file, manifest, names
from flowstone.limestone.format.catalog import COMPACTED_VERSION, Catalog
from flowstone.spark.collect import rows_of
from flowstone.spark.fold.limestone_fold import state_frame
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_spaces import position_of, space_id_of, storage_id_of, tracker_of
from flowstone.spark.restoration.archive_restore import (
    Format,
    Restored,
    RestoredSpace,
    check_output,
    destination,
    sync_all,
    typed_rows,
)
from flowstone.spark.restoration.limestone_compact import SortedRows, write_sorted
from flowstone.spark.sources.limestone.entry_columns import table_name
from flowstone.spark.sources.state_contract import StateContract

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flowstone.box.definitions import SpaceDefinition

FORMATS: Final[tuple[Format, ...]] = ("limestone", "delta", "parquet")
EPOCH_ZERO: Final = datetime(1970, 1, 1, tzinfo=UTC)

Tell = Callable[[str], object]


def restore_limestone(
    spark: SparkSession,
    index: LimestoneIndex,
    epoch: int,
    out: str,
    *,
    formats: Sequence[Format] = ("limestone",),
    tell: Tell = lambda what: None,
) -> Restored:
    """Write the state at a durable `epoch` into the directory `out`, which must be new or empty.

    A single format is written to `out` itself, several formats each to a directory in it. Raises NotDurable or
    EpochLost if the state is not available. On failure, all output is removed.
    """
    begun = time.monotonic()
    check_output(out)
    index.check_state(epoch)
    with destination(index.disk, out) as directory:
        places = {each: directory if len(formats) == 1 else os.path.join(directory, each) for each in formats}
        job = _Job(spark, index, epoch, tell)
        with job.prepared(formats):
            for each in formats:
                index.disk.make_directory(places[each])
                job.write(each, places[each])
        tell("syncing")
        sync_all(directory)
    named = {each: out + path.removeprefix(directory) for each, path in places.items()}
    spaces = tuple(RestoredSpace(storage, table_name(storage), count) for storage, count in sorted(job.counts.items()))
    return Restored(
        position_of(epoch), job.instance_uuid, index.instance_uuid, spaces, named, (), time.monotonic() - begun
    )


@dataclass
class _Job:
    """A single restore."""

    spark: SparkSession
    index: LimestoneIndex
    epoch: int
    tell: Tell
    counts: dict[int, int] = field(default_factory=dict)
    instance_uuid: str = ""
    _frame: DataFrame | None = None

    @contextmanager
    def prepared(self, formats: Sequence[Format]) -> Iterator[None]:
        """Keep the state on the disks of executors until the block ends, if tables are wanted."""
        from pyspark import StorageLevel

        if set(formats) == {"limestone"}:
            yield
            return
        self.tell("rebuilding the state")
        frame = self._frame = state_frame(self.spark, self.index, self.epoch).persist(StorageLevel.DISK_ONLY)
        try:
            counts = rows_of(frame.groupBy("space_id").count())
            found = {storage_id_of(row["space_id"]): row["count"] for row in counts}
            self.counts = {storage: found.get(storage, 0) for storage in self.index.storages(self.epoch)}
            yield
        finally:
            frame.unpersist()

    def write(self, format: Format, directory: str) -> None:
        if format == "limestone":
            self._write_directory(directory)
        elif format == "delta":
            self._write_delta(directory)
        else:
            self._write_parquet(directory)

    def _write_directory(self, directory: str) -> None:
        self.tell("sorting")
        disk = self.index.disk
        self.instance_uuid = str(uuid.uuid4())
        found = write_sorted(self.spark, self.index, self.epoch, f"{directory}/{names.COMPACTED}")
        self.counts = {storage: found.rows.get(storage, 0) for storage in self.index.storages(self.epoch)}
        self.tell("copying blobs")
        self._copy_blobs(directory, found)
        largest = max(self.index.max_blob_id, self.index.catalog.max_blob_id)
        catalog.write(disk, directory, Catalog(((names.COMPACTED, COMPACTED_VERSION),), (), self.epoch, largest))
        copying.write(disk, f"{directory}/{names.EPOCH}", epoch_file.record(self.epoch))
        copying.write(disk, f"{directory}/{names.MANIFEST}", manifest.encode(manifest.Manifest(self.instance_uuid)))

    def _copy_blobs(self, directory: str, found: SortedRows) -> None:
        disk = self.index.disk
        for blob_id in sorted(found.blob_ids):
            source, target = (f"{each}/{names.blob(blob_id)}" for each in (self.index.directory, directory))
            if disk.kind(source) != "file":
                raise LimestoneError(
                    f"{source} is missing, but a row of epoch {self.epoch} references it",
                    hint="blobs of earlier states are garbage-collected; restore a later epoch, or a backup",
                )
            disk.make_directory(os.path.dirname(target))
            copying.copy(disk, source, target)

    @property
    def _state(self) -> DataFrame:
        assert self._frame is not None
        return self._frame

    def _spaces(self) -> list[SpaceDefinition]:
        storages = tuple(self.index.storages(self.epoch))
        schema = tracker_of(storages).schema
        return [schema.space(space_id_of(storage)) for storage in storages]

    def _write_delta(self, directory: str) -> None:
        from flowstone.lake.table import Moment
        from flowstone.spark.lake import Lake

        self.tell("writing Delta tables")
        lake = Lake.open(directory, spark=self.spark)
        moment = Moment(self.epoch, EPOCH_ZERO)
        lake.load(self._state, self._spaces(), self.index.instance_uuid, position_of(self.epoch), moment=moment)

    def _write_parquet(self, directory: str) -> None:
        from pyspark.sql import functions

        for space in self._spaces():
            self.tell(f"writing {space.name} as Parquet")
            contract = StateContract(self.index.instance_uuid, space)
            rows = self._state.filter(functions.col("space_id") == space.id)
            path = Path(directory, space.name).as_uri()
            rows.mapInArrow(partial(typed_rows, contract), contract.spark_schema).write.parquet(path)
