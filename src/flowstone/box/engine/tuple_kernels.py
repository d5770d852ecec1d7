"""Compiled: passes over many tuples or keys that check them against a format and extract their primary keys.

A pass returns the number of the first tuple or key that it cannot accept, or -1. That tuple is invalid or only unusual
(deeply nested, a number from 2^63 on, an extension in a typed field): the caller then applies the plain rules of
`format.py` and `keys.py` to each tuple.
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
        read_integer,
        read_text,
        value_end,
    )
    from flowstone.native.words import big16, big32, byte, source

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


def note_key(buf: Bytes, at: int, is_text: int, keys: Cells, i: int) -> int:
    """Set column `i` to the key at `at`: a number, or start and end of a string. Return 1 if the type fits, else 0."""
    if is_text:
        start, end = read_text(buf, at)
        keys[0, i], keys[1, i] = start, end
        return 1 if start >= 0 else 0
    value, fits = read_integer(buf, at)
    keys[0, i] = value
    return fits


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


def check_tuples(
    buf: Bytes,
    ats: Cells,
    ends: Cells,
    masks: Cells,
    count_min: int,
    count_exact: int,
    key_field: int,
    is_text: int,
    keys: Cells,
    stack: Cells,
    starts: Cells,
) -> int:
    """Check the tuples between `ats[i]` and `ends[i]` against a format, and extract their keys into `keys`.

    `masks` has the allowed kinds of each field, `starts` room for the offset of each up to the key. Return the number
    of the first tuple that is not accepted, or -1.
    """
    data = source(buf)
    for i in range(ats.shape[0]):
        if not check_tuple(data, ats[i], ends[i], masks, count_min, count_exact, starts, stack):
            return i
        if starts[key_field] < 0 or not note_key(data, starts[key_field], is_text, keys, i):
            return i
    return -1


def check_keys(buf: Bytes, ats: Cells, ends: Cells, allowed: int, is_text: int, keys: Cells) -> int:
    """Extract the keys of requests: arrays of one element of the allowed kinds.

    Return the number of the first key that is not accepted, or -1.
    """
    data = source(buf)
    for i in range(ats.shape[0]):
        count, at = read_array(data, ats[i], ends[i])
        # The request scanner has checked that the array is complete.
        if count != 1 or not KINDS[byte(data, at)] & allowed or not note_key(data, at, is_text, keys, i):
            return i
    return -1
