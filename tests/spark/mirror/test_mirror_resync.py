"""`--resync`: single tables are taken anew from the current rows of their spaces, while the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from flowstone.box.schema import Schema
from flowstone.iproto.uri import parse_uri
from flowstone.lake.masks import Masking
from flowstone.lake.table_schema import LakeError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.lake import Lake
from flowstone.spark.mirror.sources import CurrentState, DirectorySource
from flowstone.spark.mirror.start_checks import OtherSettings
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import define, define_key, delete, insert, update, whole
from tests.spark.lakes import mirror_once, tuples_of
from tests.spark.live_servers import run
from tests.spark.replayed_changes import changes_in, check_changes

LAYOUT = (("id", "unsigned"), ("name", "string"))


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(whole(define(3, 600, "other", *LAYOUT), define_key(4, 600), insert(5, 1, "o", space=600)))
    written.write(whole(insert(6, 1, "a"), insert(7, 2, "b")), whole(update(8, 1, ("=", 2, "c"))))
    written.save()
    return written


def damage(lake: Path, name: str) -> None:
    for file in (lake / name).glob("*.parquet"):
        file.unlink()


def version(lake: Path, name: str) -> int:
    return Lake.open(str(lake)).there(name).version


def test_damaged_table_is_taken_anew_and_the_others_stay(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake, masking = tmp_path / "lake", Masking.parse(["orders.name=redact"])
    how: dict[str, Any] = {"changes": True, "masking": masking, "spool": tmp_path / "spool"}
    mirror_once(spark, [archive.directory], lake, **how)
    before = version(lake, "other")
    damage(lake, "orders")
    archive.write(whole(update(9, 1, ("=", 2, "d"))), whole(delete(10, 2), insert(11, 3, "e")))
    archive.save()
    told = mirror_once(spark, [archive.directory], lake, resync=("ord*",), **how)
    assert tuples_of(lake, "orders") == [(1, "***"), (3, "***")]
    assert tuples_of(tmp_path / "spool" / "exact", "orders") == [(1, "d"), (3, "e")]
    assert version(lake, "other") == before
    said = [str(event) for event in told]
    assert "table orders resynced: at {1: 8}" in said, said
    kinds = [(row["_change_type"], row["_commit_version"]) for row in changes_in(lake, "orders")]
    assert kinds[-4:] == [("update", 8), ("update", 9), ("delete", 11), ("insert", 11)]
    check_changes(lake)


def test_resync_of_an_unknown_or_altered_space_is_rejected(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    with pytest.raises(OtherSettings, match=r"--resync orders: .* has no table of such a space"):
        mirror_once(spark, [archive.directory], lake, resync=("orders",))
    mirror_once(spark, [archive.directory], lake)
    with pytest.raises(OtherSettings, match=r"--resync x\*: .* has no table"):
        mirror_once(spark, [archive.directory], lake, resync=("x*",))
    monkeypatch.setattr(DirectorySource, "state_of", without_spaces)
    with pytest.raises(LakeError, match="space 'orders' has another definition now than in the lake"):
        mirror_once(spark, [archive.directory], lake, resync=("orders",))


@contextmanager
def without_spaces(source: DirectorySource, *args: Any) -> Iterator[CurrentState]:
    """Stand for a snapshot taken after the space was dropped."""
    yield CurrentState(cast(DataFrame, None), VClock({1: 9}), 0, Schema({}))


def test_table_of_a_live_server_is_taken_anew_from_a_new_snapshot(
    spark: SparkSession, real_server: str, tmp_path: Path
) -> None:
    lake, source = tmp_path / "lake", [parse_uri(real_server)]
    run(real_server, "box.schema.space.create('anew', {id = 900}):create_index('pk') box.space.anew:replace{1, 'a'}")
    how: dict[str, Any] = {"changes": True, "spool": tmp_path / "spool"}
    mirror_once(spark, [source], lake, **how)
    damage(lake, "anew")
    run(real_server, "box.space.anew:update(1, {{'=', 2, 'b'}}) box.space.anew:replace{2, 'c'}")
    mirror_once(spark, [source], lake, resync=("anew",), **how)
    assert tuples_of(lake, "anew") == [(1, "b"), (2, "c")]
    assert [row["_change_type"] for row in changes_in(lake, "anew")] == ["reset", "reset"]
    run(real_server, "box.space.anew:delete(1)")
    mirror_once(spark, [source], lake, **how)
    assert tuples_of(lake, "anew") == [(2, "c")]
    assert changes_in(lake, "anew")[-1]["_change_type"] == "delete"
    assert not list((tmp_path / "spool").glob("*.resync"))
