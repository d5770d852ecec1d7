"""Compiled: the most common updates of many tuples: `=` of whole fields, `+` and `-` of integers.

The results equal those of `update.py`, byte for byte. A row with anything else (paths, names, negative positions, other
operations, doubles, two changes of one field, a field of the key) is marked as not done and left to `update.py`. The
functions for a single tuple, which `box/lane/` uses, also add and subtract doubles.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.box.update.bulk import ARGUMENT, ARGUMENT_END, CODE, DOUBLE, FIELD, INTEGER, OPERATIONS_MAX
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import put_big, put_uint, read_array, read_integer, value_end
    from flowstone.native.words import (
        big32,
        big64,
        byte,
        copy,
        float32,
        float32_bits,
        float64,
        float_bits,
        poke,
        signed,
        source,
        target,
    )

    ASSIGN, ADD, SUBTRACT = b"=+-"
    INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
    INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

FLOAT_MAX = 3.4028234663852886e38
"""The largest number that a float of four bytes holds."""


def put_array(out: Bytes, at: int, count: int) -> int:
    """Write the header of an array of `count` elements; return the offset after it."""
    if count < 16:
        return poke(out, at, 0x90 + count)
    if count < 0x10000:
        return put_big(out, poke(out, at, 0xDC), count, 2)
    return put_big(out, poke(out, at, 0xDD), count, 4)


def put_shortest(out: Bytes, at: int, value: int) -> int:
    """Write an integer in its shortest form; return the offset after it."""
    if value >= 0:
        return put_uint(out, at, value)
    if value >= -0x20:
        return poke(out, at, 0x100 + value)
    if value >= -0x80:
        return put_big(out, poke(out, at, 0xD0), value, 1)
    if value >= -0x8000:
        return put_big(out, poke(out, at, 0xD1), value, 2)
    if value >= INT32_MIN:
        return put_big(out, poke(out, at, 0xD2), value, 4)
    return put_big(out, poke(out, at, 0xD3), value, 8)


def read_operations(ops: Bytes, at: int, end: int, base: int, count: int, keys: Cells, noted: Cells) -> int:
    """Decode the operations on a tuple of `count` fields into `noted`; return their number, or -1 if not supported."""
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
        if not is_number or field < base or field > INT32_MAX:
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


def read_number(buf: Bytes, at: int) -> tuple[float, int]:
    """Return the number at `at` as a double, and 1; 0 if the value is not an integer below 2^63 or a double."""
    marker = byte(buf, at)
    if marker == 0xCB:
        return float64(big64(buf, at + 1)), 1
    if marker == 0xCA:
        return float32(big32(buf, at + 1)), 1
    value, is_integer = read_integer(buf, at)
    return float(value), is_integer


def put_float_sum(
    buf: Bytes, at: int, ops: Bytes, argument: int, code: int, is_double: int, out: Bytes, to: int
) -> int:
    """Like `put_sum` if one of the numbers is a double: a result that a float can hold becomes one, if it may."""
    left, is_left = read_number(buf, at)
    right, is_right = read_number(ops, argument)
    if not is_left or not is_right:
        return -1
    total = left + right if code == ADD else left - right
    if total != total:
        return -1
    if not is_double and -FLOAT_MAX <= total <= FLOAT_MAX and float32(float32_bits(total)) == total:
        return put_big(out, poke(out, to, 0xCA), float32_bits(total), 4)
    return put_big(out, poke(out, to, 0xCB), signed(float_bits(total)), 8)


def put_sum(buf: Bytes, at: int, ops: Bytes, argument: int, code: int, form: int, out: Bytes, to: int) -> int:
    """Write the sum or difference of two numbers; return the offset after it, or -1 if it is not supported.

    `form` is the form of a result that is not an integer.
    """
    left, is_left = read_integer(buf, at)
    right, is_right = read_integer(ops, argument)
    if not is_left or not is_right:
        return put_float_sum(buf, at, ops, argument, code, form == DOUBLE, out, to) if form != INTEGER else -1
    if right == INT64_MIN:
        return -1
    if code == SUBTRACT:
        right = -right
    if (right > 0 and left > INT64_MAX - right) or (right < 0 and left < INT64_MIN - right):
        return -1
    return put_shortest(out, to, left + right)


def put_updated(
    buf: Bytes,
    at: int,
    end: int,
    count: int,
    ops: Bytes,
    total: int,
    noted: Cells,
    forms: Cells,
    default_form: int,
    out: Bytes,
    to: int,
) -> int:
    """Write the tuple whose fields start at `at`, with the changes; return the offset after it, or -1.

    `forms` has the form of sums in each field; the others have the default one.
    """
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
            argument = noted[ARGUMENT, i]
            if noted[CODE, i] == ASSIGN:
                to = copy(out, to, ops, argument, noted[ARGUMENT_END, i] - argument)
            else:
                form = forms[field] if field < forms.shape[0] else default_form
                to = put_sum(buf, start, ops, argument, noted[CODE, i], form, out, to)
                if to < 0:
                    return -1
            copied = at
    if at != end:
        return -1
    to = copy(out, to, buf, copied, end - copied)
    if new >= 0:
        argument = noted[ARGUMENT, new]
        to = copy(out, to, ops, argument, noted[ARGUMENT_END, new] - argument)
    return to


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
    """Apply operations `i` to tuple `i` and write the results consecutively; return how many are done.

    `bases` has the INDEX_BASE of each row, `keys` the fields that must not change; `noted` is `scratch()`. Result `i`
    ends at `ends[i]`; a result that is not supported is empty, with `is_done[i]` 0. `out` has `update_bound` bytes.
    """
    with cython.nogil:
        return put_results(
            source(buf), offsets, source(ops), ops_offsets, bases, keys, noted, target(out), ends, is_done
        )


def put_results(
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
    """Run the loop of `update_tuples`."""
    to = 0
    done = 0
    for i in range(offsets.shape[0] - 1):
        begin = to
        end = offsets[i + 1]
        count, at = read_array(buf, offsets[i], end)
        total = -1
        if count >= 0 and bases[i] >= 0:
            total = read_operations(ops, ops_offsets[i], ops_offsets[i + 1], bases[i], count, keys, noted)
        if total > 0:
            to = put_updated(buf, at, end, count, ops, total, noted, keys[:0], INTEGER, out, to)
        fits = 1 if total > 0 and to >= 0 else 0
        if not fits:
            to = begin
        ends[i] = to
        is_done[i] = fits
        done += fits
    return done
