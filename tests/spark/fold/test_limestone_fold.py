"""Folding of entries: states and batches equal a model, including late versions and clearings."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from flowstone.outside import production
from flowstone.spark.fold.limestone_fold import batch_work, fold_batch, rows_here, state_frame
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_spaces import space_id_of, storage_id_of
from tests.spark.limestone_directories import Row, WrittenDirectory, random_directory

DISK = production().disk


def row_of(space_id: int, tuple_: bytes) -> Row:
    key, value, major, minor, is_long, blobs = msgpack.unpackb(tuple_)
    return storage_id_of(space_id), key, value, major, minor | is_long << 63, tuple(blobs)


def rows_of(table: pa.Table) -> list[Row]:
    return sorted(
        row_of(space_id, tuple_)
        for space_id, tuple_ in zip(table["space_id"].to_pylist(), table["tuple"].to_pylist(), strict=True)
        if tuple_ is not None
    )


def test_spark_fold_equals_the_model_state(spark: SparkSession, tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 31, 30, is_late=True)
    index = LimestoneIndex.open(DISK, directory.path)
    assert rows_of(state_frame(spark, index, 30).toArrow()) == directory.state(30)
    some = state_frame(spark, index, 17, (1, 256)).toArrow()
    assert rows_of(some) == [row for row in directory.state(17) if row[0] in (1, 256)]


class Tables:
    """The expected content of tables."""

    def __init__(self, directory: WrittenDirectory) -> None:
        self.index = LimestoneIndex.open(DISK, directory.path)
        self.rows: dict[tuple[int, bytes], Row] = {}

    def batch(self, start: int, end: int) -> int:
        storages = tuple(self.index.storages(end))
        clears = self.index.clears(end, after=start)
        work = batch_work(self.index, start, end, storages, 1000)
        folded = fold_batch(rows_here(DISK, work), start, frozenset(map(space_id_of, clears)))
        for storage in clears:
            self.rows = {key: row for key, row in self.rows.items() if key[0] != storage}
        states = folded.states
        for space_id, key, tuple_ in zip(*(states[name].to_pylist() for name in states.column_names[:3]), strict=True):
            storage = storage_id_of(space_id)
            if tuple_ is None:
                self.rows.pop((storage, key), None)
            else:
                self.rows[storage, key] = row_of(space_id, tuple_)
        assert sum(folded.counts.values()) <= self.index.row_count(start, end)
        return len(work)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("step", [1, 4])
def test_batches_add_up_to_the_state(tmp_path: Path, is_late: bool, step: int) -> None:
    directory = random_directory(tmp_path / "d", 32 + step, 40, is_late=is_late)
    tables = Tables(directory)
    for start in range(0, 40, step):
        tables.batch(start, start + step)
        assert sorted(tables.rows.values()) == directory.state(start + step)


def test_repeated_or_enlarged_batch_has_the_same_result(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 33, 20, is_late=True)
    tables = Tables(directory)
    for start, end in ((0, 6), (6, 9), (6, 9), (6, 14), (2, 20)):
        tables.batch(start, end)
        assert sorted(tables.rows.values()) == directory.state(end)


def test_batch_has_no_rivals_when_versions_follow_epochs(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 34, 20)
    tables = Tables(directory)
    tables.batch(0, 19)
    index = tables.index
    assert index.rivals(19, 20) == []
