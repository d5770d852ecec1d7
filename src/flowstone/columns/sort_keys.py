"""Encode the primary keys of many tuples or requests as bytes that sort in the order of the server.

Pure: Arrow arrays of MessagePack in, an array of keys out. The bytes are the concatenated encodings of the parts
(`box/engine/key_encoding.py`), for every type of index: equal keys have equal bytes, and no key is a prefix of another.
A kernel encodes the common types of parts; the plain encoders handle the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.box.bootstrap import collation_rows
from flowstone.box.definitions import IndexPart, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation, read_collation
from flowstone.box.engine.key_encoding import Encoder, encoder
from flowstone.box.engine.key_kernels import encode_keys
from flowstone.box.engine.key_parts import (
    FIXED_SIZE_MAX,
    PART_BINARY,
    PART_OF_TYPE,
    PART_SCALAR,
    PART_STRING,
)
from flowstone.box.engine.paths import find, parse_path
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import MessagePackError, unpack
from flowstone.iproto.scan import Bytes, Cells

_HAVE_TEXT: Final = frozenset((PART_STRING, PART_BINARY, PART_SCALAR))
_DIALECT: Final = Dialect.V2_11
"""Encodes doubles like numbers. This is also the order of an index of 2.6, which holds only doubles."""


class WrongKey(FlowstoneError):
    """A tuple or a key does not fit the primary key of its space."""


def sort_keys(
    space: SpaceDefinition, tuples: pa.Array, collations: Mapping[int, Collation] | None = None
) -> pa.BinaryArray:
    """Return the keys of tuples: null for a null tuple, and all null if the space has no primary key.

    `collations` are the user-defined ones; the built-in ones are known.
    """
    return _encode(space, tuples, of_requests=False, collations=collations)


def sort_keys_of_keys(
    space: SpaceDefinition, keys: pa.Array, collations: Mapping[int, Collation] | None = None
) -> pa.BinaryArray:
    """Return the sort keys of the keys in UPDATE and DELETE requests, which are keys of the primary index."""
    return _encode(space, keys, of_requests=True, collations=collations)


def _encode(
    space: SpaceDefinition, values: pa.Array, *, of_requests: bool, collations: Mapping[int, Collation] | None
) -> pa.BinaryArray:
    index = space.primary_key
    if index is None or values.null_count == len(values):
        return pa.nulls(len(values), pa.binary())
    kinds = _kinds(index.parts, collations)
    if kinds is None:
        keys, is_done = pa.nulls(len(values), pa.binary()), np.zeros(len(values), np.uint8)
    else:
        fields = range(len(index.parts)) if of_requests else [part.field for part in index.parts]
        keys, is_done = _compiled(values, np.array(fields, np.int64), kinds)
    is_left = is_done == 0
    if values.null_count:
        is_left &= values.is_valid().to_numpy(zero_copy_only=False)
        keys = pc.if_else(values.is_valid(), keys, pa.scalar(None, pa.binary()))
    if is_left.any():
        encode = _plain(index.parts, of_requests, collations)
        left = [_plain_key(space, encode, raw) for raw in values.filter(pa.array(is_left)).to_pylist()]
        keys = pc.replace_with_mask(keys, pa.array(is_left), pa.array(left, pa.binary()))
    return keys


# --- compiled -----------------------------------------------------------------------------------------------------


def _kinds(parts: tuple[IndexPart, ...], collations: Mapping[int, Collation] | None) -> Cells | None:
    """Return the kinds of the parts for the kernel, or None if it cannot encode any tuple."""
    if len({part.field for part in parts}) < len(parts):
        return None  # servers reject two parts on one field, but files may have them, and the kernel has no room for it
    for part in parts:
        if part.type not in PART_OF_TYPE or part.path is not None or part.is_nullable:
            return None
        if part.collation is not None and not _collation(part.collation, collations).is_binary:
            return None
    return np.array([PART_OF_TYPE[part.type] for part in parts], np.int64)


def _compiled(values: pa.Array, fields: Cells, kinds: Cells) -> tuple[pa.BinaryArray, Bytes]:
    """Return the keys, and a flag for each key that the kernel has encoded; the other keys are null."""
    count = len(values)
    offsets, buf = _layout(values)
    texts = 2 * int(offsets[-1] - offsets[0]) if _HAVE_TEXT.intersection(kinds.tolist()) else 0
    out = np.empty(count * len(kinds) * FIXED_SIZE_MAX + texts, np.uint8)
    ends, is_done = np.zeros(count + 1, np.int64), np.empty(count, np.uint8)
    done = encode_keys(buf, offsets, fields, kinds, np.empty(len(kinds), np.int64), out, ends[1:], is_done)
    size = int(ends[-1])
    data = pa.py_buffer(out[:size].tobytes())
    keys = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(ends), data])
    if done < count:
        keys = pc.if_else(pa.array(is_done.view(np.bool_)), keys, pa.scalar(None, pa.large_binary()))
    return keys.cast(pa.binary()), is_done


def _layout(values: pa.Array) -> tuple[Cells, Bytes]:
    """Return the offsets of the values and the buffer that holds them."""
    wide = values.cast(pa.large_binary())
    _, offsets, data = wide.buffers()
    begins = np.frombuffer(offsets, np.int64, len(wide) + 1, 8 * wide.offset)
    return begins, np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)


# --- one by one ---------------------------------------------------------------------------------------------------


def _plain(
    parts: tuple[IndexPart, ...], of_requests: bool, collations: Mapping[int, Collation] | None
) -> Callable[[Any], bytes]:
    """Return a function that encodes the key of a decoded tuple, or a decoded key."""
    steps: list[tuple[Any, ...]] = []
    encoders: list[Encoder] = []
    for number, part in enumerate(parts):
        steps.append((number,) if of_requests else (part.field, *parse_path(part.path or "")))
        collation = None if part.collation is None else _collation(part.collation, collations)
        encoders.append(encoder(part.type, part.is_nullable, collation, _DIALECT))
    pairs = list(zip(steps, encoders, strict=True))
    return lambda values: b"".join([encode(find(values, path)) for path, encode in pairs])


def _plain_key(space: SpaceDefinition, encode: Callable[[Any], bytes], raw: bytes) -> bytes:
    try:
        return encode(unpack(raw))
    except (TarantoolError, MessagePackError, AttributeError, TypeError, ValueError) as error:
        raise WrongKey(
            f"space {space.name!r}: {raw[:32].hex()} does not fit its primary key: {error}",
            hint="check whether the row was written under another definition of the space",
        ) from error


def _collation(number: int, collations: Mapping[int, Collation] | None) -> Collation:
    found = collations.get(number) if collations is not None else None
    if found is None:
        found = _known_collations().get(number)
    if found is None:
        raise WrongKey(f"primary key has unknown collation {number}")
    return found


@cache
def _known_collations() -> dict[int, Collation]:
    return {row[0]: read_collation(row) for row in collation_rows()}
