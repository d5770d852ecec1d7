"""Kernels that write binary data and extension types as JSON strings (`docs/spec/iproto.md#extension-types`).

Each kernel takes a payload that lies inside `buf` and returns the end offset of the text. It returns UNSUPPORTED for
values that only the plain formatter (`json_plain`) writes: content that no server writes, years of more than four
digits, types without a kernel.
"""

from __future__ import annotations

import numpy as np

from flowstone.iproto.extensions import ExtensionType
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, big16, byte, poke, poke64
from flowstone.text.integer_text import eight_digits
from flowstone.text.json_plain import NANOSECONDS

UNSUPPORTED = -1

DECIMAL, UUID = ExtensionType.DECIMAL.value, ExtensionType.UUID.value
DATETIME = ExtensionType.DATETIME.value

DECIMAL_DIGITS_MAX = 38
"""What servers before 3.5 store. Longer ones, and larger scales, are left to the plain formatter."""

EXTENSION_TEXT_MAX = 2 * DECIMAL_DIGITS_MAX + 16
"""Room that any of these texts needs, base64 apart."""

OFFSET_MIN, OFFSET_MAX = -12 * 60, 14 * 60  # minutes
ZONE_INDEX_MAX = 1024

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_ZEROS = np.uint64(0x30303030_30303030)

DAY = 86400


@inlined
def base64_size(count: int) -> int:
    """Length of the quoted base64 text of `count` bytes."""
    return (count + 2) // 3 * 4 + 2


