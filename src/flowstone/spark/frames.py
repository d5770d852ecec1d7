"""Changes and snapshots as data frames without a data source: the plan becomes rows, and those become batches.

For the jobs of the pipeline, which make many small batches: Spark starts no planning process for them, and executors
keep their workers. A slice is a partition of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from flowstone.box.system import TRUNCATE_ID
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.archive_index import SLICE_SIZE, ArchiveIndex, Slice
from flowstone.spark.archive_runs import SnapshotFile
from flowstone.spark.change_batches import read_slice
from flowstone.spark.clear_errors import clear_errors
from flowstone.spark.contract import RAW_COLUMNS, ChangeContract
from flowstone.spark.slice_bytes import SliceServer, Transport, with_transport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RAW_COLUMNS", "SliceRows", "changes_frame", "slices_frame", "snapshot_frame", "snapshot_rows"]

SLICE_SIZE_MIN: Final = 512 * 1024
"""Below this a task of its own costs more than it helps."""

SLICES_PER_CORE: Final = 3
"""So that a core that is done early has something left to do."""


def changes_frame(
    spark: SparkSession,
    index: ArchiveIndex,
    start: VClock,
    end: VClock,
    *,
    columns: Sequence[str] = RAW_COLUMNS,
    spaces: Collection[int] = (),
    show_system: bool = False,
    show_secrets: bool = True,
    transport: Transport = "file",
    server: SliceServer | None = None,
) -> DataFrame:
    """The settled changes behind `start` up to `end`, both settled; of `spaces` alone where they are named."""
    size = slice_size(spark, index.size_between(start, end))
    # Truncations are rows of another space.
    slices = index.slices(start, end, size=size, spaces=(*spaces, TRUNCATE_ID) if spaces else ())
    contract = _contract(index, columns, spaces, show_system)
    return slices_frame(
        spark, slices, start, end, contract, show_secrets=show_secrets, transport=transport, server=server
    )


def snapshot_frame(
    spark: SparkSession,
    index: ArchiveIndex,
    snapshot: SnapshotFile,
    *,
    columns: Sequence[str] = RAW_COLUMNS,
    spaces: Collection[int] = (),
    show_system: bool = False,
    show_secrets: bool = True,
    transport: Transport = "file",
    server: SliceServer | None = None,
) -> DataFrame:
    """The rows of a snapshot: each is an `insert`, and the version of all is the snapshot's signature."""
    slices = index.snapshot_slices(snapshot, size=slice_size(spark, snapshot.size))
    contract = _contract(index, columns, spaces, show_system)
    position = snapshot.vclock
    return slices_frame(
        spark, slices, position, position, contract, show_secrets=show_secrets, transport=transport, server=server
    )


def snapshot_rows(
    spark: SparkSession,
    index: ArchiveIndex,
    snapshot: SnapshotFile,
    *,
    columns: Sequence[str],
    spaces: Collection[int] = (),
    transport: Transport = "file",
    server: SliceServer | None = None,
) -> SliceRows:
    """The same rows for who makes something else of them at once."""
    slices = index.snapshot_slices(snapshot, size=slice_size(spark, snapshot.size))
    contract = _contract(index, columns, spaces, show_system=False)
    return slice_rows(spark, slices, snapshot.vclock, snapshot.vclock, contract, transport=transport, server=server)


def slices_frame(
    spark: SparkSession,
    slices: Sequence[Slice],
    start: VClock,
    end: VClock,
    contract: ChangeContract,
    *,
    show_secrets: bool = True,
    transport: Transport = "file",
    server: SliceServer | None = None,
) -> DataFrame:
    """What slices hold behind `start` up to `end`, a partition each."""
    rows = slice_rows(
        spark, slices, start, end, contract, show_secrets=show_secrets, transport=transport, server=server
    )
    return rows.plan.mapInArrow(rows.read, contract.spark_schema)


ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class SliceRows:
    """Rows of slices that are in no frame yet. A function of them runs where they are read: they enter no JVM."""

    plan: DataFrame
    read: ArrowFunction

    def mapInArrow(self, func: ArrowFunction, schema: str) -> DataFrame:  # noqa: N802  # as frames call it
        """What `func` makes of the rows, which it gets batch by batch."""
        read = self.read
        return self.plan.mapInArrow(lambda batches: func(read(batches)), schema)


def slice_rows(
    spark: SparkSession,
    slices: Sequence[Slice],
    start: VClock,
    end: VClock,
    contract: ChangeContract,
    *,
    show_secrets: bool = True,
    transport: Transport = "file",
    server: SliceServer | None = None,
) -> SliceRows:
    """What slices hold behind `start` up to `end`, a partition each."""
    slices = with_transport(slices, transport, server)
    # What the slices are goes with the function, once for all that share definitions; their bytes go with their rows.
    plan = [replace(part, data=None) for part in slices]
    schema = pa.schema([pa.field("number", pa.int32(), nullable=False), pa.field("data", pa.binary())])
    rows = [
        pa.record_batch([pa.array([number], pa.int32()), pa.array([part.data], pa.binary())], schema=schema)
        for number, part in enumerate(slices)
    ]
    # One batch is one partition.
    frame = spark.createDataFrame(pa.Table.from_batches(rows, schema))

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        disk = production().disk
        with clear_errors():
            for batch in batches:
                for number, data in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    part = replace(plan[number], data=data)
                    yield from read_slice(disk, part, start, end, contract, show_secrets=show_secrets)

    return SliceRows(frame, read)


def slice_size(spark: SparkSession, whole: int) -> int:
    """Bytes per slice, so that all cores have work."""
    cores = _cores(spark)
    return max(SLICE_SIZE_MIN, min(SLICE_SIZE, whole // (cores * SLICES_PER_CORE) + 1))


def _cores(spark: SparkSession) -> int:
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        return int(spark.conf.get("spark.sql.leafNodeDefaultParallelism", None) or 8)
    return int(spark.sparkContext.defaultParallelism)


def _contract(
    index: ArchiveIndex, columns: Sequence[str], spaces: Collection[int], show_system: bool
) -> ChangeContract:
    only = tuple(sorted(spaces)) if spaces else None
    return ChangeContract(index.replicaset_uuid, wanted=tuple(columns), show_system=show_system, only=only)
