"""Compiled passes over many tuples or keys: do they fit the format, and what are their primary keys.

A pass returns the number of the first one that a compiled rule cannot vouch for, or -1. It may be wrong or only
unusual (deeply nested, a number above 2^63, an extension where types are asked for): whoever calls then lets the
plain rules of `format.py` and `keys.py` decide, one by one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.box.engine.field_types import (
    KIND_ALL,
    KIND_ARRAY,
    KIND_BIN,
    KIND_BOOL,
    KIND_DOUBLE,
    KIND_FLOAT,
    KIND_INT,
    KIND_MAP,
    KIND_NIL,
    KIND_STR,
    KIND_UINT,
)
from flowstone.iproto.limits import NESTING_MAX
from flowstone.iproto.scan import CHILDREN, FIXED, LENGTH, NO_VALUE, Bytes, Cells
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import big16, big32, big64, byte


def _kinds() -> NDArray[np.int64]:
    """Per first byte of a value its kind; 0 for extensions, whose kind needs a second look."""
    kinds = np.zeros(256, np.int64)
    kinds[0x00:0x80] = KIND_UINT
    kinds[0x80:0x90] = KIND_MAP
    kinds[0x90:0xA0] = KIND_ARRAY
    kinds[0xA0:0xC0] = KIND_STR
    kinds[0xC0] = KIND_NIL
    kinds[0xC2:0xC4] = KIND_BOOL
    kinds[0xC4:0xC7] = KIND_BIN
    kinds[0xCA], kinds[0xCB] = KIND_FLOAT, KIND_DOUBLE
    kinds[0xCC:0xD0] = KIND_UINT
    kinds[0xD0:0xD4] = KIND_INT
    kinds[0xD9:0xDC] = KIND_STR
    kinds[0xDC:0xDE] = KIND_ARRAY
    kinds[0xDE:0xE0] = KIND_MAP
    kinds[0xE0:] = KIND_INT
    return kinds


KINDS = _kinds()
STACK_SIZE = NESTING_MAX
"""Entries of the scratch array that `nested_end` counts in."""


@inlined
def nested_end(buf: Bytes, at: int, end: int, stack: Cells) -> int:
    """The offset behind the value at `at`; -1 where it is malformed, too long, or nested deeper than `stack` is."""
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


@inlined
def read_array(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """The number of elements of the array at `at` (-1: none, or not whole) and the offset of the first."""
    if at >= end:
        return -1, at
    marker = byte(buf, at)
    if 0x90 <= marker <= 0x9F:
        return marker & 0x0F, at + 1
    if marker == 0xDC and at + 3 <= end:
        return big16(buf, at + 1), at + 3
    if marker == 0xDD and at + 5 <= end:
        return big32(buf, at + 1), at + 5
    return -1, at


@inlined
def read_integer(buf: Bytes, at: int) -> tuple[int, int]:
    """A number written in MessagePack, whole at `at`, and 1 if it is one and below 2^63."""
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, 1
    if marker >= 0xE0:
        return marker - 0x100, 1
    if marker == 0xCC:
        return byte(buf, at + 1), 1
    if marker == 0xCD:
        return big16(buf, at + 1), 1
    if marker == 0xCE:
        return big32(buf, at + 1), 1
    if marker == 0xD0:
        value = byte(buf, at + 1)
        return value - 0x100 if value >= 0x80 else value, 1
    if marker == 0xD1:
        value = big16(buf, at + 1)
        return value - 0x10000 if value >= 0x8000 else value, 1
    if marker == 0xD2:
        value = big32(buf, at + 1)
        return value - 0x1_0000_0000 if value >= 0x8000_0000 else value, 1
    if marker == 0xCF or marker == 0xD3:
        value = int(np.uint64(big64(buf, at + 1)).view(np.int64))
        return value, 1 if marker == 0xD3 or value >= 0 else 0
    return 0, 0


@inlined
def read_text(buf: Bytes, at: int) -> tuple[int, int]:
    """Where the bytes of the string at `at`, which is whole, begin and end; -1 if it is none."""
    marker = byte(buf, at)
    if 0xA0 <= marker <= 0xBF:
        return at + 1, at + 1 + (marker & 0x1F)
    if marker == 0xD9:
        return at + 2, at + 2 + byte(buf, at + 1)
    if marker == 0xDA:
        return at + 3, at + 3 + big16(buf, at + 1)
    if marker == 0xDB:
        return at + 5, at + 5 + big32(buf, at + 1)
    return -1, -1


@inlined
def note_key(buf: Bytes, at: int, is_text: int, keys: Cells, i: int) -> int:
    """Writes the key at `at` into column `i`: a number, or where its bytes begin and end; 1 if it is such a key."""
    if is_text:
        start, end = read_text(buf, at)
        keys[0, i], keys[1, i] = start, end
        return 1 if start >= 0 else 0
    value, fits = read_integer(buf, at)
    keys[0, i] = value
    return fits


@kernel
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
) -> int:
    """Checks the tuples between `ats[i]` and `ends[i]` against a format and notes their keys.

    `masks` has the allowed kinds of each field. Returns the first tuple that it cannot vouch for, or -1.
    """
    for i in range(ats.shape[0]):
        end = int(ends[i])
        count, at = read_array(buf, int(ats[i]), end)
        if count < count_min or (count_exact and count != count_exact) or count <= key_field:
            return i
        for field in range(count):
            if at >= end:
                return i
            marker = byte(buf, at)
            kind = KINDS[marker]
            allowed = masks[field] if field < masks.shape[0] else KIND_ALL
            if kind:
                if not kind & allowed:
                    return i
            elif allowed != KIND_ALL:
                return i
            start = at
            if byte(CHILDREN, marker) or byte(LENGTH, marker):
                at = nested_end(buf, at, end, stack)
                if at < 0:
                    return i
            else:
                at += 1 + byte(FIXED, marker)
                if at > end:
                    return i
            if field == key_field and not note_key(buf, start, is_text, keys, i):
                return i
        if at != end:
            return i
    return -1


@kernel
def check_keys(buf: Bytes, ats: Cells, ends: Cells, allowed: int, is_text: int, keys: Cells) -> int:
    """Notes the keys of requests: arrays of one element of the allowed kinds. The first that is not, or -1."""
    for i in range(ats.shape[0]):
        count, at = read_array(buf, int(ats[i]), int(ends[i]))
        # The scanner found the array whole, so its only element ends where the array does.
        if count != 1 or not KINDS[byte(buf, at)] & allowed or not note_key(buf, at, is_text, keys, i):
            return i
    return -1
