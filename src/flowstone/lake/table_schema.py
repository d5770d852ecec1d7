"""The layout of a space's table: its columns, their names, and how tuples fill them.

Pure: definitions, keys and tuples in, Arrow out. A table has the space's fields as typed columns for queries, and
`_key` and `_tuple` as the exact data, from which all other columns can be rebuilt. `columns/arrow_columns.py` defines
the types of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.columns.arrow_columns import MOMENT, Column, ColumnError, ColumnOptions, FieldMisfits, TypedDecoder
from flowstone.columns.change_contract import spark_type
from flowstone.columns.column_types import ColumnType
from flowstone.columns.tuple_slabs import slab_of_tuples
from flowstone.errors import FlowstoneError
from flowstone.lake.misfits import MisfitRows, Origins
from flowstone.text.row_table import UnknownColumn

EXTRA: Final = pa.field("_extra", pa.string())
REPLICASET: Final = pa.field("_replicaset_uuid", pa.string())
KEY: Final = pa.field("_key", pa.binary(), nullable=False)
TUPLE: Final = pa.field("_tuple", pa.binary(), nullable=False)
IS_CURRENT: Final = pa.field("_is_current", pa.bool_())
HISTORY_FIELDS: Final = (
    pa.field("_valid_from", MOMENT),
    pa.field("_valid_to", MOMENT),
    pa.field("_from_version", pa.int64()),
    pa.field("_to_version", pa.int64()),
    pa.field("_operation", pa.string()),
    pa.field("_replica_id", pa.int32()),
    pa.field("_lsn", pa.int64()),
)
"""Columns of a state in a history table: when it was current, and the change that made it so."""

NOTE: Final = "flowstone"
"""Name under which the metadata of column `_tuple` describe the table: metadata change together with the schema."""

_COMMENT: Final = {"comment": "the tuple as it is, MessagePack"}
_REFUSED: Final = str.maketrans(dict.fromkeys(" ,;{}()\n\t=", "_"))
"""Characters that Delta does not allow in column names."""

_RESERVED: Final = frozenset(
    "_replica_id _lsn _tsn _timestamp _type _flags _extra _key _operations _index_id _index_base _tuple "
    "_replicaset_uuid _valid_from _valid_to _from_version _to_version _is_current _operation".split()
)
SET_PREFIX_SIZE: Final = 16
"""Bytes of the replica set's UUID before each key, in a lake of several sets."""


class LakeError(FlowstoneError):
    """Something in a lake is not as expected; the message says what and where."""


def column_names(space: SpaceDefinition) -> tuple[str, ...]:
    """Return the column name of each field, in field order.

    A character that Delta refuses becomes `_`, and a field without a name `field_N`. Delta allows no names that differ
    only in case, and some names are reserved: a clashing field gets the suffix `_2`, `_3` …, in field order.
    """
    taken = set(_RESERVED)
    names: list[str] = []
    for number, each in enumerate(space.fields, 1):
        plain = name = each.name.translate(_REFUSED) or f"field_{number}"
        copy = 1
        while name.lower() in taken:
            copy += 1
            name = f"{plain}_{copy}"
        taken.add(name.lower())
        names.append(name)
    return tuple(names)


