"""Reasons to reject a mirror: they are found before Spark starts, and before anything is created."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from pyspark.sql import SparkSession

from flowstone.box.schema import UnknownSpace
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import parse_uri
from flowstone.lake.masks import Masking, WrongMask
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.lake import Lake, LakeProgress
from flowstone.spark.mirror.choice import MirrorChoice, WrongChoice
from flowstone.spark.mirror.mirror_run import LakePlace, MirrorOptions, MirrorRun
from flowstone.spark.mirror.sources import DirectorySource, MirrorBusy
from flowstone.spark.mirror.spark_table import EXTENSION
from flowstone.spark.mirror.start_checks import OtherSettings, WrongPlace, check_start, made, origin_of
from flowstone.text.row_table import UnknownColumn
from tests.real_tarantool import free_port
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, insert, whole

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000002"
MASKED = MirrorOptions(masking=Masking.parse(["orders.name=sha256"]))
REFUSED: list[tuple[MirrorOptions, type[FlowstoneError], str]] = [
    (MirrorOptions(masking=Masking.parse(["orders.nick=null"])), WrongMask, "has no field 'nick' to mask"),
    (MirrorOptions(masking=Masking.parse(["orders.id=null"])), WrongMask, "is part of its primary key"),
    (MirrorOptions(masking=Masking.parse(["order.name=null"])), WrongMask, "--mask: no space 'order'"),
    (MirrorOptions(choice=MirrorChoice.parse(["users"], [], [])), UnknownSpace, "users"),
    (MirrorOptions(choice=MirrorChoice.parse([], [], ["orders=nick"])), UnknownColumn, "has no field 'nick'"),
    (
        MirrorOptions(choice=MirrorChoice.parse([], ["ordres"], [])),
        WrongChoice,
        "--exclude ordres: no such space",
    ),
    (
        MirrorOptions(choice=MirrorChoice.parse([], ["ordr*"], [])),
        WrongChoice,
        "--exclude ordr.: no space matches; known spaces: ",
    ),
]


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    written.write(whole(insert(3, 1, "a")))
    written.save()
    return written


@contextmanager
def nothing_new(directory: Path) -> Iterator[None]:
    before = sorted(directory.rglob("*"))
    yield
    assert sorted(directory.rglob("*")) == before


def mode(path: str) -> int:
    return os.stat(path).st_mode & 0o777


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that starts without changes to apply."""
    monkeypatch.setattr(MirrorRun, "_make_executors", lambda self, stack: None)
    monkeypatch.setattr(MirrorRun, "_loop", lambda self: None)


def start(sources: list[Any], lake: Path, spool: Path, options: MirrorOptions) -> None:
    MirrorRun(cast(SparkSession, None), sources, LakePlace(str(lake), str(spool)), options).run()


@pytest.mark.usefixtures("without_spark")
@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_live_source_is_checked_before_a_spool_begins(
    node_server: str, tmp_path: Path, options: MirrorOptions, kind: type[FlowstoneError], message: str
) -> None:
    members = [parse_uri(node_server)]
    with nothing_new(tmp_path):
        with pytest.raises(kind, match=message):
            check_start([members], str(tmp_path / "lake"), options)
        with pytest.raises(kind, match=message):
            start([members], tmp_path / "lake", tmp_path / "spool", options)


def test_directory_is_checked_before_the_lake_is_created(tmp_path: Path) -> None:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    layout = [{"name": "id", "type": "unsigned"}, {"name": "name", "type": "string"}]
    rows: list[tuple[int, Any]] = [
        (272, ("version", 2, 11, 1)),
        (280, (512, 1, "orders", "memtx", 0, {}, layout)),
        (288, (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])),
    ]
    written.snapshot(VClock({1: 2}), rows)
    written.save()
    with nothing_new(tmp_path):
        for options, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                check_start([written.directory], str(tmp_path / "lake"), options)


@pytest.mark.usefixtures("without_spark")
def test_spool_is_readable_only_by_its_mirror(node_server: str, tmp_path: Path) -> None:
    members = [parse_uri(node_server)]
    uuid = origin_of(members, []).replicaset_uuid
    spool = tmp_path / "spool"
    start([members], tmp_path / "lake", spool, MASKED)
    assert [mode(f"{spool}{each}") for each in ("", f"/{uuid}", "/exact")] == [0o700] * 3
    start([members], tmp_path / "other", tmp_path / "plain", MirrorOptions())
    assert [mode(f"{tmp_path}/plain{each}") for each in ("", f"/{uuid}")] == [0o700] * 2


def test_unreachable_source_is_the_only_replica_set_of_the_lake(tmp_path: Path) -> None:
    nobody = [parse_uri(f"127.0.0.1:{free_port()}")]
    assert origin_of(nobody, [UUID]).replicaset_uuid == UUID
    for known in ([], [UUID, "another"]):
        with pytest.raises(FlowstoneError):
            origin_of(nobody, known)
    lake = str(tmp_path / "lake")
    with nothing_new(tmp_path), pytest.raises(FlowstoneError):
        check_start([nobody], lake, MirrorOptions())
    Lake.open(lake).save(LakeProgress(UUID, VClock({1: 3}), settings=MirrorOptions().settings))
    assert check_start([nobody], lake, MirrorOptions()) == [nobody]


