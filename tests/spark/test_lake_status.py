"""The tables of a lake without Spark, with one or several replica sets."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark import Mirror, lake_tables
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole
from tests.spark.limestone_directories import random_directory


def test_tables_have_rows_and_positions_of_each_replica_set(spark: SparkSession, tmp_path: Path) -> None:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(whole(insert(3, 1, "a")))
    written.save()
    limestone = random_directory(tmp_path / "log", 83, 6)
    Mirror([written.directory, limestone.path], tmp_path / "lake").run_once()
    tables = lake_tables(tmp_path / "lake")
    assert tables["orders"].row_count == 1
    assert tables["orders"].path == str(tmp_path / "lake/orders")
    assert tables["orders"].positions[UUID] == VClock({1: 3})
    assert len(tables) > 1


def test_missing_lake_has_no_tables(tmp_path: Path) -> None:
    assert lake_tables(tmp_path / "none") == {}
