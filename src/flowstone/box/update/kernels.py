"""Compiled: what most updates do, to many tuples at once: `=` of whole fields, `+` and `-` of integers.

The bytes are those of `update.py`. Anything else (paths, names, negative positions, other operations, doubles, two
changes of one field, a field of the key) is marked as not done, row by row, and left to that.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flowstone.box.engine.tuple_kernels import read_array, read_integer
from flowstone.iproto.row_batches import put_big, put_uint
from flowstone.iproto.scan import Bytes, Cells, value_end
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte, copy, poke

OPERATIONS_MAX: Final = 16
"""Operations of one update that are done here."""

HEAD_MAX: Final = 8
INT64_MAX: Final = (1 << 63) - 1
INT64_MIN: Final = -(1 << 63)

ASSIGN: Final = ord("=")
ADD: Final = ord("+")
SUBTRACT: Final = ord("-")

FIELD, CODE, ARGUMENT, ARGUMENT_END = range(4)
"""Lines of the scratch table, a column per operation."""


def scratch() -> Cells:
    """What `update_tuples` needs to note the operations of a row."""
    return np.empty((4, OPERATIONS_MAX), np.int64)


def update_bound(tuples: int, operations: int, count: int) -> int:
    """Bytes for the results of `count` updates of so many bytes: an operation takes five bytes, its number nine."""
    return tuples + 2 * operations + HEAD_MAX * count


@inlined
def put_array(out: Bytes, at: int, count: int) -> int:
    if count < 16:
        return poke(out, at, 0x90 + count)
    if count < 0x10000:
        return put_big(out, poke(out, at, 0xDC), count, 2)
    return put_big(out, poke(out, at, 0xDD), count, 4)


@inlined
def put_shortest(out: Bytes, at: int, value: int) -> int:
    """A number in as few bytes as it takes."""
    if value >= 0:
        return put_uint(out, at, value)
    if value >= -0x20:
        return poke(out, at, 0x100 + value)
    if value >= -0x80:
        return put_big(out, poke(out, at, 0xD0), value, 1)
    if value >= -0x8000:
        return put_big(out, poke(out, at, 0xD1), value, 2)
    if value >= -0x8000_0000:
        return put_big(out, poke(out, at, 0xD2), value, 4)
    return put_big(out, poke(out, at, 0xD3), value, 8)


@inlined
def read_operations(ops: Bytes, at: int, end: int, base: int, count: int, keys: Cells, noted: Cells) -> int:
    """Notes the operations on a tuple of `count` fields; how many there are, or -1 if any is not for here."""
    total, at = read_array(ops, at, end)
    if total < 1 or total > OPERATIONS_MAX:
        return -1
    has_new = 0
    for i in range(total):
        length, at = read_array(ops, at, end)
        if length != 3 or at + 2 > end or byte(ops, at) != 0xA1:
            return -1
        code = byte(ops, at + 1)
        if code != ASSIGN and code != ADD and code != SUBTRACT:
            return -1
        at += 2
        behind = value_end(ops, at, end)
        if behind < 0:
            return -1
        field, is_number = read_integer(ops, at)
        if not is_number or field < base:
            return -1
        field -= base
        at = behind
        behind = value_end(ops, at, end)
        if behind < 0 or field > count or (field == count and (code != ASSIGN or has_new)):
            return -1
        if field == count:
            has_new = 1
        for key in range(keys.shape[0]):
            if keys[key] == field:
                return -1
        for other in range(i):
            if noted[FIELD, other] == field:
                return -1
        noted[FIELD, i], noted[CODE, i] = field, code
        noted[ARGUMENT, i], noted[ARGUMENT_END, i] = at, behind
        at = behind
    return total if at == end else -1


@inlined
def put_sum(buf: Bytes, at: int, ops: Bytes, argument: int, code: int, out: Bytes, to: int) -> int:
    """The sum or difference of two integers; -1 where they are none, or too large."""
    left, is_left = read_integer(buf, at)
    right, is_right = read_integer(ops, argument)
    if not is_left or not is_right or right == INT64_MIN:
        return -1
    if code == SUBTRACT:
        right = -right
    if (right > 0 and left > INT64_MAX - right) or (right < 0 and left < INT64_MIN - right):
        return -1
    return put_shortest(out, to, left + right)


@inlined
def put_updated(
    buf: Bytes, at: int, end: int, count: int, ops: Bytes, total: int, noted: Cells, out: Bytes, to: int
) -> int:
    """The tuple whose fields begin at `at`, changed; the offset behind it, or -1."""
    new = -1
    for i in range(total):
        if noted[FIELD, i] == count:
            new = i
    to = put_array(out, to, count + 1 if new >= 0 else count)
    copied = at
    for field in range(count):
        start = at
        at = value_end(buf, at, end)
        if at < 0:
            return -1
        for i in range(total):
            if noted[FIELD, i] != field:
                continue
            to = copy(out, to, buf, copied, start - copied)
            argument = int(noted[ARGUMENT, i])
            if noted[CODE, i] == ASSIGN:
                to = copy(out, to, ops, argument, int(noted[ARGUMENT_END, i]) - argument)
            else:
                to = put_sum(buf, start, ops, argument, int(noted[CODE, i]), out, to)
                if to < 0:
                    return -1
            copied = at
    if at != end:
        return -1
    to = copy(out, to, buf, copied, end - copied)
    if new >= 0:
        argument = int(noted[ARGUMENT, new])
        to = copy(out, to, ops, argument, int(noted[ARGUMENT_END, new]) - argument)
    return to


@kernel
def update_tuples(
    buf: Bytes,
    offsets: Cells,
    ops: Bytes,
    ops_offsets: Cells,
    bases: Cells,
    keys: Cells,
    noted: Cells,
    out: Bytes,
    ends: Cells,
    is_done: Bytes,
) -> int:
    """Writes tuple `i` after the operations `i`, one after the other; how many are done.

    `bases` are the INDEX_BASEs, `keys` the fields that must not change, `noted` is `scratch()`. Result `i` ends at
    `ends[i]`; one that is not for here is empty, and `is_done[i]` is 0. `out` has `update_bound` bytes.
    """
    to = 0
    done = 0
    for i in range(offsets.shape[0] - 1):
        begin = to
        end = int(offsets[i + 1])
        count, at = read_array(buf, int(offsets[i]), end)
        total = -1
        if count >= 0 and bases[i] >= 0:
            ops_at, ops_end = int(ops_offsets[i]), int(ops_offsets[i + 1])
            total = read_operations(ops, ops_at, ops_end, int(bases[i]), count, keys, noted)
        if total > 0:
            to = put_updated(buf, at, end, count, ops, total, noted, out, to)
        fits = 1 if total > 0 and to >= 0 else 0
        if not fits:
            to = begin
        ends[i] = to
        poke(is_done, i, fits)
        done += fits
    return done
