"""`flowstone restore` of a Limestone directory: a data directory that opens, and tables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from flowstone.cli import run
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import manifest, names
from flowstone.limestone.format.entries import put
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from flowstone.spark.index.limestone_index import LimestoneIndex, NotDurable
from flowstone.spark.restoration.archive_restore import OutputTaken
from flowstone.spark.restoration.limestone_restore import restore_limestone
from tests.spark.limestone_directories import UUID, Row, WrittenDirectory, random_directory, version

DISK = production().disk


def opened(directory: WrittenDirectory) -> LimestoneIndex:
    return LimestoneIndex.open(DISK, directory.path)


def store_blobs(directory: WrittenDirectory, epoch: int) -> None:
    for row in directory.state(epoch):
        for blob_id in row[5]:
            path = Path(directory.path, names.blob(blob_id))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"blob %d" % blob_id)


def rows_in(path: Path) -> list[tuple[Any, ...]]:
    return sorted(
        (row.storage_id, row.key, row.value, row.blob_ids) for row in recover(DISK, str(path)).snapshot.rows()
    )


def without_versions(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(*row[:3], row[5]) for row in rows]


def test_restored_data_directory_can_be_opened(spark: SparkSession, tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 81, 20)
    store_blobs(directory, 20)
    store_blobs(directory, 9)
    for epoch in (20, 9):
        out = tmp_path / f"out {epoch}"
        restored = restore_limestone(spark, opened(directory), epoch, str(out))
        assert rows_in(out) == without_versions(directory.state(epoch))
        assert restored.row_count == len(directory.state(epoch))
        assert restored.files == {"limestone": str(out)}
        found = manifest.read(DISK, str(out))
        assert found is not None
        assert found.instance_uuid == restored.instance_uuid != UUID == restored.replicaset_uuid
        recovered = recover(DISK, str(out))
        assert (recovered.durable_epoch, recovered.catalog.max_epoch_id) == (epoch, epoch)
        for row in directory.state(epoch):
            assert all((out / names.blob(each)).read_bytes() == b"blob %d" % each for each in row[5])
    assert {path.stat().st_mode & 0o777 for path in (out, *out.rglob("*")) if path.is_dir()} == {0o700}
    with pytest.raises(OutputTaken, match="not empty"):
        restore_limestone(spark, opened(directory), 20, str(tmp_path / "out 20"))


def test_missing_blob_fails_the_restore_without_leftovers(spark: SparkSession, tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 1, put(1, b"k", b"v", version(1), (7,)))
    directory.durable(1)
    with pytest.raises(LimestoneError, match=r"0000000000000007\.blob is missing"):
        restore_limestone(spark, opened(directory), 1, str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["d"]
    with pytest.raises(NotDurable):
        restore_limestone(spark, opened(directory), 2, str(tmp_path / "out"))


def test_storages_are_restored_as_tables(spark: SparkSession, tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 82, 8)
    out = tmp_path / "out"
    restored = restore_limestone(spark, opened(directory), 8, str(out), formats=("delta", "parquet"))
    expected = {row[:3] for row in directory.state(8)}
    storages = [space.id for space in restored.spaces]
    assert storages == [1, 2, 256, 1 << 33]
    delta, parquet = (
        {
            (storage, row["key"], row["value"])
            for storage in storages
            for row in read(f"{out}/{kind}/storage_{storage}").to_pylist()
        }
        for kind, read in (("delta", lambda path: DeltaTable(path).to_pyarrow_table()), ("parquet", pq.read_table))
    )
    assert delta == parquet == expected
    assert restored.row_count == len(expected)


def test_restore_command_writes_a_data_directory(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = random_directory(tmp_path / "d", 83, 6)
    store_blobs(directory, 6)
    for name, to in (("out", ()), ("newest", ("--to", "newest"))):
        assert run(["restore", directory.path, *to, "--out", str(tmp_path / name), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["position"], told["rows"]) == ({"1": 6}, len(directory.state(6)))
        assert rows_in(tmp_path / name) == without_versions(directory.state(6))
