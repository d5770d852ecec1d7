"""Compiled: MessagePack values as JSON text.

Integers are exact, also above 2^53. A double is the shortest text that reads back to the same double. A str is escaped
as JSON requires, and a byte that is not UTF-8 becomes \\udcXX, as in Python's "surrogateescape", so nothing is lost.
bin is base64. A map key that is not a string becomes the string of its text. decimal, uuid and datetime are strings.
`json_plain` has the same rules in plain Python and writes the values that are not supported here. No length is
trusted: every value is bounded by the caller's `end`, nesting by NESTING_MAX.

In every function, `buf` has `size` bytes, of which those up to `end` belong to the value, and `out` has `room` bytes.
Functions that return (offset, offset, status) return the end offset of the value and the end offset of its text.
"""

from __future__ import annotations

import cython
import numpy as np

from flowstone.iproto.limits import NESTING_MAX as _NESTING_MAX

if not cython.compiled:  # compiled, the .pxd provides these
    from numpy.typing import NDArray

    from flowstone.native.words import (
        Bytes,
        big16,
        big32,
        big64,
        byte,
        float32,
        float64,
        little64,
        numbers,
        poke,
        poke64,
        put,
        signed,
        signed32,
        source,
        target,
        trailing_zeros,
        word,
    )
    from flowstone.text.float_text import write_double
    from flowstone.text.integer_text import write_short, write_signed, write_unsigned
    from flowstone.text.json_extension import base64_size, write_base64, write_extension, write_hex
    from flowstone.text.json_limits import FULL, MALFORMED, OK, ROOM, TOO_DEEP, UNSUPPORTED

    Integers = NDArray[np.int64]

    LOWEST = 0x0101010101010101
    HIGHEST = 0x8080808080808080
    SPACES = 0x2020202020202020
    QUOTES = 0x2222222222222222
    BACKSLASHES = 0x5C5C5C5C5C5C5C5C

NESTING_MAX = _NESTING_MAX
ESCAPES = np.frombuffer(bytes(8) + b"btn\0fr" + bytes(18), np.uint8)
"""The letter of the short escape of each control character; 0 if it has none."""


def special_bits(eight: int) -> int:
    """Return the top bits of the bytes of a word that a JSON string cannot contain unchanged.

    Bits above the lowest set one may be wrong.
    """
    quotes = eight ^ QUOTES
    backslashes = eight ^ BACKSLASHES
    control = (eight - SPACES) & ~eight
    return (control | ((quotes - LOWEST) & ~quotes) | ((backslashes - LOWEST) & ~backslashes) | eight) & HIGHEST


def sequence_length(buf: Bytes, at: int, end: int) -> int:
    """Return the length of the UTF-8 sequence at `at`, whose first byte is above 0x7F; 0 if it is invalid."""
    lead = byte(buf, at)
    if lead < 0xC2 or lead > 0xF4:
        return 0
    length = 2 if lead < 0xE0 else (3 if lead < 0xF0 else 4)
    if at + length > end:
        return 0
    second = byte(buf, at + 1)
    low, high = 0x80, 0xBF
    if lead == 0xE0:
        low = 0xA0  # overlong encoding of a shorter sequence
    elif lead == 0xED:
        high = 0x9F  # surrogates
    elif lead == 0xF0:
        low = 0x90
    elif lead == 0xF4:
        high = 0x8F  # beyond U+10FFFF
    if second < low or second > high:
        return 0
    for i in range(2, length):
        if byte(buf, at + i) & 0xC0 != 0x80:
            return 0
    return length


def write_special(buf: Bytes, size: int, at: int, end: int, out: Bytes, room: int, to: int) -> tuple[int, int]:
    """Write characters until the next one that needs no escape; return the offsets after them and after their text."""
    while at < end and to + ROOM <= room:
        value = byte(buf, at)
        if value >= 0x80:
            length = sequence_length(buf, at, end)
            if length == 0:
                to = write_hex(value, out, put(out, to, b"\\udc"))
                length = 1
            else:
                for i in range(length):
                    to = poke(out, to, byte(buf, at + i))
            at += length
            continue
        if value >= 32 and value != 34 and value != 92:
            if at <= size - 8:
                break
            to = poke(out, to, value)  # too close to the end of the buffer to read a whole word
        else:
            to = write_escape(value, out, to)
        at += 1
    return at, to


def write_escape(value: int, out: Bytes, to: int) -> int:
    """Write the escape of an ASCII character; return the offset after it."""
    to = poke(out, to, 92)
    if value >= 32:
        return poke(out, to, value)
    short = byte(source(ESCAPES), value)
    if short:
        return poke(out, to, short)
    return write_hex(value, out, put(out, to, b"u00"))


