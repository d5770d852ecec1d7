"""The columns of source `limestone`, as Arrow and Spark types, and how chunks of entries fill them.

Pure: chunks in, record batches out. Columns that describe a change have the same names as in all sources of changes
(`_operation`, `_commit_version`, `_space`, `_replicaset_uuid`). A Limestone log has no times, row numbers or names, so
there are no columns for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flowstone.columns.arrow_columns import span_column, text_array
from flowstone.errors import FlowstoneError
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import (
    AT,
    BLOB_COUNT,
    END,
    KEY_AT,
    KEY_END,
    MAJOR,
    MINOR,
    STORAGE_ID,
    TYPE,
    VALUE_AT,
    VALUE_END,
)
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.sources.limestone.entry_reader import IS_POINT, Rows
from flowstone.text.row_table import UnknownColumn

Mode = Literal["changes", "state"]
Unsigned = Literal["int64", "decimal"]

DECIMAL: Final = pa.decimal128(20, 0)
INT64_MAX: Final = (1 << 63) - 1

OPERATIONS: Final = {
    EntryType.NORMAL: "replace",
    EntryType.NORMAL_WITH_BLOB: "replace",
    EntryType.REMOVE: "delete",
    EntryType.CLEAR_STORAGE: "truncate",
    EntryType.ADD_STORAGE: "add_storage",
    EntryType.REMOVE_STORAGE: "remove_storage",
}
_NAMES: Final = text_array([OPERATIONS.get(EntryType(code), "") if code else "" for code in range(11)])
_IS_PUT: Final = np.zeros(256, np.bool_)
_IS_PUT[[EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB]] = True

_SPARK_TYPES: Final = {
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.int64(): "BIGINT",
    DECIMAL: "DECIMAL(20, 0)",
}
PLACE_SIZE: Final = 28
_PLACE: Final = np.dtype([("major", ">u8"), ("minor", ">u8"), ("number", ">u4"), ("offset", ">u8")])


class TooLarge(FlowstoneError):
    """A number above 2^63-1 does not fit into a BIGINT."""


def table_name(storage_id: int) -> str:
    """Return the name to use for a storage, which has none of its own."""
    return f"storage_{storage_id}"


@dataclass(frozen=True)
class EntryContract:
    """The columns of one query; `storages` limits the entries to these storages. Picklable."""

    instance_uuid: str
    mode: Mode = "changes"
    wanted: tuple[str, ...] | None = None
    unsigned_as: Unsigned = "int64"
    storages: tuple[int, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EntryContract, (self.instance_uuid, self.mode, self.wanted, self.unsigned_as, self.storages)

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema. Raises UnknownColumn if a wanted column does not exist."""
        number = pa.int64() if self.unsigned_as == "int64" else DECIMAL
        types: dict[str, tuple[pa.DataType, bool]] = {
            "_operation": (pa.string(), False),
            "_commit_version": (pa.int64(), False),
            "_space": (pa.string(), False),
            "storage_id": (number, False),
            "key": (pa.binary(), self.mode == "changes"),
            "value": (pa.binary(), self.mode == "changes"),
            "version_major": (number, False),
            "version_minor": (DECIMAL, False),
            "blob_ids": (pa.list_(pa.field("element", number)), self.mode == "changes"),
            "_replicaset_uuid": (pa.string(), False),
        }
        if self.mode == "state":
            del types["_operation"], types["_commit_version"]
        chosen = tuple(types) if self.wanted is None else self.wanted
        unknown = [name for name in chosen if name not in types]
        if unknown:
            raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(types)}")
        return pa.schema([pa.field(name, types[name][0], nullable=types[name][1]) for name in chosen])

    @property
    def spark_schema(self) -> str:
        """The schema in Spark's DDL."""
        return ", ".join(
            f"`{each.name}` {_spark_type(each.type)}{'' if each.nullable else ' NOT NULL'}" for each in self.schema
        )

    def chosen(self, chunk: EntryChunk, rows: Rows) -> Rows:
        """Return the entries of the wanted storages."""
        return of_storages(chunk, rows, self.storages)

    def batch(self, chunk: EntryChunk, rows: Rows) -> pa.RecordBatch:
        """Return the given entries, none of them a marker, as a batch."""
        entries = _Entries(chunk, rows, self)
        children = [entries.column(name) for name in self.schema.names]
        # Built from a struct array, because a batch without columns must still have a row count.
        struct = pa.Array.from_buffers(pa.struct(self.schema), len(rows), [None], children=children)
        return pa.RecordBatch.from_struct_array(struct)


def of_storages(chunk: EntryChunk, rows: Rows, storages: Collection[int] | None) -> Rows:
    if storages is None:
        return rows
    return rows[np.isin(chunk.table[STORAGE_ID, rows], np.array(sorted(storages), np.uint64))]


