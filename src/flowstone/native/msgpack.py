"""MessagePack values in a byte array: end offsets, and the numbers, strings and container headers of rows.

These are the interpreted forms of the inline functions in msgpack.pxd. A function that takes `end` reads no byte at or
after that offset; the others trust their caller that the value is complete.
"""

from __future__ import annotations

import numpy as np

from flowstone.native.words import Bytes, big16, big32, big64, byte, poke, signed

NIL = 0xC0
NO_VALUE = 255
"""Entry of the table of lengths for the byte that starts no value."""


def _marker_tables() -> tuple[Bytes, Bytes, Bytes]:
    """Return, per first byte of a value, the number of fixed bytes, of children, and of bytes of an explicit length."""
    fixed, children, length = np.zeros((3, 256), np.uint8)
    for marker in range(0x80, 0x90):
        children[marker] = 2 * (marker & 0x0F)
    for marker in range(0x90, 0xA0):
        children[marker] = marker & 0x0F
    for marker in range(0xA0, 0xC0):
        fixed[marker] = marker & 0x1F
    for marker, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        fixed[marker] = size
    for marker, size in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        fixed[marker] = size
    for exponent in range(5):  # fixext 1, 2, 4, 8, 16: a type byte and the data
        fixed[0xD4 + exponent] = 1 + (1 << exponent)
    for marker, size in ((0xD9, 1), (0xDA, 2), (0xDB, 4), (0xC4, 1), (0xC5, 2), (0xC6, 4)):
        length[marker] = size
    for marker, size in ((0xC7, 1), (0xC8, 2), (0xC9, 4)):  # ext: a type byte as well
        length[marker], fixed[marker] = size, 1
    for marker, size in ((0xDC, 2), (0xDD, 4)):
        length[marker], children[marker] = size, 1
    for marker, size in ((0xDE, 2), (0xDF, 4)):
        length[marker], children[marker] = size, 2
    length[0xC1] = NO_VALUE
    return fixed, children, length


FIXED, CHILDREN, LENGTH = _marker_tables()


def value_end(buf: Bytes, at: int, end: int) -> int:
    """Return the offset after the value at `at`, or -1 if it is malformed or does not end by `end`.

    Needs no stack for nesting: each value consumes at least one byte, so the loop is bounded by `end`.
    """
    todo = 1
    while todo > 0:
        if at >= end:
            return -1
        marker = byte(buf, at)
        at += 1
        width = byte(LENGTH, marker)
        if width == 0:
            at += byte(FIXED, marker)
            todo += byte(CHILDREN, marker) - 1
        else:
            if width == NO_VALUE or at + width > end:
                return -1
            count = byte(buf, at) if width == 1 else (big16(buf, at) if width == 2 else big32(buf, at))
            at += width
            children = byte(CHILDREN, marker)
            todo -= 1
            if children:
                todo += count * children
            else:
                at += count + byte(FIXED, marker)
    return at if at <= end else -1


