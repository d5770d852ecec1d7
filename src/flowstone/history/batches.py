"""A reading as Arrow record batches: every row in the generic shape, or one space with its own columns.

A typed batch has the columns that the space had as of its rows; where the definition changes, so does the schema of
the batches from there on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa

from flowstone.box.schema import SpaceDefinition
from flowstone.history.reading import Reading
from flowstone.xlog.columns import Column, ColumnOptions, TypedDecoder, generic_batch
from flowstone.xlog.meta import FileType


def generic_batches(reading: Reading) -> Iterator[pa.RecordBatch]:
    """Every row of the reading, MessagePack kept as binary."""
    for piece in reading.pieces():
        yield generic_batch(piece.slab, piece.rows)


def typed_batches(
    reading: Reading,
    space: int | str,
    *,
    options: ColumnOptions = ColumnOptions(),
    wanted: Collection[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of `space` (an id, or a name as of the row), whose reading selects that space and no other."""
    decoders: dict[tuple[SpaceDefinition | None, bool], TypedDecoder] = {}
    for piece in reading.pieces():
        definition = piece.schema.get(space)
        partial = piece.meta.file_type is not FileType.SNAP
        decoder = decoders.get((definition, partial))
        if decoder is None:
            decoder = decoders[definition, partial] = typed_decoder(definition, partial, options, wanted)
        yield decoder.batch(piece.slab, piece.rows)


def typed_decoder(
    definition: SpaceDefinition | None,
    partial: bool,
    options: ColumnOptions = ColumnOptions(),
    wanted: Collection[str] | None = None,
) -> TypedDecoder:
    """The decoder for a space; one that the log does not define has no columns of its own, only `_extra`."""
    if definition is None:
        return TypedDecoder((), partial=partial, options=options, wanted=wanted)
    columns = [Column(field.name, field.type, field.is_nullable) for field in definition.fields]
    key = definition.primary_key
    key_fields = [] if key is None else [part.field if not part.path else -1 for part in key.parts]
    return TypedDecoder(columns, key_fields=key_fields, partial=partial, options=options, wanted=wanted)
