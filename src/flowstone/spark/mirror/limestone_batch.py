"""A batch of a mirror from a Limestone directory: the states of touched keys, in the form of `batch.py`.

Rows that a table already has are not skipped: the state of a key at the end of a batch follows from the log alone, so
applying a batch again to a table that is ahead after a crash gives the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from flowstone.columns.change_contract import spark_ddl
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.limestone_fold import (
    KEYS,
    FoldedEntries,
    batch_work,
    fold_batch,
    folding,
    partitions,
    rows_frame,
    rows_here,
    slice_size,
    state_frame,
)
from flowstone.spark.index.limestone_log import LimestoneLog
from flowstone.spark.index.limestone_spaces import EPOCHS, epoch_of, storage_id_of
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.mirror.batch import (
    DRIVER_ROWS,
    FOLDED_SCHEMA,
    SHUFFLE_ROWS,
    Executors,
    FoldedTable,
    Target,
    Truncation,
    by_space,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class LimestoneJob:
    """Fulfils `BatchJob` for a Limestone directory."""

    log: LimestoneLog
    executors: Executors

    def run(self, start: VClock, end: VClock, targets: Mapping[int, Target], row_count: int) -> dict[int, FoldedTable]:
        """Return the effect of a batch on tables. The driver itself folds small ones."""
        if not targets:
            return {}
        spark, index = self.executors.spark, self.log.entries
        storages = tuple(sorted(map(storage_id_of, targets)))
        begin, until = epoch_of(start), epoch_of(end)
        typed = self.log.tables_at(until).typed
        work = batch_work(index, begin, until, storages, slice_size(spark, index.size_between(begin, until)), typed)
        emptied = frozenset(self.log.emptied(start, end))
        make = partial(_as_folded, dict(targets), until)
        if row_count < DRIVER_ROWS:
            found = fold_batch(rows_here(index.disk, work), begin, emptied)
            return by_space(pa.Table.from_batches(make(found), FOLDED_SCHEMA))
        frame = rows_frame(spark, work)
        count = partitions(spark, sum(part.size for part, _ in work))
        frame = frame.coalesce(1) if row_count < SHUFFLE_ROWS else frame.repartition(count, *KEYS)
        return by_space(frame.mapInArrow(folding(begin, emptied, make), spark_ddl(FOLDED_SCHEMA)).toArrow())

    def load(self, snapshot: SnapshotFile, spaces: Collection[int]) -> DataFrame:
        """Return the state at a position: space id, sort key, tuple."""
        storages = tuple(sorted(map(storage_id_of, spaces)))
        epoch = epoch_of(snapshot.vclock)
        return state_frame(self.executors.spark, self.log.entries, epoch, storages, self.log.tables_at(epoch).typed)

    def truncations(self, start: VClock, end: VClock, spaces: Collection[int]) -> dict[int, Truncation]:
        """Return the spaces that are emptied between two positions."""
        epoch = epoch_of(end)
        emptied = sorted(self.log.emptied(start, end))
        return {space_id: Truncation(epoch, epoch, 0) for space_id in emptied if space_id in spaces}

    def has_two_keys(self, start: VClock, end: VClock, space_id: int, emptied: Truncation | None) -> bool:
        """Return False: the primary key of a storage never changes."""
        return False


def _as_folded(targets: Mapping[int, Target], end: int, found: FoldedEntries) -> Iterator[pa.RecordBatch]:
    for space_id, target in targets.items():
        if found.counts.get(space_id):
            yield _tally(space_id, found.counts[space_id])
        mine = found.states.filter(pc.equal(found.states["space_id"], space_id))
        if mine.num_rows:
            yield _states(target, end, mine)


def _tally(space_id: int, count: int) -> pa.RecordBatch:
    values = {"space_id": space_id, "lsn": count}
    arrays = [pa.array([values.get(each.name)], each.type) for each in FOLDED_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=FOLDED_SCHEMA)


def _states(target: Target, end: int, states: pa.Table) -> pa.RecordBatch:
    count = states.num_rows
    tuples = states["tuple"].combine_chunks()

    def same(value: Any, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), count)

    columns = {
        "space_id": states["space_id"].combine_chunks(),
        "sort_key": states["sort_key"].combine_chunks(),
        "tuple": tuples,
        "masked": target.mask.tuples(tuples) if target.mask is not None else pa.nulls(count, pa.binary()),
        "before": pa.nulls(count, pa.binary()),
        "operation": pc.if_else(tuples.is_valid(), "replace", "delete"),
        "commit_version": same(end, pa.int64()),
        "commit_timestamp": pa.nulls(count, FOLDED_SCHEMA.field("commit_timestamp").type),
        "replica_id": same(EPOCHS, pa.int32()),
        "lsn": same(end, pa.int64()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in FOLDED_SCHEMA.names], schema=FOLDED_SCHEMA)
