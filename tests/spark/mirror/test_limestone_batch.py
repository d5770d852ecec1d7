"""`flowstone mirror` of a Limestone directory: one table per storage, the last version wins, each change once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from flowstone.limestone.format.entries import put, remove
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.lake import Lake
from flowstone.spark.mirror import limestone_batch as limestone_mirror
from flowstone.spark.mirror import tables as mirror_tables
from flowstone.spark.mirror.mirror_run import LakePlace, MirrorOptions, MirrorRun
from flowstone.spark.mirror.progress import MirrorEvent
from flowstone.spark.mirror.start_checks import OtherSettings, check_start
from tests.spark.limestone_directories import (
    UUID,
    Row,
    WrittenDirectory,
    clear,
    random_sessions,
    version,
)


class Mirrored:
    """A lake of one directory."""

    def __init__(self, spark: SparkSession, directory: WrittenDirectory, lake: Path) -> None:
        self.spark, self.directory, self.lake = spark, directory, str(lake)
        self.events: list[MirrorEvent] = []

    def run(self, **options: Any) -> None:
        options = {"once": True, "compact_every": None, "vacuum_after": None, **options}
        MirrorRun(
            self.spark,
            [self.directory.path],
            LakePlace(self.lake),
            MirrorOptions(**options),
            on_event=self.events.append,
        ).run()

    def rows(self) -> list[Row]:
        found: list[Row] = []
        for name, table in Lake.open(self.lake).tables().items():
            storage = int(name.removeprefix("storage_"))
            for row in table._delta.to_pyarrow_table().to_pylist():
                minor = row["version_minor"] | row["version_is_long"] << 63
                blobs = tuple(map(int, row["blob_ids"].strip("[]").split(","))) if row["blob_ids"] != "[]" else ()
                found.append((storage, row["key"], row["value"], row["version_major"], minor, blobs))
        return sorted(found)

    @property
    def epoch(self) -> int:
        return Lake.open(self.lake).progress[UUID].position.get(1)


@pytest.fixture
def mirrored(spark: SparkSession, tmp_path: Path) -> Mirrored:
    return Mirrored(spark, WrittenDirectory(tmp_path / "d"), tmp_path / "lake")


def test_mirror_follows_storages_late_versions_clears_and_compaction(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = mirrored.directory
    detached: list[str] = []
    # A compacted entry has lost its version and loses against any other, so no entry may be late after it.
    late = random_sessions(41, 12, is_late=True)
    for channel, epoch, entries in [*late, *(each for each in random_sessions(42, 30) if each[1] > 12)]:
        directory.session(channel, epoch, *entries)
        if not channel:
            continue
        directory.durable(epoch)
        if epoch == 20:
            monkeypatch.setattr(limestone_mirror, "DRIVER_ROWS", 0)  # run the batch as a Spark job
        if epoch in (3, 10, 12, 20, 30):
            mirrored.run(max_rows=60)
            assert mirrored.epoch == epoch
            assert mirrored.rows() == directory.state(epoch)
        if epoch == 12:
            detached = [directory.rotate(0), directory.rotate(1)]
            directory.compact(*detached, epoch=12)
            for name in detached:
                os.unlink(f"{directory.path}/{name}")
    assert set(Lake.open(mirrored.lake).tables()) == {f"storage_{each}" for each in (1, 2, 256, 1 << 33)}


def test_mirror_killed_between_two_tables_applies_each_change_once(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = mirrored.directory
    for storage in (1, 2, 3):
        directory.session(
            0, storage, put(storage, b"a", b"1", version(storage)), put(storage, b"b", b"1", version(storage))
        )
    directory.durable(3)
    mirrored.run()
    commit, calls = mirror_tables.MirrorTables.commit, []

    def dying(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return commit(self, *args, **options)

    directory.session(0, 4, *(put(each, b"a", b"2", version(4)) for each in (1, 2, 3)), clear(1, 4, 0))
    directory.session(1, 4, *(remove(each, b"b", version(4, 1)) for each in (2, 3)))
    directory.durable(4)
    with monkeypatch.context() as patched:
        patched.setattr(mirror_tables.MirrorTables, "commit", dying)
        with pytest.raises(KeyboardInterrupt):
            mirrored.run()
    assert mirrored.epoch == 3
    tables = Lake.open(mirrored.lake).tables()
    assert [tables[f"storage_{each}"].positions[UUID].get(1) for each in (1, 2, 3)] == [4, 3, 3]
    directory.session(0, 5, put(1, b"c", b"3", version(5)))
    directory.durable(5)
    mirrored.run()
    assert (mirrored.epoch, mirrored.rows()) == (5, directory.state(5))


def test_changes_lost_to_compaction_are_an_error_or_replaced_by_the_state(mirrored: Mirrored) -> None:
    directory = mirrored.directory
    directory.session(0, 1, put(1, b"a", b"1", version(1)), put(2, b"a", b"1", version(1)))
    directory.durable(1)
    mirrored.run()
    directory.session(0, 2, put(1, b"b", b"2", version(2)), remove(2, b"a", version(2)))
    directory.durable(2)
    detached = directory.rotate(0)
    directory.compact(detached, epoch=2)
    os.unlink(f"{directory.path}/{detached}")
    directory.session(0, 3, put(1, b"c", b"3", version(3)))
    directory.durable(3)
    with pytest.raises(DataLoss, match="changes after epoch 1 were removed by compaction"):
        mirrored.run()
    mirrored.run(fail_on_data_loss=False)
    assert [row[:3] for row in mirrored.rows()] == [row[:3] for row in directory.state(3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [(MirrorOptions(history=True), "has no times"), (MirrorOptions(changes=True), "has no order of the writes")],
)
def test_history_and_changes_are_refused_before_the_lake_is_created(
    mirrored: Mirrored, options: MirrorOptions, message: str
) -> None:
    with pytest.raises(OtherSettings, match=message):
        check_start([mirrored.directory.path], mirrored.lake, options)
    assert not os.path.exists(mirrored.lake)
