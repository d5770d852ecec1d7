"""Source `tarantool` as a batch: snapshots and look-ups of a real server and of a node, mostly without a JVM."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession, functions
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from flowstone.spark import register
from flowstone.spark.live_node import CannotUse
from flowstone.spark.tarantool_source import TarantoolSource
from tests.spark.live_servers import PAIR_ROWS, create, insert, run, server


def read(address: str, *filters: Filter, **options: str) -> list[dict[str, Any]]:
    """As Spark calls it: the reader is pickled on its way to where it reads."""
    source = TarantoolSource({"uri": address, **options})
    reader = source.reader(StructType())
    if options.get("readMode") == "select":
        assert list(reader.pushFilters(list(filters))) == list(filters)
    parts = reader.partitions()
    reader = pickle.loads(pickle.dumps(reader))
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_a_space_has_typed_columns(address: str) -> None:
    source = TarantoolSource({"uri": address, "space": "orders"})
    assert source.schema() == "`id` BIGINT, `name` STRING, `amount` DOUBLE, `note` STRING, `_extra` STRING"
    assert [tuple(row.values()) for row in read(address, space="orders")] == [
        (1, "one", 1.5, None, None),
        (2, "two", 2.0, "second", '["extra",[1]]'),
        (3, "three", -3.0, None, None),
    ]


def test_without_a_space_all_rows_of_users_are_json_and_messagepack(address: str) -> None:
    rows = read(address)
    assert {"orders", "pairs", "loose"} <= {row["_space"] for row in rows}
    assert not [row for row in rows if row["_space"].startswith("_")]
    (loose,) = [row for row in rows if row["_space"] == "loose"]
    assert (loose["_space_id"], loose["_tuple"]) == (514, '[1,{"a":[true,null]}]')
    assert loose["_tuple_msgpack"] == b"\x92\x01\x81\xa1a\x92\xc3\xc0"
    assert len({row["_replicaset_uuid"] for row in rows}) == 1
    assert "_space" in {row["_space"] for row in read(address, showSystem="true")}


@pytest.mark.parametrize("mode", ["snapshot", "select"])
def test_columns_are_chosen_and_others_asked_for(address: str, mode: str) -> None:
    rows = read(address, space="512", columns="_tuple,id,_space,_replicaset_uuid", readMode=mode)
    assert list(rows[1]) == ["_tuple", "id", "_space", "_replicaset_uuid"]
    assert tuple(rows[1].values())[:3] == ('[2,"two",2,"second","extra",[1]]', 2, "orders")
    assert len(rows[1]["_replicaset_uuid"]) == 36


A, B = ("a",), ("b",)


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([EqualTo(A, 2), IsNotNull(A)], lambda a, b: a == 2),
        ([EqualTo(A, 2), EqualTo(B, "b7")], lambda a, b: (a, b) == (2, "b7")),
        ([In(A, (1, 3, 77, None)), GreaterThanOrEqual(B, "b8")], lambda a, b: a in (1, 3) and b >= "b8"),
        ([GreaterThan(A, 2)], lambda a, b: a > 2),
        ([GreaterThanOrEqual(A, 1), LessThan(A, 3)], lambda a, b: 1 <= a < 3),
        ([EqualTo(A, 3), LessThan(B, "b2"), GreaterThan(B, "b0")], lambda a, b: a == 3 and "b0" < b < "b2"),
        ([LessThanOrEqual(A, 0)], lambda a, b: a <= 0),
        ([EqualTo(A, -1)], lambda a, b: False),
        ([EqualTo(B, "b5")], lambda a, b: b == "b5"),
    ],
)
def test_filters_on_the_key_lose_nothing_and_double_nothing(
    address: str, filters: Sequence[Filter], wanted: Any
) -> None:
    rows = [(row["a"], row["b"], row["c"]) for row in read(address, *filters, space="pairs", readMode="select")]
    assert [row for row in rows if wanted(*row[:2])] == [row for row in PAIR_ROWS if wanted(*row[:2])]
    assert len(set(rows)) == len(rows)


def test_filters_spare_the_server_most_of_its_work(address: str) -> None:
    assert len(read(address, EqualTo(A, 2), space="pairs", readMode="select")) == 10
    assert len(read(address, EqualTo(A, 2), space="pairs")) == 40


def test_hashes_of_passwords_are_not_shown_unless_asked_for(address: str) -> None:
    """The hash is that of the empty password, which guests have."""
    for mode in ("snapshot", "select"):
        text = str(read(address, space="_user", readMode=mode))
        assert "hidden" in text
        assert "vhvewKp0tNyweZQ+cFKAlsyphfg=" not in text
        assert "vhvewKp0tNyweZQ+cFKAlsyphfg=" in str(read(address, space="_user", readMode=mode, showSecrets="true"))
    assert "vhvewKp0tNyweZQ+cFKAlsyphfg=" not in str(read(address, showSystem="true"))


def test_several_replica_sets_are_read_together(real_server: str, node_server: str) -> None:
    """And a member that is not there is passed over."""
    rows = read(f"{real_server};127.0.0.1:1,{node_server}", space="orders", columns="id,_replicaset_uuid")
    assert [row["id"] for row in rows] == [1, 2, 3, 1, 2, 3]
    assert len({row["_replicaset_uuid"] for row in rows}) == 2


def test_temporary_spaces_are_read_by_select(address: str) -> None:
    create(address, 600, "passing", [("id", "unsigned")], options={"temporary": True})
    insert(address, 600, [(number,) for number in range(700)])
    assert [row["id"] for row in read(address, space="passing", readMode="select")] == list(range(700))
    with pytest.raises(CannotUse, match="no snapshot has its rows; read it with readMode=select"):
        read(address, space="passing")


def test_a_snapshot_is_of_one_moment(real_server: str) -> None:
    """Numbers move between rows in transactions all the while; their sum never changes."""
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


def test_spark_reads_it(spark: SparkSession, real_server: str) -> None:
    """A snapshot, whose frame serves a query with filters and one without, and a look-up."""
    register(spark)
    source = spark.read.format("tarantool").options(uri=real_server, space="pairs")
    frame = source.load()
    wanted = "a = 2 and b in ('b1', 'b7') and c > 2"
    assert frame.where(wanted).count() == 1
    assert frame.groupBy("a").agg(functions.sum("c")).orderBy("a").collect()[3][:] == (3, 135)
    few = source.option("readMode", "select").load().where(wanted).drop("_extra")
    assert list(map(tuple, few.collect())) == [(2, "b7", 14)]


def test_a_dropped_space_is_told_from_a_changed_one(tmp_path: Path, tarantool: object) -> None:
    with server("real", tmp_path) as address:
        reader = TarantoolSource({"uri": address, "space": "orders"}).reader(StructType())
        run(address, "box.space.orders:format({{'id', 'unsigned'}, {'title', 'string'}})")
        with pytest.raises(Exception, match="format of space 'orders' has changed since this query was planned"):
            list(reader.read(reader.partitions()[0]))
