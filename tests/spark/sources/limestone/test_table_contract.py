"""Source `limestone` with option `table`: typed states, changes and streams of Tsurugi's tables."""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import flowstone.spark
from flowstone.limestone.errors import BadRow, NoSuchTable
from flowstone.spark.sources.limestone.source import LimestoneReader, LimestoneSource
from flowstone.spark.sources.limestone.stream import LimestoneStreamReader
from flowstone.spark.sources.limestone.table_contract import TableContract, TableReplaced
from flowstone.spark.sources.options import WrongOption, limestone_options
from flowstone.text.row_table import UnknownColumn
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec
from tests.limestone.tsurugi.generator import UUID, GeneratedDatabase
from tests.limestone.tsurugi.recorded import ROW_ID, in_order, log_of, selected
from tests.limestone.tsurugi.test_row_columns import every_type, stored
from tests.limestone.tsurugi.test_table_reader import in_arrow

TABLE = TableSpec(
    "t",
    (
        ColumnSpec("id", "int4", nullable=False),
        ColumnSpec("price", "decimal", precision=5, scale=1),
        ColumnSpec("at", "time"),
    ),
    ("id",),
)


@pytest.fixture
def database(tmp_path: Path) -> GeneratedDatabase:
    """Return a table that exists from epoch 2 to 4, and another of its name from epoch 6 on."""
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(TableSpec("other", TABLE.columns, TABLE.keys), 9)
    database.commit()
    database.create(TABLE, 2)
    database.upsert("t", [{"id": 1, "price": "1.5", "at": 7}])
    database.commit()
    database.upsert("t", [{"id": 2, "price": None, "at": None}])
    database.delete("t", [{"id": 1}])
    database.commit()
    database.reserve("t")
    database.commit()
    database.remove("t")
    database.commit()
    database.create(TableSpec("t", TABLE.columns[:2], ("id",)), 2)
    database.upsert("t", [{"id": 5, "price": "5"}])
    database.commit()
    return database


def read(path: str, **options: str) -> list[dict[str, Any]]:
    """Read as Spark does, without Spark."""
    reader = LimestoneReader(limestone_options({"path": path, "table": "t", **options}))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_state_is_typed_as_of_an_epoch(database: GeneratedDatabase) -> None:
    assert read(database.path, mode="state") == [{"id": 5, "price": Decimal("5.0")}]
    assert read(database.path, mode="state", asOf="2") == [{"id": 1, "price": Decimal("1.5"), "at": 7}]
    assert read(database.path, mode="state", asOf="3", columns="id") == [{"id": 2}]
    for epoch in ("1", "4", "5"):
        with pytest.raises(NoSuchTable, match="no table 't'"):
            read(database.path, mode="state", asOf=epoch)


def test_changes_have_rows_and_keys_of_deletes(database: GeneratedDatabase) -> None:
    changes = sorted(read(database.path, endingOffsets="3", startingOffsets="1"), key=str)
    replace, delete = {"_operation": "replace"}, {"_operation": "delete"}
    assert changes == [
        delete | {"_commit_version": 3, "id": 1, "price": None, "at": None},
        replace | {"_commit_version": 2, "id": 1, "price": Decimal("1.5"), "at": 7},
        replace | {"_commit_version": 3, "id": 2, "price": None, "at": None},
    ]
    assert read(database.path, startingOffsets="5") == [
        replace | {"_commit_version": 6, "id": 5, "price": Decimal("5.0")}
    ]


def test_changes_across_a_table_of_the_same_name_are_rejected(database: GeneratedDatabase) -> None:
    for end in ("4", "6"):
        with pytest.raises(TableReplaced, match=r"table 't' was dropped, emptied or created") as caught:
            read(database.path, startingOffsets="2", endingOffsets=end)
    assert caught.value.hint == "read it as mode=state, or start after epoch 3"


