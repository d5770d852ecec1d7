"""What the table of a space looks like: its columns, their names, and how tuples fill them.

Pure: definitions, keys and tuples in, Arrow out. A table has the space's fields as typed columns for people and
queries, and `_key` and `_tuple` for exactness: from these two everything else can be made again.
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

from flowstone.box.definitions import SpaceDefinition
from flowstone.errors import FlowstoneError
from flowstone.history.tables import UnknownColumn
from flowstone.spark.state_contract import slab_of_tuples
from flowstone.xlog.columns import MOMENT, Column, ColumnError, ColumnOptions, TypedDecoder

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
"""Of a state in a history table: from when to when it was the current one, and the change that made it so."""

NOTE: Final = "flowstone"
"""Under this name the metadata of column `_tuple` hold what the table is of: they change with the schema, at once."""

_COMMENT: Final = {"comment": "the tuple as it is, MessagePack"}
_REFUSED: Final = str.maketrans(dict.fromkeys(" ,;{}()\n\t=", "_"))
"""Characters that Delta does not take in names of columns."""

_RESERVED: Final = frozenset(
    "_replica_id _lsn _tsn _timestamp _type _flags _extra _key _operations _index_id _index_base _tuple "
    "_replicaset_uuid _valid_from _valid_to _from_version _to_version _is_current _operation".split()
)
SET_PREFIX_SIZE: Final = 16
"""Bytes of the replica set's UUID in front of each key, in a lake of several sets."""


class LakeError(FlowstoneError):
    """Something in a lake is not as it should be; the message says what, and where."""


def column_names(space: SpaceDefinition) -> tuple[str, ...]:
    """The name of each field's column, in the order of the fields.

    A character that Delta refuses becomes `_`, a field without a name `field_N`. Delta takes no names that differ only
    in case, and some are ours: such a field gets `_2`, `_3` … behind its name, in the order of fields.
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
    """The columns of the table of one space, and what else is noted about it. Picklable.

    `sets` are the replica sets whose rows are here, `dropped` those of them whose space is gone or has another name.
    `wanted` limits the fields that have columns, by the field's name; `_key`, `_tuple` and `_extra` stay. `renamed_to`
    is the name under which the table goes on.
    """

    space: SpaceDefinition
    sets: tuple[str, ...] = ()
    options: ColumnOptions = field(default_factory=ColumnOptions)
    wanted: tuple[str, ...] | None = None
    several_sets: bool = False
    history: bool = False
    dropped: tuple[str, ...] = ()
    renamed_to: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders are made again where they are needed.
        return LakeSchema, tuple(getattr(self, each.name) for each in fields(self))

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """The columns of fields that the table has."""
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
        """The columns as Delta has them, with the note."""
        columns = [self._decoder.schema.field(name) for name in (*self.column_names, EXTRA.name)]
        if self.several_sets:
            columns.append(REPLICASET)
        if self.history:
            columns += [*HISTORY_FIELDS, IS_CURRENT]
        return pa.schema([*columns, KEY, TUPLE.with_metadata({NOTE: self.note, **_COMMENT})])

    @property
    def file_schema(self) -> pa.Schema:
        """The columns as files have them: a partition's value is not in its files, and notes are in the log only."""
        return pa.schema([each.remove_metadata() for each in self.schema if each.name != IS_CURRENT.name])

    @property
    def partition_by(self) -> list[str]:
        """Current rows and former ones are in files apart: only those of the current ones are ever written anew."""
        return [IS_CURRENT.name] if self.history else []

    @property
    def note(self) -> str:
        """Everything that this object knows, as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_note(cls, note: str) -> LakeSchema:
        """What `note` wrote."""
        return msgspec.json.decode(note, type=cls)

    def moved(self, space: SpaceDefinition) -> LakeSchema:
        """This schema for another definition of the space; fields asked for that it no longer has are left out."""
        wanted = self.wanted
        if wanted is not None:
            wanted = tuple(name for name in wanted if name in space.field_names)
        return replace(self, space=space, wanted=wanted)

    def shows_as(self, other: LakeSchema) -> bool:
        """Whether rows of the one are rows of the other, all but their keys: if so, files may stay as they are."""
        ours, theirs = ((each._shown, each.options, each.history) for each in (self, other))
        return ours == theirs

    @property
    def _shown(self) -> list[tuple[str | None, str]]:
        """Of each field its column, if it has one, and its type: a name may go from one field to another."""
        named = zip(column_names(self.space), self.space.fields, strict=True)
        return [(name if name in self.column_names else None, each.type) for name, each in named]

    def has_keys_of(self, other: LakeSchema) -> bool:
        """Whether both have the same primary key."""
        ours, theirs = self.space.primary_key, other.space.primary_key
        return (ours and ours.parts) == (theirs and theirs.parts)

    @cached_property
    def _decoder(self) -> TypedDecoder:
        names = column_names(self.space)
        columns = [Column(name, each.type) for name, each in zip(names, self.space.fields, strict=True)]
        return TypedDecoder(columns, options=self.options, wanted=[*self.column_names, EXTRA.name])

    def prefix(self, replicaset_uuid: str) -> bytes:
        """What stands before the sort keys of a replica set in `_key`."""
        return UUID(replicaset_uuid).bytes if self.several_sets else b""

    def rows(self, keys: pa.Array, tuples: pa.Array, states: dict[str, pa.Array] | None = None) -> pa.Table:
        """Rows of `file_schema`: `keys` are values of `_key`, prefix and all; no tuple is null.

        `states` are the columns of HISTORY_FIELDS, in a history.
        """
        keys, tuples = _whole(keys), _whole(tuples)
        slab = slab_of_tuples(tuples, self.space.id, self.space.name)
        try:
            decoded = self._decoder.batch(slab, np.arange(len(slab), dtype=np.int64))
        except ColumnError as error:
            raise _with_key(error, self.space, keys, tuples, self._decoder) from None
        found: dict[str, pa.Array] = {name: decoded.column(name) for name in decoded.schema.names}
        found |= {KEY.name: keys, TUPLE.name: tuples, **(states or {})}
        if self.several_sets:
            found[REPLICASET.name] = _sets_of(keys)
        return pa.Table.from_arrays([found[name] for name in self.file_schema.names], schema=self.file_schema)


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def prefixed(prefix: bytes, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Sort keys of one replica set as values of `_key`."""
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
    """Values of `_key` as sort keys of their replica sets: without the first `size` bytes."""
    # Without an end Arrow reckons with 2^63 bytes a row, which overflows from the second row on.
    return pc.binary_slice(keys, size, np.iinfo(np.int32).max) if size else keys


def _sets_of(keys: pa.Array) -> pa.Array:
    """The UUIDs that stand before the keys."""
    encoded = pc.dictionary_encode(pc.binary_slice(keys, 0, SET_PREFIX_SIZE))
    names: Sequence[str] = [str(UUID(bytes=each)) for each in encoded.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(encoded.indices)


def _with_key(
    error: ColumnError, space: SpaceDefinition, keys: pa.Array, tuples: pa.Array, decoder: TypedDecoder
) -> LakeError:
    """The same with the key of the first tuple that does not fit: places in a table say nothing to anybody."""
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
    """A table has no other shape, but it can do without the column."""
    return error.hint if error.hint and "choose" in error.hint else "name the columns that the table shall have"
