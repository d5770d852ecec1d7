"""`flowstone verify` of Limestone directories: with a lake, with another directory, at one durable epoch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from flowstone.limestone.format.entries import put, remove
from flowstone.spark.index.limestone_index import NotDurable
from flowstone.spark.index.limestone_spaces import position_of
from flowstone.spark.mirror.mirror_run import LakePlace, MirrorOptions, MirrorRun
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.comparison import VerifyOptions
from flowstone.spark.verification.limestone_side import NOTE, LimestoneSide
from flowstone.spark.verification.open_side import open_side
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import SideError
from tests.spark.comparisons import verify_sides
from tests.spark.limestone_directories import UUID, WrittenDirectory, random_directory, version

OTHER_UUID = "bbbbbbbb-2222-4000-8000-000000000002"


def compared(spark: SparkSession, a: str, b: str, **options: object) -> VerifyReport:
    first, second = open_side(a), open_side(b)
    assert first.kind == "limestone"
    return verify_sides(spark, first, second, VerifyOptions(wait=0, **options))  # type: ignore[arg-type]


def test_directory_is_compared_with_its_lake(spark: SparkSession, tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 71, 15, has_tail=False)
    lake = str(tmp_path / "lake")
    MirrorRun(
        spark, [directory.path], LakePlace(lake), MirrorOptions(once=True, compact_every=None, vacuum_after=None)
    ).run()
    detached = [directory.rotate(0), directory.rotate(1)]
    directory.compact(*detached, epoch=15)
    directory.session(0, 16, put(1, b"new", b"row", version(16)), remove(2, directory.state(15)[-1][1], version(16)))
    directory.durable(16)
    report = compared(spark, directory.path, lake)
    assert (report.b.lacks, report.a.position) == (((1, 16, 16),), {1: 15}), "the lake lags"
    assert report.difference_count == 0, "compaction removes versions, but no rows"
    assert sum(space.rows_a for space in report.spaces) == len(directory.state(15))


def test_two_directories_are_compared_at_one_epoch(spark: SparkSession, tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "a", 72, 12, has_tail=False)
    other = WrittenDirectory(tmp_path / "b", OTHER_UUID)
    for name in ("pwal_0000", "pwal_0001", "epoch"):
        shutil.copy(f"{directory.path}/{name}", f"{other.path}/{name}")
    other.sessions = list(directory.sessions)
    other.compact(*(other.rotate(channel) for channel in range(2)), epoch=12)
    directory.session(0, 13, put(1, b"only here", b"1", version(13)), put(1, b"both", b"a", version(13)))
    other.session(0, 13, put(1, b"both", b"b", version(13)))
    for each in (directory, other):
        each.durable(13)
    different = compared(spark, directory.path, other.path)
    assert sorted((each.kind, each.key) for each in different.differences) == [
        ("differs", '["Ym90aA=="]'),
        ("missing in B", '["b25seSBoZXJl"]'),
    ]
    (differing,) = [each for each in different.differences if each.kind == "differs"]
    assert [field.path for field in differing.fields] == ["value"]
    report = compared(spark, directory.path, other.path, at=AsOf(lsn=12))
    assert report.is_equal
    assert (report.a.position, report.b.position) == ({1: 12}, {1: 12})
    assert NOTE in report.notes


def test_side_shows_durable_epochs_only(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 73, 5, has_tail=False)
    side = LimestoneSide(directory.path)
    assert (side.kind, side.replicaset_uuid, side.reach, side.has_past) == ("limestone", UUID, position_of(5), True)
    assert (side.can_show(position_of(3)), side.can_show(position_of(6))) == (True, False)
    assert side.resolve(AsOf(lsn=4)) == side.resolve(AsOf(vclock=position_of(4))) == position_of(4)
    with pytest.raises(NotDurable):
        side.resolve(AsOf(lsn=6))
    with pytest.raises(SideError, match="has no times"):
        side.resolve(AsOf(time=1.5))
    directory.durable(6)
    side.refresh()
    assert side.reach == position_of(6)
    side.choose(UUID)
    side.close()
