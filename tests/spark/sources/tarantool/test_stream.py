"""Source `tarantool` as a stream: the reader as Spark's process calls it, and a real session around it."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from flowstone.archive.refusals import RowsMissing
from flowstone.errors import FlowstoneError
from flowstone.spark import register
from flowstone.spark.sources import spool_stream
from flowstone.spark.sources.change_batches import FormatChanged
from flowstone.spark.sources.options import WrongOption, tarantool_options
from flowstone.spark.sources.spool_stream import SnapshotLost
from flowstone.spark.sources.tarantool.stream import TarantoolStreamReader, stream_schema
from tests.interop.versions import parameters
from tests.node.archived_server import SCHEMA, RealServer
from tests.spark.spooled_servers import SYNCHRONOUS, collect_logs, pair, until

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("tarantool")]

FORMAT = """
box.space.t:format({{'id', 'unsigned'}, {'text', 'string', is_nullable = true}})
"""
Row = dict[str, Any]


@pytest.fixture(params=parameters("2.6"))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealServer]:
    cfg = "checkpoint_count=1, replication_timeout=0.2, replication_synchro_timeout=0.1"
    setup = SCHEMA + SYNCHRONOUS + FORMAT
    with RealServer(tmp_path / "master", setup=setup, cfg=cfg, binary=request.param.path) as running:
        yield running


class Query:
    """The calls of Spark: the offset log, batches in order, and commits; `died` drops the reader."""

    def __init__(self, tmp_path: Path, *groups: str, **options: str) -> None:
        self.spool = tmp_path / "spool"
        self.options = {"uri": ";".join(groups), "spoolLocation": str(self.spool), **options}
        self.logged: list[dict[str, Any]] = []
        self.batches: list[list[Row]] = []
        self._reader: TarantoolStreamReader | None = None

    @property
    def reader(self) -> TarantoolStreamReader:
        if self._reader is None:
            self._reader = TarantoolStreamReader(tarantool_options(self.options, streaming=True))
            self.limit = self._reader.getDefaultReadLimit()
            assert self._reader.initialOffset() == {}
        return self._reader

    @property
    def position(self) -> dict[str, Any]:
        return self.logged[-1] if self.logged else {}

    def plan(self, limit: ReadLimit | None = None) -> bool:
        """Log the next batch, if there is one."""
        reader = self.reader
        end = reader.latestOffset(self.position, limit or self.limit)
        if end == self.position and self.logged:
            return False
        self.logged.append(end)
        return True

    def run(self, number: int) -> list[Row]:
        start = self.logged[number - 1] if number else {}
        if number:
            self.reader.commit(start)
        executor = pickle.loads(pickle.dumps(self.reader))
        parts = pickle.loads(pickle.dumps(list(self.reader.partitions(start, self.logged[number]))))
        return [row for part in parts for batch in executor.read(part) for row in batch.to_pylist()]

    def batch(self, limit: ReadLimit | None = None) -> list[Row] | None:
        if not self.plan(limit):
            return None
        self.batches.append(self.run(len(self.logged) - 1))
        return self.batches[-1]

    def rest(self) -> list[Row]:
        """Return all batches up to the current position of the servers."""
        self.reader.prepareForTriggerAvailableNow()
        found: list[Row] = []
        while (batch := self.batch()) is not None:
            found += batch
        self.reader.targets = None
        return found

    def died(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.stop()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Query]]:
    monkeypatch.setattr(TarantoolStreamReader, "is_watching_driver", False)
    monkeypatch.setattr(spool_stream, "CHUNK_SIZE", 4_000)
    made: list[Query] = []

    def making(*groups: str, **options: str) -> Query:
        made.append(Query(tmp_path, *groups, **options))
        return made[-1]

    yield making
    for query in made:
        query.died()


def ids(rows: list[Row]) -> list[int]:
    return [row["id"] for row in rows]


def test_stream_delivers_a_snapshot_in_chunks_then_changes_repeatably(
    server: RealServer, make: Callable[..., Query]
) -> None:
    server.eval("fill(1, 30000)")
    query = make(server.uri, space="t", columns="id,_operation,_commit_version,_commit_timestamp,_lsn")
    chunks = [query.batch(ReadMaxRows(1)) for _ in range(3)]
    server.eval("fill(29999, 30003)")
    rows = [row for chunk in chunks for row in chunk or []] + query.rest()
    assert ids(rows) == [*range(1, 30001), *range(29999, 30004)]
    assert {row["_operation"] for row in rows[:30000]} == {"insert"}
    assert {row["_operation"] for row in rows[30000:]} == {"replace"}
    assert [list(offset["snapshots"].values()) for offset in query.logged[:3]] == [[1], [2], [3]]
    times = [row["_commit_timestamp"] for row in rows]
    assert times == sorted(times)
    last = len(query.logged) - 1
    query.died()
    assert query.run(last) == query.batches[last]  # a new process calls this before any latestOffset
    assert query.rest() == []
    assert query.reader.reportLatestOffset() == {uuid: lsns for uuid, lsns in query.position.items() if "-" in uuid}
    server.eval("fill(1, 1)")
    assert ids(query.rest()) == [1]


def test_rolled_back_rows_are_never_delivered(server: RealServer, make: Callable[..., Query]) -> None:
    query = make(server.uri, columns="_space,_tuple", startingOffsets="latest")
    assert query.batch() == []
    server.eval(
        "claim() box.space.s:replace{1} box.cfg{replication_synchro_quorum = 3}"
        " pcall(box.space.s.replace, box.space.s, {2}) box.cfg{replication_synchro_quorum = 1} box.space.s:replace{3}"
    )
    assert [row["_tuple"] for row in query.rest() if row["_space"] == "s"] == ["[1]", "[3]"]


def test_lost_spool_is_filled_again(server: RealServer, make: Callable[..., Query]) -> None:
    query = make(server.uri, space="t", columns="id,_lsn,_commit_version,_commit_timestamp")
    query.rest()
    server.eval("fill(1, 50)")
    query.reader.prepareForTriggerAvailableNow()
    rows = query.batch()
    assert rows
    server.eval("fill(51, 60)")
    query.died()
    shutil.rmtree(query.spool)
    assert query.run(len(query.logged) - 1) == rows
    assert ids(rows + query.rest()) == list(range(1, 61))


def test_snapshot_lost_halfway_is_an_error(server: RealServer, make: Callable[..., Query]) -> None:
    server.eval("fill(1, 5000)")
    query = make(server.uri, space="t")
    query.batch(ReadMaxRows(1))
    query.died()
    shutil.rmtree(query.spool)
    with pytest.raises(SnapshotLost, match="was deleted after 1 of its chunks were delivered"):
        query.batch()


@pytest.mark.parametrize("starting", ["snapshot", "latest"])
def test_first_batch_can_be_repeated_by_another_process(
    server: RealServer, make: Callable[..., Query], starting: str
) -> None:
    server.eval("fill(1, 5)")
    query = make(server.uri, space="t", columns="id", startingOffsets=starting)
    query.batch()
    server.eval("fill(6, 7)")
    query.died()
    assert query.run(0) == query.batches[0]
    query.died()
    shutil.rmtree(query.spool)
    if starting == "snapshot":
        with pytest.raises(SnapshotLost, match="was deleted after"):
            query.run(0)
    else:
        assert query.run(0) == []
        assert ids(query.rest()) == [6, 7]


def test_committed_rows_are_dropped(server: RealServer, make: Callable[..., Query]) -> None:
    query = make(server.uri)
    query.rest()
    assert list(query.spool.glob("*/*.snap"))
    server.eval("fill(1, 1)")
    query.rest()
    assert not list(query.spool.glob("*/*.snap"))


@pytest.mark.parametrize("allowed", ["true", "false"])
def test_gap_is_an_error_or_a_new_snapshot(server: RealServer, make: Callable[..., Query], allowed: str) -> None:
    query = make(server.uri, space="t", columns="id,_operation", failOnDataLoss=allowed)
    query.rest()
    server.eval("fill(1, 10)")
    query.rest()
    query.died()
    server.eval("fill(11, 20)")
    collect_logs(server)
    if allowed == "true":
        with pytest.raises(RowsMissing, match=r"no longer has LSN \d+ to \d+ of replica 1"):
            query.rest()
        return
    rows = query.rest()
    assert ids(rows) == list(range(1, 21))
    assert {row["_operation"] for row in rows} == {"insert"}
    server.eval("fill(21, 22)")
    assert ids(query.rest()) == [21, 22]


def test_two_replica_sets_make_one_stream(server: RealServer, make: Callable[..., Query], tmp_path: Path) -> None:
    with RealServer(tmp_path / "other", setup=SCHEMA + FORMAT, cfg="replication_timeout=0.2") as other:
        server.eval("fill(1, 5)")
        other.eval("fill(101, 105)")
        query = make(server.uri, other.uri, space="t", columns="id,_replicaset_uuid")
        rows = query.rest()
        server.eval("fill(6, 6)")
        other.eval("fill(106, 106)")
        rows += query.rest()
        query.died()
        server.eval("fill(7, 7)")
        rows += query.rest()
    by_set: dict[str, list[int]] = {}
    for row in rows:
        by_set.setdefault(row["_replicaset_uuid"], []).append(row["id"])
    assert sorted(by_set.values()) == [[1, 2, 3, 4, 5, 6, 7], [101, 102, 103, 104, 105, 106]]
    assert set(query.position) - {"stamps"} == set(by_set)


def test_stream_continues_from_another_member(make: Callable[..., Query], tmp_path: Path) -> None:
    with pair(tmp_path) as (a, b):
        query = make(f"{a.uri},{b.uri}", columns="_space,_tuple")
        query.rest()
        a.eval("fill(1, 10)")
        assert len(query.rest()) == 10
        until(lambda: a.vclock() == b.vclock())
        a.kill()
        b.eval("fill(11, 20)")
        assert len(query.rest()) == 10


def test_change_of_format_ends_the_query_and_a_new_one_resumes(server: RealServer, make: Callable[..., Query]) -> None:
    server.eval("fill(1, 3)")
    query = make(server.uri, space="t", columns="id,_lsn")
    query.rest()
    query.batches.clear()
    server.eval("fill(4, 5)")
    server.eval(
        "box.space.t:format({{'id', 'unsigned'}, {'text', 'string', is_nullable=true},"
        " {'note', 'string', is_nullable=true}}) box.space.t:replace{6, 'x', 'new'}"
        " box.space.t:format({{'id', 'unsigned'}, {'text', 'string', is_nullable=true},"
        " {'third', 'string', is_nullable=true}}) box.space.t:replace{7, 'x', 'newer'}"
    )
    with pytest.raises(FormatChanged, match="format of space 't' changes after"):
        query.rest()
    assert [row["id"] for batch in query.batches for row in batch] == [4, 5]
    query.died()
    options = tarantool_options({"uri": server.uri, "spoolLocation": str(query.spool), "space": "t"}, streaming=True)
    assert "note" in stream_schema(options)
    assert "third" not in stream_schema(options)
    query.options["columns"] = "id,note,_lsn"
    with pytest.raises(FormatChanged):
        query.rest()
    assert [row["note"] for row in query.batches[-1]] == ["new"]
    query.died()
    query.options["columns"] = "id,third,_lsn"
    assert [row["third"] for row in query.rest()] == ["newer"]


def test_stream_can_begin_at_a_vclock(server: RealServer, make: Callable[..., Query]) -> None:
    lsn = server.vclock()[1]
    server.eval("fill(1, 10)")
    query = make(server.uri, space="t", columns="id", startingOffsets=f'{{"1": {lsn + 4}}}', maxRowsPerTrigger="3")
    assert ids(query.rest()) == [5, 6, 7, 8, 9, 10]
    assert isinstance(query.limit, ReadMaxRows)
    query.died()
    shutil.rmtree(query.spool)
    assert query.run(0) == query.batches[0]


def test_default_limits_depend_on_the_transport(server: RealServer, make: Callable[..., Query]) -> None:
    for transport, kind in [("auto", ReadMaxBytes), ("inline", ReadMaxBytes), ("file", ReadAllAvailable)]:
        options = tarantool_options(
            {"uri": server.uri, "spoolLocation": "/nowhere", "transport": transport}, streaming=True
        )
        assert isinstance(TarantoolStreamReader(options).getDefaultReadLimit(), kind)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"images": "full"}, WrongOption, "images=full does not apply to a live server"),
        ({"startingOffsets": "earliest"}, WrongOption, "startingOffsets=earliest does not apply to a live server"),
        ({"space": "nope"}, FlowstoneError, "unknown space 'nope'"),
    ],
)
def test_mistakes_are_reported_before_anything_is_created(
    server: RealServer, make: Callable[..., Query], options: dict[str, str], error: type[Exception], message: str
) -> None:
    query = make(server.uri, **options)
    with pytest.raises(error, match=message):
        stream_schema(tarantool_options(query.options, streaming=True))
    with pytest.raises(error, match=message):
        query.batch()
    assert not query.spool.exists()


# --- in Spark ---


def streamed(spark: SparkSession, server: RealServer, directory: Path, **options: str) -> list[int]:
    """Return the ids of all batches so far."""
    found: list[int] = []

    def keep(batch: DataFrame, number: int) -> None:
        found.extend(row["id"] for row in batch.select("id").collect())

    source = spark.readStream.format("tarantool").options(
        uri=server.uri, space="t", spoolLocation=str(directory / "spool"), **options
    )
    query = source.load().writeStream.foreachBatch(keep).trigger(availableNow=True)
    query.option("checkpointLocation", str(directory / "checkpoint")).start().awaitTermination()
    return found


def test_spark_delivers_each_change_once_by_every_transport(
    spark: SparkSession, server: RealServer, tmp_path: Path
) -> None:
    register(spark)
    server.eval("fill(1, 1000)")
    assert streamed(spark, server, tmp_path, transport="inline") == list(range(1, 1001))
    for first, transport in ((1001, "file"), (1011, "tcp")):
        server.eval("fill(...)", first, first + 9)
        assert streamed(spark, server, tmp_path, transport=transport) == list(range(first, first + 10))


def test_unreachable_server_is_one_clear_error_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    register(spark)
    source = spark.readStream.format("tarantool").options(uri="127.0.0.1:1", spoolLocation=str(tmp_path / "spool"))
    with pytest.raises(PySparkException) as caught:
        source.load()
    text = str(caught.value)
    assert "cannot connect to 127.0.0.1:1" in text
    assert "Traceback" not in text.split("cannot connect")[0]


def test_executors_get_no_password() -> None:
    given = {"uri": "dana:hunter2@127.0.0.1:3301", "spoolLocation": "spool"}
    reader = TarantoolStreamReader(tarantool_options(given, streaming=True))
    assert b"hunter2" not in pickle.dumps(reader)