def test_source_or_options_that_contradict_the_lake_are_refused(archive: WrittenArchive, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    Lake.open(lake).save(LakeProgress(UUID, VClock({1: 3}), settings=MASKED.settings))
    (opened,) = check_start([archive.directory], lake, MASKED)
    assert isinstance(opened, DirectorySource)
    with pytest.raises(OtherSettings, match="created with different --mask"):
        check_start([archive.directory], lake, MirrorOptions())
    with pytest.raises(OtherSettings, match="created with different --history"):
        check_start([archive.directory], lake, replace(MASKED, history=True))
    with pytest.raises(WrongPlace, match="belongs to the same replica set as another source"):
        check_start([archive.directory, archive.directory], lake, MASKED)
    Lake.open(lake).save(LakeProgress(OTHER_UUID, VClock({1: 3}), settings=MASKED.settings))
    with pytest.raises(OtherSettings, match=f"rows of replica set {OTHER_UUID}"):
        check_start([archive.directory], lake, MASKED)


def test_exclude_of_a_space_with_a_table_is_refused(archive: WrittenArchive, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    begun = MirrorOptions(choice=MirrorChoice.parse([], ["queue"], []))
    Lake.open(lake).save(LakeProgress(UUID, VClock({1: 3}), tables={512: "orders"}, settings=begun.settings))
    assert check_start([archive.directory], lake, begun), "a space that was excluded and no longer exists"
    for name in ("orders", "512"):
        with pytest.raises(OtherSettings, match=r"space 'orders' cannot be excluded: it already has a table in"):
            check_start([archive.directory], lake, MirrorOptions(choice=MirrorChoice.parse([], [name], [])))


def test_exclude_of_a_dropped_space_is_accepted_for_a_lake_whose_settings_do_not_name_exclusions(
    archive: WrittenArchive, tmp_path: Path
) -> None:
    """In a lake that was created before exclusions were saved, the space may have been dropped since."""
    lake = str(tmp_path / "lake")
    options = MirrorOptions(choice=MirrorChoice.parse([], ["queue"], []))
    settings = {name: value for name, value in options.settings.items() if name != "excluded"}
    Lake.open(lake).save(LakeProgress(UUID, VClock({1: 3}), tables={512: "orders"}, settings=settings))
    assert check_start([archive.directory], lake, options)
    with pytest.raises(OtherSettings, match="cannot be excluded"):
        check_start([archive.directory], lake, MirrorOptions(choice=MirrorChoice.parse([], ["orders"], [])))
    Lake.open(lake).save(LakeProgress(UUID, VClock({1: 3}), settings=MirrorOptions().settings))
    with pytest.raises(WrongChoice, match="no such space"):
        check_start([archive.directory], lake, options)


def test_exclude_of_an_unknown_space_is_accepted_while_its_source_is_unreachable(
    archive: WrittenArchive, tmp_path: Path
) -> None:
    nobody, lake = [parse_uri(f"127.0.0.1:{free_port()}")], str(tmp_path / "lake")
    Lake.open(lake).save(LakeProgress(UUID, VClock({1: 3}), tables={512: "orders"}, settings=MirrorOptions().settings))
    assert check_start([nobody], lake, MirrorOptions(choice=MirrorChoice.parse([], ["created_since"], []))) == [nobody]
    with pytest.raises(OtherSettings, match="cannot be excluded"):
        check_start([nobody], lake, MirrorOptions(choice=MirrorChoice.parse([], ["orders"], [])))


class DeltaSession:
    """The part of a session with Delta's jars that a start inspects; its catalog has the schema `default`."""

    conf: ClassVar = {"spark.sql.extensions": EXTENSION}

    @property
    def catalog(self) -> DeltaSession:
        return self

    def databaseExists(self, name: str) -> bool:  # noqa: N802
        return name == "default"


@pytest.mark.usefixtures("without_spark")
def test_catalog_without_the_schema_is_refused_before_the_lake_is_created(
    archive: WrittenArchive, tmp_path: Path
) -> None:
    session = cast(SparkSession, DeltaSession())
    place = LakePlace(str(tmp_path / "lake"), str(tmp_path / "spool"))
    with nothing_new(tmp_path), pytest.raises(WrongPlace, match=r"--catalog shop: no such schema .*; create it"):
        MirrorRun(session, [archive.directory], place, MirrorOptions(catalog="shop")).run()
    MirrorRun(session, [archive.directory], place, MirrorOptions(catalog="default")).run()


def test_lake_in_use_is_refused(archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    lock = production().disk.lock(str(lake))
    with pytest.raises(MirrorBusy, match="is in use by another mirror"):
        check_start([archive.directory], str(lake), MirrorOptions())
    lock.release()
    check_start([archive.directory], str(lake), MirrorOptions())


def test_remote_lake_is_not_checked_at_the_start() -> None:
    nobody = [parse_uri(f"127.0.0.1:{free_port()}")]
    assert check_start([nobody], "s3a://bucket/lake", MirrorOptions()) == [nobody]


def fill_and_fail(directory: Path) -> None:
    (directory / "file").touch()
    raise DataLoss("gone")


def test_error_removes_new_empty_directories(tmp_path: Path) -> None:
    there, full, empty = (tmp_path / name for name in ("there", "full", "empty"))
    there.mkdir()
    with pytest.raises(DataLoss), made(*map(str, (there, full, empty, empty / "within"))):
        fill_and_fail(full)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["full", "there"]
    with made(str(empty), is_private=True):
        pass
    assert mode(str(empty)) == 0o700
