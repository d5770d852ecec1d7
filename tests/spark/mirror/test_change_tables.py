"""The change tables of a mirror: changes with both images, markers, resets. `test_mirror_run.py` checks them, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.outside import production
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import define, delete, insert, truncate, update, upsert, whole
from tests.spark.lakes import mirror_once
from tests.spark.replayed_changes import changes_in, check_changes

LAYOUT = (("id", "unsigned"), ("name", "string"))


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    return written


def test_change_table_has_each_change_with_the_row_before_and_after_it(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")), whole(update(4, 1, ("=", 2, "b")), insert(5, 2, "c")))
    archive.write(whole(delete(6, 7)), whole(upsert(7, (2, "x"), ("=", 1, "d"))), whole(truncate(8), insert(9, 3, "e")))
    archive.write(whole(define(10, 512, "sales", *LAYOUT), insert(11, 4, "f")))
    archive.write(whole(delete(12, 512, 0, space=288), delete(13, 512, space=280)))
    archive.save()
    mirror_once(spark, [archive.directory], lake, changes=True)
    check_changes(lake)
    names = ("_change_type", "_operation", "_commit_version", "_lsn", "_detail")
    assert [tuple(row[name] for name in names) for row in changes_in(lake, "orders")] == [
        ("insert", "insert", 3, 3, None),
        ("update", "update", 5, 4, None),
        ("insert", "insert", 5, 5, None),
        ("update", "upsert", 7, 7, None),
        ("truncate", None, 9, 8, None),
        ("insert", "insert", 9, 9, None),
        ("rename", None, 11, None, "sales"),
    ]
    assert [tuple(row[name] for name in names) for row in changes_in(lake, "sales")] == [
        ("reset", None, 10, None, "renamed from orders"),
        ("insert", "insert", 11, 11, None),
        ("drop", None, 13, None, None),
    ]
    assert changes_in(lake, "orders")[1]["before"]["name"] == "a"
    assert changes_in(lake, "orders")[1]["after"]["name"] == "b"


def test_change_table_that_missed_changes_gets_a_reset(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")))
    archive.save()
    for lsn, keeps in enumerate((False, None, True, None, False, True), 4):
        archive.write(whole(update(lsn, 1, ("=", 2, str(lsn)))))
        archive.save()
        mirror_once(spark, [archive.directory], lake, changes=keeps)
    check_changes(lake)
    kinds = [(row["_change_type"], row["_commit_version"]) for row in changes_in(lake, "orders")]
    assert kinds == [("reset", 5), ("update", 6), ("update", 7), ("reset", 8), ("update", 9)]