def write_string(buf: Bytes, size: int, at: int, end: int, out: Bytes, room: int, to: int) -> int:
    """Write the bytes from `at` to `end` as a JSON string; return the offset after it, or -1 if `out` is full."""
    to = poke(out, to, 34)
    last = size - 8
    while at < end:
        if to + ROOM > room:
            return -1
        if at <= last:
            eight = little64(buf, at)
            count = end - at
            if count < 8:
                keep = (word(1) << word(8 * count)) - 1
                eight = (eight & keep) | (SPACES & ~keep)
            else:
                count = 8
            special = special_bits(eight)
            poke64(out, to, eight)
            if special == 0:
                at, to = at + count, to + count
                continue
            clean = trailing_zeros(special) >> 3
            at, to = at + clean, to + clean
        at, to = write_special(buf, size, at, end, out, room, to)
    return poke(out, to, 34)


def write_integer(marker: int, buf: Bytes, at: int, out: Bytes, to: int) -> tuple[int, int, int]:
    """Write the integer whose bytes start at `at`, after its marker; they are complete."""
    if marker == 0xCC:
        return at + 1, write_short(word(byte(buf, at)), out, to), OK
    if marker == 0xCD:
        return at + 2, write_short(word(big16(buf, at)), out, to), OK
    if marker == 0xCE:
        return at + 4, write_unsigned(word(big32(buf, at)), out, to), OK
    if marker == 0xCF:
        return at + 8, write_unsigned(big64(buf, at), out, to), OK
    if marker == 0xD0:
        return at + 1, write_signed((byte(buf, at) ^ 0x80) - 0x80, out, to), OK
    if marker == 0xD1:
        return at + 2, write_signed((big16(buf, at) ^ 0x8000) - 0x8000, out, to), OK
    if marker == 0xD2:
        return at + 4, write_signed(signed32(big32(buf, at)), out, to), OK
    return at + 8, write_signed(signed(big64(buf, at)), out, to), OK


def write_number(marker: int, buf: Bytes, at: int, end: int, out: Bytes, to: int) -> tuple[int, int, int]:
    """Write a number of more than one byte; `at` is after its marker."""
    width = 1 << (marker & 3)  # 0xCC and 0xD0 on: 1, 2, 4, 8
    if marker <= 0xCB:
        width = 4 if marker == 0xCA else 8
    if at + width > end:
        return at, to, MALFORMED
    if marker > 0xCB:
        return write_integer(marker, buf, at, out, to)
    double = float32(big32(buf, at)) if marker == 0xCA else float64(big64(buf, at))
    return at + width, write_double(double, out, to), OK


def write_sized(marker: int, buf: Bytes, at: int, end: int, out: Bytes, room: int, to: int) -> tuple[int, int, int]:
    """Write a bin or extension value; `at` is after its marker."""
    extension = 1 if marker >= 0xC7 else 0
    if marker >= 0xD4:
        count = 1 << (marker - 0xD4)
    else:
        at, count = read_length((marker - 0xC4) % 3, buf, at, end)
    if at < 0 or at + count + extension > end:
        return at, to, MALFORMED
    if extension:
        after = write_extension(byte(buf, at), buf, at + 1, count, out, to)
        return at + 1 + count, after, (OK if after >= 0 else UNSUPPORTED)
    if to + base64_size(count) + ROOM > room:
        return at, to, FULL
    return at + count, write_base64(buf, at, count, out, to), OK


