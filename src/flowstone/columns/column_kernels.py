"""Compiled loops that turn fields of many tuples into the buffers of Arrow columns, one kernel per kind of column.

`split_tuples` records where each field of each row starts; every other kernel reads one field of all rows. A start of
-1 is a missing field. Kernels trust the scanner that each value lies completely inside the buffer; the content of
extensions is not checked yet. Kernels return the number of the first row whose value does not fit the column, and the
reason, or (-1, FITS).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.constants import RequestType
from flowstone.iproto.extensions import DECIMAL_EXPONENT_MAX, ExtensionType
from flowstone.iproto.scan import INDEX_ID, KEY_AT, TUPLE_AT, TYPE, Cells, value_end
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, big16, big32, big64, byte, copy, copy32, little64, poke

Starts = NDArray[np.int32]
Doubles = NDArray[np.float64]

FITS, WRONG_TYPE, TOO_LARGE, TOO_PRECISE, OUT_OF_RANGE, COLUMN_FULL = range(6)
"""What can be wrong with a value: see `columns.ColumnError`, which puts it into words."""

NIL = 0xC0
OFFSET_MAX = 2**31 - 1
"""Arrow's offsets of strings and binaries have 32 bits."""


@inlined
def array_header(buf: Bytes, at: int) -> tuple[int, int]:
    """The number of elements of the array at `at` (-1: no array) and the offset of the first."""
    marker = byte(buf, at)
    if 0x90 <= marker <= 0x9F:
        return marker & 0x0F, at + 1
    if marker == 0xDC:
        return big16(buf, at + 1), at + 3
    if marker == 0xDD:
        return big32(buf, at + 1), at + 5
    return -1, at


@kernel
def split_tuples(buf: Bytes, cells: Cells, rows: Cells, key_fields: Cells, starts: Starts) -> int:
    """Fills `starts[f, i]` with the offset of field f of row `rows[i]`; the last line gets the first extra field.

    Rows without a tuple (UPDATE, DELETE) have the fields of their primary key, if that is what their key is of. Returns
    the number of the first row whose tuple or key is no array, or -1.
    """
    fields = starts.shape[0] - 1
    end = buf.shape[0]
    for i in range(rows.shape[0]):
        row = rows[i]
        at = int(cells[TUPLE_AT, row])
        if at < 0 or cells[TYPE, row] == RequestType.UPDATE:
            for f in range(fields + 1):
                starts[f, i] = -1
            at = int(cells[KEY_AT, row])
            if at < 0 or cells[INDEX_ID, row] != 0:
                continue
            count, at = array_header(buf, at)
            if count < 0:
                return i
            for part in range(min(count, key_fields.shape[0])):
                if 0 <= key_fields[part] < fields:
                    starts[key_fields[part], i] = at
                at = value_end(buf, at, end)
            continue
        count, at = array_header(buf, at)
        if count < 0:
            return i
        for f in range(min(count, fields)):
            starts[f, i] = at
            at = value_end(buf, at, end)
        for f in range(count, fields):
            starts[f, i] = -1
        starts[fields, i] = at if count > fields else -1
    return -1


@inlined
def signed64(buf: Bytes, at: int) -> int:
    return int(np.uint64(big64(buf, at)).view(np.int64))


@inlined
def read_int(buf: Bytes, at: int) -> tuple[int, int]:
    """A whole number and whether it fits int64."""
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, FITS
    if marker >= 0xE0:
        return marker - 256, FITS
    if marker == 0xCC:
        return byte(buf, at + 1), FITS
    if marker == 0xCD:
        return big16(buf, at + 1), FITS
    if marker == 0xCE:
        return big32(buf, at + 1), FITS
    if marker == 0xCF:
        value = signed64(buf, at + 1)
        return value, (FITS if value >= 0 else TOO_LARGE)
    if marker == 0xD0:
        return (byte(buf, at + 1) ^ 0x80) - 0x80, FITS
    if marker == 0xD1:
        return (big16(buf, at + 1) ^ 0x8000) - 0x8000, FITS
    if marker == 0xD2:
        return (big32(buf, at + 1) ^ 0x80000000) - 0x80000000, FITS
    if marker == 0xD3:
        return signed64(buf, at + 1), FITS
    return 0, WRONG_TYPE


