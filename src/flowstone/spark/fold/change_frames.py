"""Changes and snapshots as data frames without a data source: a plan of slices is mapped to record batches.

For the jobs of the pipeline, which run many small batches: Spark starts no planning process for them, and executors
reuse their workers. Each slice is a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from flowstone.box.system import TRUNCATE_ID
from flowstone.columns.change_contract import RAW_COLUMNS, ChangeContract
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import SLICE_SIZE, ArchiveIndex, Slice
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import SliceServer, Transport, with_transport
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RAW_COLUMNS", "SliceRows", "changes_frame", "slices_frame", "snapshot_frame", "snapshot_rows"]

SLICE_SIZE_MIN: Final = 512 * 1024
"""Below this size, a separate task costs more than it saves."""

SLICES_PER_CORE: Final = 3
"""Several slices per core keep a core busy that finishes early."""


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
    """Return the settled changes after `start` up to `end`, both settled; with `spaces`, only changes of these."""
    size = slice_size(spark, index.size_between(start, end))
    # Truncations are rows of `_truncate`.
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
    """Return the rows of a snapshot, each as an `insert` whose version is the snapshot's signature."""
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
    """Return the rows of a snapshot for a caller that maps them before they enter a frame."""
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
    """Return the changes in slices after `start` up to `end`, one partition per slice."""
    rows = slice_rows(
        spark, slices, start, end, contract, show_secrets=show_secrets, transport=transport, server=server
    )
    return rows.plan.mapInArrow(rows.read, contract.spark_schema)


ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class SliceRows:
    """Rows of slices before they enter a frame. A function mapped over them runs where they are read, not in a JVM."""

    plan: DataFrame
    read: ArrowFunction

    def mapInArrow(self, func: ArrowFunction, schema: str) -> DataFrame:  # noqa: N802  # named as in DataFrame
        """Return a frame of the batches that `func` yields from the batches of rows."""
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
    """Return the changes in slices after `start` up to `end`, one partition per slice."""
    slices = with_transport(slices, transport, server)
    # Slice descriptions are pickled with the function, once for slices that share definitions; bytes travel in the
    # rows.
    plan = [replace(part, data=None) for part in slices]
    schema = pa.schema([pa.field("number", pa.int32(), nullable=False), pa.field("data", pa.binary())])
    rows = [
        pa.record_batch([pa.array([number], pa.int32()), pa.array([part.data], pa.binary())], schema=schema)
        for number, part in enumerate(slices)
    ]
    # Each batch becomes a partition.
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
    """Return the number of bytes per slice that gives all cores work."""
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
