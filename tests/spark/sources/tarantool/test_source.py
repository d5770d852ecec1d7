"""Source `tarantool` as a batch: snapshots and look-ups of a real server and of a node, mostly without a JVM."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession, functions
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from flowstone.spark import register
from flowstone.spark.sources.tarantool.live_node import CannotUse
from flowstone.spark.sources.tarantool.source import TarantoolSource
from tests.spark.live_servers import create, insert, run, server


def read(address: str, **options: str) -> list[dict[str, Any]]:
    """Read as Spark does: the reader is pickled on its way to the executor."""
    source = TarantoolSource({"uri": address, **options})
    reader = source.reader(StructType())
    parts = reader.partitions()
    reader = pickle.loads(pickle.dumps(reader))
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_space_has_typed_columns(address: str) -> None:
    source = TarantoolSource({"uri": address, "space": "orders"})
    assert source.schema() == "`id` BIGINT, `name` STRING, `amount` DOUBLE, `note` STRING, `_extra` STRING"
    assert [tuple(row.values()) for row in read(address, space="orders")] == [
        (1, "one", 1.5, None, None),
        (2, "two", 2.0, "second", '["extra",[1]]'),
        (3, "three", -3.0, None, None),
    ]


def test_rows_of_all_user_spaces_are_json_and_messagepack(address: str) -> None:
    rows = read(address)
    assert {"orders", "pairs", "loose"} <= {row["_space"] for row in rows}
    assert not [row for row in rows if row["_space"].startswith("_")]
    (loose,) = [row for row in rows if row["_space"] == "loose"]
    assert (loose["_space_id"], loose["_tuple"]) == (514, '[1,{"a":[true,null]}]')
    assert loose["_tuple_msgpack"] == b"\x92\x01\x81\xa1a\x92\xc3\xc0"
    assert len({row["_replicaset_uuid"] for row in rows}) == 1
    assert "_space" in {row["_space"] for row in read(address, showSystem="true")}


@pytest.mark.parametrize("mode", ["snapshot", "select"])
def test_columns_can_be_chosen_including_metadata(address: str, mode: str) -> None:
    rows = read(address, space="512", columns="_tuple,id,_space,_replicaset_uuid", readMode=mode)
    assert list(rows[1]) == ["_tuple", "id", "_space", "_replicaset_uuid"]
    assert tuple(rows[1].values())[:3] == ('[2,"two",2,"second","extra",[1]]', 2, "orders")
    assert len(rows[1]["_replicaset_uuid"]) == 36


def test_password_hashes_are_hidden_by_default(address: str) -> None:
    """The hash in the test is that of the empty password, which guests have."""
    for mode in ("snapshot", "select"):
        text = str(read(address, space="_user", readMode=mode))
        assert "hidden" in text
        assert "vhvewKp0tNyweZQ+cFKAlsyphfg=" not in text
        assert "vhvewKp0tNyweZQ+cFKAlsyphfg=" in str(read(address, space="_user", readMode=mode, showSecrets="true"))
    assert "vhvewKp0tNyweZQ+cFKAlsyphfg=" not in str(read(address, showSystem="true"))


def test_several_replica_sets_are_read_together(real_server: str, node_server: str) -> None:
    """An unreachable member is skipped."""
    rows = read(f"{real_server};127.0.0.1:1,{node_server}", space="orders", columns="id,_replicaset_uuid")
    assert [row["id"] for row in rows] == [1, 2, 3, 1, 2, 3]
    assert len({row["_replicaset_uuid"] for row in rows}) == 2


def test_temporary_spaces_are_read_by_select(address: str) -> None:
    create(address, 600, "passing", [("id", "unsigned")], options={"temporary": True})
    insert(address, 600, [(number,) for number in range(700)])
    assert [row["id"] for row in read(address, space="passing", readMode="select")] == list(range(700))
    with pytest.raises(CannotUse, match="snapshots do not have its rows; read it with readMode=select"):
        read(address, space="passing")


def test_snapshot_is_consistent_during_writes(real_server: str) -> None:
    """During the reads, transactions move amounts between rows; the sum never changes."""
    run(
        real_server,
        """
        local s = box.schema.space.create('moved', {id = 700, format = {{'id', 'unsigned'}, {'n', 'unsigned'}}})
        s:create_index('pk')
        for i = 1, 2000 do s:replace{i, 10} end
        rawset(_G, 'moving', true)
        local fiber = require('fiber')
        fiber.create(function()
            while _G.moving do
                box.begin()
                for _ = 1, 20 do
                    local a, b = math.random(2000), math.random(2000)
                    if s:get(a)[2] > 0 and a ~= b then
                        s:update(a, {{'-', 2, 1}}) s:update(b, {{'+', 2, 1}})
                    end
                end
                box.commit()
                fiber.yield()
            end
        end)
        """,
    )
    try:
        for _ in range(5):
            numbers = [row["n"] for row in read(real_server, space="moved")]
            assert (len(numbers), sum(numbers)) == (2000, 20_000)
            assert set(numbers) != {10}
    finally:
        run(real_server, "_G.moving = false")


@pytest.mark.parametrize("mode", ["snapshot", "select"])
def test_one_frame_serves_queries_with_different_filters(spark: SparkSession, real_server: str, mode: str) -> None:
    register(spark)
    frame = spark.read.format("tarantool").options(uri=real_server, space="pairs", readMode=mode).load()
    wanted = "a = 2 and b in ('b1', 'b7') and c > 2"
    assert list(map(tuple, frame.where(wanted).drop("_extra").collect())) == [(2, "b7", 14)]
    assert frame.where("a = 1").unionAll(frame.where("a = 2")).count() == 20
    assert frame.where("a = 0").alias("one").join(frame.where("a = 3").alias("two"), "b").count() == 10
    assert frame.groupBy("a").agg(functions.sum("c")).orderBy("a").collect()[3][:] == (3, 135)
    frame.createOrReplaceTempView("pairs")
    counts = "SELECT (SELECT count(*) FROM pairs WHERE a = 1) + (SELECT count(*) FROM pairs WHERE a > 1)"
    assert spark.sql(counts).collect()[0][0] == 30
    assert frame.count() == 40


def test_sources_push_no_filters(real_server: str) -> None:
    """Spark 4.2.0, 4.2.1 and 4.3.0 reuse the filters pushed to one scan of a frame for its other scans."""
    for mode in ("snapshot", "select"):
        reader = TarantoolSource({"uri": real_server, "space": "pairs", "readMode": mode}).reader(StructType())
        assert type(reader).pushFilters is DataSourceReader.pushFilters


def test_dropped_and_changed_spaces_have_different_errors(tmp_path: Path, tarantool: object) -> None:
    with server("real", tmp_path) as address:
        reader = TarantoolSource({"uri": address, "space": "orders"}).reader(StructType())
        run(address, "box.space.orders:format({{'id', 'unsigned'}, {'title', 'string'}})")
        with pytest.raises(Exception, match="format of space 'orders' has changed since the query was planned"):
            list(reader.read(reader.partitions()[0]))
