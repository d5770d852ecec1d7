"""The change contract: which columns a source of changes has, in Arrow's words and in Spark's, and how rows fill them.

Pure: slabs and definitions in, record batches out. With a space its fields are typed columns; without, keys, tuples and
operations are JSON text and MessagePack. The columns that say what happened and where are the same for all sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa

from flowstone.box.definitions import FieldDefinition, IndexPart, SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.box.system import FIRST_USER_SPACE_ID, TRUNCATE_ID
from flowstone.errors import FlowstoneError
from flowstone.history.columnar import json_of_messagepack
from flowstone.history.selection import Mask, truncated_space
from flowstone.history.tables import UnknownColumn
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Cells
from flowstone.spark.images import Images, with_images
from flowstone.spark.stream_order import Stamps
from flowstone.xlog.columns import INT32_MAX, MOMENT, Column, ColumnOptions, TypedDecoder, generic_batch
from flowstone.xlog.reader import Slab

LEADING_FIELDS: Final = (
    pa.field("_operation", pa.string(), nullable=False),
    pa.field("_commit_version", pa.int64(), nullable=False),
    pa.field("_commit_timestamp", MOMENT, nullable=False),
    pa.field("_replica_id", pa.int32(), nullable=False),
    pa.field("_lsn", pa.int64(), nullable=False),
    pa.field("_tsn", pa.int64(), nullable=False),
    pa.field("_space", pa.string()),
    pa.field("_replicaset_uuid", pa.string(), nullable=False),
)
"""What every change has. `_space` is null where the log does not define the space."""

CHANGE_TYPE: Final = pa.field("_change_type", pa.string(), nullable=False)
"""Behind `_operation`, with images: insert, update_preimage, update_postimage, delete."""

EXTRA: Final = pa.field("_extra", pa.string())
TUPLE_FIELDS: Final = (pa.field("_tuple", pa.string()), pa.field("_tuple_msgpack", pa.binary()))
TRAILING_FIELDS: Final = (
    pa.field("_key", pa.string()),
    pa.field("_key_msgpack", pa.binary()),
    pa.field("_operations", pa.string()),
    pa.field("_operations_msgpack", pa.binary()),
    # `_key` is of this index, and field numbers in `_operations` count from this number.
    pa.field("_index_id", pa.int32(), nullable=False),
    pa.field("_index_base", pa.int32(), nullable=False),
)

_OPERATIONS: Final = {
    RequestType.INSERT.value: "insert",
    RequestType.REPLACE.value: "replace",
    RequestType.UPDATE.value: "update",
    RequestType.UPSERT.value: "upsert",
    RequestType.DELETE.value: "delete",
}
_IS_OPERATION: Final = np.array([code in _OPERATIONS for code in range(max(_OPERATIONS) + 2)])
_TRUNCATE: Final = "truncate"
_NAMES: Final = pa.array([_OPERATIONS.get(code) for code in range(max(_OPERATIONS) + 1)], pa.string())
_JSON: Final = {"_key": "_key_msgpack", "_tuple": "_tuple_msgpack", "_operations": "_operations_msgpack"}
"""Text columns, and the column of the MessagePack that they show."""


class ColumnClash(FlowstoneError):
    """A field of a space has the name of a column that every change has."""


@dataclass(frozen=True)
class ChangeContract:
    """The columns of one source. `space` is the definition that typed columns follow; None for rows of any space.

    `wanted` limits the columns by name, in that order; `show_system` takes in the rows of system spaces;
    `images` says what stands in the columns of a row that changed a tuple. Picklable: executors
    get it with their part of the work.
    """

    replicaset_uuid: str
    space: SpaceDefinition | None = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    wanted: tuple[str, ...] | None = None
    show_system: bool = False
    images: Images = "ops"

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders are made again where they are needed.
        given = (self.replicaset_uuid, self.space, self.columns, self.wanted, self.show_system, self.images)
        return ChangeContract, given

    @property
    def _leading_fields(self) -> tuple[pa.Field, ...]:
        if self.images == "ops":
            return LEADING_FIELDS
        return (*LEADING_FIELDS[:1], CHANGE_TYPE, *LEADING_FIELDS[1:])

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, as Arrow has them. Raises ColumnClash and UnknownColumn: make it before a query starts."""
        fields = [*TUPLE_FIELDS]
        if self.space is not None:
            decoded = _decoder(self.space, self.columns, None).schema
            fields = [decoded.field(name) for name in (*self.space.field_names, EXTRA.name)]
        whole = pa.schema([*self._leading_fields, *fields, *TRAILING_FIELDS])
        if self.wanted is None:
            return whole
        unknown = [name for name in self.wanted if name not in whole.names]
        if unknown:
            raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"there are: {', '.join(whole.names)}")
        return pa.schema([whole.field(name) for name in self.wanted])

    @property
    def spark_schema(self) -> str:
        """The same in Spark's DDL."""
        return spark_ddl(self.schema)

    @cached_property
    def _decoder(self) -> TypedDecoder | None:
        if self.space is None:
            return None
        return _decoder(self.space, self.columns, None if self.wanted is None else self._decoded_names(self.wanted))

    def _decoded_names(self, wanted: Sequence[str]) -> list[str]:
        """What the decoder has to give for the wanted columns: its own names, under which it knows MessagePack, too."""
        assert self.space is not None
        names = [name for name in (*self.space.field_names, EXTRA.name) if name in wanted]
        return names + [name for name in ("_key", "_operations") if {name, f"{name}_msgpack"} & {*wanted}]

    def batches(self, slab: Slab, rows: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        """The changes among the given rows, ascending, in their order; `stamps` are of all rows of the slab.

        Rows that change nothing in a space (NOP, verdicts, terms) are left out, and so are those of other spaces than
        `space`. `schema` is the one in force. Truncations are batches of their own: they have neither key nor tuple.
        """
        is_truncate = _truncates(slab, rows)
        is_change = self._changes(slab, rows)
        if not is_truncate.any():
            yield from self._plain(slab, rows[is_change], stamps, schema)
            return
        start = 0
        for at in [*np.flatnonzero(is_truncate).tolist(), len(rows)]:
            yield from self._plain(slab, rows[start:at][is_change[start:at]], stamps, schema)
            if at < len(rows):
                yield from self._truncation(slab, rows[at : at + 1], stamps, schema)
            start = at + 1

    def _changes(self, slab: Slab, rows: Cells) -> Mask:
        kinds, space_ids = slab.cells[scan.TYPE, rows], slab.cells[scan.SPACE_ID, rows]
        known: Mask = _IS_OPERATION[np.minimum(kinds, len(_IS_OPERATION) - 1)]
        if self.space is not None:
            known &= space_ids == self.space.id
        else:
            known &= space_ids >= (0 if self.show_system else FIRST_USER_SPACE_ID)
        return known

    def _plain(self, slab: Slab, rows: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        if not len(rows):
            return
        change_types = None
        kinds = slab.cells[scan.TYPE, rows]
        if self.images != "ops":
            slab, places, change_types = with_images(slab, rows, preimages=self.images == "full")
            stamps = Stamps(stamps.versions[rows[places]], stamps.times[rows[places]])
            kinds, rows = kinds[places], np.arange(len(places), dtype=np.int64)
            if not len(rows):
                return
        found = self._leading(slab, rows, stamps, _NAMES.take(pa.array(kinds)), _space_names(slab, rows, schema))
        if change_types is not None:
            found[CHANGE_TYPE.name] = change_types
        if self._decoder is not None:
            decoded = self._decoder.batch(slab, rows)
            names = {"_key": "_key_msgpack", "_operations": "_operations_msgpack"}
        else:
            decoded = generic_batch(slab, rows)
            names = {name.removesuffix("_msgpack")[1:]: name for name in _JSON.values()}
        for name, array in zip(decoded.schema.names, decoded.columns, strict=True):
            found.setdefault(names.get(name, name), array)
        yield self._batch(slab, rows, found)

    def _truncation(self, slab: Slab, row: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        target = truncated_space(slab, row)
        if self.space is not None and target != self.space.id:
            return
        space = schema.get(target)
        name = pa.array([space.name if space is not None else None], pa.string())
        found = self._leading(slab, row, stamps, pa.array([_TRUNCATE]), name)
        found[CHANGE_TYPE.name] = pa.array(["delete"])
        found |= {"_index_id": pa.array([0], pa.int32()), "_index_base": pa.array([0], pa.int32())}
        found |= {name: pa.nulls(1, self.schema.field(name).type) for name in self.schema.names if name not in found}
        yield self._batch(slab, row, found)

    def _leading(
        self, slab: Slab, rows: Cells, stamps: Stamps, operations: pa.Array, names: pa.Array
    ) -> dict[str, pa.Array]:
        cells = slab.cells
        return {
            "_operation": operations,
            "_commit_version": pa.array(stamps.versions[rows]),
            "_commit_timestamp": pa.array(stamps.times[rows]).view(MOMENT),
            "_replica_id": pa.array(cells[scan.REPLICA_ID, rows].astype(np.int32)),
            "_lsn": pa.array(cells[scan.LSN, rows]),
            "_tsn": pa.array(cells[scan.TSN, rows]),
            "_space": names,
            "_replicaset_uuid": pa.repeat(pa.scalar(self.replicaset_uuid, pa.string()), len(rows)),
        }

    def _batch(self, slab: Slab, rows: Cells, found: dict[str, pa.Array]) -> pa.RecordBatch:
        for name in self.schema.names:
            if name not in found and name in _JSON:
                found[name] = json_of_messagepack(found[_JSON[name]])
            elif name not in found:
                line = scan.INDEX_ID if name == "_index_id" else scan.INDEX_BASE
                found[name] = pa.array(np.minimum(slab.cells[line, rows], INT32_MAX).astype(np.int32))
        # By way of a struct, because a batch without columns still has rows to be counted.
        children = [found[name] for name in self.schema.names]
        struct = pa.Array.from_buffers(pa.struct(self.schema), len(rows), [None], children=children)
        return pa.RecordBatch.from_struct_array(struct)


def _decoder(space: SpaceDefinition, columns: ColumnOptions, wanted: Sequence[str] | None) -> TypedDecoder:
    ours = {each.name for each in (*LEADING_FIELDS, CHANGE_TYPE, EXTRA, *TRAILING_FIELDS)}
    clash = [each.name for each in space.fields if each.name in ours]
    if clash:
        raise ColumnClash(
            f"space {space.name!r} has a field {clash[0]!r}, which is the name of a column of every change",
            hint="read it without `space`, as JSON, or rename the field",
        )
    key = space.primary_key
    return TypedDecoder(
        [Column(each.name, each.type, each.is_nullable) for each in space.fields],
        key_fields=[] if key is None else [-1 if part.path else part.field for part in key.parts],
        options=columns,
        wanted=wanted,
    )


def shape_of(space: SpaceDefinition | None) -> tuple[tuple[FieldDefinition, ...], tuple[IndexPart, ...]] | None:
    """What of a definition the typed columns depend on: where it changes, a query with one schema has to stop."""
    if space is None:
        return None
    return space.fields, space.primary_key.parts if space.primary_key is not None else ()


def _truncates(slab: Slab, rows: Cells) -> Mask:
    """Rows of `_truncate` that empty a space; when one is dropped, its row there goes, and that empties nothing."""
    found: Mask = slab.cells[scan.SPACE_ID, rows] == TRUNCATE_ID
    if found.any():
        found &= slab.cells[scan.TYPE, rows] != RequestType.DELETE
    return found


def _space_names(slab: Slab, rows: Cells, schema: Schema) -> pa.Array:
    space_ids = slab.cells[scan.SPACE_ID, rows]
    if space_ids[0] == space_ids[-1] and (space_ids == space_ids[0]).all():
        space = schema.get(int(space_ids[0]))
        return pa.repeat(pa.scalar(space.name if space is not None else None, pa.string()), len(rows))
    distinct, places = np.unique(space_ids, return_inverse=True)
    spaces = [schema.get(space_id) for space_id in distinct.tolist()]
    names = pa.array([space.name if space is not None else None for space in spaces], pa.string())
    return names.take(pa.array(places))


# --- Spark's words ------------------------------------------------------------------------------------------------

_SPARK_TYPES: Final = {
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    MOMENT: "TIMESTAMP",
}


def spark_ddl(fields: Iterable[pa.Field]) -> str:
    """Arrow's columns as a schema in Spark's DDL."""
    return ", ".join(
        f"{_quoted(each.name)} {_spark_type(each.type)}{'' if each.nullable else ' NOT NULL'}" for each in fields
    )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _spark_type(kind: pa.DataType) -> str:
    return f"DECIMAL({kind.precision}, {kind.scale})" if pa.types.is_decimal(kind) else _SPARK_TYPES[kind]
