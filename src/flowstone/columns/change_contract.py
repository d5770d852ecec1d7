"""The change contract: the columns of a source of changes, as Arrow and Spark types, and how rows fill them.

Pure: slabs and definitions in, record batches out. With a space, its fields are typed columns; without one, keys,
tuples and operations are JSON text and MessagePack. The columns for operation and position are the same in all sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.box.system import FIRST_USER_SPACE_ID, TRUNCATE_ID
from flowstone.columns.arrow_columns import (
    INT32_MAX,
    MOMENT,
    Column,
    ColumnOptions,
    TypedDecoder,
    span_column,
    text_array,
)
from flowstone.columns.image_rows import Images, with_images
from flowstone.columns.log_batches import json_of_messagepack
from flowstone.errors import FlowstoneError
from flowstone.history.selection import Mask, truncated_space
from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.text.row_table import UnknownColumn

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
"""Columns of every change. `_space` is null if the log does not define the space."""

CHANGE_TYPE: Final = pa.field("_change_type", pa.string(), nullable=False)
"""Follows `_operation` if images are requested: insert, update_preimage, update_postimage, delete."""

EXTRA: Final = pa.field("_extra", pa.string())
TUPLE_FIELDS: Final = (pa.field("_tuple", pa.string()), pa.field("_tuple_msgpack", pa.binary()))
TRAILING_FIELDS: Final = (
    pa.field("_key", pa.string()),
    pa.field("_key_msgpack", pa.binary()),
    pa.field("_operations", pa.string()),
    pa.field("_operations_msgpack", pa.binary()),
    # `_key` belongs to this index, and field numbers in `_operations` start at `_index_base`.
    pa.field("_index_id", pa.int32(), nullable=False),
    pa.field("_index_base", pa.int32(), nullable=False),
    # For a truncation, the space that is emptied.
    pa.field("_space_id", pa.int32(), nullable=False),
)
SORT_KEY: Final = pa.field("_sort_key", pa.binary())
"""The primary key as bytes that sort in key order; only on request, because it is costly. Null if a row has no key."""

RAW_COLUMNS: Final = (
    "_space_id",
    "_sort_key",
    "_operation",
    "_commit_version",
    "_commit_timestamp",
    "_replica_id",
    "_lsn",
    "_tuple_msgpack",
    "_key_msgpack",
    "_operations_msgpack",
    "_index_base",
)
"""The columns that folding needs; none of them requires decoding."""

_OPERATIONS: Final = {
    RequestType.INSERT.value: "insert",
    RequestType.REPLACE.value: "replace",
    RequestType.UPDATE.value: "update",
    RequestType.UPSERT.value: "upsert",
    RequestType.DELETE.value: "delete",
}
_IS_OPERATION: Final = np.array([code in _OPERATIONS for code in range(max(_OPERATIONS) + 2)])
_TRUNCATE: Final = "truncate"
_NAMES: Final = text_array([_OPERATIONS.get(code, "") for code in range(max(_OPERATIONS) + 1)])


class ColumnClash(FlowstoneError):
    """A field of a space has the name of a column that every change has."""


class FormerFormat(FlowstoneError):
    """Rows of a former format of a space do not fit its current columns."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """`_commit_version` and `_commit_timestamp` (microseconds since 1970) of each row's transaction."""

    versions: Cells
    times: Cells