def read_length(exponent: int, buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the offset after a length of 1, 2 or 4 bytes, or -1 if it is incomplete, and the length."""
    if at + (1 << exponent) > end:
        return -1, 0
    if exponent == 0:
        return at + 1, byte(buf, at)
    if exponent == 1:
        return at + 2, big16(buf, at)
    return at + 4, big32(buf, at)


def write_plain(marker: int, buf: Bytes, at: int, end: int, out: Bytes, to: int) -> tuple[int, int, int]:
    """Write nil, a boolean or a number; `at` is after its marker."""
    if 0xCA <= marker <= 0xD3:
        return write_number(marker, buf, at, end, out, to)
    if marker == 0xC0:
        return at, put(out, to, b"null"), OK
    if marker == 0xC2:
        return at, put(out, to, b"false"), OK
    if marker == 0xC3:
        return at, put(out, to, b"true"), OK
    return at, write_signed(marker if marker < 0x80 else marker - 256, out, to), OK


def write_scalar(
    marker: int, buf: Bytes, at: int, end: int, out: Bytes, room: int, to: int, is_key: bool
) -> tuple[int, int, int]:
    """Write a scalar other than str, as a string if it is a key. `write_value` handles str and one-byte numbers."""
    if marker == 0xC1:
        return at, to, MALFORMED
    if 0xC4 <= marker <= 0xC9 or 0xD4 <= marker <= 0xD8:
        return write_sized(marker, buf, at + 1, end, out, room, to)
    start = to
    if is_key:
        to = poke(out, to, 34)
    at, to, status = write_plain(marker, buf, at + 1, end, out, to)
    if is_key and status == OK:
        if byte(out, start + 1) != 34:
            return at, poke(out, to, 34), status
        for i in range(start, to - 1):  # NaN and the infinities are already quoted
            poke(out, i, byte(out, i + 1))
        to -= 1
    return at, to, status


def string_bounds(marker: int, buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return start and end of the content of the str at `at`; (-1, -1) if it is incomplete."""
    if marker < 0xC0:
        start, count = at + 1, marker & 31
    else:
        start, count = read_length(marker - 0xD9, buf, at + 1, end)
    if start < 0 or start + count > end:
        return -1, -1
    return start, start + count


def container(buf: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the offset of the first item of a container, the number of items, and 1 for a map.

    The offset is -1 if there is no complete header of a container. Keys and values of a map count separately.
    """
    marker = byte(buf, at)
    if marker >= 0x80 and marker < 0xA0:
        count = marker & 15
        if marker >= 0x90:
            return at + 1, count, 0
        return at + 1, 2 * count, 1
    if marker < 0xDC or marker > 0xDF:
        return -1, 0, 0
    is_map = (marker - 0xDC) >> 1
    if marker & 1:
        if at + 5 <= end:
            return at + 5, big32(buf, at + 1) << is_map, is_map
    elif at + 3 <= end:
        return at + 3, big16(buf, at + 1) << is_map, is_map
    return -1, 0, 0


def write_value(
    buf: Bytes, size: int, at: int, end: int, out: Bytes, room: int, to: int, stack: Integers
) -> tuple[int, int, int]:
    """Write the value at `at` as JSON text at `to`; return (end of the value, end of the text, status).

    `stack` is scratch space of NESTING_MAX numbers. Unless the status is OK, the text is invalid.
    """
    left, is_map, depth = 1, 0, 0  # number of remaining items; keys and values of a map count separately
    while True:
        if to + ROOM > room:
            return at, to, FULL
        if at >= end:
            return at, to, MALFORMED
        marker = byte(buf, at)
        is_key = is_map == 1 and left & 1 == 0
        if marker < 0x80 and not is_key:
            to = write_short(word(marker), out, to)
            at += 1
        elif 0xA0 <= marker < 0xC0 or 0xD9 <= marker < 0xDC:
            start, after = string_bounds(marker, buf, at, end)
            if after < 0:
                return at, to, MALFORMED
            to = write_string(buf, size, start, after, out, room, to)
            if to < 0:
                return at, to, FULL
            at = after
        elif 0x80 <= marker < 0xA0 or 0xDC <= marker < 0xE0:
            if is_key:
                return at, to, UNSUPPORTED
            if depth >= NESTING_MAX:
                return at, to, TOO_DEEP
            at, count, kind = container(buf, at, end)
            if at < 0:
                return at, to, MALFORMED
            to = poke(out, to, 123 if kind else 91)
            if count:
                stack[depth] = left << 1 | is_map
                left, is_map, depth = count, kind, depth + 1
                continue
            to = poke(out, to, 125 if kind else 93)
        else:
            at, to, status = write_scalar(marker, buf, at, end, out, room, to, is_key)
            if status != OK:
                return at, to, status
        left -= 1
        while left == 0:
            if depth == 0:
                return at, to, OK
            if to + ROOM > room:
                return at, to, FULL
            to = poke(out, to, 125 if is_map else 93)
            depth -= 1
            left, is_map = (stack[depth] >> 1) - 1, stack[depth] & 1
        to = poke(out, to, 58 if is_map and left & 1 else 44)


def write_column(
    buf: Bytes, starts: Integers, ends: Integers, first: int, out: Bytes, offsets: Integers, stack: Integers
) -> tuple[int, int]:
    """Write the texts of the values from number `first` on, from `offsets[first]` on.

    Return the number of values done, and the status of the next one.
    """
    status = OK
    data, size, text, room, scratch = source(buf), buf.shape[0], target(out), out.shape[0], numbers(stack)
    with cython.nogil:
        to = offsets[first]
        while first < starts.shape[0]:
            if starts[first] >= 0:
                at, after, status = write_value(data, size, starts[first], ends[first], text, room, to, scratch)
                if status == OK and at != ends[first]:
                    status = MALFORMED
                if status != OK:
                    break
                to = after
            first += 1
            offsets[first] = to
    return first, status
