"""Applies the operations of UPDATE and UPSERT to a tuple (docs/spec/files.md#update-operations).

Pure functions on raw tuples, with the semantics, the resulting bytes and the error codes of the real server: values
that no operation touches keep their bytes. `update` and `upsert` do the same for decoded tuples. An operation is
checked when it is decoded (`operation.py`) and again when it is applied to a tuple (`tree.py`). Checking
the format and the keys of the result is up to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from flowstone.box.engine.format import TupleFormat
from flowstone.box.update.operation import OPERATIONS_MAX, Operation, decode_operations, is_changed_twice
from flowstone.box.update.tree import Array, Typed, Untyped
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack

__all__ = [
    "OPERATIONS_MAX",
    "Operation",
    "UpdateRules",
    "decode_operations",
    "update",
    "update_raw",
    "upsert",
    "upsert_raw",
]


FILL_MAX: Final = 1 << 24
"""Largest number of nil fields that `=` or `!` may add before its value, to bound memory; real tuples have fewer."""

_NIL: Final = b"\xc0"


class UpdateRules(NamedTuple):
    """Differences between server versions."""

    fills_gaps: bool = False
    """Since 2.8: `=` and `!` past the end of a tuple fill the gap with nils, and `#` past the end does nothing."""
    repeats: bool = False
    """Since 3.0: several operations may change one field; each applies to the result of the previous one."""


OLDEST: Final = UpdateRules()


def update_raw(
    raw: bytes, operations: Sequence[Operation], format: TupleFormat | None = None, rules: UpdateRules = OLDEST
) -> bytes:
    """Apply the operations from left to right and return the new tuple; raise the first error.

    `format` determines which fields must stay doubles. Without it a result is a double if the old value was.
    """
    typed = format or Untyped()
    root = Array(raw)
    for operation in operations:
        root = _applied(root, operation, typed, rules)
    return root.packed(typed)


def upsert_raw(
    raw: bytes, operations: Sequence[Operation], format: TupleFormat | None = None, rules: UpdateRules = OLDEST
) -> bytes:
    """Same as `update_raw`, but skip operations that fail, as servers do when an UPSERT finds a tuple."""
    typed = format or Untyped()
    root = Array(raw)
    for operation in operations:
        try:
            root = _applied(root, operation, typed, rules)
        except errors.TarantoolError:
            continue
    return root.packed(typed)


def _applied(root: Array, operation: Operation, typed: Typed, rules: UpdateRules) -> Array:
    if rules.fills_gaps and not operation.path and not _fill_gap(root, operation):
        return root
    steps = (operation.field, *operation.path)
    try:
        root.apply(operation, steps)
    except errors.TarantoolError as error:
        if not rules.repeats or not is_changed_twice(error):
            raise
        root = Array(root.packed(typed))
        root.apply(operation, steps)
    return root


def _fill_gap(root: Array, operation: Operation) -> bool:
    """Extend the tuple for the operation; return False if there is nothing to do: a deletion past the end."""
    gap = operation.field - len(root.items)
    if operation.code == "#":
        return gap < 0
    if operation.code in "=!" and gap > 0:
        if gap > FILL_MAX:
            raise errors.MemtxMaxTupleSize(
                f"Failed to allocate {gap} bytes for tuple: tuple is too large. "
                "Check 'memtx_max_tuple_size' configuration option."
            )
        root.items += [_NIL] * gap
    return True


def update(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """Same as `update_raw`, for a decoded tuple."""
    changed: tuple[Any, ...] = unpack(update_raw(pack(values), operations))
    return changed


def upsert(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """Same as `upsert_raw`, for a decoded tuple."""
    changed: tuple[Any, ...] = unpack(upsert_raw(pack(values), operations))
    return changed
