"""Mirrors of archives in the test's own process: tables follow the log and its definitions despite kills."""

from __future__ import annotations

import hmac
import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.lake.embedded_table import EmbeddedTable as Embedded
from flowstone.lake.masks import Masking, WrongMask
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_list import TableList
from flowstone.lake.table_schema import LakeError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.lake import Lake
from flowstone.spark.mirror import mirror_run
from flowstone.spark.mirror.batch import ArchiveJob
from flowstone.spark.mirror.choice import MirrorChoice
from flowstone.spark.mirror.mirror_run import LakePlace
from flowstone.spark.mirror.progress import MirrorCaughtUp, MirrorDataLoss, MirrorStopped
from flowstone.spark.mirror.sources import MirrorBusy
from flowstone.spark.mirror.start_checks import OtherSettings, WrongPlace
from flowstone.spark.mirror.tables import MirrorTables
from tests.node.archived_rows import SYNC, rollback
from tests.spark import lakes
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import (
    UUID,
    define,
    define_key,
    delete,
    insert,
    rekey,
    statement,
    truncate,
    update,
    upsert,
    whole,
)
from tests.spark.lakes import names_in, rows_of, tuples_of
from tests.spark.replayed_changes import check_changes

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000002"


def mirror_once(spark: SparkSession, sources: list[str], lake: Path, **options: Any) -> list[Any]:
    """Mirror everything that is available, with change tables, and check these."""
    told = lakes.mirror_once(spark, sources, lake, changes=True, **options)
    check_changes(lake, several_sets=len(sources) > 1)
    return told


def drop(lsn: int, space: int) -> Row:
    return statement(RequestType.DELETE, lsn, {0x10: 280, 0x20: (space,)})


def drop_key(lsn: int, space: int) -> Row:
    return statement(RequestType.DELETE, lsn, {0x10: 288, 0x20: (space, 0)})


def bump(lsn: int, space: int) -> Row:
    """Increment the third field of key 1."""
    return statement(RequestType.UPDATE, lsn, {0x10: space, 0x20: (1,), 0x15: 1, 0x21: (("+", 3, 1),)})


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    written = WrittenArchive(production().disk, str(tmp_path / "archive"))
    written.define_orders()
    return written


