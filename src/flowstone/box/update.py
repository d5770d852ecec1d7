"""Update operations: what UPDATE and UPSERT do to a tuple.

Pure functions on raw tuples, with the semantics, the bytes and the error codes of the real server: what no operation
touches keeps its bytes. `update` and `upsert` do the same to decoded tuples. An operation is checked when it is decoded
(`update_operation.py`) and once more against the tuple it meets (`update_tree.py`). Who holds the tuple, its format
and its keys is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from flowstone.box.format import TupleFormat
from flowstone.box.update_operation import OPERATIONS_MAX, Operation, decode_operations, is_changed_twice
from flowstone.box.update_tree import Array, Typed, Untyped
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
"""Fields that `=` or `!` may add in front of what it writes; no tuple of a sane size has more."""

_NIL: Final = b"\xc0"


class UpdateRules(NamedTuple):
    """What differs between ages of servers."""

    fills_gaps: bool = False
    """Since 2.8: `=` and `!` behind the end of a tuple fill the gap with nils, and `#` there does nothing."""
    repeats: bool = False
    """Since 3.0: several operations may change one field, each what the one before has left."""


OLDEST: Final = UpdateRules()


def update_raw(
    raw: bytes, operations: Sequence[Operation], format: TupleFormat | None = None, rules: UpdateRules = OLDEST
) -> bytes:
    """The tuple after all operations, left to right; the first that fails is the error.

    `format` tells where doubles must stay doubles. Without it a sum is one if the field was.
    """
    typed = format or Untyped()
    root = Array(raw)
    for operation in operations:
        root = _applied(root, operation, typed, rules)
    return root.packed(typed)


def upsert_raw(
    raw: bytes, operations: Sequence[Operation], format: TupleFormat | None = None, rules: UpdateRules = OLDEST
) -> bytes:
    """As `update_raw`, but an operation that fails is left out, as the server does for a tuple it finds."""
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
    """Makes the tuple long enough for the operation; False if that is a deletion, of nothing then."""
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
    """`update_raw` of a decoded tuple."""
    changed: tuple[Any, ...] = unpack(update_raw(pack(values), operations))
    return changed


def upsert(values: tuple[Any, ...], operations: Sequence[Operation]) -> tuple[Any, ...]:
    """`upsert_raw` of a decoded tuple."""
    changed: tuple[Any, ...] = unpack(upsert_raw(pack(values), operations))
    return changed
