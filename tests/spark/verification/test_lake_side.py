"""Lakes as sides: histories with inconsistent states, masks, and tables that are ahead of the lake."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from flowstone.cli import run
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake, LakeProgress
from flowstone.spark.verification.comparison import VerifyOptions
from flowstone.spark.verification.lake_side import LakeSide, read_files
from flowstone.spark.verification.report import VerifyReport
from flowstone.spark.verification.sides import LogSide, SideError
from tests.conftest import FULL
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, delete, insert, update, whole
from tests.spark.comparisons import verify_sides
from tests.spark.lake_rows_given import OTHER_UUID, at, folded, packed, space


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(*(whole(insert(3 + number, number, f"name {number}")) for number in range(20)))
    written.write(whole(update(23, 1, ("=", 2, "once"))), whole(update(24, 1, ("=", 2, "twice"))), whole(delete(25, 2)))
    written.save()
    return written


def mirrored(archive: WrittenArchive, lake: Path, *options: str) -> Path:
    assert run(["mirror", "--once", *options, archive.directory, str(lake)]) == 0
    return lake


def found(spark: SparkSession, archive: WrittenArchive, lake: Path, salt: str | None = None) -> VerifyReport:
    options = VerifyOptions(wait=0.0, limit=100)
    return verify_sides(spark, LogSide(archive.directory), LakeSide(str(lake), salt=salt), options)


def test_inconsistent_states_of_a_history_are_reported(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = mirrored(archive, tmp_path / "history", "--history")
    table = DeltaTable(str(lake / "orders"))
    table.update({"_to_version": "_to_version + 100"}, predicate="name = 'name 1'")
    table.update({"_to_version": "_from_version - 1"}, predicate="name = 'name 2'")
    report = found(spark, archive, lake)
    said = sorted(row.what.partition(" (")[0] for row in report.wrong)
    assert said == ["history: a state ends before it starts", "history: states overlap"]
    assert (report.is_equal, report.differences) == (False, ())
    (orders,) = [space for space in report.spaces if space.name == "orders"]
    assert (orders.rows_a, orders.rows_b, orders.wrong_b) == (19, 19, 2)


def test_masked_fields_are_compared_if_the_masks_can_be_repeated(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWSTONE_MASK_SALT", "pepper")
    masked = ["--mask", "orders.name=sha256", "--spool", str(tmp_path / "spool")]
    lake = mirrored(archive, tmp_path / "masked", *masked)
    assert found(spark, archive, lake, "pepper").is_equal
    side = LakeSide(str(lake))
    side.refresh()
    view = side.view(spark, side.reach)
    assert (view.masks, view.hidden_fields) == ({}, {512: (1,)})
    if FULL:
        without = found(spark, archive, lake)
        assert without.is_equal
        assert without.notes == ("space 'orders': masked fields are not compared: name",)


def test_table_ahead_of_the_lake_is_read_at_the_position_of_the_lake(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    """A crash between the commit of a table and that of the progress has this effect."""
    lake = mirrored(archive, tmp_path / "lake")
    opened = Lake.open(str(lake), engine="deltalake")
    before = opened.progress[UUID]
    archive.write(whole(insert(26, 50, "later")))
    archive.save()
    mirrored(archive, lake)
    _put_back(lake, before.position)
    side = LakeSide(str(lake))
    side.refresh()
    assert side.reach == VClock({1: 25})
    assert side.view(spark, side.reach).frame({512}).count() == 19


def _put_back(lake: Path, position: VClock) -> None:
    """Restore the lake's own table to an earlier position."""
    table = DeltaTable(str(lake / "_flowstone"))
    version = table.version()
    while Lake.open(str(lake), engine="deltalake").progress[UUID].position != position:
        version -= 1
        DeltaTable(str(lake / "_flowstone")).restore(version)


def test_several_replica_sets_have_separate_rows(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path), several_sets=True)
    fields = ("id", "unsigned"), ("name", "string")
    for uuid, number, name in ((UUID, 512, "ours"), (OTHER_UUID, 600, "theirs")):
        definition = space(*fields, number=number)
        table = lake.create(definition, uuid, at(1))
        table.merge(folded({1: packed(1, name)}, definition), definition, at(2), uuid)
        lake.save(LakeProgress(uuid, at(2), 0, (), {number: "orders"}, {}))
    for uuid, number, name in ((UUID, 512, "ours"), (OTHER_UUID, 600, "theirs")):
        side = LakeSide(str(tmp_path))
        side.refresh()
        side.choose(uuid)
        pinned = side.pinned("orders", side.lake.progress[uuid])
        assert pinned is not None
        work = [pa.record_batch({"space_id": [number], "path": [path]}) for path in pinned.current]
        found = [row for rows in read_files({number: pinned}, uuid, iter(work)) for row in rows.to_pylist()]
        assert [(row["space_id"], row["tuple"], row["wrong"]) for row in found] == [(number, packed(1, name), None)]


def test_outside_edit_of_a_table_of_several_sets_is_reported_for_its_set(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path), several_sets=True)
    definition = space(("id", "unsigned"), ("name", "string"))
    for uuid, name in ((UUID, "ours"), (OTHER_UUID, "theirs")):
        table = lake.create(definition, uuid, at(1))
        table.merge(folded({1: packed(1, name)}, definition), definition, at(2), uuid)
        lake.save(LakeProgress(uuid, at(2), 0, (), {512: "orders"}, {}))
    DeltaTable(str(tmp_path / "orders")).update(updates={"name": "'edited'"}, predicate="name = 'theirs'")
    for uuid, expected in ((UUID, None), (OTHER_UUID, "name is 'edited', but its tuple has 'theirs'")):
        side = LakeSide(str(tmp_path))
        side.refresh()
        side.choose(uuid)
        pinned = side.pinned("orders", side.lake.progress[uuid])
        assert pinned is not None
        work = [pa.record_batch({"space_id": [512], "path": [path]}) for path in pinned.current]
        found = [row["wrong"] for rows in read_files({512: pinned}, uuid, iter(work)) for row in rows.to_pylist()]
        assert found == [expected]


def test_lake_without_progress_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SideError, match="not a lake"):
        LakeSide(str(tmp_path)).refresh()
