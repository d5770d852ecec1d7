"""Compiled: keys and values of Tsurugi's entries as the buffers of Arrow columns.

`split_rows` locates the fields of each row and proves that they are inside of their key or value; every other kernel
reads one field of all rows. A start of -1 is NULL. `bad` marks the rows whose bytes do not fit; such a row is NULL in
all columns that follow.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.limestone.format.entry_table import Table
    from flowstone.limestone.tsurugi.row_layout import (
        FORM,
        HAS_MARK,
        MASK,
        SIZE,
        SIZED,
        TARGET,
        TERMINATOR_SIZE,
        TEXT,
        Layout,
    )
    from flowstone.native.words import big32, big64, byte, poke, signed, source, target, word

NULL_MARK, VALUE_MARK = 0x80, 0x81
SECOND_NANOSECONDS = 1_000_000_000
SIGN32, ALL32 = 0x8000_0000, 0xFFFF_FFFF


def split_rows(
    buf: Bytes, starts: Cells, ends: Cells, layout: Layout, begins: Cells, finishes: Cells, bad: Bytes
) -> None:
    """Set `begins` and `finishes` to the offsets of each field of keys or of values, in the lines of their targets.

    A start of -1 in `starts` is an entry without a value: its fields stay as they are.
    """
    data, fields = source(buf), layout.shape[1]
    with cython.nogil:
        for row in range(starts.shape[0]):
            at, end = starts[row], ends[row]
            if at < 0:
                continue
            for field in range(fields):
                at = split_field(data, at, end, layout, field, begins, finishes, row)
                if at < 0:
                    break
            if at != end:
                bad[row] = 1


def split_field(
    data: Bytes, at: int, end: int, layout: Layout, field: int, begins: Cells, finishes: Cells, row: int
) -> int:
    """Locate one field; return the offset after it, or -1 if it does not fit."""
    line, mask, form = layout[TARGET, field], layout[MASK, field], layout[FORM, field]
    if layout[HAS_MARK, field]:
        if at >= end:
            return -1
        mark = byte(data, at) ^ mask
        at += 1
        if mark == NULL_MARK:
            begins[line, row] = finishes[line, row] = -1
            return at
        if mark != VALUE_MARK:
            return -1
    size, after = layout[SIZE, field], 0
    if form == TEXT:
        size = 0
        while at + size < end and byte(data, at + size) != mask:
            size += 1
        after = TERMINATOR_SIZE
    elif form == SIZED:
        if end - at < 4:
            return -1
        size = big32(data, at) ^ (mask * 0x01010101)
        at += 4
    if size + after > end - at:
        return -1
    for place in range(after):
        if byte(data, at + size + place) != mask:
            return -1
    begins[line, row], finishes[line, row] = at, at + size
    return int(at + size + after)


def integer_column(
    buf: Bytes, begins: Cells, size: int, mask: int, least: int, most: int, out: Cells, valid: Bytes, bad: Bytes
) -> int:
    """Convert numbers of 1, 4 or 8 bytes; numbers outside of `least` to `most` are bad. Return the number of nulls."""
    data, nulls = source(buf), 0
    long_mask, short_mask = word(-1 if mask else 0), mask * 0x01010101
    with cython.nogil:
        for row in range(begins.shape[0]):
            at, value, is_valid = begins[row], 0, 0
            if at >= 0 and not bad[row]:
                if size == 8:
                    value = signed(big64(data, at) ^ long_mask ^ (word(1) << 63))
                elif size == 4:
                    value = (big32(data, at) ^ short_mask) - SIGN32
                else:
                    value = (byte(data, at) ^ mask) - 0x80
                if least <= value <= most:
                    is_valid = 1
                else:
                    value = 0
                    bad[row] = 1
            out[row], valid[row] = value, is_valid
            nulls += 1 - is_valid
    return nulls


def float_column(buf: Bytes, begins: Cells, size: int, mask: int, out: Table, valid: Bytes, bad: Bytes) -> int:
    """Convert floats of 4 or 8 bytes to their bits. Return the number of nulls."""
    data, nulls = source(buf), 0
    long_mask, short_mask = word(-1 if mask else 0), mask * 0x01010101
    with cython.nogil:
        for row in range(begins.shape[0]):
            at, is_valid = begins[row], 0
            bits = word(0)
            if at >= 0 and not bad[row]:
                is_valid = 1
                if size == 8:
                    bits = big64(data, at) ^ long_mask
                    bits ^= (word(1) << 63) if bits >> 63 else word(-1)
                else:
                    short = big32(data, at) ^ short_mask
                    bits = word(short ^ (SIGN32 if short >> 31 else ALL32))
            out[row], valid[row] = bits, is_valid
            nulls += 1 - is_valid
    return nulls


def decimal_column(
    buf: Bytes, begins: Cells, size: int, mask: int, high_end: int, low_end: int, out: Table, valid: Bytes, bad: Bytes
) -> int:
    """Convert decimals of `size` bytes to two words each, the lower one first. Return the number of nulls.

    The words `high_end` and `low_end` are the first number that has too many digits.
    """
    data, nulls, limit_high, limit_low = source(buf), 0, word(high_end), word(low_end)
    with cython.nogil:
        for row in range(begins.shape[0]):
            at, is_valid = begins[row], 0
            high, low = word(0), word(0)
            if at >= 0 and not bad[row]:
                first = (byte(data, at) ^ mask) ^ 0x80
                if first >= 0x80:
                    high, low = word(-1), word(-1)
                for place in range(size):
                    each = first if not place else byte(data, at + place) ^ mask
                    high = word((high << 8) | (low >> 56))
                    low = word((low << 8) | word(each))
                above, below = high, low
                if first >= 0x80:
                    above, below = word(~above), word(word(~below) + 1)
                    if not below:
                        above = word(above + 1)
                if above < limit_high or (above == limit_high and below < limit_low):
                    is_valid = 1
                else:
                    high, low = word(0), word(0)
                    bad[row] = 1
            out[2 * row], out[2 * row + 1] = low, high
            valid[row] = is_valid
            nulls += 1 - is_valid
    return nulls


def point_column(buf: Bytes, begins: Cells, mask: int, seconds: Cells, nanos: Cells, valid: Bytes, bad: Bytes) -> int:
    """Convert timestamps to seconds and nanoseconds. Return the number of nulls."""
    data, nulls = source(buf), 0
    long_mask, short_mask = word(-1 if mask else 0), mask * 0x01010101
    with cython.nogil:
        for row in range(begins.shape[0]):
            at, is_valid = begins[row], 0
            seconds[row], nanos[row] = 0, 0
            if at >= 0 and not bad[row]:
                rest = (big32(data, at + 8) ^ short_mask) - SIGN32
                if 0 <= rest < SECOND_NANOSECONDS:
                    seconds[row] = signed(big64(data, at) ^ long_mask ^ (word(1) << 63))
                    nanos[row] = rest
                    is_valid = 1
                else:
                    bad[row] = 1
            valid[row] = is_valid
            nulls += 1 - is_valid
    return nulls


def lob_column(buf: Bytes, begins: Cells, mask: int, out: Cells, valid: Bytes, bad: Bytes) -> int:
    """Convert blob ids; ids from 2^63 on are bad. Return the number of nulls."""
    data, nulls = source(buf), 0
    long_mask = word(-1 if mask else 0)
    with cython.nogil:
        for row in range(begins.shape[0]):
            at, value, is_valid = begins[row], 0, 0
            if at >= 0 and not bad[row]:
                value = signed(big64(data, at) ^ long_mask)
                is_valid = 1
                if value < 0:
                    value = is_valid = 0
                    bad[row] = 1
            out[row], valid[row] = value, is_valid
            nulls += 1 - is_valid
    return nulls


def byte_lengths(begins: Cells, finishes: Cells, offsets: Cells, valid: Bytes, bad: Bytes) -> int:
    """Set `offsets` to the ends of the texts of all rows, after an initial 0. Return the number of nulls."""
    nulls, total = 0, 0
    with cython.nogil:
        for row in range(begins.shape[0]):
            is_valid = 0
            if begins[row] >= 0 and not bad[row]:
                total += finishes[row] - begins[row]
                is_valid = 1
            offsets[row + 1], valid[row] = total, is_valid
            nulls += 1 - is_valid
    return nulls


def byte_copies(buf: Bytes, begins: Cells, mask: int, offsets: Cells, out: Bytes) -> None:
    """Copy the texts of all rows to `out`."""
    data, written = source(buf), target(out)
    with cython.nogil:
        for row in range(begins.shape[0]):
            at, to = begins[row], offsets[row]
            for place in range(offsets[row + 1] - to):
                poke(written, to + place, byte(data, at + place) ^ mask)
