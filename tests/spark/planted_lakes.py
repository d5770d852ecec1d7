"""Differences planted in a lake by ordinary Delta commits, which do not change the lake's position."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from flowstone.columns.sort_keys import sort_keys
from flowstone.lake.table_schema import NOTE, LakeSchema
from flowstone.spark.lake import Lake
from flowstone.spark.verification.digests import DIFFERS, MISSING_IN_A, MISSING_IN_B, TWICE
from tests.spark.planted import SPACE


@dataclass(frozen=True)
class LakePlant:
    """A change of a lake's directory, and its expected report with the lake as B.

    `wrong` is a part of the report about the row itself; without `kind` its tuple is correct.
    """

    name: str
    do: Callable[[Path], None]
    space: str
    key: str
    kind: str | None = None
    wrong: str | None = None


def _table(lake: Path, name: str = "orders") -> DeltaTable:
    return DeltaTable(str(lake / name))


def _update(predicate: str, table: str = "orders", **values: str) -> Callable[[Path], None]:
    def do(lake: Path) -> None:
        done = _table(lake, table).update(updates=values, predicate=predicate)
        assert done["num_updated_rows"] == 1

    return do


def _delete(lake: Path) -> None:
    _table(lake).delete("id = 66")


def _literal(data: bytes) -> str:
    return f"X'{data.hex()}'"


def _schema(table: DeltaTable) -> LakeSchema:
    (note,) = [each.metadata[NOTE] for each in table.schema().fields if each.name == "_tuple"]
    assert isinstance(note, str)
    return LakeSchema.from_note(note)


def _add(lake: Path, *values: Any) -> None:
    """Add a consistent row of orders."""
    table = _table(lake)
    schema = _schema(table)
    tuples = pa.array([msgpack.packb(values)], pa.binary())
    write_deltalake(table, schema.rows(sort_keys(schema.space, tuples), tuples), mode="append")


def _replace(number: int, *values: Any) -> Callable[[Path], None]:
    """Replace the tuple of a row of orders and its columns, like a mirror with a bug."""

    def do(lake: Path) -> None:
        _table(lake).delete(f"id = {number}")
        _add(lake, number, *values)

    return do


def _other_definition(lake: Path) -> None:
    opened = Lake.open(str(lake), engine="deltalake")
    ((_, progress),) = opened.progress.items()
    rows = []
    for space_id, row in progress.definitions:
        values = msgpack.unpackb(row, strict_map_key=False)
        if space_id == SPACE and values[0] == 602:
            values[2] = "couples"
            row = msgpack.packb(values)
        rows.append((space_id, row))
    opened.save(replace(progress, definitions=tuple(rows)))


def _repeat(lake: Path) -> None:
    table = _table(lake)
    rows = table.to_pyarrow_table(filters=[("id", "=", 65)])
    write_deltalake(table, rows, mode="append")


def more(number: int) -> dict[str, Any]:
    return {"a": [1, 2, {"b": f"deep {number}"}], "z": number}


LAKE_PLANTS = [
    LakePlant("a typed column is edited", _update("id = 60", name="'edited'"), "orders", "[60]",
              wrong="name is 'edited', but its tuple has 'name 60'"),
    LakePlant("a typed column is null", _update("id = 61", total="NULL"), "orders", "[61]",
              wrong="total is null, but its tuple has '183'"),
    LakePlant("_key is edited", _update("id = 62", _key="X'00'"), "orders", "[62]", wrong="_key is x'00'"),
    LakePlant("a byte of _tuple is edited",
              _update("id = 63", _tuple=_literal(msgpack.packb([63, "name 63", 190, more(63)]))), "orders", "[63]",
              DIFFERS, "total is '189', but its tuple has '190'"),
    LakePlant("_tuple is not a tuple", _update("id = 64", _tuple="X'92'"), "orders", "[64]", DIFFERS,
              "_tuple is not a tuple"),
    LakePlant("a row is there twice", _repeat, "orders", "[65]", TWICE),
    LakePlant("a row is deleted", _delete, "orders", "[66]", MISSING_IN_B),
    LakePlant("a row is added", lambda lake: _add(lake, 400, "extra"), "orders", "[400]", MISSING_IN_A),
    LakePlant("a byte deep in a map, columns too", _replace(67, "name 67", 201, {**more(67), "z": 68}), "orders",
              "[67]", DIFFERS),
    LakePlant("a double for an integer, columns too", _replace(68, "name 68", 204.0, more(68)), "orders", "[68]",
              DIFFERS),
    LakePlant("null for an absent field", _replace(69, "name 69", 207, more(69), None), "orders", "[69]", DIFFERS),
    LakePlant("_extra is edited", _update("""_extra = '["k70",70,null]'""", "events", _extra="""'["k70",71,null]'"""),
              "events", '["k70"]', wrong="_extra is"),
    LakePlant("a change of the log was not merged", _replace(201, "stale", 0), "orders", "[201]", DIFFERS),
    LakePlant("a space has another name", _other_definition, "_space", "[602]", DIFFERS),
]  # fmt: skip


def copied(lake: Path, to: Path) -> Path:
    shutil.copytree(lake, to)
    return to
