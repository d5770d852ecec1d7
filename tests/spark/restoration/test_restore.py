"""`flowstone.spark.restore` in a program: positions and formats as values, errors before Spark starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import flowstone
import flowstone.spark
from flowstone.limestone.format.entries import put
from flowstone.outside import production
from flowstone.spark import lake_tables, restore
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole
from tests.spark.limestone_directories import WrittenDirectory, version


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(whole(insert(3, 1, "a"), insert(4, 2, "b")), whole(insert(5, 3, "c")))
    written.save()
    return tmp_path / "archive"


def test_restore_writes_each_format_and_reports_it(spark: SparkSession, archive: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    restored = restore(archive, tmp_path / "out", to=4, format=["parquet", "delta"], spark=spark, on_step=steps.append)
    assert restored.position == flowstone.VClock({1: 4})
    assert restored.files == {"delta": str(tmp_path / "out/delta"), "parquet": str(tmp_path / "out/parquet")}
    assert [(space.name, space.row_count) for space in restored.spaces if space.id > 511] == [("orders", 2)]
    assert steps[:2] == ["reading the index", "starting Spark"]
    (table,) = lake_tables(tmp_path / "out/delta").values()
    assert (table.row_count, table.positions) == (2, {UUID: restored.position})


def test_restore_of_limestone_takes_an_epoch(spark: SparkSession, tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "log")
    for epoch in (5, 6):
        directory.session(0, epoch, put(1, b"%d" % epoch, b"value", version(epoch)))
    directory.durable(6)
    newest = restore(directory.path, tmp_path / "newest")
    assert (list(newest.files), newest.row_count) == (["limestone"], 2)
    earlier = restore(directory.path, tmp_path / "earlier", to="5", format="parquet")
    assert (list(earlier.files), earlier.row_count) == (["parquet"], 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": "{1: 3}"}, flowstone.spark.NotSettled, "{1: 2} and {1: 4}"),
        ({"to": 99}, flowstone.spark.NotSettled, "{1: 5}"),
        ({"to": "2126-05-01T12:00:00Z"}, flowstone.spark.EndsEarlier, "ends at 1970-01-01"),
        ({"to": "yesterday"}, flowstone.spark.WrongOption, "invalid position: 'yesterday'.*or newest"),
        ({"format": "limestone"}, flowstone.spark.WrongOption, "invalid format: 'limestone'.*snap, delta, parquet"),
    ],
)
def test_impossible_restore_is_rejected_before_spark_starts(
    archive: Path, tmp_path: Path, options: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowstone.spark.spark_session.session", None)
    with pytest.raises(error, match=message):
        restore(archive, tmp_path / "out", **options)
    with pytest.raises(flowstone.spark.OutputTaken, match="is not empty"):
        restore(archive, archive)
    assert not (tmp_path / "out").exists()


def test_snapshot_is_written_without_spark(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowstone.spark.spark_session.session", None)
    restored = restore(archive, tmp_path / "out", to=4)
    assert restored.position == flowstone.VClock({1: 4})
    assert [(space.name, space.row_count) for space in restored.spaces if space.id > 511] == [("orders", 2)]
    with pytest.raises(flowstone.spark.NotSettled):
        restore(archive, tmp_path / "never", to=3)


def test_large_state_is_left_to_spark(
    spark: SparkSession, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    monkeypatch.setattr("flowstone.spark.restoration.archive_restore.IN_MEMORY_SIZE_MAX", 1)
    restore(archive, tmp_path / "out", on_step=steps.append)
    assert "starting Spark" in steps


def test_missing_spark_is_reported_when_tables_are_wanted(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowstone.spark.restoration.restore.find_spec", lambda name: None)
    with pytest.raises(flowstone.spark.SparkUnavailable, match="needs Spark"):
        restore(archive, tmp_path / "out", format="delta")
