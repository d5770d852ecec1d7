"""Misfits of a table: values that do not fit their columns, as rows for the quarantine.

Pure: keys, tuples and the misfits of their columns in, Arrow out. A `MisfitRows` collects the misfits of one commit,
from all threads that fill columns for it. `quarantine.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.definitions import SpaceDefinition
from flowstone.columns import column_kernels as kernels
from flowstone.columns.arrow_columns import MOMENT, ColumnError, FieldMisfits
from flowstone.columns.change_contract import spark_type
from flowstone.columns.column_limits import Starts
from flowstone.columns.log_batches import json_of_messagepack
from flowstone.columns.tuple_slabs import slab_of_tuples
from flowstone.iproto.scan import Cells

if TYPE_CHECKING:
    from flowstone.lake.table_schema import LakeSchema

Origins = Mapping[str, pa.Array]
"""Columns `replica_id`, `lsn` and `time` of the changes that wrote some rows, as far as they are known."""

ORIGIN_FIELDS: Final = (
    pa.field("replica_id", pa.int32()),
    pa.field("lsn", pa.int64()),
    pa.field("time", MOMENT),
)
MISFIT_SCHEMA: Final = pa.schema(
    [
        pa.field("space", pa.string()),
        pa.field("space_id", pa.int64()),
        pa.field("replicaset_uuid", pa.string()),
        pa.field("field", pa.string()),
        pa.field("field_type", pa.string()),
        pa.field("type", pa.string()),
        pa.field("key", pa.string()),
        pa.field("value", pa.string()),
        pa.field("reason", pa.string()),
        *ORIGIN_FIELDS,
        pa.field("_key", pa.binary()),
    ]
)
"""A misfit. `field_type` is the type in the space's format, `type` the column's type in Spark; `key` is the primary
key, and `value` the value, both as JSON."""

_SET_PREFIX: Final = 16


@dataclass
class MisfitRows:
    """The misfits of one commit: of rows that it brings, and of rows that it only rebuilds from their tuples."""

    new: list[pa.Table] = field(default_factory=list)
    rebuilt: list[pa.Table] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.new or self.rebuilt)

    def set_times(self, time: pa.Scalar) -> None:
        """Set the time of new rows that have none."""
        number = MISFIT_SCHEMA.get_field_index("time")
        self.new = [
            each.set_column(number, MISFIT_SCHEMA.field(number), pc.fill_null(each.column("time"), time))
            for each in self.new
        ]

    def add(
        self,
        schema: LakeSchema,
        keys: pa.Array,
        tuples: pa.Array,
        found: Sequence[FieldMisfits],
        origins: Origins | None,
    ) -> None:
        """Add the misfits of some rows. `origins` is None for rows that are rebuilt. Any thread may call this."""
        parts = [_table(schema, keys, tuples, each, origins or {}) for each in found]
        (self.rebuilt if origins is None else self.new).extend(parts)


def _table(schema: LakeSchema, keys: pa.Array, tuples: pa.Array, found: FieldMisfits, origins: Origins) -> pa.Table:
    rows, count = pa.array(found.rows), len(found.rows)
    own_keys = keys.take(rows)
    columns = {
        "space": _repeated(schema.space.name, count),
        "space_id": pa.repeat(pa.scalar(schema.space.id, pa.int64()), count),
        "replicaset_uuid": _sets(schema, own_keys),
        "field": _repeated(schema.field_of(found.column), count),
        "field_type": _repeated(schema.field_type_of(found.column), count),
        "type": _repeated(spark_type(schema.schema.field(found.column).type), count),
        "key": key_texts(schema.space, tuples.take(rows)),
        "value": found.values,
        "reason": pa.array(found.reasons, pa.string()),
        "replica_id": _taken(origins, "replica_id", rows, pa.int32()),
        "lsn": _taken(origins, "lsn", rows, pa.int64()),
        "time": _taken(origins, "time", rows, MOMENT),
        "_key": own_keys,
    }
    return pa.table([columns[name] for name in MISFIT_SCHEMA.names], schema=MISFIT_SCHEMA)


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _taken(origins: Origins, name: str, rows: pa.Array, kind: pa.DataType) -> pa.Array:
    return origins[name].take(rows).cast(kind) if name in origins else pa.nulls(len(rows), kind)


def _sets(schema: LakeSchema, keys: pa.Array) -> pa.Array:
    """Return the replica set of each row, from the prefix of its key, or the only replica set of the table."""
    if not schema.several_sets:
        return _repeated(schema.sets[0] if schema.sets else "", len(keys))
    encoded = pc.dictionary_encode(pc.binary_slice(keys, 0, _SET_PREFIX))
    names = [str(UUID(bytes=each)) for each in encoded.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(encoded.indices)


def key_texts(space: SpaceDefinition, tuples: pa.Array) -> pa.Array:
    """Return the primary keys of tuples as JSON arrays. A part inside of a field is shown as the whole field."""
    count = len(tuples)
    if space.primary_key is None or not count:
        return pa.nulls(count, pa.string())
    fields = [part.field for part in space.primary_key.parts]
    slab = slab_of_tuples(tuples, space.id, space.name)
    starts: Starts = np.empty((max(fields) + 2, count), np.int32)
    every: Cells = np.arange(count, dtype=np.int64)
    if kernels.split_tuples(slab.buf, slab.cells, every, np.empty(0, np.int64), starts) >= 0:
        raise ColumnError(f"space {space.name!r}: a tuple is not an array")
    data = slab.buf.tobytes()
    parts: list[list[bytes]] = []
    for number in fields:
        begins, ends = np.ascontiguousarray(starts[number]), np.empty(count, np.int64)
        kernels.value_ends(slab.buf, begins, ends)
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        parts.append([data[begin:end] if begin >= 0 else b"\xc0" for begin, end in spans])
    header = b"\xdc" + len(fields).to_bytes(2)
    return json_of_messagepack(pa.array([header + b"".join(key) for key in zip(*parts, strict=True)], pa.binary()))
