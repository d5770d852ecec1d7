"""Limestone entries folded by Spark: states for a first load, a comparison or a restore, and batches of a mirror.

Executors read pieces of files and convert entries to tuples; a shuffle brings the entries of a key together. For each
key the highest write version wins, unless its storage was cleared later. In a batch of a mirror, an entry may arrive
late, with a lower version than one in the lake; therefore entries of earlier epochs that may win are read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.columns.change_contract import spark_ddl
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import STORAGE_ID, TYPE
from flowstone.outside import production
from flowstone.outside.disk import Disk
from flowstone.spark.fold.state_frames import STATE
from flowstone.spark.index.limestone_index import SLICE_SIZE, LimestoneIndex, PieceSlice
from flowstone.spark.index.limestone_pieces import Version
from flowstone.spark.index.limestone_spaces import sort_key_column, tuple_column
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.index.tsurugi_tuples import TableTuples
from flowstone.spark.sources.limestone.entry_columns import newest, of_storages, place_column
from flowstone.spark.sources.limestone.entry_reader import chunks_of, counted, points, surviving
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS: Final = pa.schema(
    [
        pa.field("space_id", pa.int64(), nullable=False),
        pa.field("sort_key", pa.binary(), nullable=False),
        pa.field("tuple", pa.binary()),
        pa.field("place", pa.binary(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
    ]
)
"""Entries before folding; `tuple` is null for a remove. The greatest `place` wins."""

KEYS: Final = ("space_id", "sort_key")
SLICE_SIZE_MIN: Final = 512 * 1024
SLICES_PER_CORE: Final = 3
PARTITION_SIZE: Final = 64 << 20
"""Bytes of log that one task folds."""


Typed = Mapping[int, TableTuples]


@dataclass(frozen=True)
class EntrySelection:
    """Selects entries after epoch `start` up to `end`, of `storages` if given, that no clear in `clears` made void.

    `typed` encodes the entries of typed tables, by storage id; entries of other storages are raw.
    """

    start: int
    end: int
    clears: Mapping[int, Version]
    storages: tuple[int, ...] | None = None
    typed: Typed = field(default_factory=dict)

    def rows(self, disk: Disk, part: PieceSlice) -> Iterator[pa.RecordBatch]:
        for chunk in chunks_of(disk, part):
            chosen = points(chunk, counted(chunk, self.start, min(self.end, part.limit)))
            chosen = of_storages(chunk, chosen, self.storages)
            chosen = surviving(chunk, chosen, self.clears, is_compacted=part.is_compacted)
            if not len(chosen):
                continue
            present = np.unique(chunk.table[STORAGE_ID, chosen]).tolist()
            raw = [each for each in present if each not in self.typed]
            if raw:
                rows = of_storages(chunk, chosen, raw)
                tuples = tuple_column(chunk, rows)
                yield _batch(chunk, rows, part, tuples, sort_key_column(tuples))
            for storage_id in present:
                if storage_id in self.typed:
                    rows = of_storages(chunk, chosen, (storage_id,))
                    yield _batch(chunk, rows, part, *self.typed[storage_id].encode(chunk, rows))


def _batch(chunk: EntryChunk, rows: Any, part: PieceSlice, tuples: pa.Array, keys: pa.Array) -> pa.RecordBatch:
    is_gone = chunk.table[TYPE, rows] == np.uint64(EntryType.REMOVE)
    if is_gone.any():
        tuples = pc.if_else(pa.array(is_gone), pa.scalar(None, pa.binary()), tuples)
    columns = [
        pa.array(chunk.table[STORAGE_ID, rows].view(np.int64) + FIRST_USER_SPACE_ID),
        keys,
        tuples,
        place_column(chunk, rows, part.number, is_compacted=part.is_compacted),
        pa.array(chunk.epochs[rows].view(np.int64)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


# --- frames -------------------------------------------------------------------------------------------------------

Work = Sequence[tuple[PieceSlice, EntrySelection]]


def work_frame(
    spark: SparkSession, count: int, read: Callable[[int], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return the batches that `read` yields for work items 0 to `count` - 1, one partition each."""
    numbers = [pa.record_batch({"number": pa.array([number], pa.int32())}) for number in range(count)]
    schema_of_plan = pa.schema([pa.field("number", pa.int32())])
    plan = spark.createDataFrame(pa.Table.from_batches(numbers, schema_of_plan))

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with clear_errors():
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from read(number)

    return plan.mapInArrow(run, schema)


def rows_frame(spark: SparkSession, work: Work) -> DataFrame:
    """Return the entries of slices."""
    planned = list(work)

    def read(number: int) -> Iterator[pa.RecordBatch]:
        part, reading = planned[number]
        return reading.rows(production().disk, part)

    return work_frame(spark, len(planned), read, spark_ddl(ROWS))


