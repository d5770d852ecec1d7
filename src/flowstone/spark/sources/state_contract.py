"""The state contract: the columns of a state, and how tuples fill them.

Pure: slabs, tuples and definitions in, record batches out. The fields of a given space are typed columns; without a
space, tuples are JSON text and MessagePack. Batches of `tarantool` and of `xlog` with mode=state have these columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema
from flowstone.columns.arrow_columns import Column, ColumnOptions, TypedDecoder, span_column
from flowstone.columns.change_contract import EXTRA, ColumnClash, spark_ddl
from flowstone.columns.log_batches import json_of_messagepack
from flowstone.columns.tuple_slabs import slab_of_tuples
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab
from flowstone.text.row_table import UnknownColumn

SPACE: Final = pa.field("_space", pa.string())
SPACE_ID: Final = pa.field("_space_id", pa.int32(), nullable=False)
TUPLE: Final = pa.field("_tuple", pa.string())
TUPLE_MSGPACK: Final = pa.field("_tuple_msgpack", pa.binary())
REPLICASET_UUID: Final = pa.field("_replicaset_uuid", pa.string(), nullable=False)
GENERIC_FIELDS: Final = (SPACE, SPACE_ID, TUPLE, TUPLE_MSGPACK, REPLICASET_UUID)
"""The columns of a state without a space; with a space, columns that can be selected besides its fields."""


class FormatDiffers(FlowstoneError):
    """The fields of a space differ from those the query was planned with, or between replica sets."""


@dataclass(frozen=True)
class StateContract:
    """The columns of one state. `space` defines the typed columns; None for rows of any space.

    `wanted` selects columns by name, in that order. Picklable: it is sent to executors with their tasks.
    """

    replicaset_uuid: str
    space: SpaceDefinition | None = None
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    wanted: tuple[str, ...] | None = None
    show_system: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders are not pickled; executors create their own.
        return StateContract, (self.replicaset_uuid, self.space, self.columns, self.wanted, self.show_system)

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema. Raises ColumnClash and UnknownColumn, so read it before a query starts."""
        default = [*GENERIC_FIELDS]
        if self.space is not None:
            decoded = self._decoder_of(None).schema
            default = [decoded.field(name) for name in (*self.space.field_names, EXTRA.name)]
        if self.wanted is None:
            return pa.schema(default)
        known = {each.name: each for each in (*default, *GENERIC_FIELDS)}
        unknown = [name for name in self.wanted if name not in known]
        if unknown:
            raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(known)}")
        return pa.schema([known[name] for name in self.wanted])

    @property
    def spark_schema(self) -> str:
        """The schema as Spark DDL."""
        return spark_ddl(self.schema)

    @cached_property
    def _decoder(self) -> TypedDecoder | None:
        if self.space is None:
            return None
        return self._decoder_of([name for name in (*self.space.field_names, EXTRA.name) if name in self.schema.names])

    def _decoder_of(self, wanted: Sequence[str] | None) -> TypedDecoder:
        assert self.space is not None
        ours = {each.name for each in (EXTRA, *GENERIC_FIELDS)}
        clash = [each.name for each in self.space.fields if each.name in ours]
        if clash:
            raise ColumnClash(
                f"field {clash[0]!r} of space {self.space.name!r} has the name of a metadata column",
                hint="rename the field, or read JSON by omitting `space`",
            )
        columns = [Column(each.name, each.type, each.is_nullable) for each in self.space.fields]
        return TypedDecoder(columns, options=self.columns, wanted=wanted)

    def batch(self, slab: Slab, rows: Cells, schema: Schema) -> pa.RecordBatch:
        """Return the numbered rows of a slab as a record batch.

        The numbers are ascending, every row has a tuple, and all rows belong to the contract's space if it has one.
        `schema` provides the names of spaces.
        """
        found: dict[str, pa.Array] = {}
        if self._decoder is not None:
            decoded = self._decoder.batch(slab, rows)
            found = dict(zip(decoded.schema.names, decoded.columns, strict=True))
        for name in self.schema.names:
            if name not in found:
                found[name] = self._generic(name, slab, rows, schema)
        # Built from a struct array, because a batch without columns must still have a row count.
        children = [found[name] for name in self.schema.names]
        struct = pa.Array.from_buffers(pa.struct(self.schema), len(rows), [None], children=children)
        return pa.RecordBatch.from_struct_array(struct)

    def of_tuples(self, tuples: pa.Array) -> pa.RecordBatch:
        """Return a record batch of tuples of the space, given as MessagePack. None of them may be null."""
        assert self.space is not None
        slab = slab_of_tuples(tuples, self.space.id, self.space.name)
        return self.batch(slab, np.arange(len(slab), dtype=np.int64), Schema({self.space.id: self.space}))

    def _generic(self, name: str, slab: Slab, rows: Cells, schema: Schema) -> pa.Array:
        cells = slab.cells
        match name:
            case "_replicaset_uuid":
                return pa.repeat(pa.scalar(self.replicaset_uuid, pa.string()), len(rows))
            case "_space_id":
                return pa.array(cells[scan.SPACE_ID, rows].astype(np.int32))
            case "_space":
                return _space_names(cells[scan.SPACE_ID, rows], schema)
        tuples = span_column(slab.buf, cells[scan.TUPLE_AT, rows], cells[scan.TUPLE_END, rows])
        return tuples if name == TUPLE_MSGPACK.name else json_of_messagepack(tuples)


def _space_names(space_ids: Cells, schema: Schema) -> pa.Array:
    distinct, places = np.unique(space_ids, return_inverse=True)
    spaces = [schema.get(space_id) for space_id in distinct.tolist()]
    names = pa.array([space.name if space is not None else None for space in spaces], pa.string())
    return names.take(pa.array(places))