@kernel
def write_base64(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """`count` bytes in standard base64 with padding, quoted."""
    to = poke(out, to, 34)
    whole = at + count // 3 * 3
    while at < whole:
        bits = (big16(buf, at) << 8) | byte(buf, at + 2)
        for shift in (18, 12, 6, 0):
            to = poke(out, to, byte(_ALPHABET, (bits >> shift) & 63))
        at += 3
    left = count % 3
    if left:
        bits = byte(buf, at) << 16
        if left == 2:
            bits |= byte(buf, at + 1) << 8
        to = poke(out, to, byte(_ALPHABET, bits >> 18))
        to = poke(out, to, byte(_ALPHABET, (bits >> 12) & 63))
        to = poke(out, to, byte(_ALPHABET, (bits >> 6) & 63) if left == 2 else 61)
        to = poke(out, to, 61)
    return poke(out, to, 34)


@kernel
def write_uuid(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Sixteen bytes as a quoted canonical UUID."""
    if count != 16:
        return UNSUPPORTED
    to = poke(out, to, 34)
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            to = poke(out, to, 45)
        value = byte(buf, at + i)
        to = poke(out, to, byte(_HEX, value >> 4))
        to = poke(out, to, byte(_HEX, value & 15))
    return poke(out, to, 34)


@inlined
def _scale(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """The scale that starts a decimal and the offset of its digits; the offset is -1 where no server writes such."""
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, at + 1
    if marker >= 0xE0:
        return marker - 256, at + 1
    if at + 2 <= end:
        value = byte(buf, at + 1)
        if marker == 0xCC:
            return value, at + 2
        if marker == 0xD0:
            return (value ^ 0x80) - 0x80, at + 2
    return 0, -1


@inlined
def _nibble(buf: Bytes, at: int, index: int) -> int:
    value = byte(buf, at + (index >> 1))
    return value & 15 if index & 1 else value >> 4


@kernel
def write_decimal(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Packed decimal digits as a quoted number in plain notation, its scale kept."""
    end = at + count
    if count < 2:
        return UNSUPPORTED
    scale, at = _scale(buf, at, end)
    if at < 0 or at >= end or not -DECIMAL_DIGITS_MAX <= scale <= DECIMAL_DIGITS_MAX:
        return UNSUPPORTED
    stop = 2 * (end - at) - 1  # the nibble that holds the sign
    sign = _nibble(buf, at, stop)
    first = 0
    while first < stop - 1 and _nibble(buf, at, first) == 0:
        first += 1
    if sign < 10 or stop - first > DECIMAL_DIGITS_MAX or stop < 1:
        return UNSUPPORTED
    to = poke(out, to, 34)
    if sign == 0xB or sign == 0xD:
        to = poke(out, to, 45)
    if stop - first <= scale:  # zeros between the point and the digits
        to = poke(out, to, 48)
        for i in range(scale - (stop - first)):
            if i == 0:
                to = poke(out, to, 46)
            to = poke(out, to, 48)
    point = stop - scale
    for index in range(first, stop):
        digit = _nibble(buf, at, index)
        if digit > 9:
            return UNSUPPORTED
        if index == point:
            to = poke(out, to, 46)
        to = poke(out, to, 48 + digit)
    if _nibble(buf, at, first) != 0:
        for _ in range(-scale):
            to = poke(out, to, 48)
    return poke(out, to, 34)


@inlined
def _little(buf: Bytes, at: int, width: int) -> int:
    """A signed number of `width` bytes, least significant first."""
    value = 0
    for i in range(width):
        value |= byte(buf, at + i) << (8 * i)
    sign = 1 << (8 * width - 1)
    return (value ^ sign) - sign


@inlined
def _write_two(value: int, out: Bytes, to: int) -> int:
    to = poke(out, to, 48 + value // 10)
    return poke(out, to, 48 + value % 10)


@inlined
def _write_date(days: int, out: Bytes, to: int) -> int:
    """YYYY-MM-DD of a day counted from 1970-01-01, in the proleptic Gregorian calendar."""
    days += 719468  # from 0000-03-01, so that a leap day ends its year
    era = days // 146097
    day_of_era = days - era * 146097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5 + 1
    year = year_of_era + era * 400 + (1 if month >= 10 else 0)
    to = _write_two(year // 100, out, to)
    to = _write_two(year % 100, out, to)
    to = poke(out, to, 45)
    to = _write_two(month - 9 if month >= 10 else month + 3, out, to)
    to = poke(out, to, 45)
    return _write_two(day, out, to)


@inlined
def _write_fraction(nanoseconds: int, out: Bytes, to: int) -> int:
    """The fraction of a second in as many groups of three digits as it needs."""
    if nanoseconds == 0:
        return to
    to = poke(out, to, 46)
    poke64(out, to, eight_digits(np.uint64(nanoseconds // 10)) | _ZEROS)
    if nanoseconds % 1_000_000 == 0:
        return to + 3
    if nanoseconds % 1_000 == 0:
        return to + 6
    return poke(out, to + 8, 48 + nanoseconds % 10)


FIRST_SECOND, LAST_SECOND = -62167219200, 253402300799
"""The years 0 to 9999."""


@kernel
def write_datetime(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """A point in time as a quoted ISO 8601 text, in its own offset from UTC."""
    if count != 8 and count != 16:
        return UNSUPPORTED
    seconds = _little(buf, at, 8)
    nanoseconds = offset = zone = 0
    if count == 16:
        nanoseconds = _little(buf, at + 8, 4)
        offset = _little(buf, at + 12, 2)
        zone = _little(buf, at + 14, 2)
    if not (0 <= nanoseconds < NANOSECONDS and OFFSET_MIN <= offset <= OFFSET_MAX and 0 <= zone <= ZONE_INDEX_MAX):
        return UNSUPPORTED
    if not FIRST_SECOND - DAY <= seconds <= LAST_SECOND + DAY:
        return UNSUPPORTED
    seconds += offset * 60
    if not FIRST_SECOND <= seconds <= LAST_SECOND:
        return UNSUPPORTED
    to = _write_date(seconds // DAY, out, poke(out, to, 34))
    seconds %= DAY
    to = _write_two(seconds // 3600, out, poke(out, to, 84))
    to = _write_two(seconds // 60 % 60, out, poke(out, to, 58))
    to = _write_two(seconds % 60, out, poke(out, to, 58))
    to = _write_fraction(nanoseconds, out, to)
    if offset == 0:
        to = poke(out, to, 90)
    else:
        to = poke(out, to, 45 if offset < 0 else 43)
        to = _write_two(abs(offset) // 60, out, to)
        to = _write_two(abs(offset) % 60, out, to)
    return poke(out, to, 34)


@kernel
def write_extension(kind: int, buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """The payload of an extension of type `kind`."""
    if kind == DECIMAL:
        return write_decimal(buf, at, count, out, to)
    if kind == UUID:
        return write_uuid(buf, at, count, out, to)
    if kind == DATETIME:
        return write_datetime(buf, at, count, out, to)
    return UNSUPPORTED