def slice_size(spark: SparkSession, whole: int) -> int:
    """Return the number of bytes per slice that gives all cores work."""
    cores = int(spark.sparkContext.defaultParallelism)
    return max(SLICE_SIZE_MIN, min(SLICE_SIZE, whole // (cores * SLICES_PER_CORE) + 1))


def partitions(spark: SparkSession, size: int) -> int:
    """Return the number of tasks for a shuffle of `size` bytes."""
    return max(int(spark.sparkContext.defaultParallelism), size // PARTITION_SIZE + 1)


def state_work(
    spark: SparkSession,
    index: LimestoneIndex,
    epoch: int,
    storages: tuple[int, ...] | None = None,
    typed: Typed | None = None,
) -> list[tuple[PieceSlice, EntrySelection]]:
    """Return all slices that make up the state at an epoch."""
    size = slice_size(spark, sum(part.size for part in index.state_slices(epoch)))
    clears = index.clears(epoch, with_detached=epoch < index.horizon)
    reading = EntrySelection(-1, epoch, clears, storages, typed or {})
    return [(part, reading) for part in index.state_slices(epoch, size=size)]


def state_frame(
    spark: SparkSession,
    index: LimestoneIndex,
    epoch: int,
    storages: tuple[int, ...] | None = None,
    typed: Typed | None = None,
) -> DataFrame:
    """Return the state at a durable epoch, with the columns of STATE."""
    work = state_work(spark, index, epoch, storages, typed)
    count = partitions(spark, sum(part.size for part, _ in work))
    return rows_frame(spark, work).repartition(count, *KEYS).mapInArrow(fold_state, spark_ddl(STATE))


def fold_state(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In executors: yield the surviving rows of all entries of some keys."""
    with clear_errors():
        found = newest(_whole(batches), KEYS)
        found = found.filter(found["tuple"].is_valid()).select(STATE.names).cast(STATE)
        yield from found.to_batches(max_chunksize=1 << 16)


def _whole(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches([batch.cast(ROWS) for batch in batches], ROWS).combine_chunks()


# --- batches of a mirror ------------------------------------------------------------------------------------------


def batch_work(
    index: LimestoneIndex, start: int, end: int, storages: tuple[int, ...], size: int, typed: Typed | None = None
) -> Work:
    """Return the entries of a batch, and the entries of earlier epochs that may win against them."""
    clears = index.clears(end, with_detached=start < index.horizon)
    changed, rivals = (EntrySelection(*bounds, clears, storages, typed or {}) for bounds in ((start, end), (-1, start)))
    found = [(part, changed) for part in index.slices(start, end, size=size)]
    return [*found, *((part, rivals) for part in index.rivals(start, end, size=size))]


def rows_here(disk: Disk, work: Work) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the work without Spark."""
    return (batch for part, reading in work for batch in reading.rows(disk, part))


@dataclass(frozen=True)
class FoldedEntries:
    """The states after a batch of all touched keys, and of all keys of `emptied` spaces."""

    states: pa.Table
    counts: dict[int, int]
    """Number of changes per space."""


def fold_batch(batches: Iterable[pa.RecordBatch], start: int, emptied: frozenset[int]) -> FoldedEntries:
    rows = _whole(batches)
    is_new = pc.greater(rows["epoch"], start)
    changed = rows.filter(is_new)
    counted_rows = changed["space_id"].combine_chunks().value_counts()
    counts = {each["values"].as_py(): each["counts"].as_py() for each in counted_rows}
    if changed.num_rows < rows.num_rows:
        touched = changed.group_by(list(KEYS), use_threads=False).aggregate([])
        is_emptied = pc.is_in(rows["space_id"], pa.array(sorted(emptied), pa.int64()))
        others = rows.filter(pc.and_(pc.invert(is_new), pc.invert(is_emptied)))
        others = others.join(touched, list(KEYS), join_type="left semi") if others.num_rows else others
        rows = pa.concat_tables([changed, rows.filter(pc.and_(pc.invert(is_new), is_emptied)), others.cast(ROWS)])
    return FoldedEntries(newest(rows.combine_chunks(), KEYS), counts)


Make = Callable[[FoldedEntries], Iterable[pa.RecordBatch]]


def folding(start: int, emptied: frozenset[int], make: Make) -> Callable[[Iterable[pa.RecordBatch]], Any]:
    """Return the function that executors run in a batch; `make` builds the batches to send back."""
    return partial(_run_fold, start, emptied, make)


def _run_fold(
    start: int, emptied: frozenset[int], make: Make, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    with clear_errors():
        yield from make(fold_batch(batches, start, emptied))
