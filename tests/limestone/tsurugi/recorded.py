"""Recorded databases of Tsurugi (tests/vectors/tsurugi), and their rows as its SELECT returned them."""

from __future__ import annotations

import json
import struct
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Final

from flowstone.limestone.tsurugi.definitions import SqlTable
from flowstone.limestone.tsurugi.row_reader import Date, LobId, Time, Timestamp
from tests.places import VECTORS

HERE: Final = VECTORS / "tsurugi"
DATABASES: Final = ("basic", "index-name-keys", "reopened-compacted")
ROW_ID: Final = "__generated_rowid_"


def log_of(database: str) -> Path:
    return HERE / database / "log"


@cache
def fields() -> list[dict[str, Any]]:
    """Return single encoded fields, each with its type and its value."""
    found: list[dict[str, Any]] = json.loads((HERE / "fields.json").read_text())
    return found


def selected(database: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table in the form of `shown`."""
    tables = json.loads((HERE / database / "rows.json").read_text())
    return {
        name: [{column: plain(value) for column, value in row.items()} for row in rows] for name, rows in tables.items()
    }


def plain(value: Any) -> Any:
    """Return a recorded value in a form in which equal values are equal, NaN included."""
    if not isinstance(value, dict):
        return value
    match next(iter(value)):
        case "decimal":
            return Decimal(value["decimal"])
        case "float4":
            return "float", struct.unpack(">f", bytes.fromhex(value["bits"].zfill(8)))[0].hex()
        case "float8":
            return "float", struct.unpack(">d", bytes.fromhex(value["bits"].zfill(16)))[0].hex()
        case "hex":
            return bytes.fromhex(value["hex"])
        case "date":
            return Date(value["days"])
        case "time":
            return Time(value["nanos"])
        case "timestamp":
            return Timestamp(value["seconds"], value["nanos"])
        case "blob_id" | "clob_id" as kind:
            return LobId(value[kind])
    raise AssertionError(value)


def shown(table: SqlTable, row: tuple[Any, ...]) -> dict[str, Any]:
    """Return a decoded row as SELECT shows it: without the generated row id."""
    found = zip(table.columns, row, strict=True)
    return {
        column.name: ("float", value.hex()) if isinstance(value, float) else value
        for column, value in found
        if not column.name.startswith(ROW_ID)
    }


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=repr)
