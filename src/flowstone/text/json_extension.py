"""Compiled: binary data and extension types as JSON strings (`docs/spec/iproto.md#extension-types`).

Each function takes a payload that lies inside `buf` and returns the end offset of the text. It returns -1 for values
that only the plain formatter (`json_plain`) writes: content that no server writes, years of more than four digits,
types without a kernel.
"""

from __future__ import annotations

import cython
import numpy as np

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.extensions import ExtensionType
    from flowstone.native.words import (
        Bytes,
        big16,
        byte,
        little64,
        poke,
        poke64,
        signed,
        signed32,
        source,
        word,
    )
    from flowstone.text.integer_text import eight_digits
    from flowstone.text.json_limits import DECIMAL_DIGITS_MAX

    ZEROS = 0x30303030_30303030
    FIRST_SECOND, LAST_SECOND = -62167219200, 253402300799  # the years 0 to 9999
    DAY = 86400
    NANOSECONDS = 1_000_000_000
    OFFSET_MIN, OFFSET_MAX = -12 * 60, 14 * 60  # minutes
    ZONE_INDEX_MAX = 1024

ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)


def base64_size(count: int) -> int:
    """Return the size of the quoted base64 text of `count` bytes."""
    return (count + 2) // 3 * 4 + 2


def write_base64(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Write `count` bytes as quoted base64 with padding."""
    alphabet = source(ALPHABET)
    to = poke(out, to, 34)
    whole = at + count // 3 * 3
    while at < whole:
        bits = (big16(buf, at) << 8) | byte(buf, at + 2)
        poke(out, to, byte(alphabet, bits >> 18))
        poke(out, to + 1, byte(alphabet, (bits >> 12) & 63))
        poke(out, to + 2, byte(alphabet, (bits >> 6) & 63))
        to = poke(out, to + 3, byte(alphabet, bits & 63))
        at += 3
    left = count % 3
    if left:
        bits = byte(buf, at) << 16
        if left == 2:
            bits |= byte(buf, at + 1) << 8
        to = poke(out, to, byte(alphabet, bits >> 18))
        to = poke(out, to, byte(alphabet, (bits >> 12) & 63))
        to = poke(out, to, byte(alphabet, (bits >> 6) & 63) if left == 2 else 61)
        to = poke(out, to, 61)
    return poke(out, to, 34)


def write_hex(value: int, out: Bytes, to: int) -> int:
    """Write a byte as two hexadecimal digits."""
    high, low = value >> 4, value & 15
    to = poke(out, to, high + (48 if high < 10 else 87))
    return poke(out, to, low + (48 if low < 10 else 87))


def write_uuid(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Write 16 bytes as a quoted UUID in canonical form."""
    if count != 16:
        return -1
    to = poke(out, to, 34)
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            to = poke(out, to, 45)
        to = write_hex(byte(buf, at + i), out, to)
    return poke(out, to, 34)


def read_scale(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the scale of a decimal and the offset of its digits; -1 if its encoding is unusual."""
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


def nibble(buf: Bytes, at: int, index: int) -> int:
    """Return nibble number `index` of the bytes from `at` on."""
    value = byte(buf, at + (index >> 1))
    return value & 15 if index & 1 else value >> 4


def write_decimal(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Write a packed decimal as a quoted number in plain notation, with its scale."""
    end = at + count
    if count < 2:
        return -1
    scale, at = read_scale(buf, at, end)
    if at < 0 or at >= end or not -DECIMAL_DIGITS_MAX <= scale <= DECIMAL_DIGITS_MAX:
        return -1
    stop = 2 * (end - at) - 1  # the nibble that holds the sign
    sign = nibble(buf, at, stop)
    first = 0
    while first < stop - 1 and nibble(buf, at, first) == 0:
        first += 1
    if sign < 10 or stop - first > DECIMAL_DIGITS_MAX or stop < 1:
        return -1
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
        digit = nibble(buf, at, index)
        if digit > 9:
            return -1
        if index == point:
            to = poke(out, to, 46)
        to = poke(out, to, 48 + digit)
    if nibble(buf, at, first) != 0:
        for _ in range(-scale):
            to = poke(out, to, 48)
    return poke(out, to, 34)


def write_two(value: int, out: Bytes, to: int) -> int:
    """Write a number below 100 as two digits."""
    to = poke(out, to, 48 + value // 10)
    return poke(out, to, 48 + value % 10)


def write_date(days: int, out: Bytes, to: int) -> int:
    """Write the date of a day counted from 0000-01-01 as YYYY-MM-DD, in the proleptic Gregorian calendar."""
    days += 146097 - 60  # from March 1 of the year -400: years that begin in March end with the leap day
    era = days // 146097
    day_of_era = days - era * 146097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5 + 1
    year = year_of_era + (era - 1) * 400 + (1 if month >= 10 else 0)
    to = write_two(year // 100, out, to)
    to = write_two(year % 100, out, to)
    to = poke(out, to, 45)
    to = write_two(month - 9 if month >= 10 else month + 3, out, to)
    to = poke(out, to, 45)
    return write_two(day, out, to)


def write_fraction(nanoseconds: int, out: Bytes, to: int) -> int:
    """Write the fraction of a second in groups of three digits, without trailing groups of zeros."""
    if nanoseconds == 0:
        return to
    to = poke(out, to, 46)
    poke64(out, to, eight_digits(word(nanoseconds // 10)) | ZEROS)
    if nanoseconds % 1_000_000 == 0:
        return to + 3
    if nanoseconds % 1_000 == 0:
        return to + 6
    return poke(out, to + 8, 48 + nanoseconds % 10)


def write_datetime(buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Write a datetime as quoted ISO 8601 text with its offset from UTC."""
    if count != 8 and count != 16:
        return -1
    seconds = signed(little64(buf, at))
    nanoseconds = offset = zone = 0
    if count == 16:
        rest = signed(little64(buf, at + 8))  # nanoseconds of 4 bytes, minutes from UTC and time zone of 2 each
        nanoseconds = signed32(rest)
        offset = signed32(rest >> 16) >> 16
        zone = rest >> 48
    if not (0 <= nanoseconds < NANOSECONDS and OFFSET_MIN <= offset <= OFFSET_MAX and 0 <= zone <= ZONE_INDEX_MAX):
        return -1
    if not FIRST_SECOND - DAY <= seconds <= LAST_SECOND + DAY:
        return -1
    seconds += offset * 60
    if not FIRST_SECOND <= seconds <= LAST_SECOND:
        return -1
    seconds -= FIRST_SECOND
    to = write_date(seconds // DAY, out, poke(out, to, 34))
    seconds %= DAY
    to = write_two(seconds // 3600, out, poke(out, to, 84))
    to = write_two(seconds // 60 % 60, out, poke(out, to, 58))
    to = write_two(seconds % 60, out, poke(out, to, 58))
    to = write_fraction(nanoseconds, out, to)
    if offset == 0:
        to = poke(out, to, 90)
    else:
        to = poke(out, to, 45 if offset < 0 else 43)
        offset = -offset if offset < 0 else offset
        to = write_two(offset // 60, out, to)
        to = write_two(offset % 60, out, to)
    return poke(out, to, 34)


def write_extension(kind: int, buf: Bytes, at: int, count: int, out: Bytes, to: int) -> int:
    """Write the payload of an extension of type `kind`."""
    if kind == ExtensionType.DECIMAL:
        return write_decimal(buf, at, count, out, to)
    if kind == ExtensionType.UUID:
        return write_uuid(buf, at, count, out, to)
    if kind == ExtensionType.DATETIME:
        return write_datetime(buf, at, count, out, to)
    return -1