@dataclass(frozen=True)
class LakeSchema:
    """The columns of the table of one space, and the other facts in its note. Picklable.

    `sets` are the replica sets with rows in the table, `dropped` the replica sets whose space was dropped or renamed.
    `wanted` limits the fields that have columns, by field name; `_key`, `_tuple` and `_extra` always exist.
    `renamed_to` is the name under which the table continues. `types` are declared types of columns, by field name; a
    type that cannot hold its field is ignored.
    """

    space: SpaceDefinition
    sets: tuple[str, ...] = ()
    options: ColumnOptions = field(default_factory=ColumnOptions)
    wanted: tuple[str, ...] | None = None
    several_sets: bool = False
    history: bool = False
    dropped: tuple[str, ...] = ()
    renamed_to: str | None = None
    types: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders are not pickled; they are rebuilt on demand.
        return LakeSchema, tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """The field columns of the table."""
        names = column_names(self.space)
        if self.wanted is None:
            return names
        unknown = [name for name in self.wanted if name not in self.space.field_names]
        if unknown:
            raise UnknownColumn(
                f"space {self.space.name!r} has no field {unknown[0]!r}",
                hint=f"it has: {', '.join(self.space.field_names) or 'no format'}",
            )
        chosen = zip(self.space.field_names, names, strict=True)
        return tuple(name for field_name, name in chosen if field_name in self.wanted)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns in Delta's schema, with the note."""
        columns = [self._decoder.schema.field(name) for name in (*self.column_names, EXTRA.name)]
        if self.several_sets:
            columns.append(REPLICASET)
        if self.history:
            columns += [*HISTORY_FIELDS, IS_CURRENT]
        return pa.schema([*columns, KEY, TUPLE.with_metadata({NOTE: self.note, **_COMMENT})])

    @property
    def file_schema(self) -> pa.Schema:
        """The columns in files: partition values are not stored in files, and the note is in the log only."""
        return pa.schema([each.remove_metadata() for each in self.schema if each.name != IS_CURRENT.name])

    @property
    def partition_by(self) -> list[str]:
        """Current and former rows are in separate files: only files of current rows are ever rewritten."""
        return [IS_CURRENT.name] if self.history else []

    @property
    def note(self) -> str:
        """All fields of this object as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_note(cls, note: str) -> LakeSchema:
        """Parse a `note`."""
        return msgspec.json.decode(note, type=cls)

    def moved(self, space: SpaceDefinition) -> LakeSchema:
        """Return this schema for another definition of the space, without wanted fields that no longer exist."""
        wanted = self.wanted
        if wanted is not None:
            wanted = tuple(name for name in wanted if name in space.field_names)
        return replace(self, space=space, wanted=wanted)

    def shows_as(self, other: LakeSchema) -> bool:
        """Return True if rows of both schemas are equal except for their keys; files can then stay as they are."""
        ours, theirs = ((each._shown, each.options, each.history) for each in (self, other))
        return ours == theirs

    @property
    def _shown(self) -> list[tuple[str | None, str, ColumnType | None]]:
        """The column (if any) and types of each field, because a name may move from one field to another."""
        named = zip(column_names(self.space), self.space.fields, strict=True)
        return [(name if name in self.column_names else None, each.type, self._declared(each)) for name, each in named]

    def _declared(self, each: FieldDefinition) -> ColumnType | None:
        text = dict(self.types).get(each.name)
        kind = None if text is None else ColumnType.parse(text)
        return kind if kind is not None and kind.holds(each.type) else None

    def has_keys_of(self, other: LakeSchema) -> bool:
        """Return True if both have the same primary key."""
        ours, theirs = self.space.primary_key, other.space.primary_key
        return (ours and ours.parts) == (theirs and theirs.parts)

    @cached_property
    def _decoder(self) -> TypedDecoder:
        names = column_names(self.space)
        columns = [
            Column(name, each.type, declared=self._declared(each))
            for name, each in zip(names, self.space.fields, strict=True)
        ]
        return TypedDecoder(columns, options=self.options, wanted=[*self.column_names, EXTRA.name])

    def field_of(self, column: str) -> str:
        """Return the name of a column's field; the column's own name if the field has none."""
        return self.space.fields[column_names(self.space).index(column)].name or column

    def field_type_of(self, column: str) -> str:
        """Return the type of a column's field."""
        return self.space.fields[column_names(self.space).index(column)].type

    def spark_type_of(self, column: str) -> str:
        """Return the type of a column in Spark's DDL."""
        return spark_type(self.schema.field(column).type)

    def prefix(self, replicaset_uuid: str) -> bytes:
        """Return the prefix in `_key` before the sort keys of a replica set."""
        return UUID(replicaset_uuid).bytes if self.several_sets else b""

    def rows(
        self,
        keys: pa.Array,
        tuples: pa.Array,
        states: dict[str, pa.Array] | None = None,
        *,
        misfits: MisfitRows | None = None,
        origins: Origins | None = None,
    ) -> pa.Table:
        """Return rows of `file_schema`. `keys` are values of `_key` including the prefix; no tuple is null.

        `states` are the columns of HISTORY_FIELDS, for a history. A value that does not fit its column raises
        LakeError; with `misfits`, the value is null and is added to them. `origins` are the changes that wrote the
        rows; None if the rows are only rebuilt.
        """
        keys, tuples = _whole(keys), _whole(tuples)
        decoded = self._decoded(keys, tuples, misfits, origins)
        found: dict[str, pa.Array] = {name: decoded.column(name) for name in decoded.schema.names}
        found |= {KEY.name: keys, TUPLE.name: tuples, **(states or {})}
        if self.several_sets:
            found[REPLICASET.name] = _sets_of(keys)
        return pa.Table.from_arrays([found[name] for name in self.file_schema.names], schema=self.file_schema)

    def collect_misfits(self, keys: pa.Array, tuples: pa.Array, misfits: MisfitRows) -> None:
        """Add the misfits of rows that exist."""
        self._decoded(_whole(keys), _whole(tuples), misfits, None)

    def _decoded(
        self, keys: pa.Array, tuples: pa.Array, misfits: MisfitRows | None, origins: Origins | None
    ) -> pa.RecordBatch:
        slab = slab_of_tuples(tuples, self.space.id, self.space.name)
        found: list[FieldMisfits] | None = None if misfits is None else []
        try:
            decoded = self._decoder.batch(slab, np.arange(len(slab), dtype=np.int64), found)
        except ColumnError as error:
            raise _with_key(error, self.space, keys, tuples, self._decoder) from None
        if misfits is not None and found:
            misfits.add(self, keys, tuples, found, origins)
        return decoded


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def prefixed(prefix: bytes, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return sort keys of one replica set as values of `_key`."""
    keys = _whole(keys)
    if not prefix:
        return keys
    _, offsets, data = keys.buffers()
    edges = np.frombuffer(offsets, np.int32, len(keys) + 1, 4 * keys.offset).astype(np.int64)
    lengths = np.diff(edges)
    out_edges = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(lengths + len(prefix), out=out_edges[1:])
    out = np.empty(int(out_edges[-1]), np.uint8)
    is_prefix = np.zeros(len(out), np.bool_)
    for place in range(len(prefix)):
        is_prefix[out_edges[:-1] + place] = True
    out[is_prefix] = np.tile(np.frombuffer(prefix, np.uint8), len(keys))
    out[~is_prefix] = np.frombuffer(data, np.uint8)[edges[0] : edges[-1]] if data is not None else []
    buffers = [None, pa.py_buffer(out_edges.astype(np.int32)), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.binary(), len(keys), buffers)


def unprefixed(size: int, keys: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return values of `_key` as sort keys: without the first `size` bytes."""
    # Without an end, Arrow assumes 2^63 bytes per row, which overflows from the second row on.
    return pc.binary_slice(keys, size, np.iinfo(np.int32).max) if size else keys


def _sets_of(keys: pa.Array) -> pa.Array:
    """Return the UUIDs in the prefixes of keys."""
    encoded = pc.dictionary_encode(pc.binary_slice(keys, 0, SET_PREFIX_SIZE))
    names: Sequence[str] = [str(UUID(bytes=each)) for each in encoded.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(encoded.indices)


def _with_key(
    error: ColumnError, space: SpaceDefinition, keys: pa.Array, tuples: pa.Array, decoder: TypedDecoder
) -> LakeError:
    """Return the error with the key of the first tuple that does not fit: a row number would not help the user."""
    for number in range(len(tuples)):
        slab = slab_of_tuples(tuples.slice(number, 1), space.id, space.name)
        try:
            decoder.batch(slab, np.zeros(1, np.int64))
        except ColumnError as found:
            what = found.message.rpartition(": ")[2]
            key = keys[number].as_py().hex()
            return LakeError(f"space {space.name!r}, tuple with _key x'{key}': {what}", hint=_hint(found))
    return LakeError(error.message, hint=_hint(error))


def _hint(error: ColumnError) -> str | None:
    """Return a hint; unless the error offers a choice, the remedy is to leave the column out of the table."""
    return error.hint if error.hint and "choose" in error.hint else "specify the columns of the table"
