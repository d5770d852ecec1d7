"""Changes and snapshots as data frames: Spark reads what the index plans, one partition per slice."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.change_frames import RAW_COLUMNS, SLICE_SIZE_MIN, changes_frame, slice_size, snapshot_frame
from flowstone.spark.index.log_index import ArchiveIndex
from tests.node.archived_rows import SYNC, rollback
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import delete, insert, truncate, update, whole


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    archive.write(whole(insert(3, 3, "three"), insert(4, 4, "four")))
    archive.write(whole(insert(5, 7, "gone"), flags=SYNC), rollback(6, 5))
    archive.write(whole(update(7, 3, ("=", 2, "drei")), delete(8, 4)), whole(insert(9, 1, space=513)))
    archive.write(whole(truncate(10)))
    archive.save()
    return archive


def opened(archive: WrittenArchive) -> ArchiveIndex:
    return ArchiveIndex.open(archive.disk, archive.directory)


def test_changes_have_the_columns_that_folding_needs(spark: SparkSession, archive: WrittenArchive) -> None:
    index = opened(archive)
    frame = changes_frame(spark, index, VClock({1: 2}), index.settled)
    assert frame.columns == list(RAW_COLUMNS)
    rows = sorted(frame.collect(), key=lambda row: row["_lsn"])
    found = [(row["_lsn"], row["_operation"], row["_space_id"], row["_sort_key"] is not None) for row in rows]
    assert found == [
        (3, "insert", 512, True),
        (4, "insert", 512, True),
        (7, "update", 512, True),
        (8, "delete", 512, True),
        (9, "insert", 513, False),  # the space has no primary key
        (10, "truncate", 512, False),
    ]
    keys = {row["_lsn"]: row["_sort_key"] for row in rows}
    assert keys[3] == keys[7]
    assert keys[4] == keys[8]
    assert bytes(rows[0]["_tuple_msgpack"]) == b"\x92\x03\xa5three"


def test_rows_of_other_spaces_are_omitted(spark: SparkSession, archive: WrittenArchive) -> None:
    index = opened(archive)
    frame = changes_frame(spark, index, VClock({1: 2}), index.settled, spaces=[512], columns=["_lsn"])
    assert sorted(row["_lsn"] for row in frame.collect()) == [3, 4, 7, 8, 10]
    assert not changes_frame(spark, index, index.settled, index.settled).collect()


def test_rows_of_a_snapshot_are_inserts_at_its_position(spark: SparkSession, archive: WrittenArchive) -> None:
    archive.snapshot(VClock({1: 10}), [(280, (512, 1, "orders", "memtx", 0, {}, [])), (512, (1, "x")), (512, (2, "y"))])
    index = opened(archive)
    frame = snapshot_frame(spark, index, index.snapshots[-1])
    rows = sorted(frame.collect(), key=lambda row: row["_tuple_msgpack"])
    assert [(row["_operation"], row["_commit_version"]) for row in rows] == [("insert", 10)] * 2


def test_inline_bytes_are_sent_with_their_slices(spark: SparkSession, archive: WrittenArchive) -> None:
    index = opened(archive)
    frame = changes_frame(spark, index, VClock({1: 2}), index.settled, columns=["_lsn"], transport="inline")
    archive.disk.rename(f"{archive.directory}/{0:020d}.xlog", f"{archive.directory}/elsewhere")
    assert sorted(row["_lsn"] for row in frame.collect()) == [3, 4, 7, 8, 9, 10]


def test_slice_size_grows_with_the_input_up_to_a_limit(spark: SparkSession) -> None:
    assert slice_size(spark, 0) == SLICE_SIZE_MIN
    assert slice_size(spark, 1 << 40) == 8 * 1024 * 1024
