"""The stream of source `xlog` as Spark drives it, without Spark: offsets, repeated batches, gaps, formats."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from flowstone.columns.change_contract import FormerFormat
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.sources import spool_stream
from flowstone.spark.sources.change_batches import FormatChanged
from flowstone.spark.sources.options import WrongOption, xlog_options
from flowstone.spark.sources.xlog.log_directories import LogDirectories, contracts_of_stream
from flowstone.spark.sources.xlog.source import XlogReader, XlogStreamReader
from tests.node.archived_rows import SYNC, confirm
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import UUID, define, define_key, delete, insert, whole

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000001"
Row = dict[str, Any]


@pytest.fixture
def archive(tmp_path: Path) -> WrittenArchive:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"))
    archive.define_orders()
    for lsn in range(3, 11):
        archive.write(whole(insert(lsn, lsn, "x")))
    archive.save()
    return archive


class Query:
    """A query over directories that plans batches and keeps state as Spark does."""

    def __init__(self, *paths: str, limit: ReadLimit | None = None, **options: str) -> None:
        self.options = {"path": ",".join(paths), **options}
        self.limit = limit
        self.offset: Mapping[str, Any] = {}
        self.planned: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
        self.restart()

    def restart(self, **options: str) -> None:
        self.options |= options
        parsed = xlog_options(self.options, streaming=True)
        directories = LogDirectories.open(production().disk, parsed.paths)
        types = next(iter(contracts_of_stream(directories, parsed).values())).spark_types
        self.reader = XlogStreamReader(parsed, types)

    def batches(self) -> Iterator[list[Row]]:
        """Return the batches available now."""
        if not self.planned:
            assert self.reader.initialOffset() == self.offset == {}
        while True:
            end = self.reader.latestOffset(self.offset, self.limit or self.reader.getDefaultReadLimit())
            if end == self.offset:
                return
            self.planned.append((self.offset, end))
            yield self.read(*self.planned[-1])
            self.offset = end

    def read(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[Row]:
        executor = pickle.loads(pickle.dumps(self.reader))
        parts = [pickle.loads(pickle.dumps(part)) for part in self.reader.partitions(start, end)]
        return [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]

    def lsns(self) -> list[list[int]]:
        return [[row["_lsn"] for row in batch] for batch in self.batches()]


def test_batches_are_repeatable(archive: WrittenArchive) -> None:
    query = Query(archive.directory, maxRowsPerTrigger="3")
    assert isinstance(query.reader.getDefaultReadLimit(), ReadMaxRows)
    first = list(query.batches())
    assert [[row["_lsn"] for row in batch] for batch in first] == [[3], [4, 5, 6], [7, 8, 9], [10]]
    archive.write(whole(insert(11, 11, "x")))
    archive.save()
    query.restart()
    assert [query.read(start, end) for start, end in query.planned] == first
    assert query.lsns() == [[11]]
    assert query.offset == {UUID: {"1": 11}, "stamps": {UUID: 111_000_000}}


def test_stream_can_begin_at_the_end(archive: WrittenArchive) -> None:
    query = Query(archive.directory, startingOffsets="latest")
    assert query.lsns() == [[]]
    archive.write(whole(insert(11, 11, "x")))
    archive.save()
    query.restart()
    assert query.read(*query.planned[0]) == []
    assert query.lsns() == [[11]]


def test_stream_can_begin_at_a_position(archive: WrittenArchive) -> None:
    assert Query(archive.directory, startingOffsets='{"1": 8}').lsns() == [[9, 10]]
    with pytest.raises(WrongOption, match="startingOffsets has no position for replica set"):
        Query(archive.directory, startingOffsets=f'{{"{OTHER_UUID}": {{"1": 8}}}}').lsns()


def test_stream_can_begin_with_a_snapshot_in_chunks(archive: WrittenArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_stream, "CHUNK_SIZE", 1)
    archive.log.cut(VClock({1: 10}))
    definitions = [
        (
            280,
            (
                512,
                1,
                "orders",
                "memtx",
                0,
                {},
                [{"name": "id", "type": "unsigned"}, {"name": "name", "type": "string"}],
            ),
        ),
        (288, (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])),
    ]
    archive.snapshot(VClock({1: 10}), [*definitions, *((512, (number, "x" * 300)) for number in range(2000))])
    archive.write(whole(insert(11, 5000, "x")))
    archive.save()
    query = Query(archive.directory, space="orders", startingOffsets="snapshot", maxRowsPerTrigger="1")
    found = list(query.batches())
    assert len(found) > 4
    ids = [[row["id"] for row in batch] for batch in found]
    assert [each for batch in ids for each in batch] == [*range(2000), 5000]
    assert {(row["_operation"], row["_commit_version"]) for batch in found[:-1] for row in batch} == {("insert", 10)}
    times = [row["_commit_timestamp"] for batch in found for row in batch]
    assert times == sorted(times)
    query.restart()
    assert [query.read(start, end) for start, end in query.planned] == found
    chunks = [end.get("snapshots", {}).get(UUID) for _, end in query.planned]
    assert chunks[:-2] == list(range(1, len(chunks) - 1))
    assert chunks[-2:] == [None, None]


def test_gap_ends_a_stream_or_is_skipped_if_allowed(archive: WrittenArchive) -> None:
    archive.lose(VClock({1: 20}))
    archive.write(whole(insert(21, 21, space=513)))
    archive.save()
    query = Query(archive.directory)
    with pytest.raises(DataLoss, match=r"LSN 11 to 20 of replica 1 are missing after \{1: 10\}: they were collected"):
        query.lsns()
    assert query.offset[UUID] == {"1": 10}
    query.restart(failOnDataLoss="false")
    assert query.lsns() == [[], [], [21]]  # skips the snapshot, which has no user rows, and continues with the changes
    query.restart()
    assert [query.read(start, end) for start, end in query.planned][-1][0]["_lsn"] == 21


def test_missing_logs_of_a_plain_directory_are_a_gap(tmp_path: Path) -> None:
    archive = WrittenArchive(production().disk, str(tmp_path / "archive"), wal_max_size=1)
    archive.define_orders()
    for lsn in range(3, 11):
        archive.write(whole(insert(lsn, lsn, "x")))
    archive.save()
    for name in ("manifest.json", f"{5:020d}.xlog", f"{6:020d}.xlog"):
        archive.disk.unlink(f"{archive.directory}/{name}")
    query = Query(archive.directory, failOnDataLoss="false")
    assert query.lsns() == [[3, 4, 5], [], [8, 9, 10]]
    with pytest.raises(DataLoss, match="LSN 6 to 7 of replica 1 are missing"):
        Query(archive.directory).lsns()
    options = xlog_options({"path": archive.directory, "failOnDataLoss": "false"})
    assert batch_lsns(XlogReader(options)) == [3, 4, 5, 8, 9, 10]


def batch_lsns(reader: XlogReader) -> list[int]:
    executor = pickle.loads(pickle.dumps(reader))
    found = [row for part in reader.partitions() for batch in executor.read(part) for row in batch.to_pylist()]
    return [row["_lsn"] for row in found]


def test_stream_ends_at_a_change_of_format_and_resumes_with_the_next(archive: WrittenArchive) -> None:
    query = Query(archive.directory, space="orders")
    assert len(query.lsns()) == 1
    archive.write(whole(insert(11, 11, "x")))
    archive.write(whole(define(12, 512, "orders", ("id", "unsigned"), ("name", "string"), ("more", "string"))))
    archive.write(whole(insert(13, 13, "x", "y")), whole(insert(14, 14, "x", "y")))
    archive.write(whole(define(15, 512, "orders", ("id", "unsigned"))), whole(insert(16, 16, "x", "y")))
    archive.save()
    with pytest.raises(FormatChanged, match=r"changes after \{1: 11\}, but the query has the old columns"):
        query.lsns()
    assert query.offset[UUID] == {"1": 11}
    # By now there is a third format, which the query does not have.
    query.restart()
    with pytest.raises(FormatChanged):
        query.lsns()
    query.restart(schemaAt='{"1": 11}')
    batches = query.batches()
    assert [(row["_lsn"], row["more"]) for row in next(batches)] == [(13, "y"), (14, "y")]
    with pytest.raises(FormatChanged, match=r"after \{1: 14\}"):
        next(batches)
    query.restart(schemaAt='{"1": 14}')
    assert query.lsns() == [[16]]


def test_stream_ends_when_its_space_is_recreated(archive: WrittenArchive) -> None:
    query = Query(archive.directory, space="orders")
    assert len(query.lsns()) == 1
    archive.write(whole(delete(11, 512, 0, space=288)), whole(delete(12, 512, space=280)))
    archive.save()
    assert query.lsns() == [[]]  # while the new space has no rows, the stream continues
    archive.write(whole(define(13, 600, "orders", ("id", "unsigned"), ("name", "string"))), whole(define_key(14, 600)))
    archive.write(whole(insert(15, 15, "x", space=600)))
    archive.save()
    with pytest.raises(FormatChanged, match=r"after \{1: 13\}"):
        query.lsns()
    query.restart()
    assert query.lsns() == [[15]]


def test_batch_over_several_formats_has_the_columns_at_its_end(archive: WrittenArchive) -> None:
    archive.write(whole(define(11, 512, "orders", ("id", "unsigned"), ("renamed", "string"), ("more", "string"))))
    archive.write(whole(insert(12, 12, "x", "y")), whole(delete(13, 12)))
    archive.save()
    reader = XlogReader(xlog_options({"path": archive.directory, "space": "orders", "startingOffsets": '{"1": 9}'}))
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [(row["_lsn"], row["id"], row["renamed"], row["more"]) for row in found] == [
        (10, 10, None, None),
        (12, 12, "x", "y"),
        (13, 12, None, None),
    ]
    archive.write(whole(define(14, 512, "orders", ("id", "string"))))
    archive.save()
    with pytest.raises(FormerFormat, match="field 'id' of space 'orders' changes its type after LSN"):
        batch_lsns(reader)


def test_several_replica_sets_are_one_stream(archive: WrittenArchive, tmp_path: Path) -> None:
    other = WrittenArchive(production().disk, str(tmp_path / "other"), uuid=OTHER_UUID)
    other.define_orders()
    other.write(whole(insert(3, 3, "other")))
    other.save()
    query = Query(archive.directory, other.directory, maxRowsPerTrigger="4")
    rows = [row for batch in query.batches() for row in batch]
    assert sorted((row["_replicaset_uuid"], row["_lsn"]) for row in rows) == [
        *((UUID, lsn) for lsn in range(3, 11)),
        (OTHER_UUID, 3),
    ]
    assert {uuid: query.offset[uuid] for uuid in (UUID, OTHER_UUID)} == {UUID: {"1": 10}, OTHER_UUID: {"1": 3}}
    query.restart(path=archive.directory)
    with pytest.raises(
        WrongOption, match=f"checkpoint is at .* of replica set {OTHER_UUID}, but path has no log of it"
    ):
        query.lsns()


def test_consecutive_archives_are_one_stream(archive: WrittenArchive, tmp_path: Path) -> None:
    second = WrittenArchive(production().disk, str(tmp_path / "second"))
    second.begin_at(VClock({1: 8}))
    for lsn in range(9, 15):
        second.write(whole(insert(lsn, lsn, "x")))
    second.save()
    rows = [row for batch in Query(archive.directory, second.directory).batches() for row in batch]
    assert [row["_lsn"] for row in rows] == list(range(3, 15))
    assert [row["_commit_version"] for row in rows] == list(range(3, 15))
    options = xlog_options({"path": f"{archive.directory},{second.directory}"})
    assert batch_lsns(XlogReader(options)) == list(range(3, 15))


@pytest.mark.parametrize("seed", range(3))
def test_versions_increase_when_members_order_rows_differently(tmp_path: Path, seed: int) -> None:
    """The logs of two members have the same rows of two origins, each in a different order."""
    random = Random(seed)
    transactions = [(1, [first, first + 1]) for first in range(3, 43, 2)] + [(2, [lsn]) for lsn in range(1, 20)]
    archives = []
    for name in ("a", "b"):
        order = [origin for origin, _ in transactions]
        random.shuffle(order)
        rows = {origin: iter([lsns for each, lsns in transactions if each == origin]) for origin in (1, 2)}
        archive = WrittenArchive(production().disk, str(tmp_path / name))
        archive.define_orders()
        count = len(order) if name == "b" else len(order) // 2
        for origin in order[:count]:
            archive.write(whole(*(insert(lsn, lsn, "x", origin=origin) for lsn in next(rows[origin]))))
        archive.save()
        archives.append(archive)
    query = Query(*(each.directory for each in archives), maxRowsPerTrigger="5")
    query.options["path"] = archives[0].directory
    query.restart()
    found = [row for batch in query.batches() for row in batch]
    query.restart(path=",".join(each.directory for each in archives))
    found += [row for batch in query.batches() for row in batch]
    keys = [(row["_replica_id"], row["_lsn"]) for row in found]
    assert sorted(keys) == sorted((origin, lsn) for origin, lsns in transactions for lsn in lsns)
    versions = [row["_commit_version"] for row in found]
    assert versions == sorted(versions)
    assert len(set(versions)) == len({(row["_replica_id"], row["_tsn"]) for row in found})


def test_available_now_ends_at_the_rows_present_at_its_start(archive: WrittenArchive) -> None:
    query = Query(archive.directory, maxRowsPerTrigger="5")
    query.reader.prepareForTriggerAvailableNow()
    archive.write(whole(insert(11, 11, "x")))
    archive.save()
    assert query.lsns() == [[3, 4, 5], [6, 7, 8, 9, 10]]


def test_limits_can_be_bytes_or_none(archive: WrittenArchive) -> None:
    assert isinstance(Query(archive.directory).reader.getDefaultReadLimit(), ReadAllAvailable)
    assert len(Query(archive.directory, maxBytesPerTrigger="1").lsns()) == 9
    assert len(Query(archive.directory, maxBytesPerTrigger="1", maxRowsPerTrigger="100").lsns()) == 9
    assert len(Query(archive.directory, maxBytesPerTrigger="1g", limit=ReadAllAvailable()).lsns()) == 1


def test_unsettled_rows_are_not_delivered(archive: WrittenArchive) -> None:
    archive.write(whole(insert(11, 11, "x"), flags=SYNC), whole(insert(12, 12, "x")))
    archive.save()
    query = Query(archive.directory)
    assert query.lsns() == [list(range(3, 11))]
    archive.write(confirm(13, 11))
    archive.save()
    assert query.lsns() == [[11, 12]]


def test_batch_that_ends_before_its_start_is_refused(archive: WrittenArchive) -> None:
    given = {"path": archive.directory, "startingOffsets": '{"1": 8}', "endingOffsets": '{"1": 4}'}
    with pytest.raises(WrongOption, match=r"batch starts at \{1: 8\}, but ends at \{1: 4\}"):
        XlogReader(xlog_options(given)).partitions()
