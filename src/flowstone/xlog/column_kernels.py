"""Compiled loops that turn fields of many tuples into the buffers of Arrow columns, one kernel per kind of column.

`split_tuples` notes where each field of each row starts; every other kernel here reads one field of all rows. A start
of -1 is a missing field. Kernels trust the scanner: each value they are pointed at lies whole inside the buffer. They
return the number of the first row whose value does not fit the column, and what is wrong with it, or (-1, 0).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.kernel import kernel
from flowstone.iproto.scan import INDEX_ID, KEY_AT, TUPLE_AT, TYPE, Bytes, Cells, value_end

Starts = NDArray[np.int32]
Doubles = NDArray[np.float64]

FITS, WRONG_TYPE, TOO_LARGE, TOO_PRECISE, NO_ARRAY = range(5)
"""What can be wrong with a value: see `columns.ColumnError`, which puts it into words."""

NIL = 0xC0
TYPE_UPDATE = 4
EXT_DECIMAL, EXT_UUID, EXT_DATETIME = 1, 2, 4


@kernel
def array_header(buf: Bytes, at: int) -> tuple[int, int]:
    """The number of elements of the array at `at` (-1: no array) and the offset of the first."""
    marker = buf[at]
    if 0x90 <= marker <= 0x9F:
        return np.int64(marker & 0x0F), at + 1
    if marker == 0xDC:
        return (np.int64(buf[at + 1]) << 8) | buf[at + 2], at + 3
    if marker == 0xDD:
        return big_endian(buf, at + 1, 4), at + 5
    return -1, at


@kernel
def big_endian(buf: Bytes, at: int, width: int) -> int:
    value = np.int64(0)
    for i in range(width):
        value = (value << 8) | buf[at + i]
    return value


@kernel
def split_tuples(
    buf: Bytes, cells: Cells, rows: Cells, key_fields: Cells, starts: Starts
) -> tuple[int, int]:
    """Fills `starts[f, i]` with the offset of field f of row `rows[i]`; the last line gets the first extra field.

    Rows without a tuple (UPDATE, DELETE) have the fields of their primary key, if that is what their key is of.
    """
    fields = starts.shape[0] - 1
    end = buf.shape[0]
    for i in range(rows.shape[0]):
        row = rows[i]
        at = cells[TUPLE_AT, row]
        if at < 0 or cells[TYPE, row] == TYPE_UPDATE:
            for f in range(fields + 1):
                starts[f, i] = -1
            at = cells[KEY_AT, row]
            if at < 0 or cells[INDEX_ID, row] != 0:
                continue
            count, at = array_header(buf, at)
            if count < 0:
                return i, NO_ARRAY
            for part in range(min(count, key_fields.shape[0])):
                if 0 <= key_fields[part] < fields:
                    starts[key_fields[part], i] = at
                at = value_end(buf, at, end)
            continue
        count, at = array_header(buf, at)
        if count < 0:
            return i, NO_ARRAY
        for f in range(min(count, fields)):
            starts[f, i] = at
            at = value_end(buf, at, end)
        for f in range(count, fields):
            starts[f, i] = -1
        starts[fields, i] = at if count > fields else -1
    return -1, FITS


@kernel
def read_int(buf: Bytes, at: int) -> tuple[int, int]:
    """A whole number and whether it fits int64."""
    marker = buf[at]
    if marker < 0x80:
        return np.int64(marker), FITS
    if marker >= 0xE0:
        return np.int64(marker) - 256, FITS
    if 0xCC <= marker <= 0xCF:
        value = big_endian(buf, at + 1, 1 << (marker - 0xCC))
        return value, (FITS if value >= 0 else TOO_LARGE)
    if 0xD0 <= marker <= 0xD3:
        width = 1 << (marker - 0xD0)
        shift = 64 - 8 * width
        return (big_endian(buf, at + 1, width) << shift) >> shift, FITS
    return 0, WRONG_TYPE


@kernel
def int_column(buf: Bytes, starts: Starts, out: Cells, valid: Bytes) -> tuple[int, int, int]:
    """int64 values; returns (bad row, what, number of nulls)."""
    nulls = 0
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        if at < 0 or buf[at] == NIL:
            out[i], valid[i] = 0, 0
            nulls += 1
            continue
        value, what = read_int(buf, at)
        if what != FITS:
            return i, what, nulls
        out[i], valid[i] = value, 1
    return -1, FITS, nulls


@kernel
def double_column(
    buf: Bytes, starts: Starts, out: Doubles, valid: Bytes, later: Cells
) -> tuple[int, int, int, int]:
    """float64 values. Decimals are left to the caller: their rows are listed in `later`.

    Returns (bad row, what, nulls, length of `later`).
    """
    nulls = deferred = 0
    bits = out.view(np.int64)
    single = np.empty(1, np.float32)
    single_bits = single.view(np.int32)
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        if at < 0 or buf[at] == NIL:
            out[i], valid[i] = 0.0, 0
            nulls += 1
            continue
        marker = buf[at]
        valid[i] = 1
        if marker == 0xCB:
            bits[i] = big_endian(buf, at + 1, 8)
        elif marker == 0xCA:
            single_bits[0] = np.int32(big_endian(buf, at + 1, 4))
            out[i] = single[0]
        elif marker == 0xCF:
            out[i] = np.float64(np.uint64(big_endian(buf, at + 1, 8)))
        elif is_extension(buf, at, EXT_DECIMAL):
            out[i] = 0.0
            later[deferred] = i
            deferred += 1
        else:
            value, what = read_int(buf, at)
            if what != FITS:
                return i, what, nulls, deferred
            out[i] = np.float64(value)
    return -1, FITS, nulls, deferred


@kernel
def bool_column(buf: Bytes, starts: Starts, out: Bytes, valid: Bytes) -> tuple[int, int, int]:
    """One byte per value, to be packed by the caller."""
    nulls = 0
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        if at < 0 or buf[at] == NIL:
            out[i], valid[i] = 0, 0
            nulls += 1
        elif buf[at] == 0xC2 or buf[at] == 0xC3:
            out[i], valid[i] = buf[at] - 0xC2, 1
        else:
            return i, WRONG_TYPE, nulls
    return -1, FITS, nulls


@kernel
def bytes_of(buf: Bytes, at: int) -> tuple[int, int]:
    """Offset and length of the content of a str or bin value; the length is -1 for anything else."""
    marker = buf[at]
    if 0xA0 <= marker <= 0xBF:
        return at + 1, np.int64(marker & 0x1F)
    if marker == 0xD9 or marker == 0xC4:
        return at + 2, np.int64(buf[at + 1])
    if marker == 0xDA or marker == 0xC5:
        return at + 3, big_endian(buf, at + 1, 2)
    if marker == 0xDB or marker == 0xC6:
        return at + 5, big_endian(buf, at + 1, 4)
    return at, -1


@kernel
def bytes_lengths(buf: Bytes, starts: Starts, offsets: Starts, valid: Bytes) -> tuple[int, int, int]:
    """Fills the Arrow offsets of a str or bin column. A column of 2 GiB or more is TOO_LARGE."""
    nulls, total = 0, np.int64(0)
    offsets[0] = 0
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        if at < 0 or buf[at] == NIL:
            valid[i] = 0
            nulls += 1
        else:
            _, length = bytes_of(buf, at)
            if length < 0:
                return i, WRONG_TYPE, nulls
            valid[i] = 1
            total += length
            if total > 0x7FFFFFFF:
                return i, TOO_LARGE, nulls
        offsets[i + 1] = total
    return -1, FITS, nulls


@kernel
def bytes_copy(buf: Bytes, starts: Starts, offsets: Starts, out: Bytes) -> None:
    """Copies the contents to where `bytes_lengths` put them."""
    for i in range(starts.shape[0]):
        length = offsets[i + 1] - offsets[i]
        if length:
            source, _ = bytes_of(buf, np.int64(starts[i]))
            target = np.int64(offsets[i])
            for k in range(length):
                out[target + k] = buf[source + k]


@kernel
def span_copy(buf: Bytes, starts: Cells, ends: Cells, offsets: Starts, out: Bytes) -> None:
    """Copies raw spans of the buffer, for columns that keep MessagePack."""
    for i in range(starts.shape[0]):
        target, source = np.int64(offsets[i]), starts[i]
        for k in range(offsets[i + 1] - offsets[i]):
            out[target + k] = buf[source + k]


@kernel
def value_ends(buf: Bytes, starts: Starts, ends: Cells) -> None:
    """Where each value ends; -1 where there is none."""
    for i in range(starts.shape[0]):
        ends[i] = value_end(buf, np.int64(starts[i]), buf.shape[0]) if starts[i] >= 0 else -1


@kernel
def gather_extra(buf: Bytes, starts: Starts, ends: Cells, out: Bytes, begins: Cells, finishes: Cells) -> None:
    """Writes the values of buf[starts[i]:ends[i]] as one MessagePack array per row to `out`, and where they are."""
    at_out = np.int64(0)
    for i in range(starts.shape[0]):
        if starts[i] < 0:
            begins[i] = finishes[i] = -1
            continue
        begins[i] = at_out
        count, at = np.int64(0), np.int64(starts[i])
        while at < ends[i]:
            count += 1
            at = value_end(buf, at, ends[i])
        out[at_out] = 0xDD
        for k in range(4):
            out[at_out + 1 + k] = np.uint8((count >> (24 - 8 * k)) & 0xFF)
        at_out += ARRAY_HEADER_SIZE
        for k in range(starts[i], ends[i]):
            out[at_out] = buf[k]
            at_out += 1
        finishes[i] = at_out


ARRAY_HEADER_SIZE = 5


@kernel
def extension(buf: Bytes, at: int) -> tuple[int, int, int]:
    """Type, offset and length of the data of an extension value; the length is -1 for anything else."""
    marker = buf[at]
    if 0xD4 <= marker <= 0xD8:
        return np.int64(buf[at + 1]), at + 2, np.int64(1) << (marker - 0xD4)
    if 0xC7 <= marker <= 0xC9:
        width = 1 << (marker - 0xC7)
        return np.int64(buf[at + 1 + width]), at + 2 + width, big_endian(buf, at + 1, width)
    return 0, at, -1


@kernel
def is_extension(buf: Bytes, at: int, code: int) -> bool:
    found, _, length = extension(buf, at)
    return length >= 0 and found == code


HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@kernel
def uuid_column(buf: Bytes, starts: Starts, offsets: Starts, out: Bytes, valid: Bytes) -> tuple[int, int, int]:
    """UUIDs as their 36 characters; `out` has room for all rows."""
    nulls, at_out = 0, np.int64(0)
    offsets[0] = 0
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        if at < 0 or buf[at] == NIL:
            valid[i] = 0
            nulls += 1
            offsets[i + 1] = at_out
            continue
        code, data, length = extension(buf, at)
        if code != EXT_UUID or length != 16:
            return i, WRONG_TYPE, nulls
        for k in range(16):
            if k == 4 or k == 6 or k == 8 or k == 10:
                out[at_out] = 0x2D
                at_out += 1
            out[at_out], out[at_out + 1] = HEX[buf[data + k] >> 4], HEX[buf[data + k] & 15]
            at_out += 2
        valid[i] = 1
        offsets[i + 1] = at_out
    return -1, FITS, nulls


@kernel
def little_endian(buf: Bytes, at: int, width: int) -> int:
    """A signed little-endian number."""
    value = np.int64(0)
    for i in range(width):
        value |= np.int64(buf[at + i]) << (8 * i)
    shift = 64 - 8 * width
    return (value << shift) >> shift


MICROSECONDS_MAX = (2**63 - 1) // 1_000_000 - 1


@kernel
def datetime_column(buf: Bytes, starts: Starts, out: Cells, valid: Bytes) -> tuple[int, int, int]:
    """Microseconds since 1970 UTC; the zone of the value is not part of the moment."""
    nulls = 0
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        if at < 0 or buf[at] == NIL:
            out[i], valid[i] = 0, 0
            nulls += 1
            continue
        code, data, length = extension(buf, at)
        if code != EXT_DATETIME or (length != 8 and length != 16):
            return i, WRONG_TYPE, nulls
        seconds = little_endian(buf, data, 8)
        if seconds > MICROSECONDS_MAX or seconds < -MICROSECONDS_MAX:
            return i, TOO_LARGE, nulls
        nanoseconds = little_endian(buf, data + 8, 4) if length == 16 else np.int64(0)
        out[i], valid[i] = seconds * 1_000_000 + nanoseconds // 1000, 1
    return -1, FITS, nulls


@kernel
def decimal_digits(buf: Bytes, at: int, digits: Bytes) -> tuple[int, int, bool, int]:
    """(number of significant digits, scale, is negative, what) of the decimal at `at`, digits into `digits`."""
    code, data, length = extension(buf, at)
    if code != EXT_DECIMAL or length < 2:
        return 0, 0, False, WRONG_TYPE
    end = data + length
    at = value_end(buf, data, end)  # first: the scanner has not looked into extensions
    if at < 0 or at >= end:
        return 0, 0, False, WRONG_TYPE
    scale, what = read_int(buf, data)
    if what != FITS:
        return 0, 0, False, WRONG_TYPE
    count = 0
    while at < end:
        high, low = buf[at] >> 4, buf[at] & 15
        if high > 9 or (at + 1 < end and low > 9) or (at + 1 == end and low < 10):
            return 0, 0, False, WRONG_TYPE
        if count or high:
            if count >= digits.shape[0]:
                return 0, 0, False, TOO_PRECISE
            digits[count] = high
            count += 1
        if at + 1 < end and (count or low):
            if count >= digits.shape[0]:
                return 0, 0, False, TOO_PRECISE
            digits[count] = low
            count += 1
        at += 1
    sign = buf[end - 1] & 15
    return count, scale, sign == 0xB or sign == 0xD, FITS


LOW32 = np.uint64(0xFFFFFFFF)


@kernel
def times_ten_plus(high: int, low: int, digit: int) -> tuple[int, int]:
    """128-bit `value * 10 + digit` in two halves."""
    part0 = (np.uint64(low) & LOW32) * np.uint64(10) + np.uint64(digit)
    part1 = (np.uint64(low) >> np.uint64(32)) * np.uint64(10) + (part0 >> np.uint64(32))
    new_low = (part1 << np.uint64(32)) | (part0 & LOW32)
    return np.uint64(high) * np.uint64(10) + (part1 >> np.uint64(32)), new_low


DECIMAL_DIGITS_MAX = 38


@kernel
def decimal128_column(
    buf: Bytes, starts: Starts, scale: int, out: NDArray[np.uint64], valid: Bytes
) -> tuple[int, int, int]:
    """Decimals and whole numbers as 128-bit integers in units of 10^-scale, low half first."""
    nulls = 0
    digits = np.empty(80, np.uint8)
    for i in range(starts.shape[0]):
        at = np.int64(starts[i])
        out[2 * i] = out[2 * i + 1] = 0
        if at < 0 or buf[at] == NIL:
            valid[i] = 0
            nulls += 1
            continue
        count, own_scale, negative, what = whole_digits(buf, at, digits)
        if what == WRONG_TYPE:
            count, own_scale, negative, what = decimal_digits(buf, at, digits)
        if what != FITS:
            return i, what, nulls
        while own_scale > scale and count and digits[count - 1] == 0:
            count, own_scale = count - 1, own_scale - 1
        if count and own_scale > scale:
            return i, TOO_PRECISE, nulls
        if count and count + scale - own_scale > DECIMAL_DIGITS_MAX:
            return i, TOO_LARGE, nulls
        high, low = np.uint64(0), np.uint64(0)
        for k in range(count + scale - own_scale if count else 0):
            high, low = times_ten_plus(high, low, digits[k] if k < count else 0)
        if negative:
            low = ~low + np.uint64(1)
            high = ~high + np.uint64(1 if low == 0 else 0)
        out[2 * i], out[2 * i + 1], valid[i] = low, high, 1
    return -1, FITS, nulls


@kernel
def whole_digits(buf: Bytes, at: int, digits: Bytes) -> tuple[int, int, bool, int]:
    """Like `decimal_digits`, for MessagePack integers."""
    marker = buf[at]
    if marker == 0xCF:
        rest, negative = np.uint64(big_endian(buf, at + 1, 8)), False
    else:
        value, what = read_int(buf, at)
        if what != FITS:
            return 0, 0, False, what
        negative = value < 0
        rest = np.uint64(-value) if negative else np.uint64(value)
    count = 0
    while rest > np.uint64(0):
        digits[count] = np.uint8(rest % np.uint64(10))
        rest = rest // np.uint64(10)
        count += 1
    for k in range(count // 2):
        digits[k], digits[count - 1 - k] = digits[count - 1 - k], digits[k]
    return count, 0, negative, FITS
