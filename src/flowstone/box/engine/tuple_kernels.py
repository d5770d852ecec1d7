"""Compiled: checks of a tuple against a format, and the offsets of its fields.

A tuple that is not accepted is invalid or only unusual (deeply nested, an extension in a typed field): the caller then
applies the plain rules of `format.py`.
"""

from __future__ import annotations

import cython
import numpy as np

from flowstone.box.engine.field_types import KIND_ALL as _KIND_ALL
from flowstone.box.engine.field_types import KINDS as _KINDS
from flowstone.iproto.limits import NESTING_MAX

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import (
        CHILDREN,
        FIXED,
        LENGTH,
        NO_VALUE,
        read_array,
        value_end,
    )
    from flowstone.native.words import big16, big32, byte

KIND_ALL = _KIND_ALL
KINDS = np.array(_KINDS, np.int64)
STACK_SIZE = NESTING_MAX
"""Size of the scratch array of `nested_end`: one entry per level of nesting."""


def nested_end(buf: Bytes, at: int, end: int, stack: Cells) -> int:
    """Return the offset after the value at `at`; -1 if it is malformed, ends after `end` or is nested too deeply."""
    depth = 0
    stack[0] = 1
    while depth >= 0:
        if stack[depth] == 0:
            depth -= 1
            continue
        stack[depth] -= 1
        if at >= end:
            return -1
        marker = byte(buf, at)
        at += 1
        width = byte(LENGTH, marker)
        children = byte(CHILDREN, marker)
        if width == 0:
            at += byte(FIXED, marker)
        else:
            if width == NO_VALUE or at + width > end:
                return -1
            count = byte(buf, at) if width == 1 else (big16(buf, at) if width == 2 else big32(buf, at))
            at += width
            if children:
                children *= count
            else:
                at += count + byte(FIXED, marker)
        if children:
            depth += 1
            if depth >= stack.shape[0]:
                return -1
            stack[depth] = children
    return at if at <= end else -1


def check_tuple(
    buf: Bytes, at: int, end: int, masks: Cells, count_min: int, count_exact: int, starts: Cells, stack: Cells
) -> int:
    """Check the tuple between `at` and `end` against a format; return 1 if it is accepted, else 0.

    `masks` has the allowed kinds of each field. `starts` receives the offset of each field, -1 for a missing one.
    """
    count, at = read_array(buf, at, end)
    if count < count_min or (count_exact and count != count_exact):
        return 0
    for field in range(count, starts.shape[0]):
        starts[field] = -1
    for field in range(count):
        if at >= end:
            return 0
        marker = byte(buf, at)
        kind = KINDS[marker]
        allowed = masks[field] if field < masks.shape[0] else KIND_ALL
        if kind:
            if not kind & allowed:
                return 0
        elif allowed != KIND_ALL:
            return 0
        if field < starts.shape[0]:
            starts[field] = at
        if byte(CHILDREN, marker) or byte(LENGTH, marker):
            at = nested_end(buf, at, end, stack)
            if at < 0:
                return 0
        else:
            at += 1 + byte(FIXED, marker)
    return 1 if at == end else 0


def note_fields(buf: Bytes, at: int, end: int, starts: Cells) -> int:
    """Set `starts` to the offsets of the first fields of a tuple, -1 for a missing field.

    Return 1, or 0 if the tuple is not complete.
    """
    count, at = read_array(buf, at, end)
    for field in range(starts.shape[0]):
        if field >= count:
            starts[field] = -1
            continue
        starts[field] = at
        if at >= end:
            return 0
        marker = byte(buf, at)
        if byte(CHILDREN, marker) or byte(LENGTH, marker):
            at = value_end(buf, at, end)
            if at < 0:
                return 0
        else:
            at += 1 + byte(FIXED, marker)
    return 1 if at <= end else 0