@dataclass(frozen=True)
class _Entries:
    chunk: EntryChunk
    rows: Rows
    contract: EntryContract

    def column(self, name: str) -> pa.Array:
        if name == "_replicaset_uuid":
            return pa.repeat(pa.scalar(self.contract.instance_uuid, pa.string()), len(self.rows))
        found: pa.Array = getattr(self, f"_make_{name.removeprefix('_')}")()
        return found

    def _line(self, line: int) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = self.chunk.table[line, self.rows]
        return found

    @cached_property
    def _types(self) -> NDArray[np.uint8]:
        return self._line(TYPE).astype(np.uint8)

    def _make_operation(self) -> pa.Array:
        return operation_column(self._types)

    def _make_commit_version(self) -> pa.Array:
        return pa.array(self.chunk.epochs[self.rows].astype(np.int64))

    def _make_space(self) -> pa.Array:
        distinct, places = np.unique(self._line(STORAGE_ID), return_inverse=True)
        return pa.array([table_name(each) for each in distinct.tolist()], pa.string()).take(pa.array(places))

    def _make_storage_id(self) -> pa.Array:
        return self._number("storage_id", self._line(STORAGE_ID))

    def _make_key(self) -> pa.Array:
        return key_column(self.chunk, self.rows)

    def _make_value(self) -> pa.Array:
        starts = np.where(_IS_PUT[self._types], self._line(VALUE_AT).astype(np.int64), -1)
        return span_column(self.chunk.buf, starts, self._line(VALUE_END).astype(np.int64))

    def _make_version_major(self) -> pa.Array:
        return self._number("version_major", self._line(MAJOR))

    def _make_version_minor(self) -> pa.Array:
        return decimals(self._line(MINOR))

    def _make_blob_ids(self) -> pa.Array:
        counts = self._line(BLOB_COUNT).astype(np.int64)
        has_blobs = counts > 0
        starts = np.where(has_blobs, self._line(VALUE_END).astype(np.int64) + 4, -1)
        raw = span_column(self.chunk.buf, starts, self._line(END).astype(np.int64)) if has_blobs.any() else None
        ids = np.frombuffer(raw.buffers()[2], np.uint64) if raw is not None else np.zeros(0, np.uint64)
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        kind = self.contract.schema.field("blob_ids").type
        is_put = _IS_PUT[self._types]
        nulls = len(is_put) - int(is_put.sum())
        bitmap = pa.py_buffer(np.packbits(is_put, bitorder="little")) if nulls else None
        values = self._number("blob_ids", ids)
        return pa.Array.from_buffers(kind, len(counts), [bitmap, pa.py_buffer(offsets)], nulls, children=[values])

    def _number(self, name: str, values: NDArray[np.uint64]) -> pa.Array:
        if self.contract.unsigned_as == "decimal":
            return decimals(values)
        if len(values) and values.max() > INT64_MAX:
            raise TooLarge(f"{name} {values.max()} of an entry does not fit BIGINT", hint="set unsignedAs=decimal")
        return pa.array(values.view(np.int64))


def operation_column(types: NDArray[np.uint8]) -> pa.Array:
    """Return the operations of entries by their types."""
    return _NAMES.take(pa.array(types))


def key_column(chunk: EntryChunk, rows: Rows) -> pa.Array:
    """Return the keys; null for entries about a whole storage."""
    is_point = IS_POINT[chunk.table[TYPE, rows].astype(np.uint8)]
    starts = np.where(is_point, chunk.table[KEY_AT, rows].astype(np.int64), -1)
    return span_column(chunk.buf, starts, chunk.table[KEY_END, rows].astype(np.int64))


def decimals(values: NDArray[np.uint64]) -> pa.Array:
    """Return unsigned 64-bit numbers as decimals."""
    wide = np.zeros((len(values), 2), np.uint64)
    wide[:, 0] = values
    return pa.Array.from_buffers(DECIMAL, len(values), [None, pa.py_buffer(wide)])


def place_column(chunk: EntryChunk, rows: Rows, number: int, *, is_compacted: bool = False) -> pa.Array:
    """Return bytes that sort in the order in which entries of a key win: by version, then by file and offset.

    Compaction removes versions, so an entry of a compacted file loses against any log.
    """
    places = np.zeros(len(rows), _PLACE)
    if not is_compacted:
        places["major"], places["minor"] = chunk.table[MAJOR, rows], chunk.table[MINOR, rows]
        places["number"] = number + 1
    places["offset"] = chunk.table[AT, rows] + np.uint64(chunk.base)
    offsets = PLACE_SIZE * np.arange(len(rows) + 1, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(offsets), pa.py_buffer(places)])


def places_of(column: pa.Array) -> NDArray[Any]:
    """Return the fields encoded by `place_column`."""
    _, offsets, data = column.buffers()
    first = int(np.frombuffer(offsets, np.int32, 1, 4 * column.offset)[0]) if len(column) else 0
    return np.frombuffer(data, _PLACE, len(column), first) if len(column) else np.zeros(0, _PLACE)


def newest(table: pa.Table, keys: Iterable[str], place: str = "place") -> pa.Table:
    """Return the winning row of each key, in no particular order."""
    if not table.num_rows:
        return table
    places = places_of(table[place].combine_chunks())
    order = np.lexsort((places["offset"], places["number"], places["minor"], places["major"]))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    names = list(keys)
    grouped = table.select(names).append_column("rank", pa.array(rank)).group_by(names, use_threads=False)
    last = grouped.aggregate([("rank", "max")])["rank_max"].to_numpy()
    return table.take(pa.array(order[last]))


def _spark_type(kind: pa.DataType) -> str:
    return f"ARRAY<{_SPARK_TYPES[kind.value_type]}>" if pa.types.is_list(kind) else _SPARK_TYPES[kind]
