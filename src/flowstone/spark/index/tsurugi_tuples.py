"""Tsurugi's tables as spaces and their rows as tuples, so that lakes, mirrors and comparisons show columns and types.

Pure. A table is a space of its own name; its columns are the fields, and the primary key is the same. A row that does
not fit its table becomes a tuple, too: in place of the first field that cannot be decoded, it has the bytes that are
left, which fit no column, so a mirror puts them into its quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.definitions import SpaceDefinition
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import pack
from flowstone.iproto.scan import Bytes, Cells
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import KEY_AT, KEY_END, TYPE, VALUE_AT, VALUE_END
from flowstone.limestone.tsurugi.definitions import SqlTable, SqlType, TypeName
from flowstone.limestone.tsurugi.row_columns import EXACT_POINT, RowColumns, RowSpans
from flowstone.limestone.tsurugi.row_reader import Date, LobId, Time, Timestamp, Undecoded, Value, salvage_row
from flowstone.spark.index.limestone_kernels import HEAD_ROOM, join_fields
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.sources.limestone.entry_reader import Rows
from flowstone.spark.sources.tarantool.tuple_encoder import encoding_of

_FIELD_TYPES: Final = {
    TypeName.BOOLEAN: "boolean",
    **dict.fromkeys((TypeName.INT1, TypeName.INT2, TypeName.INT4, TypeName.INT8), "integer"),
    **dict.fromkeys((TypeName.TIME, TypeName.TIME_WITH_ZONE), "integer"),
    **dict.fromkeys((TypeName.FLOAT4, TypeName.FLOAT8), "double"),
    **dict.fromkeys((TypeName.TIMESTAMP, TypeName.TIMESTAMP_WITH_ZONE), "datetime"),
    **dict.fromkeys((TypeName.BLOB, TypeName.CLOB), "unsigned"),
    TypeName.CHARACTER: "string",
    TypeName.OCTET: "varbinary",
    TypeName.DATE: "date",
}
_POINT_SIZE: Final = 18
_POINT: Final = np.dtype(
    [("marker", "u1"), ("type", "u1"), ("seconds", "<i8"), ("nanoseconds", "<i4"), ("zone", "<i4")]
)
_NIL, _FIXEXT8, _FIXEXT16, _DATETIME = 0xC0, 0xD7, 0xD8, 4


def field_type(kind: SqlType) -> str:
    """Return the type of the field for a column: times are nanoseconds, and BLOBs the numbers of blobs."""
    return str(kind).lower() if kind.name is TypeName.DECIMAL else _FIELD_TYPES[kind.name]


def space_row(table: SqlTable, space_id: int) -> tuple[object, ...]:
    """Return the row of `_space` for a table."""
    fields = [
        {"name": each.name, "type": field_type(each.type), "is_nullable": each.is_nullable} for each in table.columns
    ]
    return (space_id, 1, table.name, "memtx", len(fields), {}, fields)


def index_row(table: SqlTable, space_id: int) -> tuple[object, ...]:
    """Return the row of `_index` for the primary key. Its parts accept every type, even bytes that do not fit."""
    parts = [{"field": each.column, "type": "scalar"} for each in table.keys]
    return (space_id, 0, "primary", "tree", {"unique": True}, parts)


@dataclass(frozen=True)
class TableTuples:
    """Encodes entries of the storage of one table as tuples of its space. Picklable."""

    table: SqlTable
    space: SpaceDefinition

    def __reduce__(self) -> tuple[Any, ...]:
        return TableTuples, (self.table, self.space)

    @cached_property
    def _columns(self) -> RowColumns:
        return RowColumns(self.table, partial=True, exact=True)

    def encode(self, chunk: EntryChunk, rows: Rows) -> tuple[pa.Array, pa.Array]:
        """Return the tuples and the sort keys of entries. The tuple of a removal has only the fields of its key."""
        starts = [chunk.table[line, rows].astype(np.int64) for line in (KEY_AT, KEY_END, VALUE_AT, VALUE_END)]
        is_gone = chunk.table[TYPE, rows] == np.uint64(EntryType.REMOVE)
        spans = RowSpans(chunk.buf, starts[0], starts[1], np.where(is_gone, -1, starts[2]), starts[3])
        decoded = self._columns.decode(spans)
        tuples = _tuples(decoded.batch)
        if len(decoded.unfit):
            mask = np.zeros(len(rows), np.bool_)
            mask[decoded.unfit] = True
            found = [self._salvaged(spans, row) for row in decoded.unfit.tolist()]
            tuples = pc.replace_with_mask(tuples, pa.array(mask), pa.array(found, pa.binary()))
        return tuples, sort_keys(self.space, tuples)

    def _salvaged(self, spans: RowSpans, row: int) -> bytes:
        buf, key_at, key_end, value_at, value_end = spans
        key, value = buf[key_at[row] : key_end[row]].tobytes(), None
        if value_at[row] >= 0:
            value = buf[value_at[row] : value_end[row]].tobytes()
        keys = {part.column for part in self.table.keys}
        found = salvage_row(self.table, key, value)
        return pack([_plain(each, in_key=place in keys) for place, each in enumerate(found)])


def _plain(value: Value | Undecoded, *, in_key: bool) -> Any:
    """Return a value for a tuple. A key has undecoded bytes as they are; elsewhere an array fits no column."""
    match value:
        case Undecoded(data):
            return data if in_key else [data]
        case Date(number) | Time(number) | LobId(number):
            return number
        case Timestamp(seconds, nanoseconds):
            return Datetime(seconds, nanoseconds)
    return value


def _tuples(batch: pa.RecordBatch) -> pa.Array:
    """Return the rows of a batch as MessagePack tuples."""
    count = len(batch)
    pieces = [_field(column) for column in batch.columns]
    sizes = [int(edges[-1]) for _, edges in pieces]
    starts = np.cumsum([0, *sizes])
    data: Bytes = np.empty(int(starts[-1]), np.uint8)
    edges: Cells = np.empty((len(pieces), count + 1), np.int64)
    for number, (each, own) in enumerate(pieces):
        data[starts[number] : starts[number + 1]] = each[: sizes[number]]
        edges[number] = own + starts[number]
    out: Bytes = np.empty(int(starts[-1]) + HEAD_ROOM * count, np.uint8)
    ends: Cells = np.zeros(count + 1, np.int64)
    size = join_fields(data, edges, out, ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(out[:size])]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers).cast(pa.binary())


def _field(column: pa.Array) -> tuple[Bytes, Cells]:
    """Return a column encoded as MessagePack: all values in one array, and the edges between them."""
    if column.type == EXACT_POINT:
        return _points(column)
    if pa.types.is_date32(column.type):
        column = column.view(pa.int32())
    elif pa.types.is_time64(column.type):
        column = column.view(pa.int64())
    kind = "any" if not pa.types.is_string(column.type) else "string"
    encode = encoding_of(kind, column.type)
    assert encode is not None, f"no encoding of {column.type}"
    found = encode(column)
    return found.data, found.edges


def _points(column: pa.Array) -> tuple[Bytes, Cells]:
    count = len(column)
    seconds, nanoseconds = (column.field(name).to_numpy() for name in ("seconds", "nanoseconds"))
    is_valid = column.is_valid().to_numpy(zero_copy_only=False)
    full = np.zeros(count, _POINT)
    full["marker"] = np.where(is_valid, np.where(nanoseconds != 0, _FIXEXT16, _FIXEXT8), _NIL)
    full["type"], full["seconds"], full["nanoseconds"] = _DATETIME, seconds, nanoseconds
    sizes = np.where(is_valid, np.where(nanoseconds != 0, _POINT_SIZE, _POINT_SIZE - 8), 1)
    raw = full.view(np.uint8).reshape(count, _POINT_SIZE)
    edges: Cells = np.zeros(count + 1, np.int64)
    np.cumsum(sizes, out=edges[1:])
    return raw[np.arange(_POINT_SIZE) < sizes[:, None]], edges
