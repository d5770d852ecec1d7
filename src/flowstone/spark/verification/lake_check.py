"""Check that the columns of a lake's rows agree with their tuples: rebuild them from `_tuple` and compare.

Pure: record batches of a table's file in, rows to compare with other sides out. `_tuple` is authoritative; a `_key` or
typed column that disagrees was changed by someone else, or is the result of a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.columns.sort_keys import sort_keys
from flowstone.errors import FlowstoneError
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.table_schema import EXTRA, KEY, TUPLE, LakeSchema, prefixed
from flowstone.spark.verification.tuple_differences import BrokenTuple, check_whole

CHECKED: pa.Schema = pa.schema(
    [
        pa.field("space_id", pa.int64()),
        pa.field("sort_key", pa.binary()),
        pa.field("tuple", pa.binary()),
        pa.field("wrong", pa.string()),
    ]
)

_PLAIN: Final = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


def checked_rows(schema: LakeSchema, replicaset_uuid: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows of one replica set; `wrong` names the columns of a row that contradict its tuple."""
    prefix = schema.prefix(replicaset_uuid)
    batch = _plain(batch)
    if prefix:
        batch = batch.filter(pc.equal(pc.binary_slice(batch.column(KEY.name), 0, len(prefix)), prefix))
    if _are_whole(batch.column(TUPLE.name)):
        try:
            return _checked(schema, prefix, batch)
        except FlowstoneError:
            pass  # some tuple does not fit: check row by row
    parts = [_checked_one(schema, prefix, batch.slice(row, 1)) for row in range(len(batch))]
    return (
        pa.Table.from_batches(parts, CHECKED).combine_chunks().to_batches()[0] if parts else _rows(schema, [], [], [])
    )


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with plain Arrow types instead of views, and with a key and a tuple in every row.

    delta-rs writes files of views, which Arrow can neither filter nor take from. A null key or tuple counts as empty.
    """
    for place, column in enumerate(batch.columns):
        if column.type in _PLAIN:
            batch = batch.set_column(place, batch.schema.field(place).name, column.cast(_PLAIN[column.type]))
    for name in (KEY.name, TUPLE.name):
        place = batch.schema.get_field_index(name)
        if place < 0:
            batch = batch.append_column(name, pa.array([b""] * len(batch), pa.binary()))
        else:
            batch = batch.set_column(place, name, pc.fill_null(batch.column(place).cast(pa.binary()), b""))
    return batch


def _are_whole(tuples: pa.Array) -> bool:
    """Return True if each tuple is exactly one MessagePack value: kernels do not check their input."""
    _, offsets, data = tuples.buffers()
    if not len(tuples):
        return True
    edges = np.frombuffer(offsets, np.int32, len(tuples) + 1, 4 * tuples.offset)
    reader = msgpack.Unpacker(max_buffer_size=2**31 - 1)
    reader.feed(memoryview(data)[int(edges[0]) : int(edges[-1])] if data is not None else b"")
    begin = int(edges[0])
    try:
        for edge in edges[1:].tolist():
            reader.skip()
            if reader.tell() != edge - begin:
                return False
    except (msgpack.UnpackException, ValueError):
        return False
    return True


def _checked(schema: LakeSchema, prefix: bytes, batch: pa.RecordBatch) -> pa.RecordBatch:
    keys, tuples = batch.column(KEY.name), batch.column(TUPLE.name)
    own_keys = sort_keys(schema.space, tuples)
    wrong: dict[int, list[str]] = {}
    for row in _differing(keys, prefixed(prefix, own_keys)):
        wrong.setdefault(row, []).append(
            f"_key is x'{keys[row].as_py().hex()}', but its tuple has x'{own_keys[row].as_py().hex()}'"
        )
    # A value that does not fit its column is null there, and in the quarantine.
    misfits, states = MisfitRows(), _no_states(schema, len(batch))
    expected = schema.rows(prefixed(prefix, own_keys), tuples, states, misfits=misfits)
    for name in (*schema.column_names, EXTRA.name):
        stored = batch.column(name) if name in batch.schema.names else pa.nulls(len(batch), expected.column(name).type)
        theirs = expected.column(name).combine_chunks()
        for row in _differing(stored, theirs):
            wrong.setdefault(row, []).append(f"{name} is {_text(stored[row])}, but its tuple has {_text(theirs[row])}")
    texts = (
        [None] * len(batch)
        if not wrong
        else ["; ".join(wrong[row]) if row in wrong else None for row in range(len(batch))]
    )
    return _rows(schema, own_keys, tuples, texts)


def _no_states(schema: LakeSchema, count: int) -> dict[str, pa.Array] | None:
    if not schema.history:
        return None
    names = ("_valid_from", "_valid_to", "_from_version", "_to_version", "_operation", "_replica_id", "_lsn")
    return {name: pa.nulls(count, schema.schema.field(name).type) for name in names}


def _checked_one(schema: LakeSchema, prefix: bytes, row: pa.RecordBatch) -> pa.RecordBatch:
    key, data = row.column(KEY.name)[0].as_py(), row.column(TUPLE.name)[0].as_py()
    try:
        check_whole(data)
        return _checked(schema, prefix, row)
    except BrokenTuple:
        what = f"_tuple is not a tuple: x'{data[:32].hex()}'"
    except FlowstoneError as error:
        what = f"_tuple does not fit the space: {error.message}"
    return _rows(schema, [key[len(prefix) :]], [data], [what])


def _rows(schema: LakeSchema, keys: Any, tuples: Any, wrong: Any) -> pa.RecordBatch:
    columns = [pa.array(each, kind) if isinstance(each, list) else each
               for each, kind in ((keys, pa.binary()), (tuples, pa.binary()), (wrong, pa.string()))]  # fmt: skip
    space_ids = pa.repeat(pa.scalar(schema.space.id, pa.int64()), len(columns[0]))
    return pa.RecordBatch.from_arrays([space_ids, *columns], schema=CHECKED)


def _differing(stored: pa.Array, expected: pa.Array) -> Iterator[int]:
    """Yield the rows whose values differ; null equals null, and NaN equals NaN."""
    if stored.type != expected.type:
        try:
            stored = stored.cast(expected.type)
        except pa.ArrowException:
            yield from range(len(expected))
            return
    if stored.equals(expected):
        return
    for row, (ours, theirs) in enumerate(zip(stored, expected, strict=True)):
        if not ours.equals(theirs) and not (_is_nan(ours) and _is_nan(theirs)):
            yield row


def _is_nan(value: pa.Scalar) -> bool:
    plain = value.as_py() if pa.types.is_floating(value.type) else None
    return plain is not None and plain != plain


def _text(value: pa.Scalar) -> str:
    plain = value.as_py()
    if isinstance(plain, bytes):
        return f"x'{plain.hex()}'"
    return "null" if plain is None else repr(plain) if isinstance(plain, str) else str(plain)
