"""Pieces as Arrow record batches, with the schema of each piece or with one schema for all.

There are two shapes, as in `columns/arrow_columns.py`: generic for rows of any space, typed for rows of one space. The
definition of a space can change in the log; `TypedShape.schema` reads ahead and merges the columns of all definitions
by name.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flowstone.box.schema import SpaceDefinition
from flowstone.columns.arrow_columns import (
    GENERIC_SCHEMA,
    TRAILING_FIELDS,
    Column,
    ColumnOptions,
    TypedDecoder,
    generic_batch,
    json_spans,
)
from flowstone.errors import FlowstoneError
from flowstone.history.log_reading import Piece, Reading
from flowstone.iproto import scan as rows_of
from flowstone.text.row_table import UnknownColumn

MESSAGEPACK_COLUMNS = frozenset(("key", "tuple", "operations", "_key", "_operations"))
"""Binary columns that contain MessagePack."""

LAST_COLUMNS = tuple(field.name for field in TRAILING_FIELDS)


class ColumnConflict(FlowstoneError):
    """Two definitions of a space give a column different types."""


@dataclass
class TypedShape:
    """The rows of one space, with a column per field. `wanted` selects columns by name.

    With `partial`, rows may lack fields (UPDATE, DELETE), so all columns are nullable; otherwise they are as declared.
    """

    options: ColumnOptions = field(default_factory=ColumnOptions)
    wanted: Collection[str] | None = None
    partial: bool = True
    _decoders: dict[SpaceDefinition | None, TypedDecoder] = field(default_factory=dict)

    def batch(self, piece: Piece) -> pa.RecordBatch:
        """Return the rows of a piece, with the columns of their space at that point of the log."""
        return self._decoder(piece).batch(piece.slab, piece.rows)

    def schema(self, pieces: Iterable[Piece]) -> pa.Schema:
        """Return the columns of all definitions that the pieces use; a column is null where a definition lacks it."""
        found: list[TypedDecoder] = []
        for piece in pieces:
            decoder = self._decoder(piece)
            if decoder not in found:
                found.append(decoder)
        schema = _united([decoder.schema for decoder in found or [TypedDecoder(())]])
        return schema if self.wanted is None else _limited(schema, self.wanted)

    def batches(self, pieces: Iterable[Piece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the schema that `schema()` returned for the same pieces."""
        for piece in pieces:
            batch = self.batch(piece)
            yield pa.RecordBatch.from_arrays([_column(batch, each) for each in schema], schema=schema)

    def _decoder(self, piece: Piece) -> TypedDecoder:
        space = piece.schema.get(int(piece.slab.cells[rows_of.SPACE_ID, piece.rows[0]]))
        decoder = self._decoders.get(space)
        if decoder is None:
            decoder = self._decoders[space] = self._new_decoder(space)
        return decoder

    def _new_decoder(self, space: SpaceDefinition | None) -> TypedDecoder:
        """Return a decoder; for a space that the log does not define, one without columns except `_extra`."""
        fields = space.fields if space is not None else ()
        key = space.primary_key if space is not None else None
        return TypedDecoder(
            [Column(each.name, each.type, each.is_nullable) for each in fields],
            key_fields=[] if key is None else [-1 if part.path else part.field for part in key.parts],
            partial=self.partial,
            options=self.options,
        )


def _united(schemas: Sequence[pa.Schema]) -> pa.Schema:
    fields: dict[str, pa.Field] = {}
    for schema in schemas:
        for each in schema:
            known = fields.setdefault(each.name, each)
            if known.type != each.type:
                raise ColumnConflict(
                    f"column {each.name!r} is {known.type} in one definition of the space and {each.type} in another",
                    hint="read the log before and after the space was altered separately, with --from and --to",
                )
            fields[each.name] = known.with_nullable(known.nullable or each.nullable)
    everywhere = [name for name in fields if all(name in schema.names for schema in schemas)]
    united = [each if name in everywhere else each.with_nullable(True) for name, each in fields.items()]
    last = [each for each in united if each.name in LAST_COLUMNS]
    return pa.schema([*(each for each in united if each.name not in LAST_COLUMNS), *last])


def _limited(schema: pa.Schema, wanted: Collection[str]) -> pa.Schema:
    unknown = sorted(set(wanted) - set(schema.names))
    if unknown:
        raise UnknownColumn(f"no column {unknown[0]!r}", hint=f"known columns: {', '.join(schema.names)}")
    return pa.schema([schema.field(name) for name in wanted])


def _column(batch: pa.RecordBatch, wanted: pa.Field) -> pa.Array:
    at = batch.schema.get_field_index(wanted.name)
    return batch.column(at) if at >= 0 else pa.nulls(len(batch), wanted.type)


SPACE_COLUMN = pa.field("space", pa.string())
_SPACE_AT = GENERIC_SCHEMA.get_field_index("space_id") + 1


@dataclass
class GenericShape:
    """Rows of any space: MessagePack as binary columns, and the name of the space next to its id."""

    wanted: Collection[str] | None = None

    def schema(self) -> pa.Schema:
        schema = GENERIC_SCHEMA.insert(_SPACE_AT, SPACE_COLUMN)
        return schema if self.wanted is None else _limited(schema, self.wanted)

    def batches(self, pieces: Iterable[Piece]) -> Iterator[pa.RecordBatch]:
        schema = self.schema()
        for piece in pieces:
            batch = generic_batch(piece.slab, piece.rows)
            batch = batch.add_column(_SPACE_AT, SPACE_COLUMN, _space_names(piece))
            yield batch.select(schema.names)


def _space_names(piece: Piece) -> pa.Array:
    space_ids = piece.slab.cells[rows_of.SPACE_ID, piece.rows]
    distinct, places = np.unique(space_ids, return_inverse=True)
    spaces = [piece.schema.get(space_id) for space_id in distinct.tolist()]
    names = pa.array([space.name if space is not None else None for space in spaces], pa.string())
    return names.take(pa.array(places))


def typed_reader(readings: tuple[Reading, Reading], shape: TypedShape) -> pa.RecordBatchReader:
    """Return the rows of one space with one schema. The first of two readings of the same files finds the schema."""
    schema = shape.schema(readings[0].pieces())
    return pa.RecordBatchReader.from_batches(schema, shape.batches(readings[1].pieces(), schema))


def text_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of `text_batch`: the columns as types that a text file can represent."""
    return pa.schema([each.with_type(_text_type(each.type)) for each in schema])


def text_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with MessagePack as JSON and other binary columns in base64."""
    arrays = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_binary(column.type):
            column = json_of_messagepack(column) if name in MESSAGEPACK_COLUMNS else _base64(column)
        arrays.append(column.cast(_text_type(column.type)))
    return pa.RecordBatch.from_arrays(arrays, schema=text_schema(batch.schema))


def _text_type(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_binary(kind) or pa.types.is_dictionary(kind) else kind


def _base64(column: pa.Array) -> pa.Array:
    return pa.array([None if each is None else b64encode(each).decode() for each in column.to_pylist()], pa.string())


def json_of_messagepack(column: pa.Array) -> pa.Array:
    """Return a binary column of MessagePack as JSON text; nil becomes null, like a missing value."""
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.string())
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    starts = np.where(np.asarray(column.is_valid()), offsets[:-1], -1)
    return json_spans(np.frombuffer(data, np.uint8), starts, offsets[1:])