@kernel
def int_column(buf: Bytes, starts: Starts, out: Cells, valid: Bytes) -> tuple[int, int, int]:
    """int64 values; returns (bad row, what, number of nulls)."""
    nulls = 0
    for i in range(starts.shape[0]):
        at = int(starts[i])
        if at < 0 or byte(buf, at) == NIL:
            out[i], valid[i] = 0, 0
            nulls += 1
            continue
        value, what = read_int(buf, at)
        if what != FITS:
            return i, what, nulls
        out[i], valid[i] = value, 1
    return -1, FITS, nulls


@kernel
def double_column(buf: Bytes, starts: Starts, out: Doubles, valid: Bytes, later: Cells) -> tuple[int, int, int, int]:
    """float64 values. Decimals are left to the caller: their rows are listed in `later`.

    Returns (bad row, what, nulls, length of `later`).
    """
    nulls = deferred = 0
    for i in range(starts.shape[0]):
        at = int(starts[i])
        if at < 0 or byte(buf, at) == NIL:
            out[i], valid[i] = 0.0, 0
            nulls += 1
            continue
        marker = byte(buf, at)
        valid[i] = 1
        if marker == 0xCB:
            out[i] = np.uint64(big64(buf, at + 1)).view(np.float64)
        elif marker == 0xCA:
            out[i] = np.uint32(big32(buf, at + 1)).view(np.float32)
        elif marker == 0xCF:
            out[i] = np.float64(big64(buf, at + 1))
        elif is_decimal(buf, at):
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
        at = int(starts[i])
        marker = byte(buf, at) if at >= 0 else NIL
        if marker == NIL:
            out[i], valid[i] = 0, 0
            nulls += 1
        elif marker == 0xC2 or marker == 0xC3:
            out[i], valid[i] = marker - 0xC2, 1
        else:
            return i, WRONG_TYPE, nulls
    return -1, FITS, nulls


@inlined
def bytes_of(buf: Bytes, at: int) -> tuple[int, int]:
    """Offset and length of the content of a str or bin value; the length is -1 for anything else."""
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


@kernel
def bytes_lengths(buf: Bytes, starts: Starts, offsets: Starts, valid: Bytes) -> tuple[int, int, int]:
    """Fills the Arrow offsets of a str or bin column."""
    nulls = total = 0
    offsets[0] = 0
    for i in range(starts.shape[0]):
        at = int(starts[i])
        if at < 0 or byte(buf, at) == NIL:
            valid[i] = 0
            nulls += 1
        else:
            _, length = bytes_of(buf, at)
            if length < 0:
                return i, WRONG_TYPE, nulls
            valid[i] = 1
            total += length
            if total > OFFSET_MAX:
                return i, COLUMN_FULL, nulls
        offsets[i + 1] = total
    return -1, FITS, nulls


COPY_ROOM = 32
"""Bytes behind the last value that the copying kernels may write to: short values are copied whole words at a time."""


@inlined
def copy_value(buf: Bytes, source: int, length: int, out: Bytes, target: int) -> None:
    """Copies `length` bytes; `out` has COPY_ROOM bytes behind them."""
    if length <= COPY_ROOM and source + COPY_ROOM <= buf.size:
        copy32(out, target, buf, source)
    else:
        copy(out, target, buf, source, length)


@kernel
def bytes_copy(buf: Bytes, starts: Starts, offsets: Starts, out: Bytes) -> None:
    """Copies the contents to where `bytes_lengths` put them."""
    for i in range(starts.shape[0]):
        length = int(offsets[i + 1]) - int(offsets[i])
        if length:
            source, _ = bytes_of(buf, int(starts[i]))
            copy_value(buf, source, length, out, int(offsets[i]))


@kernel
def span_copy(buf: Bytes, starts: Cells, offsets: Starts, out: Bytes) -> None:
    """Copies raw spans of the buffer, for columns that keep MessagePack."""
    for i in range(starts.shape[0]):
        length = int(offsets[i + 1]) - int(offsets[i])
        if length:
            copy_value(buf, int(starts[i]), length, out, int(offsets[i]))


@kernel
def value_ends(buf: Bytes, starts: Starts, ends: Cells) -> None:
    """Where each value ends; -1 where there is none."""
    for i in range(starts.shape[0]):
        ends[i] = value_end(buf, int(starts[i]), buf.shape[0]) if starts[i] >= 0 else -1


