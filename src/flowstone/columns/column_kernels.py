"""Compiled: kernels that convert fields of many tuples to the buffers of Arrow columns, one per type of column.

`split_tuples` locates each field of each row; every other kernel reads one field of all rows. A start of -1 is a
missing field. Kernels trust the scanner that each value is complete; they check the content of extensions themselves.
A column kernel returns the number of the first row whose value does not fit the column and the reason, or -1 and FITS;
then the number of nulls.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.columns.column_limits import (
        COLUMN_FULL,
        COPY_ROOM,
        DECIMAL_DIGITS_MAX,
        FITS,
        OFFSET_MAX,
        OUT_OF_RANGE,
        TOO_LARGE,
        TOO_PRECISE,
        WRONG_TYPE,
        Starts,
    )
    from flowstone.iproto.constants import RequestType
    from flowstone.iproto.extensions import DECIMAL_EXPONENT_MAX, ExtensionType
    from flowstone.iproto.scan import INDEX_ID, KEY_AT, KEY_END, TUPLE_AT, TUPLE_END, TYPE, Cells
    from flowstone.native.msgpack import NIL, put_big, read_array, read_integer, value_end
    from flowstone.native.words import (
        Bytes,
        big16,
        big32,
        big64,
        byte,
        copy,
        copy32,
        float32,
        float64,
        high_product,
        little32,
        little64,
        poke,
        poke64,
        signed,
        signed32,
        source,
        target,
        word,
    )

    Doubles = NDArray[np.float64]
    Words = NDArray[np.uint64]

SECONDS_MAX = (2**63 - 1) // 1_000_000 - 2
NANOSECONDS_END = 2_000_000_000
"""Limit of the nanoseconds: servers accept leap seconds, up to twice a second."""

ONES, NIBBLES = 0x0101010101010101, 0x0F0F0F0F0F0F0F0F
BYTES_APART, PAIRS_APART = 0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF


def split_tuples(buf: Bytes, cells: Cells, rows: Cells, key_fields: Cells, starts: Starts) -> int:
    """Set `starts[f, i]` to the offset of field f of row `rows[i]`, and the last line to the first extra field.

    Rows without a tuple (UPDATE, DELETE) have the fields of their key, if it is a key of the primary index. Return the
    number of the first row whose tuple or key is not a whole array, or -1: not all tuples come from the scanner.
    """
    data = source(buf)
    fields, parts = starts.shape[0] - 1, key_fields.shape[0]
    with cython.nogil:
        for i in range(rows.shape[0]):
            row = rows[i]
            at = cells[TUPLE_AT, row]
            if at < 0 or cells[TYPE, row] == RequestType.UPDATE:
                for f in range(fields + 1):
                    starts[f, i] = -1
                at = cells[KEY_AT, row]
                if at < 0 or cells[INDEX_ID, row] != 0:
                    continue
                end = cells[KEY_END, row]
                count, at = read_array(data, at, end)
                if count < 0:
                    return i
                for part in range(min(count, parts)):
                    if 0 <= key_fields[part] < fields:
                        starts[key_fields[part], i] = at
                    at = value_end(data, at, end)
                    if at < 0:
                        return i
                continue
            end = cells[TUPLE_END, row]
            count, at = read_array(data, at, end)
            if count < 0:
                return i
            for f in range(min(count, fields)):
                starts[f, i] = at
                at = value_end(data, at, end)
                if at < 0:
                    return i
            for f in range(count, fields):
                starts[f, i] = -1
            starts[fields, i] = at if count > fields else -1
    return -1


def read_int(buf: Bytes, at: int) -> tuple[int, int]:
    """Return the integer at `at`, and FITS or the reason why it is not an int64."""
    value, fits = read_integer(buf, at)
    if fits:
        return value, FITS
    return value, (TOO_LARGE if byte(buf, at) == 0xCF else WRONG_TYPE)


def int_column(buf: Bytes, starts: Starts, out: Cells, valid: Bytes) -> tuple[int, int, int]:
    """Convert integers to int64."""
    data, nulls = source(buf), 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            if at < 0 or byte(data, at) == NIL:
                out[i], valid[i] = 0, 0
                nulls += 1
                continue
            value, what = read_int(data, at)
            if what != FITS:
                return i, what, nulls
            out[i], valid[i] = value, 1
    return -1, FITS, nulls


def double_column(buf: Bytes, starts: Starts, out: Doubles, valid: Bytes, later: Cells) -> tuple[int, int, int, int]:
    """Convert numbers to float64, except for decimals, whose rows are listed in `later` for the caller.

    The last result is the length of `later`.
    """
    data, nulls, deferred = source(buf), 0, 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            if at < 0 or byte(data, at) == NIL:
                out[i], valid[i] = 0.0, 0
                nulls += 1
                continue
            marker = byte(data, at)
            valid[i] = 1
            if marker == 0xCB:
                out[i] = float64(big64(data, at + 1))
            elif marker == 0xCA:
                out[i] = float32(big32(data, at + 1))
            elif marker == 0xCF:
                out[i] = big64(data, at + 1)
            else:
                value, what = read_int(data, at)
                if what == FITS:
                    out[i] = value
                elif is_decimal(data, at):
                    out[i] = 0.0
                    later[deferred] = i
                    deferred += 1
                else:
                    return i, what, nulls, deferred
    return -1, FITS, nulls, deferred


def bool_column(buf: Bytes, starts: Starts, out: Bytes, valid: Bytes) -> tuple[int, int, int]:
    """Convert booleans to one byte each, which the caller packs into bits."""
    data, nulls = source(buf), 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            marker = byte(data, at) if at >= 0 else NIL
            if marker == NIL:
                out[i], valid[i] = 0, 0
                nulls += 1
            elif marker == 0xC2 or marker == 0xC3:
                out[i], valid[i] = marker - 0xC2, 1
            else:
                return i, WRONG_TYPE, nulls
    return -1, FITS, nulls


def bytes_of(buf: Bytes, at: int) -> tuple[int, int]:
    """Return offset and length of the content of a str or bin value; the length is -1 for any other value."""
    marker = byte(buf, at)
    if 0xA0 <= marker <= 0xBF:
        return at + 1, marker & 0x1F
    if marker == 0xD9 or marker == 0xC4:
        return at + 2, byte(buf, at + 1)
    if marker == 0xDA or marker == 0xC5:
        return at + 3, big16(buf, at + 1)
    if marker == 0xDB or marker == 0xC6:
        return at + 5, big32(buf, at + 1)
    return at, -1


def bytes_lengths(buf: Bytes, starts: Starts, offsets: Starts, valid: Bytes) -> tuple[int, int, int]:
    """Set the Arrow offsets of a column of str or bin values."""
    data, nulls, total = source(buf), 0, 0
    offsets[0] = 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            if at < 0 or byte(data, at) == NIL:
                valid[i] = 0
                nulls += 1
            else:
                _, length = bytes_of(data, at)
                if length < 0:
                    return i, WRONG_TYPE, nulls
                valid[i] = 1
                total += length
                if total > OFFSET_MAX:
                    return i, COLUMN_FULL, nulls
            offsets[i + 1] = total
    return -1, FITS, nulls


def copy_value(buf: Bytes, end: int, start: int, length: int, out: Bytes, at: int) -> None:
    """Copy `length` bytes of a buffer that ends at `end`; `out` has COPY_ROOM bytes after them."""
    if length <= COPY_ROOM and start + COPY_ROOM <= end:
        copy32(out, at, buf, start)
    else:
        copy(out, at, buf, start, length)


def bytes_copy(buf: Bytes, starts: Starts, offsets: Starts, out: Bytes) -> None:
    """Copy the content of each value to the offset that `bytes_lengths` assigned."""
    data, end, texts = source(buf), buf.shape[0], target(out)
    with cython.nogil:
        for i in range(starts.shape[0]):
            at, length = offsets[i], offsets[i + 1] - offsets[i]
            if length:
                start, _ = bytes_of(data, starts[i])
                copy_value(data, end, start, length, texts, at)


def span_copy(buf: Bytes, starts: Cells, offsets: Starts, out: Bytes) -> None:
    """Copy spans of the buffer unchanged, for columns of MessagePack."""
    data, end, spans = source(buf), buf.shape[0], target(out)
    with cython.nogil:
        for i in range(starts.shape[0]):
            at, length = offsets[i], offsets[i + 1] - offsets[i]
            if length:
                copy_value(data, end, starts[i], length, spans, at)


def value_ends(buf: Bytes, starts: Starts, ends: Cells) -> None:
    """Set `ends` to the end offset of each value; -1 for a missing value."""
    data, end = source(buf), buf.shape[0]
    with cython.nogil:
        for i in range(starts.shape[0]):
            ends[i] = value_end(data, starts[i], end) if starts[i] >= 0 else -1


def gather_extra(buf: Bytes, starts: Starts, ends: Cells, out: Bytes, begins: Cells, finishes: Cells) -> int:
    """Write the values in buf[starts[i]:ends[i]] as one MessagePack array per row, from begins[i] to finishes[i].

    Return the number of the first row whose values are not whole, or -1.
    """

    data, arrays, to = source(buf), target(out), 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            start, end, count = starts[i], ends[i], 0
            if start < 0:
                begins[i], finishes[i] = -1, -1
                continue
            begins[i] = to
            at = start
            while at < end:
                count += 1
                at = value_end(data, at, end)
                if at < 0:
                    return i
            to = put_big(arrays, poke(arrays, to, 0xDD), count, 4)
            to = copy(arrays, to, data, start, end - start)
            finishes[i] = to
    return -1


def extension(buf: Bytes, at: int) -> tuple[int, int, int]:
    """Return type, data offset and data length of an extension value; the length is -1 for any other value."""
    marker = byte(buf, at)
    if 0xD4 <= marker <= 0xD8:
        return byte(buf, at + 1), at + 2, 1 << (marker - 0xD4)
    if marker == 0xC7:
        return byte(buf, at + 2), at + 3, byte(buf, at + 1)
    if marker == 0xC8:
        return byte(buf, at + 3), at + 4, big16(buf, at + 1)
    if marker == 0xC9:
        return byte(buf, at + 5), at + 6, big32(buf, at + 1)
    return 0, at, -1


def is_decimal(buf: Bytes, at: int) -> bool:
    code, _, length = extension(buf, at)
    return length >= 0 and code == ExtensionType.DECIMAL


def hex_digits(value: int) -> int:
    """Return the 8 hexadecimal digits of 4 bytes, both as little-endian words.

    Without branches: which digits are letters is unpredictable.
    """
    spread = (value | value << 16) & PAIRS_APART
    spread = (spread | spread << 8) & BYTES_APART
    nibbles = (spread >> 4 | spread << 8) & NIBBLES
    letters = ((nibbles + 6 * ONES) >> 4) & ONES
    return nibbles + 0x30 * ONES + 0x27 * letters


def uuid_column(buf: Bytes, starts: Starts, offsets: Starts, out: Bytes, valid: Bytes) -> tuple[int, int, int]:
    """Convert UUIDs to text of 36 characters; `out` has room for all rows."""
    data, texts, nulls, to = source(buf), target(out), 0, 0
    offsets[0] = 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            if at < 0 or byte(data, at) == NIL:
                valid[i] = 0
                nulls += 1
                offsets[i + 1] = to
                continue
            code, content, length = extension(data, at)
            if code != ExtensionType.UUID or length != 16:
                return i, WRONG_TYPE, nulls
            middle = hex_digits(little32(data, content + 4))
            after = hex_digits(little32(data, content + 8))
            poke64(texts, to, hex_digits(little32(data, content)))
            poke64(texts, to + 9, middle)
            poke64(texts, to + 14, middle >> 32)  # each write overwrites the excess bytes of the previous one
            poke64(texts, to + 19, after)
            poke64(texts, to + 24, after >> 32)
            poke64(texts, to + 28, hex_digits(little32(data, content + 12)))
            for dash in range(8, 24, 5):
                poke(texts, to + dash, 0x2D)
            to += 36
            valid[i] = 1
            offsets[i + 1] = to
    return -1, FITS, nulls


def datetime_column(buf: Bytes, starts: Starts, out: Cells, valid: Bytes) -> tuple[int, int, int]:
    """Convert datetimes to microseconds since 1970 UTC, without their time zone."""
    data, nulls = source(buf), 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            if at < 0 or byte(data, at) == NIL:
                out[i], valid[i] = 0, 0
                nulls += 1
                continue
            code, content, length = extension(data, at)
            if code != ExtensionType.DATETIME or (length != 8 and length != 16):
                return i, WRONG_TYPE, nulls
            seconds = signed(little64(data, content))
            rest = signed(little64(data, content + 8)) if length == 16 else 0
            nanoseconds = signed32(rest)
            if nanoseconds < 0 or nanoseconds >= NANOSECONDS_END:
                return i, WRONG_TYPE, nulls
            if seconds > SECONDS_MAX or seconds < -SECONDS_MAX:
                return i, OUT_OF_RANGE, nulls
            out[i], valid[i] = seconds * 1_000_000 + nanoseconds // 1000, 1
    return -1, FITS, nulls


def decimal_digits(buf: Bytes, at: int, digits: Bytes, room: int) -> tuple[int, int, bool, int]:
    """Decode the decimal at `at` into `digits`; return digit count, scale, True if negative, and FITS or why not."""
    code, content, length = extension(buf, at)
    if code != ExtensionType.DECIMAL or length < 2:
        return 0, 0, False, WRONG_TYPE
    end = content + length
    at = value_end(buf, content, end)
    if at < 0 or at >= end:
        return 0, 0, False, WRONG_TYPE
    scale, what = read_int(buf, content)
    if what != FITS:
        return 0, 0, False, WRONG_TYPE
    count = 0
    while at < end:
        high, low, is_last = byte(buf, at) >> 4, byte(buf, at) & 15, at + 1 == end
        if high > 9 or (low > 9) != is_last:
            return 0, 0, False, WRONG_TYPE
        if count + 2 > room:
            return 0, 0, False, TOO_PRECISE
        if count or high:
            count = poke(digits, count, high)
        if not is_last and (count or low):
            count = poke(digits, count, low)
        at += 1
    if scale < -DECIMAL_EXPONENT_MAX or scale > DECIMAL_EXPONENT_MAX + room:
        return 0, 0, False, TOO_PRECISE
    sign = byte(buf, end - 1) & 15
    return count, scale, sign == 0xB or sign == 0xD, FITS


def whole_digits(buf: Bytes, at: int, digits: Bytes) -> tuple[int, int, bool, int]:
    """Decode the integer at `at` as `decimal_digits` does."""
    rest, negative = word(0), False
    if byte(buf, at) == 0xCF:
        rest = big64(buf, at + 1)
    else:
        value, what = read_int(buf, at)
        if what != FITS:
            return 0, 0, False, what
        negative = value < 0
        rest = word(-(value + 1)) + 1 if negative else word(value)
    count = 0
    while rest > 0:
        count = poke(digits, count, rest % 10)
        rest = rest // 10
    for k in range(count // 2):
        first, last = byte(digits, k), byte(digits, count - 1 - k)
        poke(digits, k, last)
        poke(digits, count - 1 - k, first)
    return count, 0, negative, FITS


def decimal_kinds(buf: Bytes, starts: Starts, digits: Bytes) -> tuple[int, int]:
    """Check that all values are valid decimals or integers. `digits` is scratch space of DIGITS_ROOM bytes."""
    data, found, room = source(buf), target(digits), digits.shape[0]
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            if at < 0 or byte(data, at) == NIL:
                continue
            _, what = read_int(data, at)
            if what == WRONG_TYPE:
                _, _, _, what = decimal_digits(data, at, found, room)
                if what != FITS:
                    return i, what
    return -1, FITS


def times_ten_plus(high: int, low: int, digit: int) -> tuple[int, int]:
    """Return `value * 10 + digit` for a value below 10^37, both in two halves of 64 bits."""
    tens = word(low * 10)
    units = word(tens + digit)
    carry = high_product(low, 10) + (1 if units < tens else 0)
    return high * 10 + carry, units


def decimal128_column(
    buf: Bytes, starts: Starts, scale: int, out: Words, valid: Bytes, digits: Bytes
) -> tuple[int, int, int]:
    """Convert decimals and integers to 128-bit integers in units of 10^-scale, low half first.

    `digits` is scratch space of DIGITS_ROOM bytes.
    """
    data, found, room, nulls = source(buf), target(digits), digits.shape[0], 0
    with cython.nogil:
        for i in range(starts.shape[0]):
            at = starts[i]
            out[2 * i], out[2 * i + 1] = 0, 0
            if at < 0 or byte(data, at) == NIL:
                valid[i] = 0
                nulls += 1
                continue
            count, own_scale, negative, what = whole_digits(data, at, found)
            if what == WRONG_TYPE:
                count, own_scale, negative, what = decimal_digits(data, at, found, room)
            if what != FITS:
                return i, what, nulls
            valid[i] = 1
            while own_scale > scale and count and byte(found, count - 1) == 0:
                count, own_scale = count - 1, own_scale - 1
            if count == 0:
                continue
            if own_scale > scale or count + scale - own_scale > DECIMAL_DIGITS_MAX:
                return i, TOO_PRECISE, nulls
            high, low = word(0), word(0)
            for k in range(count + scale - own_scale):
                high, low = times_ten_plus(high, low, byte(found, k) if k < count else 0)
            if negative:  # the value is not 0, so its complement plus 1 fits
                if low == 0:
                    high = word(~high + 1)
                else:
                    high, low = word(~high), word(~low + 1)
            out[2 * i], out[2 * i + 1] = low, high
    return -1, FITS, nulls
