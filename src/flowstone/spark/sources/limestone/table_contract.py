"""The columns of source `limestone` with option `table`: those of one of Tsurugi's tables, and of its changes.

Pure, but for `table_between`, which reads an index. Fulfils the same calls as `EntryContract`. Storages keep their
columns for life, so a table that has other columns, or was emptied by TRUNCATE, is another storage of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from flowstone.columns.change_contract import spark_ddl
from flowstone.limestone.errors import LimestoneError, NoSuchTable
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import KEY_AT, KEY_END, TYPE, VALUE_AT, VALUE_END
from flowstone.limestone.tsurugi.definitions import SqlTable
from flowstone.limestone.tsurugi.row_columns import RowColumns, RowSpans
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.sources.limestone.entry_columns import of_storages, operation_column
from flowstone.spark.sources.limestone.entry_reader import Rows, points
from flowstone.text.row_table import UnknownColumn

_CHANGE_FIELDS: Final = (
    pa.field("_operation", pa.string(), False),
    pa.field("_commit_version", pa.int64(), False),
)


class TableReplaced(LimestoneError):
    """A table was dropped, emptied or created again between two epochs."""


@dataclass(frozen=True)
class TableContract:
    """The columns of one query. Picklable.

    A change has the whole row; a delete only the columns of the primary key.
    """

    table: SqlTable
    mode: Literal["changes", "state"] = "changes"
    wanted: tuple[str, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TableContract, (self.table, self.mode, self.wanted)

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema. Raises UnknownColumn if a wanted column does not exist."""
        is_change = self.mode == "changes"
        fields = [*(_CHANGE_FIELDS if is_change else ())]
        for each, column in zip(RowColumns(self.table).schema, self.table.columns, strict=True):
            kind = pa.int64() if pa.types.is_time64(each.type) else each.type  # Spark has no time of day
            fields.append(pa.field(each.name, kind, is_change or column.is_nullable))
        found = {each.name: each for each in fields}
        unknown = [name for name in self.wanted or () if name not in found]
        if unknown:
            raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(found)}")
        return pa.schema([found[name] for name in self.wanted or found])

    @property
    def spark_schema(self) -> str:
        """The schema in Spark's DDL."""
        return spark_ddl(self.schema)

    def chosen(self, chunk: EntryChunk, rows: Rows) -> Rows:
        """Return the entries that are about rows of the table."""
        return of_storages(chunk, points(chunk, rows), (self.table.storage_id,))

    @cached_property
    def _columns(self) -> RowColumns:
        return RowColumns(self.table, partial=True)

    def batch(self, chunk: EntryChunk, rows: Rows) -> pa.RecordBatch:
        """Return the given entries as a batch. Raise BadRow if one does not fit the table."""
        starts = [chunk.table[line, rows].astype(np.int64) for line in (KEY_AT, KEY_END, VALUE_AT, VALUE_END)]
        types = chunk.table[TYPE, rows].astype(np.uint8)
        starts[2] = np.where(types == np.uint8(EntryType.REMOVE), -1, starts[2])
        decoded = self._columns.decode_all(RowSpans(chunk.buf, *starts))
        columns = dict(zip(decoded.schema.names, decoded.columns, strict=True))
        if self.mode == "changes":
            columns |= {
                "_operation": operation_column(types),
                "_commit_version": pa.array(chunk.epochs[rows].astype(np.int64)),
            }
        arrays = [_for_spark(columns[name]) for name in self.schema.names]
        schema = self.schema
        if self.mode == "state":  # removes are filtered out later
            schema = pa.schema([each.with_nullable(True) for each in schema])
        struct = pa.Array.from_buffers(pa.struct(schema), len(rows), [None], children=arrays)
        return pa.RecordBatch.from_struct_array(struct)


def _for_spark(column: pa.Array) -> pa.Array:
    return column.view(pa.int64()) if pa.types.is_time64(column.type) else column


@dataclass(frozen=True)
class TableEpochs:
    """The table of a range of epochs, and the epoch after which its changes begin."""

    table: SqlTable
    start: int


def table_between(index: LimestoneIndex, name: str, start: int, end: int) -> TableEpochs:
    """Return a table as it is at epoch `end`, and where its changes after `start` begin.

    Raise TableReplaced if another table had this name after `start`, and NoSuchTable if none has it at `end`.
    """
    table = table_at(index, name, end)
    begin = at = start
    while (defining := index.definition_epoch(at)) is not None and defining <= end:
        before = table_at(index, name, max(defining - 1, start))
        if before is not None and (table is None or before.shape != table.shape):
            raise replaced(index, name, defining)
        if before is None:
            begin = max(defining - 1, start)
        at = defining
    if table is None:
        raise NoSuchTable(f"{index.directory}: no table {name!r} at epoch {end}", hint="use a later epoch")
    return TableEpochs(table, begin)


def table_at(index: LimestoneIndex, name: str, epoch: int) -> SqlTable | None:
    """Return a table at an epoch, or None."""
    try:
        return index.sql_schema(epoch).table(name)
    except NoSuchTable:
        return None


def replaced(index: LimestoneIndex, name: str, epoch: int) -> TableReplaced:
    """Return the error for a table that is another one from an epoch on."""
    return TableReplaced(
        f"{index.directory}: table {name!r} was dropped, emptied or created again at epoch {epoch}",
        hint=f"read it as mode=state, or start after epoch {epoch - 1}",
    )