@dataclass(frozen=True)
class ChangeContract:
    """The columns of one source. `space` is the definition for typed columns; None for rows of any space.

    `wanted` limits and orders the columns by name. `show_system` includes rows of system spaces. `images` chooses the
    contents of the tuple columns. `only` limits the rows to the given spaces. `keeps_truncate` also includes the rows
    of `_truncate` themselves, besides the truncations that they cause. `follows_format` decodes rows of former formats
    with their own format, and shows the fields that `space` still has. Picklable: executors receive the contract with
    their work.
    """

    replicaset_uuid: str
    space: SpaceDefinition | None = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    wanted: tuple[str, ...] | None = None
    show_system: bool = False
    images: Images = "ops"
    only: tuple[int, ...] | None = None
    keeps_truncate: bool = False
    follows_format: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders are not pickled; they are rebuilt on demand.
        what = (self.replicaset_uuid, self.space, self.columns, self.wanted, self.show_system, self.images)
        return ChangeContract, (*what, self.only, self.keeps_truncate, self.follows_format)

    @property
    def _leading_fields(self) -> tuple[pa.Field, ...]:
        if self.images == "ops":
            return LEADING_FIELDS
        return (*LEADING_FIELDS[:1], CHANGE_TYPE, *LEADING_FIELDS[1:])

    def of_snapshot(self) -> ChangeContract:
        """Return the contract for rows of a snapshot."""
        return self

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema. Raises ColumnClash and UnknownColumn, so read it before a query starts."""
        fields = [*TUPLE_FIELDS]
        if self.space is not None:
            decoded = _decoder(self.space, self.columns, None).schema
            fields = [decoded.field(name) for name in (*self.space.field_names, EXTRA.name)]
        whole = pa.schema([*self._leading_fields, *fields, *TRAILING_FIELDS])
        if self.wanted is None:
            return whole
        known = {each.name: each for each in (*whole, *TUPLE_FIELDS, SORT_KEY)}
        unknown = [name for name in self.wanted if name not in known]
        if unknown:
            raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(known)}")
        return pa.schema([known[name] for name in self.wanted])

    @property
    def spark_schema(self) -> str:
        """The schema in Spark's DDL."""
        return spark_ddl(self.schema)

    @property
    def spark_types(self) -> list[tuple[str, str]]:
        """Column names and types, spelled as in Spark's own schemas."""
        return [(each.name, spark_type(each.type).lower().replace(" ", "")) for each in self.schema]

    @cached_property
    def _decoder(self) -> TypedDecoder | None:
        """None if no field of the space is wanted."""
        if self.space is None:
            return None
        names = [name for name in (*self.space.field_names, EXTRA.name) if name in self.schema.names]
        return _decoder(self.space, self.columns, names) if names else None

    def batches(self, slab: Slab, rows: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yield the changes among the given rows in order; `rows` ascend, `stamps` cover all rows of the slab.

        Skips rows that change no space (NOP, verdicts, terms) and rows of spaces other than `space`. `schema` is the
        schema in force. Each truncation is a batch of its own, because it has neither key nor tuple.
        """
        is_truncate = _truncates(slab, rows)
        is_change = self._changes(slab, rows)
        if not is_truncate.any():
            yield from self.plain(slab, rows[is_change], stamps, schema)
            return
        start = 0
        for at in [*np.flatnonzero(is_truncate).tolist(), len(rows)]:
            yield from self.plain(slab, rows[start:at][is_change[start:at]], stamps, schema)
            if at < len(rows):
                yield from self._truncation(slab, rows[at : at + 1], stamps, schema)
                if self.keeps_truncate:
                    yield from self.plain(slab, rows[at : at + 1], stamps, schema)
            start = at + 1

    def _changes(self, slab: Slab, rows: Cells) -> Mask:
        kinds, space_ids = slab.cells[scan.TYPE, rows], slab.cells[scan.SPACE_ID, rows]
        known: Mask = _IS_OPERATION[np.minimum(kinds, len(_IS_OPERATION) - 1)]
        if self.space is not None:
            known &= space_ids == self.space.id
        else:
            known &= space_ids >= (0 if self.show_system else FIRST_USER_SPACE_ID)
        if self.only is not None:
            known &= np.isin(space_ids, self.only)
        return known

    def plain(self, slab: Slab, rows: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yield the given rows, all of them operations on tuples, without any further meaning such as a truncation."""
        if not len(rows):
            return
        found: dict[str, pa.Array] = {}
        kinds = slab.cells[scan.TYPE, rows]
        if self.images != "ops":
            slab, places, found[CHANGE_TYPE.name] = with_images(slab, rows, preimages=self.images == "full")
            stamps = Stamps(stamps.versions[rows[places]], stamps.times[rows[places]])
            kinds, rows = kinds[places], np.arange(len(places), dtype=np.int64)
            if not len(rows):
                return
        if self._decoder is not None:
            found |= self._fields(slab, rows, schema)
        yield self._batch(_Changes(slab, rows, stamps, schema, kinds), found)

    def _fields(self, slab: Slab, rows: Cells, schema: Schema) -> dict[str, pa.Array]:
        """Return the columns of the space's fields."""
        assert self.space is not None
        assert self._decoder is not None
        now = schema.get(self.space.id) if self.follows_format else self.space
        if now is None or now.shape == self.space.shape:
            decoded = self._decoder.batch(slab, rows)
            return dict(zip(decoded.schema.names, decoded.columns, strict=True))
        wanted = self._decoder.schema.names
        decoded = self._former_decoder(now).batch(slab, rows)
        found: dict[str, pa.Array] = {}
        for name in wanted:
            kind = self.schema.field(name).type
            if name not in decoded.schema.names:
                found[name] = pa.nulls(len(rows), kind)
            elif decoded.schema.field(name).type == kind:
                found[name] = decoded.column(name)
            else:
                raise FormerFormat(
                    f"field {name!r} of space {self.space.name!r} changes its type after LSN"
                    f" {slab.cells[scan.LSN, rows[-1]]}: from {decoded.schema.field(name).type} to {kind}",
                    hint="read the two parts separately (endingOffsets), or read JSON by omitting `space`",
                )
        return found

    def _former_decoder(self, space: SpaceDefinition) -> TypedDecoder:
        known = self.__dict__.setdefault("_former_decoders", {})
        if space not in known:
            assert self._decoder is not None
            names = [name for name in (*space.field_names, EXTRA.name) if name in self._decoder.schema.names]
            known[space] = _decoder(space, self.columns, names)
        decoder: TypedDecoder = known[space]
        return decoder

    def _truncation(self, slab: Slab, row: Cells, stamps: Stamps, schema: Schema) -> Iterator[pa.RecordBatch]:
        target = truncated_space(slab, row)
        if (self.space is not None and target != self.space.id) or (self.only is not None and target not in self.only):
            return
        space = schema.get(target)
        found = {
            "_operation": pa.array([_TRUNCATE]),
            CHANGE_TYPE.name: pa.array(["delete"]),
            "_space": pa.array([space.name if space is not None else None], pa.string()),
            "_space_id": pa.array([target], pa.int32()),
            "_index_id": pa.array([0], pa.int32()),
            "_index_base": pa.array([0], pa.int32()),
        }
        own = {each.name for each in LEADING_FIELDS}
        found |= {
            each.name: pa.nulls(1, each.type) for each in self.schema if each.name not in own and each.name not in found
        }
        yield self._batch(_Changes(slab, row, stamps, schema, slab.cells[scan.TYPE, row]), found)

    def _batch(self, changes: _Changes, found: dict[str, pa.Array]) -> pa.RecordBatch:
        children = []
        for name in self.schema.names:
            if name not in found:
                is_uuid = name == "_replicaset_uuid"
                found[name] = changes.repeated(self.replicaset_uuid) if is_uuid else changes.column(name)
            children.append(found[name])
        # Built from a struct array, because a batch without columns must still have a row count.
        struct = pa.Array.from_buffers(pa.struct(self.schema), len(changes.rows), [None], children=children)
        return pa.RecordBatch.from_struct_array(struct)


@dataclass
class _Changes:
    """Rows that change tuples, all under `schema`, and their columns, each built on first use."""

    slab: Slab
    rows: Cells
    stamps: Stamps
    schema: Schema
    kinds: Cells
    """The operations of the rows. With images, `slab` does not contain the operations."""
    _made: dict[str, pa.Array] = field(default_factory=dict)

    def column(self, name: str) -> pa.Array:
        if name not in self._made:
            self._made[name] = getattr(self, f"_make{name}")()
        return self._made[name]

    def repeated(self, text: str | None) -> pa.Array:
        count = len(self.rows)
        return _same_texts(text, 1 << count.bit_length()).slice(0, count)

    def _line(self, number: int) -> Cells:
        line: Cells = self.slab.cells[number]
        return line if len(self.rows) == len(line) else line[self.rows]

    def _int32(self, number: int) -> pa.Array:
        return pa.array(np.minimum(self._line(number), INT32_MAX).astype(np.int32))

    def _make_operation(self) -> pa.Array:
        first = int(self.kinds[0])
        if (self.kinds == first).all():
            return self.repeated(_OPERATIONS[first])
        return _NAMES.take(pa.array(self.kinds))

    def _make_commit_version(self) -> pa.Array:
        return pa.array(self.stamps.versions[self.rows])

    def _make_commit_timestamp(self) -> pa.Array:
        return pa.array(self.stamps.times[self.rows]).view(MOMENT)

    def _make_replica_id(self) -> pa.Array:
        return self._int32(scan.REPLICA_ID)

    def _make_lsn(self) -> pa.Array:
        return pa.array(self._line(scan.LSN))

    def _make_tsn(self) -> pa.Array:
        return pa.array(self._line(scan.TSN))

    def _make_space(self) -> pa.Array:
        distinct, places = self._spaces
        spaces = [self.schema.get(space_id) for space_id in distinct]
        names = [space.name if space is not None else None for space in spaces]
        return self.repeated(names[0]) if places is None else pa.array(names, pa.string()).take(pa.array(places))

    def _make_space_id(self) -> pa.Array:
        return self._int32(scan.SPACE_ID)

    def _make_index_id(self) -> pa.Array:
        return self._int32(scan.INDEX_ID)

    def _make_index_base(self) -> pa.Array:
        return self._int32(scan.INDEX_BASE)

    def _make_tuple_msgpack(self) -> pa.Array:
        # An UPDATE has its operations in the place of a tuple.
        starts = self._line(scan.TUPLE_AT)
        if self._is_update.any():
            starts = np.where(self._is_update, -1, starts)
        return span_column(self.slab.buf, starts, self._line(scan.TUPLE_END))

    def _make_key_msgpack(self) -> pa.Array:
        return span_column(self.slab.buf, self._line(scan.KEY_AT), self._line(scan.KEY_END))

    def _make_operations_msgpack(self) -> pa.Array:
        starts, ends = self._line(scan.OPS_AT), self._line(scan.OPS_END)
        if self._is_update.any():
            starts = np.where(self._is_update, self._line(scan.TUPLE_AT), starts)
            ends = np.where(self._is_update, self._line(scan.TUPLE_END), ends)
        return span_column(self.slab.buf, starts, ends)

    def _make_tuple(self) -> pa.Array:
        return json_of_messagepack(self.column("_tuple_msgpack"))

    def _make_key(self) -> pa.Array:
        return json_of_messagepack(self.column("_key_msgpack"))

    def _make_operations(self) -> pa.Array:
        return json_of_messagepack(self.column("_operations_msgpack"))

    def _make_sort_key(self) -> pa.Array:
        """Build the sort keys, separately for each space and for rows with a tuple or a key."""
        from flowstone.columns.sort_keys import sort_keys, sort_keys_of_keys  # load encoders only if keys are wanted

        tuples, keys = self.column("_tuple_msgpack"), self.column("_key_msgpack")
        distinct, places = self._spaces
        spaces = [self.schema.get(space_id) for space_id in distinct]
        has_tuple = np.asarray(tuples.is_valid())
        # If the tuple was found by another index, the server logged the primary key. If it was not found, there is no
        # key.
        has_key = ~has_tuple & np.asarray(keys.is_valid()) & (self._line(scan.INDEX_ID) == 0)
        parts: list[pa.Array] = []
        order: list[Cells] = []
        for number, space in enumerate(spaces):
            if space is None or space.primary_key is None:
                continue
            mine = True if places is None else places == number
            for function, values, has_them in ((sort_keys, tuples, has_tuple), (sort_keys_of_keys, keys, has_key)):
                rows = np.flatnonzero(has_them & mine)
                if len(rows) == len(self.rows):
                    return function(space, values)
                if len(rows):
                    parts.append(function(space, values.take(pa.array(rows))))
                    order.append(rows)
        whole: Cells = np.full(len(self.rows), -1, np.int64)
        if not parts:
            return pa.nulls(len(self.rows), pa.binary())
        numbers = np.concatenate(order)
        whole[numbers] = np.arange(len(numbers))
        return pa.concat_arrays(parts).take(pa.array(whole, mask=whole < 0))

    @cached_property
    def _is_update(self) -> Mask:
        found: Mask = self._line(scan.TYPE) == RequestType.UPDATE
        return found

    @cached_property
    def _spaces(self) -> tuple[list[int], Cells | None]:
        """The ids of the spaces, and the place of each row's space among them; None if there is only one space."""
        space_ids = self._line(scan.SPACE_ID)
        if space_ids[0] == space_ids[-1] and (space_ids == space_ids[0]).all():
            return [int(space_ids[0])], None
        distinct, places = np.unique(space_ids, return_inverse=True)
        return distinct.tolist(), places


@lru_cache(maxsize=16)
def _same_texts(text: str | None, count: int) -> pa.Array:
    """Return a column that repeats one text. Batches share it, as Arrow arrays are immutable."""
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _decoder(space: SpaceDefinition, columns: ColumnOptions, wanted: Sequence[str] | None) -> TypedDecoder:
    ours = {each.name for each in (*LEADING_FIELDS, CHANGE_TYPE, EXTRA, *TUPLE_FIELDS, *TRAILING_FIELDS, SORT_KEY)}
    clash = [each.name for each in space.fields if each.name in ours]
    if clash:
        raise ColumnClash(
            f"field {clash[0]!r} of space {space.name!r} has the name of a metadata column",
            hint="rename the field, or read JSON by omitting `space`",
        )
    key = space.primary_key
    return TypedDecoder(
        [Column(each.name, each.type, each.is_nullable) for each in space.fields],
        key_fields=[] if key is None else [-1 if part.path else part.field for part in key.parts],
        options=columns,
        wanted=wanted,
    )


def _truncates(slab: Slab, rows: Cells) -> Mask:
    """Mark the rows of `_truncate` that empty a space. A DELETE there follows a dropped space and empties nothing."""
    found: Mask = slab.cells[scan.SPACE_ID, rows] == TRUNCATE_ID
    if found.any():
        found &= slab.cells[scan.TYPE, rows] != RequestType.DELETE
    return found


# --- Spark types --------------------------------------------------------------------------------------------------

_SPARK_TYPES: Final = {
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    MOMENT: "TIMESTAMP",
    pa.timestamp("us"): "TIMESTAMP_NTZ",
    pa.date32(): "DATE",
}


def spark_ddl(fields: Iterable[pa.Field]) -> str:
    """Return Arrow columns as a schema in Spark's DDL."""
    return ", ".join(
        f"{_quoted(each.name)} {spark_type(each.type)}{'' if each.nullable else ' NOT NULL'}" for each in fields
    )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def spark_type(kind: pa.DataType) -> str:
    """Return the type of a column in Spark's DDL."""
    return f"DECIMAL({kind.precision}, {kind.scale})" if pa.types.is_decimal(kind) else _SPARK_TYPES[kind]
