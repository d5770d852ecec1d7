"""Changes of a batch in executors, and the driver's own reads: mostly without Spark."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from flowstone.columns.change_contract import RAW_COLUMNS, ChangeContract
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.lake.masks import Masking
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.change_frames import SliceRows
from flowstone.spark.index import slice_bytes
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.index.slice_bytes import NoBytes, SliceServer, Transport
from flowstone.spark.mirror.batch import (
    SHUFFLE_ROWS,
    ArchiveJob,
    Executors,
    FoldedTable,
    Target,
    at,
    by_space,
    fold_partition,
    mask_rows,
)
from flowstone.spark.sources.change_batches import read_slice
from tests.spark.archives import DIRECTORY, WrittenArchive
from tests.spark.change_rows import (
    INSERT,
    ORDERS,
    UUID,
    define,
    define_key,
    delete,
    insert,
    rekey,
    truncate,
    update,
    upsert,
    whole,
)

START = VClock({1: 2})
FIELDS = (("id", "unsigned"), ("name", "string"))


class Tuples:
    """A replacement for a table at a version: tuples by key."""

    def __init__(self, *rows: tuple[Any, ...]) -> None:
        self.rows = {row[0]: pack(row) for row in rows}
        self.asked = 0

    def lookup(self, keys: pa.Array) -> pa.Table:
        from flowstone.columns.sort_keys import sort_keys

        self.asked += len(keys)
        tuples = pa.array(list(self.rows.values()), pa.binary())
        found = pa.table({"sort_key": sort_keys(ORDERS, tuples), "tuple": tuples})
        return found.filter(pa.compute.is_in(found["sort_key"], value_set=keys))


def index_of(*transactions: bytes) -> ArchiveIndex:
    archive = WrittenArchive()
    archive.define_orders()
    archive.write(*transactions)
    archive.save()
    return ArchiveIndex.open(archive.disk, DIRECTORY)


class Plans:
    """A replacement for a session: records the executor tasks."""

    def __init__(self) -> None:
        self.sparkContext = SimpleNamespace(defaultParallelism=2)
        self.sent = pa.table({})

    def createDataFrame(self, plan: pa.Table) -> None:  # noqa: N802  # as Spark calls it
        self.sent = plan


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_large_snapshot_is_not_read_by_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    monkeypatch.setattr(slice_bytes, "INLINE_BATCH_MAX", 10)
    archive = WrittenArchive(production().disk, str(tmp_path))
    archive.define_orders()
    key = (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])
    rows: list[tuple[int, Any]] = [(280, (512, 1, "orders", "memtx", 0, {}, [])), (288, key), (512, (1, "a"))]
    archive.snapshot(VClock({1: 2}), rows)
    archive.save()
    index, plans = ArchiveIndex.open(archive.disk, archive.directory), Plans()
    with closing(SliceServer()) as server:
        job = ArchiveJob(index, Executors(cast(SparkSession, plans), 2, transport, server))
        loaded = job.load(index.snapshots[-1], [512])
        assert isinstance(loaded, SliceRows)
        assert plans.sent["data"].null_count == len(plans.sent) > 0
        (batch,) = [each for each in loaded.read(plans.sent.to_batches()) if each.num_rows]
        assert batch["_tuple_msgpack"].to_pylist() == [pack((1, "a"))]
        for _ in range(2):
            job.load(index.snapshots[-1], [512])
        with pytest.raises(NoBytes, match="no longer has this slice"):  # slices of earlier batches are not kept forever
            list(loaded.read(plans.sent.to_batches()))


def job_of(index: ArchiveIndex) -> ArchiveJob:
    """Return the jobs of a log for calls that the driver answers itself."""
    return ArchiveJob(index, Executors(cast(SparkSession, None), 2))


def changes(index: ArchiveIndex) -> list[pa.RecordBatch]:
    contract = ChangeContract(UUID, wanted=RAW_COLUMNS)
    return [
        batch
        for part in index.slices(START, index.settled)
        for batch in read_slice(index.disk, part, START, index.settled, contract)
    ]


def folded(target: Target, *transactions: bytes) -> FoldedTable:
    sent = list(fold_partition({512: target}, changes(index_of(*transactions))))
    return by_space(pa.Table.from_batches(sent))[512]


def states(found: FoldedTable) -> list[tuple[str, Any]]:
    rows = found.states.to_pylist()
    return [(row["operation"], None if row["tuple"] is None else unpack(row["tuple"])) for row in rows]


CHANGES = (
    whole(insert(3, 1, "a"), update(4, 2, ("=", 2, "new"))),
    whole(delete(5, 3)),
    whole(upsert(6, (4, "fresh"), ("=", 2, "old"))),
    whole(update(7, 1, ("=", 2, "b"))),
)


def target(old: Tuples | None = None, **how: Any) -> Target:
    return Target(ORDERS, START, START, old, **how)  # type: ignore[arg-type]


def test_fold_has_the_last_state_of_each_key() -> None:
    old = Tuples((2, "was"), (3, "gone"))
    found = folded(target(old), *CHANGES)
    assert states(found) == [("update", (1, "b")), ("update", (2, "new")), ("delete", None), ("upsert", (4, "fresh"))]
    assert (found.change_count, found.newest) == (5, 107_000_000)
    assert old.asked == 2  # the insert and the delete need no look-up


def test_fold_has_every_state_for_a_history() -> None:
    found = folded(target(Tuples((2, "was"), (3, "gone")), every_state=True), *CHANGES)
    assert states(found)[:2] == [("insert", (1, "a")), ("update", (1, "b"))]
    assert len(states(found)) == 5


def test_changes_that_a_table_already_has_are_omitted() -> None:
    at = VClock({1: 6})
    old = Tuples((1, "a"), (2, "new"), (4, "fresh"))
    found = folded(Target(ORDERS, at, at, old), *CHANGES)  # type: ignore[arg-type]
    assert states(found) == [("update", (1, "b"))]
    assert found.change_count == 1


def test_masked_table_and_its_exact_twin_have_separate_positions() -> None:
    mask = Masking.parse(["orders.name=redact"]).of(ORDERS)
    found = folded(Target(ORDERS, START, VClock({1: 6}), Tuples((2, "was")), mask), *CHANGES)  # type: ignore[arg-type]
    assert ("update", (1, "b")) in states(found)
    masked = [None if each is None else unpack(each) for each in found.masked.to_pylist()]
    assert masked == [(1, "***"), (2, "***"), None, (4, "***")]
    assert found.change_count == 1  # the other changes are already in the lake, but not in the twin


def test_changes_before_a_truncation_are_dropped() -> None:
    index = index_of(*CHANGES, whole(truncate(8)), whole(insert(9, 9, "z")))
    ((space, found),) = job_of(index).truncations(START, index.settled, {512: ORDERS}).items()
    assert (space, found.version, found.lsn, found.time) == (512, 8, 8, 108_000_000)
    emptied = Target(ORDERS, START, START, Tuples((2, "was")), truncated=(8, 8))  # type: ignore[arg-type]
    sent = list(fold_partition({512: emptied}, changes(index)))
    assert states(by_space(pa.Table.from_batches(sent))[512]) == [("insert", (9, "z"))]


@pytest.mark.parametrize(
    "dropped",
    [
        (delete(8, 512, 0, space=288), delete(9, 512, space=280), define(10, 512, "orders", *FIELDS, kind=INSERT)),
        (delete(8, 512, 1, space=288), delete(9, 512, 0, space=288)),
    ],
)
def test_space_dropped_and_recreated_in_a_transaction_is_emptied(dropped: tuple[Row, ...]) -> None:
    index = index_of(*CHANGES, whole(*dropped, define_key(11, 512)), whole(insert(12, 9, "z")))
    found = job_of(index).truncations(START, index.settled, {512: ORDERS})
    assert [(space, each.lsn) for space, each in found.items()] == [(512, 9)]
    secondary = index_of(*CHANGES, whole(delete(8, 512, 1, space=288)))
    assert not job_of(secondary).truncations(START, secondary.settled, {512: ORDERS})


def test_truncations_of_other_spaces_and_other_times_are_ignored() -> None:
    index = index_of(*CHANGES, whole(truncate(8)))
    assert not job_of(index).truncations(START, index.settled, {513: ORDERS})
    assert not job_of(index).truncations(index.settled, index.settled, {512: ORDERS})
    assert not job_of(index).truncations(START, VClock({1: 7}), {512: ORDERS})


def test_spaces_without_a_table_are_skipped() -> None:
    assert list(fold_partition({}, changes(index_of(*CHANGES)))) == []


def test_target_can_be_pickled() -> None:
    given = Target(ORDERS, START, START, mask=Masking.parse(["orders.name=null"]).of(ORDERS))
    assert pickle.loads(pickle.dumps(given)) == given


@pytest.mark.parametrize("is_masked", [True, False])
def test_rows_of_a_snapshot_are_masked_by_space(is_masked: bool) -> None:
    mask = Masking.parse(["orders.name=redact"]).of(ORDERS)
    assert mask is not None
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([512, 513, 512], pa.int32()),
            pa.array([b"a", b"b", b"c"]),
            pa.array([pack((1, "x")), pack((2, "y")), pack((3, "z"))]),
        ],
        names=["_space_id", "_sort_key", "_tuple_msgpack"],
    )
    rows = pa.Table.from_batches(mask_rows({512: mask} if is_masked else {}, [batch])).sort_by("sort_key")
    shown = [unpack(each)[1] for each in rows["tuple"].to_pylist()]
    assert shown == (["***", "y", "***"] if is_masked else ["x", "y", "z"])
    assert rows["space_id"].to_pylist() == [512, 513, 512]


BY_NAME = (1, "string")


@pytest.mark.parametrize(
    ("rows", "has_both"),
    [
        ([rekey(8, BY_NAME)], False),
        ([rekey(8, BY_NAME), insert(9, 9, "z")], True),
        ([insert(8, 9, "z"), rekey(9, BY_NAME)], True),
        ([truncate(8), rekey(9, BY_NAME), insert(10, 9, "z")], False),
        ([insert(8, 9, "z"), truncate(9), rekey(10, BY_NAME), insert(11, 9, "z")], False),
        ([rekey(8, BY_NAME), truncate(9), insert(10, 9, "z")], False),
        ([truncate(8), insert(9, 9, "z"), rekey(10, BY_NAME)], True),
        ([truncate(8), insert(9, 9, "z"), rekey(10, BY_NAME), insert(11, 9, "y")], True),
        ([truncate(8), insert(9, 9, "z", space=513), rekey(10, BY_NAME), insert(11, 9, "y")], False),
        ([truncate(8), insert(9, 9, "z"), rekey(10, BY_NAME, space=513), insert(11, 9, "y")], False),
    ],
)
def test_rows_with_two_keys_in_a_transaction_are_detected(rows: list[Row], has_both: bool) -> None:
    index = index_of(*CHANGES, whole(*rows))
    start = VClock({1: 7})
    emptied = job_of(index).truncations(start, index.settled, [512]).get(512)
    assert job_of(index).has_two_keys(start, index.settled, 512, emptied) is has_both


def test_small_batch_needs_no_job() -> None:
    index = index_of(*CHANGES)
    job = job_of(index)
    found = job.run(START, index.settled, {512: target(Tuples((2, "was"), (3, "gone")))}, row_count=5)
    assert [row for _, row in states(found[512])] == [(1, "b"), (2, "new"), None, (4, "fresh")]
    assert job.run(index.settled, index.settled, {512: target()}, row_count=0) == {}
    assert job.run(START, index.settled, {}, row_count=5) == {}


def test_large_batch_as_a_job_equals_the_drivers_result(spark: SparkSession, tmp_path: Path) -> None:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    archive.write(*(whole(insert(3 + number, number % 900, f"n{number}")) for number in range(2000)))
    archive.save()
    index = ArchiveIndex.open(production().disk, archive.directory)
    job = ArchiveJob(index, Executors(spark, 2))
    here = job.run(START, index.settled, {512: target()}, row_count=1)[512]
    for row_count in (SHUFFLE_ROWS - 1, SHUFFLE_ROWS):  # by one task, and by several tasks after a shuffle
        there = job.run(START, index.settled, {512: target()}, row_count=row_count)[512]
        assert there.states.sort_by("sort_key").to_pylist() == here.states.sort_by("sort_key").to_pylist()
        assert (there.change_count, there.newest) == (here.change_count, here.newest) == (2000, 2_102_000_000)


def test_moment_is_a_utc_time() -> None:
    assert at(1_500_000).isoformat() == "1970-01-01T00:00:01.500000+00:00"
