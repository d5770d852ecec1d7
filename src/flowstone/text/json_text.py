"""Kernels that write MessagePack values as JSON text, and the column of such texts for Arrow.

Integers are exact, also above 2^53. A double is the shortest text that reads back to the same double. A str is escaped
as JSON requires, and a byte that is not UTF-8 becomes \\udcXX, as in Python's "surrogateescape", so nothing is lost.
bin is base64. A map key that is not a string becomes the string of its text. decimal, uuid and datetime are strings.
`json_plain` has the same rules in plain Python and writes the values that kernels do not support. No length is
trusted: every value is bounded by the caller's `end`, nesting by NESTING_MAX.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.limits import NESTING_MAX
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, big16, big32, big64, byte, little64, poke, poke64, put, trailing_zeros, word
from flowstone.text.float_text import write_double
from flowstone.text.integer_text import write_rare, write_short, write_unsigned
from flowstone.text.json_extension import EXTENSION_TEXT_MAX, base64_size, write_base64, write_extension
from flowstone.text.json_plain import json_value

Integers = NDArray[np.int64]

OK, MALFORMED, TOO_DEEP, FULL, UNSUPPORTED = 0, 1, 2, 3, 4
"""What became of a value. FULL: no room in `out`, grow it and start the value again. UNSUPPORTED: ask json_plain."""

ROOM = EXTENSION_TEXT_MAX + 20
"""Free bytes that each step requests before it writes: enough for any scalar except str and bin, which get more."""

_U8 = np.uint64(8)
_LOWEST = np.uint64(0x0101010101010101)
_HIGHEST = np.uint64(0x8080808080808080)
_SPACES = np.uint64(0x2020202020202020)
_QUOTES = np.uint64(0x2222222222222222)
_BACKSLASHES = np.uint64(0x5C5C5C5C5C5C5C5C)
_TOP, _NONE = np.uint64(1 << 63), np.uint64(0)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_ESCAPES = np.zeros(32, np.uint8)
_ESCAPES[[8, 9, 10, 12, 13]] = np.frombuffer(b"btnfr", np.uint8)


@inlined
def _special(eight: np.uint64) -> np.uint64:
    """The top bit of each byte that a JSON string cannot take as it is; exact for the lowest such byte."""
    quotes = eight ^ _QUOTES
    backslashes = eight ^ _BACKSLASHES
    control = (eight - _SPACES) & ~eight
    return (control | ((quotes - _LOWEST) & ~quotes) | ((backslashes - _LOWEST) & ~backslashes) | eight) & _HIGHEST


@inlined
def _sequence_length(buf: Bytes, at: int, end: int) -> int:
    """Bytes of the UTF-8 sequence at `at`, which starts with a byte above 0x7F; 0 where it is none."""
    lead = byte(buf, at)
    if lead < 0xC2 or lead > 0xF4:
        return 0
    length = 2 if lead < 0xE0 else (3 if lead < 0xF0 else 4)
    if at + length > end:
        return 0
    second = byte(buf, at + 1)
    low, high = 0x80, 0xBF
    if lead == 0xE0:
        low = 0xA0  # shorter sequences hold what is below
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


@kernel
def _write_special(buf: Bytes, at: int, end: int, out: Bytes, to: int) -> tuple[int, int]:
    """The characters from one that `_special` stopped at to the next plain one; the offsets behind them."""
    while at < end and to + ROOM <= out.size:
        value = byte(buf, at)
        if value >= 0x80:
            length = _sequence_length(buf, at, end)
            if length == 0:
                to = put(out, to, "\\udc")
                to = poke(out, to, byte(_HEX, value >> 4))
                to = poke(out, to, byte(_HEX, value & 15))
                length = 1
            else:
                for i in range(length):
                    to = poke(out, to, byte(buf, at + i))
            at += length
            continue
        if value >= 32 and value != 34 and value != 92:
            if at <= buf.size - 8:
                break
            to = poke(out, to, value)  # too near the buffer's end to be read as a part of a word
        else:
            to = _write_escape(value, out, to)
        at += 1
    return at, to


@inlined
def _write_escape(value: int, out: Bytes, to: int) -> int:
    """An ASCII character that a JSON string cannot take as it is."""
    to = poke(out, to, 92)
    if value >= 32:
        return poke(out, to, value)
    short = byte(_ESCAPES, value)
    if short:
        return poke(out, to, short)
    to = put(out, to, "u00")
    to = poke(out, to, 48 + (value >> 4))
    return poke(out, to, byte(_HEX, value & 15))


@inlined
def write_string(buf: Bytes, at: int, end: int, out: Bytes, to: int) -> int:
    """The bytes from `at` to `end` as a JSON string; the offset behind it, or -1 where `out` is full."""
    to = poke(out, to, 34)
    last = buf.size - 8
    while at < end:
        if to + ROOM > out.size:
            return -1
        if at <= last:
            eight = little64(buf, at)
            count = end - at
            if count < 8:
                keep = ~(_ALL << (np.uint64(count) * _U8))
                eight = (eight & keep) | (_SPACES & ~keep)
            else:
                count = 8
            special = _special(eight)
            poke64(out, to, eight)
            if special == 0:
                at, to = at + count, to + count
                continue
            clean = trailing_zeros(special) >> 3
            at, to = at + clean, to + clean
        at, to = _write_special(buf, at, end, out, to)
    return poke(out, to, 34)


@inlined
def _integer(marker: int, buf: Bytes, at: int) -> tuple[np.uint64, bool]:
    """The number of an integer marker, whose bytes start at `at`, and whether to read it as signed."""
    if marker == 0xCC:
        return word(byte(buf, at)), False
    if marker == 0xCD:
        return word(big16(buf, at)), False
    if marker == 0xCE:
        return word(big32(buf, at)), False
    if marker == 0xCF:
        return big64(buf, at), False
    if marker == 0xD0:
        return word((byte(buf, at) ^ 0x80) - 0x80), True
    if marker == 0xD1:
        return word((big16(buf, at) ^ 0x8000) - 0x8000), True
    if marker == 0xD2:
        return word((big32(buf, at) ^ 0x80000000) - 0x80000000), True
    return big64(buf, at), True


@inlined
def _write_number(marker: int, buf: Bytes, at: int, end: int, out: Bytes, to: int) -> tuple[int, int, int]:
    """A number longer than its marker. `at` is behind the marker."""
    width = 1 << (marker & 3)  # 0xCC and 0xD0 on: 1, 2, 4, 8
    if marker <= 0xCB:
        width = 4 if marker == 0xCA else 8
    if at + width > end:
        return at, to, MALFORMED
    if marker > 0xCB:
        value, signed = _integer(marker, buf, at)
        if signed and value & _TOP:
            to = poke(out, to, 45)
            value = _NONE - value
        return at + width, write_unsigned(value, out, to), OK
    if marker == 0xCA:
        double = np.float64(np.uint32(big32(buf, at)).view(np.float32))
    else:
        double = np.uint64(big64(buf, at)).view(np.float64)
    return at + width, write_double(double, out, to), OK


@kernel
def _write_sized(marker: int, buf: Bytes, at: int, end: int, out: Bytes, to: int) -> tuple[int, int, int]:
    """A scalar with a length that is no str: bin, extensions. `at` is behind the marker."""
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
    if to + base64_size(count) + ROOM > out.size:
        return at, to, FULL
    return at + count, write_base64(buf, at, count, out, to), OK


@inlined
def read_length(exponent: int, buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """A length of 1, 2 or 4 bytes: (offset after it, length); the offset is -1 where it is cut off."""
    if at + (1 << exponent) > end:
        return -1, 0
    if exponent == 0:
        return at + 1, byte(buf, at)
    return (at + 2, big16(buf, at)) if exponent == 1 else (at + 4, big32(buf, at))


@inlined
def _write_plain(marker: int, buf: Bytes, at: int, end: int, out: Bytes, to: int) -> tuple[int, int, int]:
    """A scalar whose text is no string: nil, booleans, numbers. `at` is behind the marker."""
    if 0xCA <= marker <= 0xD3:
        return _write_number(marker, buf, at, end, out, to)
    if marker == 0xC0:
        return at, put(out, to, "null"), OK
    if marker == 0xC2:
        return at, put(out, to, "false"), OK
    if marker == 0xC3:
        return at, put(out, to, "true"), OK
    return at, write_rare(marker if marker < 0x80 else marker - 256, out, to), OK


@inlined
def _write_scalar(
    marker: int, buf: Bytes, at: int, end: int, out: Bytes, to: int, is_key: bool
) -> tuple[int, int, int]:
    """Any scalar but str and, where it is no key, a short number: `write_value` sees to those."""
    if marker == 0xC1:
        return at, to, MALFORMED
    if 0xC4 <= marker <= 0xC9 or 0xD4 <= marker <= 0xD8:
        return _write_sized(marker, buf, at + 1, end, out, to)
    start = to
    if is_key:
        to = poke(out, to, 34)
    at, to, status = _write_plain(marker, buf, at + 1, end, out, to)
    if is_key and status == OK:
        if byte(out, start + 1) != 34:
            return at, poke(out, to, 34), status
        for i in range(start, to - 1):  # NaN and the infinities bring quotes of their own
            poke(out, i, byte(out, i + 1))
        to -= 1
    return at, to, status


@inlined
def _string_bounds(marker: int, buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Where the bytes of the str at `at` start and end; both -1 where it is cut off."""
    if marker < 0xC0:
        start, count = at + 1, marker & 31
    else:
        start, count = read_length(marker - 0xD9, buf, at + 1, end)
    return (start, start + count) if start >= 0 and start + count <= end else (-1, -1)


