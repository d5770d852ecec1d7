"""The Debezium contract: changes as keys and values of messages, in the form that consumers of Debezium's topics know.

Pure, as the change contract: slabs and definitions in, record batches out. A value has the row before and after the
change as JSON objects of the fields in force, so the rows of the log need images.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.columns import column_kernels as kernels
from flowstone.columns.arrow_columns import Column, ColumnError, TypedDecoder, json_spans
from flowstone.columns.change_contract import EXTRA, ChangeContract, Stamps
from flowstone.columns.column_limits import Starts
from flowstone.columns.image_rows import with_images
from flowstone.history.selection import truncated_space
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab

MESSAGES: Final = pa.schema(
    [pa.field("topic", pa.string(), nullable=False), pa.field("key", pa.string()), pa.field("value", pa.string())]
)
"""A message, in the columns of Spark's Kafka sink. The key of a truncation is null."""

CONNECTOR: Final = "tarantool"
"""`source.connector` of all messages, and the default prefix of topics."""

_NONE: Final = -1
_AFTER_TYPES: Final = pa.array(["insert", "update_postimage"])


@dataclass(frozen=True)
class DebeziumContract(ChangeContract):
    """The messages of changes. `prefix` begins the names of topics; rows of a snapshot are read, not created."""

    prefix: str = CONNECTOR
    is_snapshot: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return DebeziumContract, (*arguments, self.prefix, self.is_snapshot)

    @cached_property
    def schema(self) -> pa.Schema:
        return MESSAGES

    def of_snapshot(self) -> ChangeContract:
        return replace(self, is_snapshot=True)

    def plain(self, slab: Slab, rows: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        if not len(rows):
            return
        images, places, change_types = with_images(slab, rows, preimages=True)
        if not len(places):
            return
        is_after = pc.is_in(change_types, value_set=_AFTER_TYPES).to_numpy(zero_copy_only=False)
        before, after = (
            _image_of_each(places[chosen], np.flatnonzero(chosen), len(rows)) for chosen in (~is_after, is_after)
        )
        has_effect = np.flatnonzero((before != _NONE) | (after != _NONE))
        rows, before, after = rows[has_effect], before[has_effect], after[has_effect]
        # Messages stay in the order of the log: each stretch of one space is a batch.
        space_ids = slab.cells[scan.SPACE_ID, rows]
        edges = [0, *(np.flatnonzero(np.diff(space_ids)) + 1).tolist(), len(rows)]
        for first, stop in pairwise(edges):
            space_id = int(space_ids[first])
            space = schema.get(space_id) or SpaceDefinition(space_id, str(space_id))
            mine = rows[first:stop]
            objects = _Objects(images, space)
            values = [objects.of(each[first:stop]) for each in (before, after)]
            keys = objects.keys(np.where(after[first:stop] == _NONE, before[first:stop], after[first:stop]))
            yield self._messages(space.name, keys, values, self._operations(values), slab, mine, stamps)

    def _operations(self, values: list[pa.Array]) -> pa.Array:
        before, after = values
        created = pa.scalar("r" if self.is_snapshot else "c")
        return pc.if_else(after.is_null(), "d", pc.if_else(before.is_null(), created, "u"))

    def _truncation(self, slab: Slab, row: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        target = truncated_space(slab, row)
        if self.only is not None and target not in self.only:
            return
        space = schema.get(target)
        nothing = pa.nulls(1, pa.string())
        name = space.name if space is not None else str(target)
        yield self._messages(name, nothing, [nothing, nothing], pa.array(["t"]), slab, row, stamps)

    def _messages(
        self,
        name: str,
        keys: pa.Array,
        values: list[pa.Array],
        operations: pa.Array,
        slab: Slab,
        rows: Cells,
        stamps: Stamps,
    ) -> pa.RecordBatch:
        times = pa.array(stamps.times[rows] // 1000).cast(pa.string())
        known = {
            "connector": CONNECTOR,
            "name": self.prefix,
            "db": self.replicaset_uuid,
            "table": name,
            "snapshot": str(self.is_snapshot).lower(),
        }
        source = [json.dumps(known, ensure_ascii=False)[:-1], ', "ts_ms": ', times]
        numbers = {
            "txId": stamps.versions[rows],
            "lsn": slab.cells[scan.LSN, rows],
            "replica_id": slab.cells[scan.REPLICA_ID, rows],
        }
        for field, column in numbers.items():
            source += [f', "{field}": ', pa.array(column).cast(pa.string())]
        before, after = (pc.fill_null(each, "null") for each in values)
        parts = ['{"before": ', before, ', "after": ', after, ', "source": ', *source, '}, "op": "', operations]
        message = _joined([*parts, '", "ts_ms": ', times, ', "transaction": null}'])
        topics = pa.repeat(pa.scalar(f"{self.prefix}.{name}"), len(rows))
        return pa.RecordBatch.from_arrays([topics, keys, message], schema=MESSAGES)


class _Objects:
    """Tuples of one space as JSON objects of its fields. Fields beyond the format are an array in `_extra`."""

    def __init__(self, slab: Slab, space: SpaceDefinition) -> None:
        self._slab = slab
        self._space = space
        self._names = [each.name or f"field_{number}" for number, each in enumerate(space.fields, 1)]

    def of(self, rows: Cells) -> pa.Array:
        """Return the tuples of these rows of the slab; null where the row is -1."""
        found = rows[rows != _NONE]
        if not len(found):
            return pa.nulls(len(rows), pa.string())
        members = list(zip(self._names, self._fields(found), strict=True))
        extra = self._extra(found)
        comma = ", " if members else ""
        more = pc.fill_null(_joined([f'{comma}"{EXTRA.name}": ', extra]), "")
        objects = _joined(["{", *_listed(members), more, "}"])
        places = np.cumsum(rows != _NONE) - 1
        return objects.take(pa.array(places, mask=rows == _NONE))

    def keys(self, rows: Cells) -> pa.Array:
        """Return the primary keys of these rows of the slab; null without a primary key."""
        key = self._space.primary_key
        if key is None:
            return pa.nulls(len(rows), pa.string())
        values = self._fields(rows)
        numbers = [number for number in dict.fromkeys(part.field for part in key.parts) if number < len(values)]
        return _joined(["{", *_listed([(self._names[number], values[number]) for number in numbers]), "}"])

    def _fields(self, rows: Cells) -> list[pa.Array]:
        """Return the fields of the format as JSON; null for fields that a tuple lacks."""
        buf = self._slab.buf
        starts: Starts = np.empty((len(self._names) + 1, len(rows)), np.int32)
        row = kernels.split_tuples(buf, self._slab.cells, rows, np.empty(0, np.int64), starts)
        if row >= 0:
            raise ColumnError(f"{self._slab.path}: a tuple of space {self._space.name!r} is not an array")
        values: list[pa.Array] = []
        for begins in np.ascontiguousarray(starts[:-1]):
            ends = np.empty(len(rows), np.int64)
            kernels.value_ends(buf, begins, ends)
            values.append(pc.fill_null(json_spans(buf, begins.astype(np.int64), ends), "null"))
        return values

    def _extra(self, rows: Cells) -> pa.Array:
        columns = [Column(name, each.type) for name, each in zip(self._names, self._space.fields, strict=True)]
        decoder = TypedDecoder(columns, wanted=[EXTRA.name])
        return decoder.batch(self._slab, rows).column(EXTRA.name)


def _image_of_each(places: Cells, images: Cells, count: int) -> Cells:
    """Return for each of `count` changes its image, or -1."""
    found: Cells = np.full(count, _NONE, np.int64)
    found[places] = images
    return found


def _listed(members: list[tuple[str, pa.Array]]) -> list[Any]:
    """Return the parts of the members of JSON objects."""
    parts: list[Any] = []
    for name, values in members:
        parts += [f"{', ' if parts else ''}{json.dumps(name, ensure_ascii=False)}: ", values]
    return parts


def _joined(parts: list[Any]) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")
