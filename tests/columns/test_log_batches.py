"""Pieces as batches of one schema: merged definitions, names of spaces, and columns as text."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flowstone.columns import column_limits
from flowstone.columns.arrow_columns import ColumnError, ColumnOptions
from flowstone.columns.log_batches import ColumnConflict, GenericShape, TypedShape, json_of_messagepack, text_batch
from flowstone.history.log_reading import Piece, Reading
from flowstone.history.selection import Selection
from flowstone.iproto.constants import RequestType
from flowstone.outside import production
from flowstone.text.json_plain import JsonError
from flowstone.text.row_table import UnknownColumn
from tests.history.logs import Log


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"), ("price", "decimal"), ("raw", "varbinary"))
    log.insert(512, 1, Decimal("1.50"), b"\x00\xff")
    return log


def alter(log: Log, *fields: tuple[str, str]) -> None:
    layout = [{"name": name, "type": kind} for name, kind in fields]
    log.write((RequestType.REPLACE, {0x10: 280, 0x21: (512, 1, "t", "memtx", 0, {}, layout)}))


def pieces(log: Log) -> list[Piece]:
    return list(Reading(production(), [log.path], selection=Selection(spaces=(512,))).pieces())


def typed(log: Log, shape: TypedShape) -> pa.Table:
    found = pieces(log)
    schema = shape.schema(found)
    return pa.Table.from_batches(shape.batches(found, schema), schema)


def test_columns_of_all_definitions_are_merged(log: Log) -> None:
    alter(log, ("id", "unsigned"), ("note", "string"))
    log.insert(512, 2, "x")
    table = typed(log, TypedShape(wanted=("id", "price", "note")))
    assert table.to_pylist() == [{"id": 1, "price": "1.50", "note": None}, {"id": 2, "price": None, "note": "x"}]
    assert typed(log, TypedShape()).column_names[-6:-1] == ["note", "_extra", "_key", "_operations", "_index_id"]


def test_conflicting_types_of_a_column_raise_an_error(log: Log) -> None:
    alter(log, ("id", "string"))
    log.insert(512, "x")
    with pytest.raises(ColumnConflict, match="column 'id' is int64 in one definition"):
        TypedShape().schema(pieces(log))


def test_typed_shape_passes_its_options_to_the_decoder(log: Log) -> None:
    table = typed(log, TypedShape(ColumnOptions(decimal_scale=2)))
    assert table.column("price").to_pylist() == [Decimal("1.50")]


def test_unknown_columns_are_rejected(log: Log) -> None:
    with pytest.raises(UnknownColumn, match="no column 'nope'; known columns: _replica_id, "):
        TypedShape(wanted=("nope",)).schema(pieces(log))


def test_no_rows_yield_an_empty_table(log: Log) -> None:
    assert TypedShape().schema([]).names[:2] == ["_replica_id", "_lsn"]


def test_generic_rows_have_the_name_of_their_space(log: Log) -> None:
    log.insert(999, 1)
    reading = Reading(production(), [log.path])
    batches = list(GenericShape(wanted=("lsn", "space_id", "space")).batches(reading.pieces()))
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches).to_pylist()
    assert rows == [{"lsn": 3, "space_id": 512, "space": "t"}, {"lsn": 4, "space_id": 999, "space": None}]


def test_text_batch_has_json_for_messagepack_and_base64_for_bytes(log: Log) -> None:
    log.write((RequestType.UPDATE, {0x10: 512, 0x20: (1,), 0x21: (("=", 0, 2),)}))
    shape = TypedShape(wanted=("_type", "raw", "_key", "_operations"))
    found = pieces(log)
    schema = shape.schema(found)
    rows = [row for batch in shape.batches(found, schema) for row in text_batch(batch).to_pylist()]
    assert rows == [
        {"_type": "INSERT", "raw": "AP8=", "_key": None, "_operations": None},
        {"_type": "UPDATE", "raw": None, "_key": "[1]", "_operations": '[["=",0,2]]'},
    ]


def test_strings_beyond_the_column_capacity_are_rejected(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    (batch, *_) = GenericShape().batches(pieces(log))
    monkeypatch.setattr(column_limits, "OFFSET_MAX", 10)
    with pytest.raises(ColumnError, match="more than 2 GiB"):
        text_batch(batch)


@pytest.mark.parametrize("values", [[b""], [b"\x01", b""], [b"", b"\x01"], [b"\xc0", b"\x92\x01"], [b"\xc1", None]])
def test_bytes_that_are_not_one_value_have_no_json_text(values: list[bytes | None]) -> None:
    with pytest.raises(JsonError):
        json_of_messagepack(pa.array(values, pa.binary()))