@inlined
def container(buf: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """(offset of the first item, number of items, 1 for a map); the offset is -1 where no whole container head is."""
    marker = byte(buf, at)
    if marker >= 0x80 and marker < 0xA0:
        count = marker & 15
        return (at + 1, count, 0) if marker >= 0x90 else (at + 1, 2 * count, 1)
    if marker < 0xDC or marker > 0xDF:
        return -1, 0, 0
    is_map = (marker - 0xDC) >> 1
    if marker & 1:
        return (at + 5, big32(buf, at + 1) << is_map, is_map) if at + 5 <= end else (-1, 0, 0)
    return (at + 3, big16(buf, at + 1) << is_map, is_map) if at + 3 <= end else (-1, 0, 0)


@inlined
def write_value(buf: Bytes, at: int, end: int, out: Bytes, to: int, stack: Integers) -> tuple[int, int, int]:
    """The value at `at` as JSON text at `to`: (offset behind the value, offset behind the text, status).

    `stack` is scratch of NESTING_MAX numbers. Unless the status is OK, what was written behind `to` means nothing.
    """
    left, is_map, depth = 1, 0, 0  # items still to come here; keys and values of a map count one by one
    while True:
        if to + ROOM > out.size:
            return at, to, FULL
        if at >= end:
            return at, to, MALFORMED
        marker = byte(buf, at)
        is_key = is_map == 1 and left & 1 == 0
        if marker < 0x80 and not is_key:
            to = write_short(np.uint64(marker), out, to)
            at += 1
        elif 0xA0 <= marker < 0xC0 or 0xD9 <= marker < 0xDC:
            start, after = _string_bounds(marker, buf, at, end)
            if after < 0:
                return at, to, MALFORMED
            to = write_string(buf, start, after, out, to)
            if to < 0:
                return at, to, FULL
            at = after
        elif 0x80 <= marker < 0xA0 or 0xDC <= marker < 0xE0:
            if is_key:
                return at, to, UNSUPPORTED
            if depth >= stack.size:
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
            at, to, status = _write_scalar(marker, buf, at, end, out, to, is_key)
            if status != OK:
                return at, to, status
        left -= 1
        while left == 0:
            if depth == 0:
                return at, to, OK
            if to + ROOM > out.size:
                return at, to, FULL
            to = poke(out, to, 125 if is_map else 93)
            depth -= 1
            left, is_map = (stack[depth] >> 1) - 1, stack[depth] & 1
        to = poke(out, to, 58 if is_map and left & 1 else 44)


GROWTH = 2
"""Factor by which a full output grows."""


@kernel
def _write_column(
    buf: Bytes, starts: Integers, ends: Integers, first: int, out: Bytes, offsets: Integers, stack: Integers
) -> tuple[int, int]:
    """Texts of the values from number `first` on, offsets[first] being known: (values done, status of the next one)."""
    to = offsets[first]
    for i in range(first, starts.size):
        if starts[i] >= 0:
            at, after, status = write_value(buf, starts[i], ends[i], out, to, stack)
            if status == OK and at != ends[i]:
                status = MALFORMED
            if status != OK:
                return i, status
            to = after
        offsets[i + 1] = to
    return starts.size, OK


def grown(out: Bytes, used: int, more: int) -> Bytes:
    """A larger copy of `out`, whose first `used` bytes matter, with room for at least `more` bytes."""
    larger: Bytes = np.empty(GROWTH * out.size + more + ROOM, np.uint8)
    larger[:used] = out[:used]
    return larger


def json_column(buf: Bytes, starts: Integers, ends: Integers) -> tuple[Integers, Bytes]:
    """JSON texts of the values at `starts` (to `ends`) of `buf`, one behind the other: (offsets, text).

    Text i is `text[offsets[i]:offsets[i + 1]]`, and empty where `starts[i]` is negative. JsonError: a value is broken.
    """
    buf, starts, ends = (
        np.ascontiguousarray(buf),
        np.ascontiguousarray(starts.astype(np.int64, copy=False)),
        np.ascontiguousarray(ends.astype(np.int64, copy=False)),
    )
    size = int(np.sum(np.where(starts < 0, 0, ends - starts)))
    out: Bytes = np.empty(2 * size + 4 * starts.size + ROOM, np.uint8)
    offsets: Integers = np.zeros(starts.size + 1, np.int64)
    stack: Integers = np.empty(NESTING_MAX, np.int64)
    done = 0
    while True:
        done, status = _write_column(buf, starts, ends, done, out, offsets, stack)
        if status == OK:
            return offsets, out[: offsets[-1]]
        used = int(offsets[done])
        if status == FULL:
            out = grown(out, used, 0)
            continue
        text = json_value(buf[starts[done] : ends[done]].tobytes()).encode()
        if used + len(text) > out.size:
            out = grown(out, used, len(text))
        out[used : used + len(text)] = np.frombuffer(text, np.uint8)
        done += 1
        offsets[done] = used + len(text)