def test_stream_waits_for_its_table_and_ends_with_it(database: GeneratedDatabase) -> None:
    stream = LimestoneStreamReader(limestone_options({"path": database.path, "table": "t"}, streaming=True))

    def between(start: int, end: int) -> list[dict[str, Any]]:
        parts = stream.partitions({UUID: start}, {UUID: end})
        return [row for part in parts for batch in stream.read(part) for row in batch.to_pylist()]

    assert between(4, 5) == []
    assert [row["id"] for row in between(5, 6)] == [5]
    with pytest.raises(TableReplaced, match="at epoch 4"):
        between(1, 2)
    database.upsert("t", [{"id": 6, "price": "6"}])
    database.commit()
    database.reserve("t")
    database.commit()
    assert [row["id"] for row in between(5, 7)] == [5, 6], "the last rows before it was dropped"
    with pytest.raises(TableReplaced, match="at epoch 8"):
        between(7, 8)


def test_row_that_does_not_fit_is_an_error(database: GeneratedDatabase) -> None:
    database.damage("t", b"\x80\0\0\x09", b"\0")
    database.commit()
    with pytest.raises(BadRow, match="table 't', row with key x'80000009'"):
        read(database.path, mode="state")


def test_options_that_make_no_sense_are_rejected(database: GeneratedDatabase) -> None:
    with pytest.raises(WrongOption, match="storage"):
        read(database.path, storage="1")
    with pytest.raises(UnknownColumn, match="no column 'x'"):
        read(database.path, mode="state", columns="x")


def test_schema_is_that_of_the_epoch(database: GeneratedDatabase) -> None:
    def schema(**options: str) -> str:
        return LimestoneSource({"path": database.path, "table": "t", **options}).schema()

    assert schema(mode="state") == "`id` INT NOT NULL, `price` DECIMAL(5, 1)"
    assert schema(mode="state", asOf="3").endswith("`at` BIGINT")
    assert schema().startswith("`_operation` STRING NOT NULL, `_commit_version` BIGINT NOT NULL, `id` INT,")


def test_contract_is_copied_with_its_columns(database: GeneratedDatabase) -> None:
    (part, *_) = LimestoneReader(limestone_options({"path": database.path, "table": "t", "mode": "state"})).partitions()
    copied: Any = pickle.loads(pickle.dumps(part))
    assert isinstance(copied.share.contract, TableContract)
    assert copied.share.contract.schema.names == ["id", "price"]


@pytest.mark.parametrize("table", ["t_ck", "t_nopk", "t_small", "t_all"])
def test_recorded_rows_are_exactly_those_selected(table: str) -> None:
    options = limestone_options({"path": str(log_of("reopened-compacted")), "table": table, "mode": "state"})
    reader = LimestoneReader(options)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    names = [name for name in batches[0].schema.names if not name.startswith(ROW_ID)]
    rows = [
        dict(zip(names, row, strict=True))
        for batch in batches
        for row in zip(*(stored(batch.column(name)) for name in names), strict=True)
    ]
    wanted = [
        {column: in_arrow(value) for column, value in row.items()} for row in selected("reopened-compacted")[table]
    ]
    assert in_order(rows) == in_order(wanted)


def test_spark_reads_and_streams_a_table_with_every_type(spark: SparkSession, tmp_path: Path) -> None:
    flowstone.spark.register(spark)
    spec, row = every_type()
    database = GeneratedDatabase(str(tmp_path / "all"))
    database.create(spec, 2)
    database.upsert("t", [row])
    database.commit()
    options = {"table": "t", "mode": "state"}
    state = spark.read.format("limestone").options(**options).load(database.path)
    types = dict(state.dtypes)
    assert (types["int1"], types["float4"], types["date"]) == ("tinyint", "float", "date")
    assert (types["timestamp"], types["timestamptz"], types["time"]) == ("timestamp_ntz", "timestamp", "bigint")
    (found,) = state.collect()
    assert (found.decimal, found.character, str(found.date)) == (Decimal("1.25"), "héllo", "2024-02-29")
    assert found.timestamp.isoformat() == "2024-02-29T12:34:56.123456"
    stream = spark.readStream.format("limestone").options(table="t").load(database.path)
    query = stream.writeStream.format("memory").queryName("typed_changes").trigger(availableNow=True).start()
    query.awaitTermination()
    assert [(each._operation, each.id, each.int2) for each in spark.table("typed_changes").collect()] == [
        ("replace", 1, 300)
    ]
