"""Update operations: what UPDATE and UPSERT do to a tuple.

Pure functions on raw tuples, with the semantics, the bytes and the error codes of the real server: what no operation
touches keeps its bytes. `update` and `upsert` do the same to decoded tuples. An operation is checked when it is decoded
(`update_operation.py`) and once more against the tuple it meets (`update_tree.py`). Who holds the tuple, its format
and its keys is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowstone.box.format import TupleFormat
from flowstone.box.update_operation import OPERATIONS_MAX, Operation, decode_operations
from flowstone.box.update_tree import Array, Untyped
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack

__all__ = [
    "OPERATIONS_MAX",
    "Operation",
    "decode_operations",
    "update",
    "update_raw",
    "upsert",
    "upsert_raw",
]


def update_raw(raw: bytes, operations: Sequence[Operation], format: TupleFormat | None = None) -> bytes:
    """The tuple after all operations, left to right; the first that fails is the error.

    `format` tells where doubles must stay doubles. Without it a sum is one if the field was.
    """
    root = Array(raw)
    for operation in operations:
        root.apply(operation, (operation.field, *operation.path))
    return root.packed(format or Untyped())


def upsert_raw(raw: bytes, operations: Sequence[Operation], format: TupleFormat | None = None) -> bytes:
    """As `update_raw`, but an operation that fails is left out, as the server does for a tuple it finds."""
    root = Array(raw)
    for operation in operations:
        try:
            root.apply(operation, (operation.field, *operation.path))
        except errors.TarantoolError:
            continue
    return root.packed(format or Untyped())


def update(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """`update_raw` of a decoded tuple."""
    changed: tuple[Any, ...] = unpack(update_raw(pack(values), operations))
    return changed


def upsert(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """`upsert_raw` of a decoded tuple."""
    changed: tuple[Any, ...] = unpack(upsert_raw(pack(values), operations))
    return changed
