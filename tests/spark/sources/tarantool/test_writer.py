"""Writer `tarantool`: checks before the first row, batches and streams, and harmless replays."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from flowstone.errors import FlowstoneError
from flowstone.spark import register
from flowstone.spark.sources.tarantool.source import TarantoolSource
from flowstone.spark.sources.tarantool.writer import Written
from tests.spark.live_servers import create, insert, rows_of

FIELDS = [("id", "unsigned"), ("name", "string"), ("note", "string", True)]
SCHEMA = StructType([StructField("id", LongType()), StructField("name", StringType())])
_ids = iter(range(900, 999))


@pytest.fixture
def space_id(address: str) -> int:
    return _new_space(address)


def _new_space(address: str) -> int:
    number = next(_ids)
    create(address, number, f"w{number}", FIELDS)
    return number


def write(address: str, space_id: int, table: pa.Table, *, stream: bool = False, **options: str) -> Written:
    """Write as Spark does: the writer is created on the driver and pickled on its way to a task."""
    source = TarantoolSource({"uri": address, "space": str(space_id), **options})
    make = source.streamWriter if stream else source.writer
    writer = pickle.loads(pickle.dumps(make(from_arrow_schema(table.schema), False)))
    done = writer.write(iter(table.to_batches(max_chunksize=2)))
    assert isinstance(pickle.loads(pickle.dumps(done)), Written)
    writer.commit([done], 0) if stream else writer.commit([done])
    return done


@pytest.mark.parametrize("stream", [False, True])
def test_rows_can_be_written_again(address: str, space_id: int, stream: bool) -> None:
    table = pa.table({"name": ["a", "b", "c"], "id": [1, 2, 3]})
    for how in ("insert", "insert", "replace", "skip"):
        done = write(address, space_id, table, stream=stream, onConflict=how)
        assert (done.row_count, done.skipped_count) == ((0, 3) if how == "skip" else (3, 0))
        assert rows_of(address, space_id) == [(1, "a", None), (2, "b", None), (3, "c", None)]


def test_empty_partition_writes_nothing(address: str, space_id: int) -> None:
    assert write(
        address, space_id, pa.table({"id": pa.array([], pa.int64()), "name": pa.array([], pa.string())})
    ) == Written(0, 0)


def test_large_strings_of_arrow_are_accepted(address: str, space_id: int) -> None:
    source = TarantoolSource({"uri": address, "space": str(space_id)})
    writer = source.writer(SCHEMA, False)
    large = pa.table({"id": [1], "name": pa.array(["a"], pa.large_string())})
    assert writer.write(iter(large.to_batches())).row_count == 1
    assert rows_of(address, space_id) == [(1, "a", None)]


def test_raw_tuples_can_be_read_and_written_back(address: str, space_id: int) -> None:
    """Raw tuples keep every type and every field."""
    source = TarantoolSource({"uri": address, "space": "orders", "columns": "_tuple_msgpack"})
    reader = source.reader(StructType())
    tuples = pa.Table.from_batches([batch for part in reader.partitions() for batch in reader.read(part)])
    number = next(_ids)
    create(address, number, f"w{number}", [])
    write(address, number, tuples)
    assert rows_of(address, number) == rows_of(address, 512)


@pytest.mark.parametrize(
    ("options", "schema", "message"),
    [
        ({"space": "nope"}, SCHEMA, "no space 'nope' at 127.0.0.1:"),
        ({"space": "_space"}, SCHEMA, "'_space' is a system space or a view; specify a user space"),
        (
            {"space": "orders", "onConflict": "upsert"},
            SCHEMA,
            "onConflict is 'upsert'; use replace, insert or skip",
        ),
        ({"space": "orders", "mode": "x"}, SCHEMA, "has no option 'mode'"),
        ({"space": "orders"}, SCHEMA, "column 'amount' is missing: the field of space 'orders' is not nullable"),
        (
            {"space": "orders"},
            StructType([StructField("id", StringType())]),
            "column 'id' of type STRING cannot be written",
        ),
        ({}, SCHEMA, "option space is missing; specify the space to write to"),
    ],
)
def test_mistakes_are_found_before_any_row_is_written(
    address: str, options: dict[str, str], schema: StructType, message: str
) -> None:
    before = rows_of(address, 512)
    with pytest.raises(FlowstoneError) as caught:
        TarantoolSource({"uri": address, **options}).writer(schema, False)
    assert message in str(caught.value)
    assert rows_of(address, 512) == before


def test_spaces_that_cannot_be_written_to_are_refused(real_server: str) -> None:
    number = next(_ids)
    insert(real_server, 280, [(number, 1, f"w{number}", "memtx", 0, {}, [{"name": "id", "type": "unsigned"}])])
    with pytest.raises(FlowstoneError, match=r"has no primary key and cannot be written to; box\.space\.w"):
        TarantoolSource({"uri": real_server, "space": str(number)}).writer(SCHEMA, False)


def test_overwrite_mode_is_refused_with_a_hint(address: str) -> None:
    source = TarantoolSource({"uri": address, "space": "orders"})
    for make in (source.writer, source.streamWriter):
        with pytest.raises(
            FlowstoneError, match=r"mode overwrite and output mode complete are not supported.*truncate"
        ):
            make(SCHEMA, True)


def test_spark_writes_batches_and_streams(
    spark: SparkSession, real_server: str, node_server: str, tmp_path: Path
) -> None:
    """The stream is run again from its beginning, when its rows already exist."""
    register(spark)
    rows: Any = spark.range(1000).selectExpr("id", "concat('n', id) as name").repartition(3)
    batch_space, stream_space = _new_space(real_server), _new_space(node_server)
    rows.write.format("tarantool").options(uri=real_server, space=f"w{batch_space}").mode("append").save()
    assert len(rows_of(real_server, batch_space)) == 1000
    rows.coalesce(1).write.parquet(str(tmp_path / "files"))
    for checkpoint in ("first", "again"):
        source: DataFrame = spark.readStream.schema("id bigint, name string").parquet(str(tmp_path / "files"))
        query = source.writeStream.format("tarantool").options(
            uri=node_server, space=f"w{stream_space}", onConflict="insert"
        )
        query.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(
            availableNow=True
        ).start().awaitTermination()
        assert rows_of(node_server, stream_space) == [(number, f"n{number}", None) for number in range(1000)]