@pytest.fixture
def by_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the driver run even the smallest batch as a Spark job."""
    monkeypatch.setattr("flowstone.spark.mirror.batch.DRIVER_ROWS", 0)


@pytest.mark.usefixtures("by_jobs")
def test_table_equals_its_space(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    archive.write(whole(insert(3, 1, "a"), insert(4, 2, "b")), whole(update(5, 2, ("=", 2, "c"))))
    archive.save()
    lake = tmp_path / "lake"
    told = mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(1, "a"), (2, "c")]
    first, _ = rows_of(lake, "orders")
    assert (first["id"], first["name"], first["_extra"]) == (1, "a", None)
    assert isinstance(told[-2], MirrorCaughtUp)
    assert isinstance(told[-1], MirrorStopped)
    archive.write(whole(delete(6, 1)), whole(upsert(7, (2, "x"), ("=", 1, "d"))), whole(upsert(8, (3, "new"))))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(2, "d"), (3, "new")]
    assert names_in(lake) == ["orders"]


def lines_of(lake: Path, name: str) -> list[tuple[Any, ...]]:
    return [(row["id"], row["name"]) for row in rows_of(lake, name)]


def test_truncated_space_empties_its_table(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")), whole(insert(4, 2, "b")), whole(truncate(5)), whole(insert(6, 3, "c")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(3, "c")]
    archive.write(whole(insert(7, 4, "d"), truncate(8), insert(9, 5, "e")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(5, "e")]


def test_tables_follow_definitions(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a", "more")), whole(insert(4, 2, "b")))
    archive.write(whole(define(5, 512, "orders", ("id", "unsigned"), ("name", "string"), ("note", "string"))))
    archive.write(whole(insert(6, 3, "c", "note")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert [row["note"] for row in rows_of(lake, "orders")] == ["more", None, "note"]
    archive.write(whole(define(7, 512, "sales", ("id", "unsigned"), ("name", "string"), ("note", "string"))))
    archive.write(whole(update(8, 1, ("=", 2, "x"))))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert names_in(lake) == ["sales"]
    assert tuples_of(lake, "sales") == [(1, "x", "more"), (2, "b"), (3, "c", "note")]
    # The space is dropped, and created again under its former name and id.
    archive.write(whole(drop_key(9, 512)), whole(drop(10, 512)))
    archive.write(whole(define(11, 512, "orders", ("id", "unsigned"), ("name", "string")), define_key(12, 512)))
    archive.write(whole(insert(13, 7, "g")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert names_in(lake) == ["orders"]
    assert tuples_of(lake, "orders") == [(7, "g")]
    listed = [(row["name"], row["state"], row["position"]) for row in TableList(str(lake), {}).rows]
    assert listed == [("orders", "live", '{"1": 12}'), ("sales", "dropped", '{"1": 9}')]


def test_space_can_be_filled_in_the_transaction_that_creates_it(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")))
    archive.write(whole(define(4, 600, "made", *LAYOUT), define_key(5, 600), insert(6, 1, "m", space=600)))
    archive.write(whole(insert(7, 2, "n", space=600)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "made") == [(1, "m"), (2, "n")]


ID, NAME = (0, "unsigned"), (1, "string")
LAYOUT = (("id", "unsigned"), ("name", "string"))


@pytest.mark.parametrize(
    ("refused", "name"),
    [
        ([define(10, 512, "sales", *LAYOUT), rekey(11, NAME), delete(12, "c")], "sales"),
        ([truncate(10), insert(11, 4, "d"), rekey(12, NAME), insert(13, 5, "e")], "orders"),
    ],
    ids=["rows-of-before", "rows-after-a-truncation"],
)
def test_changed_primary_key_is_followed_unless_one_transaction_has_rows_of_both(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, refused: list[Row], name: str
) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a"), insert(4, 2, "b")), whole(rekey(5, NAME)), whole(delete(6, "b")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(1, "a")]
    archive.write(whole(truncate(7), rekey(8, ID), insert(9, 3, "c")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(3, "c")]
    archive.write(whole(*refused))
    archive.save()
    for _ in range(2):
        with pytest.raises(LakeError, match=f"changes both the primary key of space {name!r} and its"):
            mirror_once(spark, [archive.directory], lake)
    assert names_in(lake) == ["orders"]
    assert tuples_of(lake, "orders") == [(3, "c")]


def test_definitions_without_a_table_do_not_end_a_batch(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    for number in range(5):
        lsn = 3 + 2 * number
        archive.write(whole(define(lsn, 700 + number, f"bare{number}")), whole(insert(lsn + 1, number, "a")))
    archive.save()
    told = mirror_once(spark, [archive.directory], lake)
    assert told[-1].batches == 1
    assert len(tuples_of(lake, "orders")) == 5


def test_spaces_and_columns_can_be_chosen(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    layout = (("id", "unsigned"), ("name", "string"))
    archive.write(whole(define(3, 600, "other", *layout), define_key(4, 600)), whole(insert(5, 1, "m", space=600)))
    archive.write(whole(insert(6, 1, "a")))
    archive.save()
    mirror_once(spark, [archive.directory], lake, choice=MirrorChoice.parse(["orders"], [], ["orders=name"]))
    assert names_in(lake) == ["orders"]
    assert sorted(rows_of(lake, "orders")[0]) == ["_extra", "_key", "_tuple", "name"]
    with pytest.raises(OtherSettings, match="created with different --columns"):
        mirror_once(spark, [archive.directory], lake)


@pytest.mark.usefixtures("by_jobs")
def test_masked_values_are_nowhere_in_the_lake(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake, spool = tmp_path / "lake", tmp_path / "spool"
    masking = Masking.parse(["orders.name=sha256"], "salt")
    archive.write(whole(insert(3, 1, "secret-one", 5)), whole(insert(4, 2, "secret-two", 6)))
    archive.save()
    mirror_once(spark, [archive.directory], lake, spool=spool, masking=masking, transport="tcp")
    archive.write(whole(update(5, 1, (":", 2, 1, 0, "secret-more-"))), whole(update(6, 2, ("+", 3, 1))))
    archive.save()
    mirror_once(spark, [archive.directory], lake, spool=spool, masking=masking, transport="tcp")
    shown = [hmac.new(b"salt", text, "sha256").hexdigest() for text in (b"secret-more-secret-one", b"secret-two")]
    assert tuples_of(lake, "orders") == [(1, shown[0], 5), (2, shown[1], 7)]
    assert lines_of(lake, "orders") == [(1, shown[0]), (2, shown[1])]
    told = [file for file in lake.rglob("*") if file.is_file() and b"secret" in plain_bytes(file)]
    assert told == []
    assert any(b"secret" in plain_bytes(file) for file in spool.rglob("*.parquet"))
    with pytest.raises(OtherSettings, match="created with different --mask"):
        mirror_once(spark, [archive.directory], lake, spool=spool, masking=Masking.parse(["orders.name=null"]))


def plain_bytes(file: Path) -> bytes:
    """Return the bytes of a file, with the decoded columns if it is Parquet."""
    if file.suffix != ".parquet":
        return file.read_bytes()
    return repr(pq.read_table(file).to_pylist()).encode() + file.read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("nick", "string")], "space 'orders' has no field 'name' to mask"),
        ([("nick", "string"), ("name", "string")], "field 2 was 'name' and is now 'nick'"),
    ],
    ids=["renamed", "its name is taken"],
)
def test_renamed_masked_field_stops_the_mirror(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, fields: list[tuple[str, str]], message: str
) -> None:
    lake, spool, masking = tmp_path / "lake", tmp_path / "spool", Masking.parse(["orders.name=null"])
    archive.write(whole(insert(3, 1, "secret")))
    archive.write(whole(define(4, 512, "orders", ("id", "unsigned"), *fields)))
    archive.write(whole(insert(5, 2, "secret")))
    archive.save()
    with pytest.raises(WrongMask, match=message):
        mirror_once(spark, [archive.directory], lake, spool=spool, masking=masking)
    assert tuples_of(lake, "orders") == [(1, None)]


@pytest.mark.usefixtures("by_jobs")
def test_history_has_every_state(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")), whole(update(4, 1, ("=", 2, "b"))), whole(insert(5, 2, "x")))
    archive.write(whole(delete(6, 1)))
    archive.save()
    mirror_once(spark, [archive.directory], lake, history=True)
    archive.write(whole(insert(7, 1, "again")), whole(truncate(8)), whole(insert(9, 3, "y")))
    archive.save()
    mirror_once(spark, [archive.directory], lake, history=True)
    rows = sorted(rows_of(lake, "orders"), key=lambda row: row["_from_version"])
    assert [(unpack(row["_tuple"]), row["_from_version"], row["_to_version"]) for row in rows] == [
        ((1, "a"), 3, 4),
        ((1, "b"), 4, 6),
        ((2, "x"), 5, 8),
        ((1, "again"), 7, 8),
        ((3, "y"), 9, None),
    ]


def test_rolled_back_rows_are_never_in_a_table(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")), whole(insert(4, 2, "ghost"), flags=SYNC), whole(insert(5, 3, "b")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(1, "a")]  # later transactions are not settled either
    archive.write(rollback(6, 4), whole(insert(7, 4, "c")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(1, "a"), (3, "b"), (4, "c")]


def test_second_mirror_of_a_lake_is_refused(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    archive.save()
    lock = production().disk.lock(str(lake))
    with pytest.raises(MirrorBusy, match="is in use by another mirror"):
        mirror_once(spark, [archive.directory], lake)
    lock.release()
    mirror_once(spark, [archive.directory], lake)


def test_crash_between_two_commits_applies_each_change_once(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies once at each point of a batch: after the first table's commit, before the progress is saved,
    and between the commits of a change table and its table.
    """
    lake = tmp_path / "lake"
    layout = (("id", "unsigned"), ("name", "string"))
    archive.write(whole(define(3, 600, "other", *layout), define_key(4, 600)))
    archive.write(whole(insert(5, 1, "n", 0)), whole(insert(6, 1, "n", 0, space=600)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    lsn = 6
    for place, commits_done in (
        (MirrorTables.commit, 1),
        (MirrorTables.commit, 2),
        (Embedded.merge, 0),
        (Embedded.merge, 1),
    ):
        archive.write(whole(update(lsn + 1, 1, ("+", 3, 1))), whole(bump(lsn + 2, 600)))
        lsn += 2
        archive.save()
        with monkeypatch.context() as patched:
            patched.setattr(f"{place.__module__}.{place.__qualname__}", dying_after(commits_done, place))
            patched.setattr(Lake, "save", dying_after(0, Lake.save))
            with pytest.raises(Died):
                mirror_once(spark, [archive.directory], lake)
    # More rows arrive before the restart, so the batch differs from the unfinished one.
    archive.write(whole(update(lsn + 1, 1, ("+", 3, 1))), whole(bump(lsn + 2, 600)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(1, "n", 5)]
    assert tuples_of(lake, "other") == [(1, "n", 5)]


class Died(Exception):
    """Raised to simulate the death of the process."""


def dying_after(count: int, original: Any) -> Any:
    done: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(done) >= count:
            raise Died
        done.append(1)
        return original(*args, **kwargs)

    return call


def test_gap_is_an_error_or_a_reload(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a")))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    archive.lose(VClock({1: 10}))
    archive.write(whole(define(11, 512, "orders", ("id", "unsigned"), ("name", "string")), define_key(12, 512)))
    archive.write(whole(insert(13, 5, "b")))
    archive.save()
    with pytest.raises(DataLoss, match="LSN 4 to 10 of replica 1 are missing"):
        mirror_once(spark, [archive.directory], lake)
    told = mirror_once(spark, [archive.directory], lake, fail_on_data_loss=False)
    assert any(isinstance(event, MirrorDataLoss) for event in told)
    assert tuples_of(lake, "orders") == [(5, "b")]


def snapshot_rows(spaces: dict[int, str], *rows: tuple[int, Any]) -> list[tuple[int, Any]]:
    """Return a snapshot with these spaces and rows."""
    layout = [{"name": "id", "type": "unsigned"}, {"name": "name", "type": "string"}]
    return [
        (272, ("version", 2, 11, 1)),
        *((280, (number, 1, name, "memtx", 0, {}, layout)) for number, name in spaces.items()),
        *((288, (number, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])) for number in spaces),
        *rows,
    ]


def test_renamed_spaces_are_followed_across_a_gap(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    """After the gap, one former name is free and the other belongs to a different space."""
    lake, layout = tmp_path / "lake", (("id", "unsigned"), ("name", "string"))
    archive.write(whole(define(3, 600, "other", *layout), define_key(4, 600)), whole(insert(5, 1, "o", space=600)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    archive.lose(VClock({1: 10}))
    archive.write(whole(define(11, 512, "sales", *layout), define_key(12, 512)))
    archive.write(whole(define(13, 600, "orders", *layout), define_key(14, 600)))
    rows = snapshot_rows({512: "sales", 600: "orders"}, (512, (5, "s")), (600, (6, "o")))
    archive.snapshot(VClock({1: 14}), rows)
    archive.save()
    told = mirror_once(spark, [archive.directory], lake, fail_on_data_loss=False)
    assert names_in(lake) == ["orders", "sales"]
    assert (tuples_of(lake, "orders"), tuples_of(lake, "sales")) == ([(6, "o")], [(5, "s")])
    left = Lake.open(str(lake)).table("other")
    assert left is not None
    assert left.schema.renamed_to == "orders"
    assert "table other renamed: to orders" in [str(event) for event in told]


def test_space_dropped_before_its_first_load_was_saved_has_no_current_table(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(define(3, 600, "other", ("id", "unsigned"), ("name", "string")), define_key(4, 600)))
    archive.snapshot(VClock({1: 4}), snapshot_rows({512: "orders", 600: "other"}, (600, (1, "o"))))
    archive.save()
    with monkeypatch.context() as patched:
        patched.setattr(Lake, "save", dying_after(0, Lake.save))
        with pytest.raises(Died):
            mirror_once(spark, [archive.directory], lake)
    assert names_in(lake) == ["orders", "other"]
    archive.write(whole(drop_key(5, 600), drop(6, 600)))
    archive.snapshot(VClock({1: 6}), snapshot_rows({512: "orders"}, (512, (1, "a"))))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    assert names_in(lake) == ["orders"]
    assert tuples_of(lake, "orders") == [(1, "a")]


def test_masked_space_renamed_in_a_gap_stops_the_mirror(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path
) -> None:
    lake, spool, masking = tmp_path / "lake", tmp_path / "spool", Masking.parse(["orders.name=null"])
    archive.save()
    mirror_once(spark, [archive.directory], lake, spool=spool, masking=masking)
    archive.lose(VClock({1: 10}))
    archive.write(whole(define(11, 512, "people", ("id", "unsigned"), ("name", "string")), define_key(12, 512)))
    archive.snapshot(VClock({1: 12}), snapshot_rows({512: "people"}, (512, (5, "secret"))))
    archive.save()
    with pytest.raises(WrongMask, match="was renamed to 'people', and --mask names only one of these"):
        mirror_once(spark, [archive.directory], lake, spool=spool, masking=masking, fail_on_data_loss=False)
    assert names_in(lake) == ["orders"]


def test_several_replica_sets_share_their_tables(spark: SparkSession, archive: WrittenArchive, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "a"), insert(4, 2, "b")))
    archive.save()
    second = WrittenArchive(production().disk, str(tmp_path / "second"), uuid=OTHER_UUID)
    second.define_orders()
    second.write(whole(insert(3, 1, "A")))
    second.save()
    sources = [archive.directory, second.directory]
    mirror_once(spark, sources, lake)
    second.write(whole(update(4, 1, ("=", 2, "B"))), whole(insert(5, 3, "C")))
    second.save()
    mirror_once(spark, sources, lake)
    rows = {(row["_replicaset_uuid"], unpack(row["_tuple"])) for row in rows_of(lake, "orders", several_sets=True)}
    assert rows == {(UUID, (1, "a")), (UUID, (2, "b")), (OTHER_UUID, (1, "B")), (OTHER_UUID, (3, "C"))}
    with pytest.raises(FlowstoneError):
        mirror_once(spark, [archive.directory], lake)


def test_overtaken_mirror_stops_without_changes(
    spark: SparkSession, archive: WrittenArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On object storage, no lock excludes a second mirror, but its commits do."""
    lake = tmp_path / "lake"
    archive.write(whole(insert(3, 1, "n", 0)))
    archive.save()
    mirror_once(spark, [archive.directory], lake)
    archive.write(whole(update(4, 1, ("+", 3, 1))))
    archive.save()
    original = ArchiveJob.run

    def overtaken(job: ArchiveJob, *args: Any, **kwargs: Any) -> Any:
        folded = original(job, *args, **kwargs)
        monkeypatch.setattr(ArchiveJob, "run", original)
        mirror_once(spark, [archive.directory], lake)
        return folded

    monkeypatch.setattr("flowstone.spark.mirror.mirror_run.lake_lock", lambda lake: nullcontext())
    monkeypatch.setattr(ArchiveJob, "run", overtaken)
    with pytest.raises(AnotherWriter):
        mirror_once(spark, [archive.directory], lake)
    assert tuples_of(lake, "orders") == [(1, "n", 1)]


def test_directory_of_a_real_server_can_be_mirrored_without_an_archive(
    spark: SparkSession, tarantool: Any, tmp_path: Path
) -> None:
    """Local rows count in the server's vclock, but are in no table; the state is that of the snapshot and the later
    log.
    """
    said = tarantool.run(
        """
        box.cfg{log = 'server.log'}
        local fields = {{'id', 'unsigned'}, {'name', 'string'}, {'count', 'unsigned'}}
        local orders = box.schema.space.create('orders', {format = fields})
        orders:create_index('pk')
        local own = box.schema.space.create('own', {is_local = true})
        own:create_index('pk')
        for i = 1, 100 do orders:insert{i, 'n' .. i, i} own:insert{i} end
        box.snapshot()
        for i = 1, 100, 3 do orders:update(i, {{'+', 3, 1000}, {'=', 4, {deep = i}}}) own:delete(i) end
        for i = 50, 150, 5 do orders:upsert({i, 'new', 0}, {{'=', 2, 'met'}}) end
        for i = 2, 20, 2 do orders:delete(i) end
        print(require('json').encode(orders:select()))
        os.exit(0)
        """,
        tmp_path / "server",
    )
    lake = tmp_path / "lake"
    mirror_once(spark, [str(tmp_path / "server")], lake)
    assert names_in(lake) == ["orders"]
    assert [list(each) for each in tuples_of(lake, "orders")] == json.loads(said)
    assert [row["count"] for row in rows_of(lake, "orders")] == [each[2] for each in json.loads(said)]


class Done:
    """A replacement for the tables of a mirror; it records maintenance and its times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compacted: list[tuple[float, list[str]]] = []
        self.vacuumed: list[tuple[float, int]] = []

    def compact(self, names: list[str]) -> None:
        self.compacted.append((self.now, names))

    def vacuum(self, keep_hours: int) -> None:
        self.vacuumed.append((self.now, keep_hours))


def kept_house(monkeypatch: pytest.MonkeyPatch, hours: int, **options: Any) -> Done:
    """Return the maintenance of a mirror that has a batch in its first minute, and no later one."""
    done = Done()
    monkeypatch.setattr("flowstone.spark.mirror.mirror_run.time.monotonic", lambda: done.now)
    job = mirror_run.MirrorRun(cast(SparkSession, None), [], LakePlace("/lake"), mirror_run.MirrorOptions(**options))
    job._tables = cast(MirrorTables, done)
    job._touched.add("orders")
    for minute in range(hours * 60 + 1):
        done.now = minute * 60.0
        job._run_maintenance()
    return done


def test_tables_are_compacted_once_and_vacuumed_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old versions expire even if there are no new changes."""
    done = kept_house(monkeypatch, 50)
    assert [each for each in done.compacted if each[1]] == [(300.0, ["orders"])]
    assert done.vacuumed == [(3600.0, 168), (25 * 3600.0, 168), (49 * 3600.0, 168)]


def test_tables_are_vacuumed_without_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    done = kept_house(monkeypatch, 2, compact_every=None, vacuum_after=1800.0)
    assert done.compacted == []
    assert done.vacuumed == [(3600.0, 1), (7200.0, 1)]
    assert kept_house(monkeypatch, 2, vacuum_after=None).vacuumed == []


def test_mirror_that_runs_once_compacts_and_vacuums_at_the_end() -> None:
    done = Done()
    job = mirror_run.MirrorRun(cast(SparkSession, None), [], LakePlace("/lake"), mirror_run.MirrorOptions(once=True))
    job._tables = cast(MirrorTables, done)
    job._touched.add("orders")
    job._loop()
    assert ([names for _, names in done.compacted], [hours for _, hours in done.vacuumed]) == ([["orders"]], [168])


@pytest.mark.parametrize(
    ("master", "asked", "address", "transport", "listens"),
    [
        ("local[2]", "auto", None, "file", None),
        ("local", "auto", None, "file", None),
        ("local[2]", "tcp", None, "tcp", "127.0.0.2"),
        ("spark://head:7077", "auto", None, "auto", "127.0.0.2"),
        ("spark://head:7077", "tcp", "127.0.0.1", "tcp", "127.0.0.1"),
        ("spark://head:7077", "inline", None, "inline", None),
        ("spark://head:7077", "file", None, "file", None),
    ],
)
def test_executors_fetch_slices_at_the_drivers_address(
    master: str, asked: Transport, address: str | None, transport: str, listens: str | None
) -> None:
    conf = SimpleNamespace(get={"spark.driver.host": "127.0.0.2"}.get)
    context = SimpleNamespace(master=master, defaultParallelism=2, getConf=lambda: conf)
    options = mirror_run.MirrorOptions(transport=asked, transport_address=address)
    spark = cast(SparkSession, SimpleNamespace(sparkContext=context))
    with ExitStack() as stack:
        job = mirror_run.MirrorRun(spark, [], LakePlace("/lake"), options)._make_executors(stack)
        assert job.transport == transport
        assert (job.server.address[0] if job.server is not None else None) == listens


@pytest.mark.parametrize(
    ("lake", "spool", "masked", "wanted"),
    [
        ("/lake", None, False, "/lake/_flowstone_spool"),
        ("file:///lake", None, False, "/lake/_flowstone_spool"),
        ("/lake", "/spool", True, "/spool"),
        ("s3a://bucket/lake", "/spool", True, "/spool"),
        ("/lake", "/lakes/spool", True, "/lakes/spool"),
    ],
)
def test_spool_location_is_chosen_by_the_lake(lake: str, spool: str | None, masked: bool, wanted: str) -> None:
    assert LakePlace.of(lake, spool, is_masked=masked, has_live=True).spool == wanted


@pytest.mark.parametrize(
    ("lake", "spool", "masked", "message"),
    [
        ("/lake", None, True, "--mask needs --spool"),
        ("s3a://bucket/lake", None, False, "not a local path"),
        ("/lake", "/lake/spool", True, "is inside the lake"),
        ("file:///lake", "/lake/deep/spool", True, "is inside the lake"),
    ],
)
def test_invalid_spool_location_is_refused(lake: str, spool: str | None, masked: bool, message: str) -> None:
    with pytest.raises(WrongPlace, match=message):
        LakePlace.of(lake, spool, is_masked=masked, has_live=True)
