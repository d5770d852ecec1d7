"""Change tables for the tests of mirrors: replayed, they must give the tables that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from flowstone.lake.change_table import CHANGES
from flowstone.lake.table import application
from flowstone.spark.lake import Lake, directory_of
from tests.spark.history_model import Effect

Row = dict[str, Any]


def changes_in(lake: Path, name: str, *, uuid: str | None = None) -> list[Row]:
    """Return the rows of a change table, of one replica set, in order."""
    rows: list[Row] = DeltaTable(str(lake / CHANGES / directory_of(name))).to_pyarrow_table().to_pylist()
    own = [row for row in rows if uuid in (None, row["_replicaset_uuid"])]
    return sorted(own, key=lambda row: (row["_commit_version"], row["_lsn"] or 0))


def tuple_in(image: Row | None) -> bytes | None:
    """Return the tuple of a row before or after a change."""
    return None if image is None else image["_tuple"]


def effects_in(changes: Iterable[Row]) -> list[Effect]:
    """Return the changes of a change table as the model has them, in order."""
    return [
        Effect(
            row["_operation"] or row["_change_type"],
            (row["_replica_id"], row["_lsn"]),
            row["_commit_version"],
            tuple_in(row["before"]),
            tuple_in(row["after"]),
        )
        for row in changes
        if row["_lsn"] is not None
    ]


def check_changes(lake: Path, *, several_sets: bool = False) -> None:
    """Check that the changes of each table and replica set, replayed, give its rows, and that each row before a change
    is the row after the last one."""
    for name, table in Lake.open(str(lake), several_sets=several_sets).tables().items():
        for uuid in set(table.schema.sets) - set(table.schema.dropped):
            found = _replayed(table.path, changes_in(lake, name, uuid=uuid), uuid, table.schema.prefix(uuid))
            assert found == _rows_at(table.path, table.schema.prefix(uuid)), name


def _replayed(path: str, changes: list[Row], uuid: str, prefix: bytes) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for row in changes:
        kind, key = row["_change_type"], row["_key"]
        before, after = tuple_in(row["before"]), tuple_in(row["after"])
        if kind == "reset":
            state = _rows_at(path, prefix, _version_at(path, uuid, row["_commit_version"]))
        elif key is None:
            assert kind in ("truncate", "drop", "rename"), row
            state = {}
        else:
            assert before == state.pop(key, None), row
            assert kind == ("delete" if after is None else "insert" if before is None else "update"), row
            if after is not None:
                state[key] = after
    return state


def _version_at(path: str, uuid: str, signature: int) -> int:
    """Return the last version of a table at or before a position."""
    newest = DeltaTable(path).version()
    positions = {
        number: DeltaTable(path, version=number).transaction_version(application(uuid)) for number in range(newest + 1)
    }
    return max(number for number, position in positions.items() if position is not None and position <= signature)


def _rows_at(path: str, prefix: bytes, version: int | None = None) -> dict[bytes, bytes]:
    rows = DeltaTable(path, version=version).to_pyarrow_table().to_pylist()
    return {row["_key"]: row["_tuple"] for row in rows if row["_key"].startswith(prefix) and _is_current(row)}


def _is_current(row: Row) -> bool:
    return bool(row.get("_is_current", True))