ARRAY_HEADER_SIZE = 5


@kernel
def gather_extra(buf: Bytes, starts: Starts, ends: Cells, out: Bytes, begins: Cells, finishes: Cells) -> None:
    """Writes the values of buf[starts[i]:ends[i]] as one MessagePack array per row to `out`, and where they are."""
    to = 0
    for i in range(starts.shape[0]):
        if starts[i] < 0:
            begins[i], finishes[i] = -1, -1
            continue
        begins[i] = to
        count, at, end = 0, int(starts[i]), int(ends[i])
        while at < end:
            count += 1
            at = value_end(buf, at, end)
        to = poke(out, to, 0xDD)
        for k in range(4):
            to = poke(out, to, (count >> (24 - 8 * k)) & 0xFF)
        to = copy(out, to, buf, int(starts[i]), end - int(starts[i]))
        finishes[i] = to


@inlined
def extension(buf: Bytes, at: int) -> tuple[int, int, int]:
    """Type, offset and length of the data of an extension value; the length is -1 for anything else."""
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


@inlined
def is_decimal(buf: Bytes, at: int) -> bool:
    code, _, length = extension(buf, at)
    return length >= 0 and code == ExtensionType.DECIMAL


HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@kernel
def uuid_column(buf: Bytes, starts: Starts, offsets: Starts, out: Bytes, valid: Bytes) -> tuple[int, int, int]:
    """UUIDs as their 36 characters; `out` has room for all rows."""
    nulls = to = 0
    offsets[0] = 0
    for i in range(starts.shape[0]):
        at = int(starts[i])
        if at < 0 or byte(buf, at) == NIL:
            valid[i] = 0
            nulls += 1
            offsets[i + 1] = to
            continue
        code, data, length = extension(buf, at)
        if code != ExtensionType.UUID or length != 16:
            return i, WRONG_TYPE, nulls
        for k in range(16):
            if k == 4 or k == 6 or k == 8 or k == 10:
                to = poke(out, to, 0x2D)
            value = byte(buf, data + k)
            to = poke(out, to, byte(HEX, value >> 4))
            to = poke(out, to, byte(HEX, value & 15))
        valid[i] = 1
        offsets[i + 1] = to
    return -1, FITS, nulls


SECONDS_MAX = (2**63 - 1) // 1_000_000 - 2
NANOSECONDS_END = 2_000_000_000
"""A server accepts leap seconds: nanoseconds up to twice a second."""


