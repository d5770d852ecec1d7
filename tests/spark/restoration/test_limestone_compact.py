"""Compaction on Spark writes the same file as the local one, byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.cli import run
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import put
from flowstone.limestone.store.compaction import write_here
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import production
from flowstone.spark.fold import limestone_fold
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.restoration.limestone_compact import SortedRows, write_sorted, writer
from tests.spark.limestone_directories import WrittenDirectory, random_directory, random_sessions, version

DISK = production().disk


def inputs_of(directory: WrittenDirectory) -> list[str]:
    return [
        name for name in sorted(os.listdir(directory.path)) if name.startswith("pwal_0") and name != names.COMPACTED
    ]


def test_spark_writes_the_same_file_as_one_process(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limestone_fold, "PARTITION_SIZE", 20_000)  # so that there are several ranges
    directory = random_directory(tmp_path / "d", 61, 60, is_late=True)
    write = writer(spark)
    for epoch in (60, 25):
        here, there = tmp_path / f"here {epoch}", tmp_path / f"there {epoch}"
        expected = write_here(DISK, directory.path, inputs_of(directory), epoch, str(here))
        found = write(DISK, directory.path, inputs_of(directory), epoch, str(there))
        assert there.read_bytes() == here.read_bytes()
        assert (found.rows, found.blob_ids, found.max_blob_id) == (
            expected.rows,
            expected.blob_ids,
            expected.max_blob_id,
        )
    with pytest.raises(LimestoneError, match=r"log files of .* changed during compaction"):
        write(DISK, directory.path, ["pwal_0000"], 60, str(tmp_path / "none"))
    assert sorted(os.listdir(tmp_path)) == ["d", "here 25", "here 60", "there 25", "there 60"], "no file is left over"


def test_directory_can_be_compacted_twice_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 62, 20, has_tail=False)
    shutil.copytree(directory.path, tmp_path / "local")
    outside = production()

    def compact(path: str | Path, **options: object) -> bytes:
        done = compact_offline(outside, str(path), keeps_backup=False, **options)  # type: ignore[arg-type]
        assert done.rows
        return Path(path, names.COMPACTED).read_bytes()

    assert compact(directory.path, write=writer(spark)) == compact(tmp_path / "local")
    for channel, epoch, entries in random_sessions(63, 30):
        if epoch > 20:
            directory.session(channel, epoch, *entries)
    directory.durable(30)
    for name in ("pwal_0000", "pwal_0001", "epoch"):
        shutil.copy(f"{directory.path}/{name}", tmp_path / "local" / name)
    assert compact(directory.path, write=writer(spark)) == compact(tmp_path / "local")
    index = LimestoneIndex.open(DISK, directory.path)
    assert (index.horizon, index.durable, index.input_names(30)) == (30, 30, [])


def test_empty_directory_and_largest_ids_are_compacted(spark: SparkSession, tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.durable(1)
    index = LimestoneIndex.open(DISK, directory.path)
    assert write_sorted(spark, index, 1, str(tmp_path / "empty")) == SortedRows()
    assert (tmp_path / "empty").read_bytes() == b"\x02" + bytes(8)
    large = (1 << 64) - 1
    directory.session(0, 2, put(large, b"k", b"v", version(2), (large,)))
    directory.durable(2)
    index.refresh()
    assert write_sorted(spark, index, 2, str(tmp_path / "one")) == SortedRows({large: 1}, frozenset({large}))


def test_compact_command_runs_on_spark(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = random_directory(tmp_path / "d", 64, 10, has_tail=False)
    write_here(DISK, directory.path, inputs_of(directory), 10, str(tmp_path / "expected"))
    assert run(["limestone", "compact", "--spark", "--force", "--no-backup", directory.path]) == 0
    assert f"compacted: {len(directory.state(10))} rows" in capsys.readouterr().out
    assert Path(directory.path, names.COMPACTED).read_bytes() == (tmp_path / "expected").read_bytes()
