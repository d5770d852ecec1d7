"""Limestone storages as spaces and entries as tuples, so that lakes, mirrors and comparisons handle only one model.

Pure. A raw storage has no name and no fields of its own; as a space it is called `storage_<id>`, its primary key is the
entry's key, and all such spaces have the same fields. Tsurugi's tables are spaces of their own names and fields. An
epoch is a position: the only component of its vclock.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import FIRST_USER_SPACE_ID, INDEX_ID, SPACE_ID
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format.entry_table import BLOB_COUNT, KEY_AT, KEY_END, VALUE_AT, VALUE_END
from flowstone.limestone.tsurugi.definitions import SqlTable
from flowstone.replication.vclock import VClock
from flowstone.spark.index.limestone_kernels import BLOB_ROOM, TUPLE_ROOM, entry_tuples
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.index.tsurugi_tuples import index_row, space_row
from flowstone.spark.sources.limestone.entry_columns import table_name
from flowstone.spark.sources.limestone.entry_reader import Rows

FIELDS: Final = (
    ("key", "varbinary"),
    ("value", "varbinary"),
    ("version_major", "unsigned"),
    ("version_minor", "unsigned"),
    ("version_is_long", "boolean"),
    ("blob_ids", "array"),
)
"""Minor versions lack their top bit, which marks a long transaction."""

VERSION_FIELDS: Final = (2, 3, 4)
"""Fields that are not compared between states, because compaction removes versions."""

STORAGE_MAX: Final = (1 << 63) - 1 - FIRST_USER_SPACE_ID
EPOCHS: Final = 1
"""The component of a vclock that holds the epoch."""


class StorageTooLarge(LimestoneError):
    """A storage id is too large for a table."""


def space_id_of(storage_id: int) -> int:
    if storage_id > STORAGE_MAX:
        raise StorageTooLarge(
            f"storage {storage_id} cannot have a table: the largest supported id is {STORAGE_MAX}",
            hint="read it with source limestone and unsignedAs=decimal",
        )
    return storage_id + FIRST_USER_SPACE_ID


def storage_id_of(space_id: int) -> int:
    return space_id - FIRST_USER_SPACE_ID


def position_of(epoch: int) -> VClock:
    return VClock({EPOCHS: epoch})


def epoch_of(position: VClock) -> int:
    return position.get(EPOCHS)


@lru_cache(maxsize=8)
def tracker_of(storages: tuple[int, ...], tables: tuple[SqlTable, ...] = ()) -> SchemaTracker:
    """Return the definitions of raw storages and of Tsurugi's tables as spaces. It is cached: do not modify it."""
    tracker = SchemaTracker()
    for storage_id in storages:
        space_id = space_id_of(storage_id)
        fields = [{"name": name, "type": kind} for name, kind in FIELDS]
        _apply(tracker, SPACE_ID, (space_id, 1, table_name(storage_id), "memtx", len(FIELDS), {}, fields))
        parts = [{"field": 0, "type": "varbinary"}]
        _apply(tracker, INDEX_ID, (space_id, 0, "primary", "tree", {"unique": True}, parts))
    for table in tables:
        space_id = space_id_of(table.storage_id)
        _apply(tracker, SPACE_ID, space_row(table, space_id))
        _apply(tracker, INDEX_ID, index_row(table, space_id))
    return tracker


def _apply(tracker: SchemaTracker, table_id: int, row: tuple[object, ...]) -> None:
    tracker.apply(RequestType.REPLACE, pack({Key.SPACE_ID.value: table_id, Key.TUPLE.value: row}))


@lru_cache(maxsize=1)
def any_space() -> SpaceDefinition:
    """Return one of the raw spaces: they differ only in ids and names."""
    space = tracker_of((0,)).schema.get(FIRST_USER_SPACE_ID)
    assert space is not None
    return space


def tuple_column(chunk: EntryChunk, rows: Rows) -> pa.Array:
    """Return entries about keys as MessagePack tuples; the value of a remove is empty."""
    table = chunk.table
    sizes = [table[end, rows] - table[start, rows] for start, end in ((KEY_AT, KEY_END), (VALUE_AT, VALUE_END))]
    room = (
        int(sum(each.sum() for each in sizes)) + TUPLE_ROOM * len(rows) + BLOB_ROOM * int(table[BLOB_COUNT, rows].sum())
    )
    out, ends = np.empty(room, np.uint8), np.zeros(len(rows) + 1, np.int64)
    size = entry_tuples(chunk.buf, table, rows, out, ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(out[:size])]
    return pa.Array.from_buffers(pa.large_binary(), len(rows), buffers).cast(pa.binary())


def sort_key_column(tuples: pa.Array) -> pa.Array:
    """Return the keys of tuples as bytes that sort in key order."""
    return sort_keys(any_space(), tuples)
