"""The list of a lake's tables, `_tables`: which space and replica set, live, dropped or renamed, and since when.

A small Delta table for readers. It follows from the tables, except for the times and positions at which states began.
A changed list is written again as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import CommitProperties

from flowstone.columns.arrow_columns import MOMENT
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_schema import LakeSchema
from flowstone.replication.vclock import VClock

if TYPE_CHECKING:
    from flowstone.lake.embedded_table import EmbeddedTable

TABLES: Final = "_tables"
"""Directory of the list in a lake."""

LIST_SCHEMA: Final = pa.schema(
    [
        pa.field("name", pa.string()),
        pa.field("space_id", pa.int64()),
        pa.field("replicaset_uuid", pa.string()),
        pa.field("state", pa.string()),
        pa.field("renamed_to", pa.string()),
        pa.field("since", MOMENT),
        pa.field("position", pa.string()),
        pa.field("directory", pa.string()),
        pa.field("changes", pa.string()),
    ]
)
"""`since` is when the table came into its state, and `position` its position then."""

_STATE: Final = ("name", "space_id", "replicaset_uuid", "state", "renamed_to", "directory", "changes")
_VACUUM_EVERY: Final = 100
"""Versions of the list between two vacuums."""

Row = dict[str, Any]


class TableList:
    """The list in the lake at `lake`. One writer at a time."""

    def __init__(self, lake: str, storage_options: Mapping[str, str]) -> None:
        self.path = f"{lake}/{TABLES}"
        self._storage_options = dict(storage_options) or None
        self._rows: list[Row] | None = None

    @property
    def rows(self) -> list[Row]:
        """The rows as of the last update."""
        if self._rows is None:
            try:
                table = DeltaTable(self.path, storage_options=self._storage_options)
            except TableNotFoundError:
                return []
            self._rows = table.to_pyarrow_table().to_pylist()
        return self._rows

    def update(self, tables: Iterable[EmbeddedTable], time: datetime, changes: str | None) -> None:
        """Write the list if the state of a table has changed. `tables` are all tables of the lake.

        Changed rows get this time, and the position of their table. `changes` is the directory of the change tables, if
        the mirror keeps them.
        """
        known = {tuple(row[name] for name in _STATE): row for row in self.rows}
        found: list[Row] = []
        for table in tables:
            directory = table.path.rpartition("/")[2]
            positions = table.positions
            for uuid in table.schema.sets:
                row = _row_of(table.schema, uuid, directory, changes)
                position = {str(number): lsn for number, lsn in positions.get(uuid, VClock())}
                changed = {**row, "since": time, "position": json.dumps(position)}
                found.append(known.get(tuple(row[name] for name in _STATE), changed))
        found.sort(key=lambda row: (row["name"], row["replicaset_uuid"]))
        if found != self.rows:
            self._write(found)

    def _write(self, rows: list[Row]) -> None:
        try:
            write_deltalake(
                self.path,
                pa.Table.from_pylist(rows, schema=LIST_SCHEMA),
                mode="overwrite",
                storage_options=self._storage_options,
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError as error:
            raise AnotherWriter(
                f"{self.path} was changed by another writer: {error}", hint="run only one mirror per lake"
            ) from None
        self._rows = rows
        table = DeltaTable(self.path, storage_options=self._storage_options)
        if table.version() % _VACUUM_EVERY == _VACUUM_EVERY - 1:
            table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)


def _row_of(schema: LakeSchema, uuid: str, directory: str, changes: str | None) -> Row:
    is_gone = uuid in schema.dropped or schema.renamed_to is not None
    state = "live" if not is_gone else "dropped" if schema.renamed_to is None else "renamed"
    return {
        "name": schema.space.name,
        "space_id": schema.space.id,
        "replicaset_uuid": uuid,
        "state": state,
        "renamed_to": schema.renamed_to,
        "directory": directory,
        "changes": None if changes is None else f"{changes}/{directory}",
    }