@kernel
def datetime_column(buf: Bytes, starts: Starts, out: Cells, valid: Bytes) -> tuple[int, int, int]:
    """Microseconds since 1970 UTC; the zone of the value is not part of the moment."""
    nulls = 0
    for i in range(starts.shape[0]):
        at = int(starts[i])
        if at < 0 or byte(buf, at) == NIL:
            out[i], valid[i] = 0, 0
            nulls += 1
            continue
        code, data, length = extension(buf, at)
        if code != ExtensionType.DATETIME or (length != 8 and length != 16):
            return i, WRONG_TYPE, nulls
        seconds = int(np.uint64(little64(buf, data)).view(np.int64))
        rest = int(np.uint64(little64(buf, data + 8)).view(np.int64)) if length == 16 else 0
        nanoseconds = ((rest & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
        if nanoseconds < 0 or nanoseconds >= NANOSECONDS_END:
            return i, WRONG_TYPE, nulls
        if seconds > SECONDS_MAX or seconds < -SECONDS_MAX:
            return i, OUT_OF_RANGE, nulls
        out[i], valid[i] = seconds * 1_000_000 + nanoseconds // 1000, 1
    return -1, FITS, nulls


@inlined
def decimal_digits(buf: Bytes, at: int, digits: Bytes) -> tuple[int, int, bool, int]:
    """(number of significant digits, scale, is negative, what) of the decimal at `at`, digits into `digits`."""
    code, data, length = extension(buf, at)
    if code != ExtensionType.DECIMAL or length < 2:
        return 0, 0, False, WRONG_TYPE
    end = data + length
    at = value_end(buf, data, end)
    if at < 0 or at >= end:
        return 0, 0, False, WRONG_TYPE
    scale, what = read_int(buf, data)
    if what != FITS:
        return 0, 0, False, WRONG_TYPE
    count = 0
    while at < end:
        high, low, is_last = byte(buf, at) >> 4, byte(buf, at) & 15, at + 1 == end
        if high > 9 or (low > 9) != is_last:
            return 0, 0, False, WRONG_TYPE
        if count + 2 > digits.size:
            return 0, 0, False, TOO_PRECISE
        if count or high:
            digits[count] = high
            count += 1
        if not is_last and (count or low):
            digits[count] = low
            count += 1
        at += 1
    if scale < -DECIMAL_EXPONENT_MAX or scale > DECIMAL_EXPONENT_MAX + digits.size:
        return 0, 0, False, TOO_PRECISE
    sign = byte(buf, end - 1) & 15
    return count, scale, sign == 0xB or sign == 0xD, FITS


@inlined
def whole_digits(buf: Bytes, at: int, digits: Bytes) -> tuple[int, int, bool, int]:
    """Like `decimal_digits`, for MessagePack integers."""
    rest, negative = np.uint64(0), False
    if byte(buf, at) == 0xCF:
        rest = np.uint64(big64(buf, at + 1))
    else:
        value, what = read_int(buf, at)
        if what != FITS:
            return 0, 0, False, what
        negative = value < 0
        rest = np.uint64(-value) if negative else np.uint64(value)
    count = 0
    while rest > np.uint64(0):
        digits[count] = rest % np.uint64(10)
        rest = rest // np.uint64(10)
        count += 1
    for k in range(count // 2):
        digits[k], digits[count - 1 - k] = digits[count - 1 - k], digits[k]
    return count, 0, negative, FITS


@kernel
def decimal_kinds(buf: Bytes, starts: Starts, digits: Bytes) -> tuple[int, int]:
    """Whether all values are decimals or whole numbers. `digits` is DIGITS_ROOM bytes to work in."""
    for i in range(starts.shape[0]):
        at = int(starts[i])
        if at < 0 or byte(buf, at) == NIL:
            continue
        _, what = read_int(buf, at)
        if what == WRONG_TYPE:
            _, _, _, what = decimal_digits(buf, at, digits)
            if what != FITS:
                return i, what
    return -1, FITS


DECIMAL_DIGITS_MAX = 38
DIGITS_ROOM = 80
LOW32, SHIFT32, TEN = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(10)


@inlined
def times_ten_plus(high: np.uint64, low: np.uint64, digit: int) -> tuple[np.uint64, np.uint64]:
    """128-bit `value * 10 + digit` in two halves."""
    part0 = (low & LOW32) * TEN + np.uint64(digit)
    part1 = (low >> SHIFT32) * TEN + (part0 >> SHIFT32)
    return high * TEN + (part1 >> SHIFT32), ((part1 & LOW32) << SHIFT32) | (part0 & LOW32)


@kernel
def decimal128_column(
    buf: Bytes, starts: Starts, scale: int, out: NDArray[np.uint64], valid: Bytes, digits: Bytes
) -> tuple[int, int, int]:
    """Decimals and whole numbers as 128-bit integers in units of 10^-scale, low half first.

    `digits` is DIGITS_ROOM bytes to work in.
    """
    nulls = 0
    for i in range(starts.shape[0]):
        at = int(starts[i])
        out[2 * i], out[2 * i + 1] = 0, 0
        if at < 0 or byte(buf, at) == NIL:
            valid[i] = 0
            nulls += 1
            continue
        count, own_scale, negative, what = whole_digits(buf, at, digits)
        if what == WRONG_TYPE:
            count, own_scale, negative, what = decimal_digits(buf, at, digits)
        if what != FITS:
            return i, what, nulls
        valid[i] = 1
        while own_scale > scale and count and digits[count - 1] == 0:
            count, own_scale = count - 1, own_scale - 1
        if count == 0:
            continue
        if own_scale > scale or count + scale - own_scale > DECIMAL_DIGITS_MAX:
            return i, TOO_PRECISE, nulls
        high, low = np.uint64(0), np.uint64(0)
        for k in range(count + scale - own_scale):
            high, low = times_ten_plus(high, low, int(digits[k]) if k < count else 0)
        if negative:  # not zero, so one of the halves takes the 1 without overflowing
            if low == np.uint64(0):
                high = ~high + np.uint64(1)
            else:
                high, low = ~high, ~low + np.uint64(1)
        out[2 * i], out[2 * i + 1] = low, high
    return -1, FITS, nulls