def read_unsigned(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned number at `at` as int64 (negative from 2^63 on) and the offset after it.

    The offset is -1 if there is no complete unsigned number.
    """
    if at >= end:
        return 0, -1
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, at + 1
    if marker < 0xCC or marker > 0xCF:
        return 0, -1
    after = at + 1 + (1 << (marker - 0xCC))
    if after > end:
        return 0, -1
    if marker == 0xCC:
        return byte(buf, at + 1), after
    if marker == 0xCD:
        return big16(buf, at + 1), after
    if marker == 0xCE:
        return big32(buf, at + 1), after
    return signed(big64(buf, at + 1)), after


def read_uint(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned number below 2^63 at `at` and the offset after it, which is -1 if there is none."""
    value, after = read_unsigned(buf, at, end)
    return value, (after if value >= 0 else -1)


def read_map(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number of pairs of the map at `at` and the offset of its first key, which is -1 if there is none."""
    if at >= end:
        return 0, -1
    marker = byte(buf, at)
    if 0x80 <= marker <= 0x8F:
        return marker & 0x0F, at + 1
    if marker == 0xDE and at + 3 <= end:
        return big16(buf, at + 1), at + 3
    if marker == 0xDF and at + 5 <= end:
        return big32(buf, at + 1), at + 5
    return 0, -1


def read_array(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number of elements of the array at `at` and the offset of the first.

    The number is -1 if there is no complete array header.
    """
    if at >= end:
        return -1, at
    marker = byte(buf, at)
    if 0x90 <= marker <= 0x9F:
        return marker & 0x0F, at + 1
    if marker == 0xDC and at + 3 <= end:
        return big16(buf, at + 1), at + 3
    if marker == 0xDD and at + 5 <= end:
        return big32(buf, at + 1), at + 5
    return -1, at


def read_integer(buf: Bytes, at: int) -> tuple[int, int]:
    """Return the integer at `at`, and 1 if the value is an integer below 2^63, else 0."""
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, 1
    if marker >= 0xE0:
        return marker - 0x100, 1
    if marker == 0xCC:
        return byte(buf, at + 1), 1
    if marker == 0xCD:
        return big16(buf, at + 1), 1
    if marker == 0xCE:
        return big32(buf, at + 1), 1
    if marker == 0xD0:
        value = byte(buf, at + 1)
        return value - 0x100 if value >= 0x80 else value, 1
    if marker == 0xD1:
        value = big16(buf, at + 1)
        return value - 0x10000 if value >= 0x8000 else value, 1
    if marker == 0xD2:
        value = big32(buf, at + 1)
        return value - 0x1_0000_0000 if value >= 0x8000_0000 else value, 1
    if marker == 0xCF or marker == 0xD3:
        value = signed(big64(buf, at + 1))
        return value, 1 if marker == 0xD3 or value >= 0 else 0
    return 0, 0


def read_text(buf: Bytes, at: int) -> tuple[int, int]:
    """Return the start and end of the content of the string at `at`; (-1, -1) if the value is not a string."""
    marker = byte(buf, at)
    if 0xA0 <= marker <= 0xBF:
        return at + 1, at + 1 + (marker & 0x1F)
    if marker == 0xD9:
        return at + 2, at + 2 + byte(buf, at + 1)
    if marker == 0xDA:
        return at + 3, at + 3 + big16(buf, at + 1)
    if marker == 0xDB:
        return at + 5, at + 5 + big32(buf, at + 1)
    return -1, -1


def read_length(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the packet length at `at` and the offset after it.

    The length is -1 if the value is not a length, and -2 if it is incomplete; then the offset is the end needed.
    """
    if at >= end:
        return -2, at + 1
    marker = byte(buf, at)
    if marker >= 0x80:
        if marker < 0xCC or marker > 0xCF:
            return -1, at
        after = at + 1 + (1 << (marker - 0xCC))
        if after > end:
            return -2, after
    size, after = read_uint(buf, at, end)
    return (size, after) if after >= 0 else (-1, at)


def put_uint(out: Bytes, at: int, value: int) -> int:
    """Write an unsigned number, given as int64, in its shortest form; return the offset after it."""
    if value < 0 or value >= 0x1_0000_0000:
        return put_big(out, poke(out, at, 0xCF), value, 8)
    if value < 0x80:
        return poke(out, at, value)
    if value < 0x100:
        return poke(out, poke(out, at, 0xCC), value)
    if value < 0x10000:
        return put_big(out, poke(out, at, 0xCD), value, 2)
    return put_big(out, poke(out, at, 0xCE), value, 4)


def put_big(out: Bytes, at: int, value: int, width: int) -> int:
    """Write the lowest `width` bytes of `value`, most significant first; return the offset after them."""
    for i in range(width):
        poke(out, at + i, (value >> (8 * (width - 1 - i))) & 0xFF)
    return at + width


def put_pair(out: Bytes, at: int, key: int, value: int) -> int:
    """Write a key below 128 and an unsigned number, given as int64; return the offset after them."""
    return put_uint(out, poke(out, at, key), value)
