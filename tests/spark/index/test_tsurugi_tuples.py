"""Tsurugi's rows as tuples, and as the columns of a lake: recorded, generated, not decodable."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import unpack
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.table_schema import LakeSchema
from flowstone.limestone.tsurugi.row_reader import Date, LobId, Time, Timestamp
from flowstone.outside import production
from flowstone.spark.fold.limestone_fold import EntrySelection
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_spaces import space_id_of
from flowstone.spark.index.limestone_tables import LimestoneTables, tables_at
from flowstone.spark.sources.limestone.entry_columns import newest
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec, value_of
from tests.limestone.tsurugi.generator import GeneratedDatabase
from tests.limestone.tsurugi.recorded import DATABASES, ROW_ID, in_order, log_of, selected
from tests.limestone.tsurugi.test_row_columns import every_type


def state(log: str) -> tuple[LimestoneTables, pa.Table]:
    """Return the tables of a log at its durable epoch, and the rows of all of them, as a mirror folds them."""
    index = LimestoneIndex.open(production().disk, log)
    tables = tables_at(index, index.durable)
    clears = index.clears(index.durable)
    storages = tuple(each.storage_id for each in tables.tables)
    reading = EntrySelection(-1, index.durable, clears, storages, tables.typed)
    batches = [batch for part in index.state_slices(index.durable) for batch in reading.rows(production().disk, part)]
    found = newest(pa.Table.from_batches(batches).combine_chunks(), ("space_id", "sort_key"))
    return tables, found.filter(found["tuple"].is_valid())


def in_tuple(value: Any) -> Any:
    """Return a recorded value as tuples have it."""
    match value:
        case ("float", str(text)):
            return "nan" if text == "nan" else float.fromhex(text)
        case Date(number) | Time(number) | LobId(number):
            return number
        case Timestamp(seconds, nanoseconds):
            return Datetime(seconds, nanoseconds)
    return value


@pytest.mark.parametrize("database", DATABASES)
def test_recorded_rows_are_tuples_with_exactly_the_selected_values(database: str) -> None:
    tables, found = state(str(log_of(database)))
    wanted = selected(database)
    assert {each.name for each in tables.tables} == wanted.keys()
    for table in tables.tables:
        space_id = space_id_of(table.storage_id)
        rows = [unpack(row["tuple"]) for row in found.to_pylist() if row["space_id"] == space_id]
        ours = [
            {
                name: "nan" if isinstance(value, float) and value != value else value
                for name, value in zip(table.column_names, row, strict=True)
                if not name.startswith(ROW_ID)
            }
            for row in rows
        ]
        theirs = [{name: in_tuple(value) for name, value in row.items()} for row in wanted[table.name]]
        assert in_order(ours) == in_order(theirs), table.name


def lake_columns(log: str, name: str, misfits: MisfitRows | None = None) -> dict[str, list[Any]]:
    tables, found = state(log)
    table = next(each for each in tables.tables if each.name == name)
    space = tables.tracker.schema.space(space_id_of(table.storage_id))
    rows = found.filter(pa.array([each == space.id for each in found["space_id"].to_pylist()]))
    filled = LakeSchema(space).rows(rows["sort_key"], rows["tuple"], misfits=misfits, origins={})
    result: dict[str, list[Any]] = filled.select([each.name for each in table.columns]).to_pydict()
    return result


def test_lake_has_a_typed_column_for_every_type(tmp_path: Path) -> None:
    spec, row = every_type()
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(spec, 2)
    database.upsert("t", [row])
    database.commit()
    columns = {name: values[0] for name, values in lake_columns(database.path, "t").items()}
    assert columns["decimal"] == Decimal("1.25")
    assert str(columns["date"]) == "2024-02-29"
    assert columns["time"] == 45296123456789
    assert columns["timestamp"] == datetime(2024, 2, 29, 12, 34, 56, 123456, UTC)
    assert (columns["boolean"], columns["octet"], columns["character"]) == (True, b"\x00\xff", "héllo")
    assert (columns["float4"], columns["int1"], columns["blob"]) == (1.5, -1, 7)


WIDE = TableSpec(
    "w",
    (
        ColumnSpec("id", "int4", nullable=False),
        ColumnSpec("a", "int4"),
        ColumnSpec("text", "character"),
        ColumnSpec("b", "date"),
    ),
    ("id",),
)


def test_values_that_do_not_fit_are_misfits_and_rows_stay(tmp_path: Path) -> None:
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(WIDE, 2)
    good = {"id": 1, "a": 2, "text": "x", "b": 3}
    database.upsert("w", [good])
    whole = value_of(WIDE, good)
    database.damage("w", bytes((128, 0, 0, 2)), whole[:5] + b"\x00" + whole[6:])  # no mark before `text`
    database.damage("w", bytes((128, 0, 0, 3)), whole + b"rest")
    database.damage("w", bytes((128, 0, 4)), whole)
    not_text = value_of(WIDE, good | {"text": b"\xe3\x81"})
    database.damage("w", bytes((128, 0, 0, 5)), not_text)
    far = value_of(WIDE, good | {"b": 10**12})
    database.damage("w", bytes((128, 0, 0, 6)), far)
    database.commit()
    misfits = MisfitRows()
    columns = lake_columns(database.path, "w", misfits)
    by_id = {key: number for number, key in enumerate(columns["id"])}
    assert columns["a"] == [2] * 6
    assert [columns["text"][by_id[key]] for key in (1, 2, 3, 5, 6)] == ["x", None, "x", None, "x"]
    assert columns["b"][by_id[6]] is None
    assert None in by_id, "a key that cannot be decoded is null"
    found = sorted(
        (row["field"], row["reason"]) for each in misfits.new for row in each.select(["field", "reason"]).to_pylist()
    )
    assert found == [("b", "out_of_range"), ("id", "wrong_type"), ("text", "not_utf8"), ("text", "wrong_type")]


ODD_KEY = TableSpec(
    "t",
    (
        ColumnSpec("v", "int4"),
        ColumnSpec("a", "character", nullable=False, descending=True),
        ColumnSpec("f", "float8", nullable=False),
        ColumnSpec("p", "timestamp", nullable=False),
        ColumnSpec("d", "decimal", nullable=False, precision=5, scale=1),
    ),
    ("f", "a", "p", "d"),
)


def test_removal_has_the_key_of_the_row_that_it_removes(tmp_path: Path) -> None:
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(ODD_KEY, 2)
    row = {"v": 1, "a": "x", "f": float("nan"), "p": (-5, 7), "d": "1.5"}
    database.upsert("t", [row, row | {"a": "y"}, row | {"f": -0.0}, row | {"d": "-2"}])
    database.commit()
    database.delete("t", [row, row | {"f": 0.0}])
    database.commit()
    _, found = state(database.path)
    rows = [unpack(each) for each in found["tuple"].to_pylist()]
    assert sorted((row[1], row[3], row[4]) for row in rows) == [
        ("x", Datetime(-5, 7), Decimal(-2)),
        ("y", Datetime(-5, 7), Decimal("1.5")),
    ]
