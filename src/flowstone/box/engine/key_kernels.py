"""Compiled: the order-preserving encoding (`key_encoding.py`) of the keys of many tuples or requests.

Integers, integral doubles, strings, binary data, booleans and UUIDs are supported. A row with any other value
(fraction, decimal, datetime, unusual encoding) is marked as not done and left to the plain encoders.
Each `put_…_at` function encodes the complete value at `at` and returns the offset after the encoding, or -1 if the
value is not supported.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from math import floor

    from flowstone.box.engine.key_parts import (
        PART_BINARY,
        PART_BOOLEAN,
        PART_INTEGER,
        PART_NUMBER,
        PART_STRING,
        PART_UUID,
    )
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import (
        CHILDREN,
        FIXED,
        LENGTH,
        put_big,
        read_array,
        read_integer,
        read_text,
        value_end,
    )
    from flowstone.native.words import big16, big32, big64, byte, copy, float64, poke, source, target

INTEGERS_END = 9.2e18
"""A little less than 2^63: integral doubles between its negative and itself fit into int64."""


def put_integer(out: Bytes, to: int, value: int) -> int:
    """Write an integer in nine bytes; return the offset after them."""
    return put_big(out, poke(out, to, 0x3F if value < 0 else 0x40), value, 8)


def put_integer_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    """Encode an integer."""
    if byte(buf, at) == 0xCF:
        to = poke(out, to, 0x40)
        return copy(out, to, buf, at + 1, 8)
    value, fits = read_integer(buf, at)
    return put_integer(out, to, value) if fits else -1


def put_number_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    """Encode an integer or an integral double."""
    if byte(buf, at) == 0xCB:
        value = float64(big64(buf, at + 1))
        if not (value > -INTEGERS_END and value < INTEGERS_END) or floor(value) != value:
            return -1
        return poke(out, put_integer(out, to, int(value)), 0)
    to = put_integer_at(buf, at, out, to)
    return poke(out, to, 0) if to >= 0 else -1


def put_bytes(buf: Bytes, start: int, end: int, first: int, out: Bytes, to: int) -> int:
    """Write the byte `first`, then the content with 0xff after each zero byte, then two zeros."""
    to = poke(out, to, first)
    for at in range(start, end):
        value = byte(buf, at)
        to = poke(out, to, value)
        if value == 0:
            to = poke(out, to, 0xFF)
    return poke(out, poke(out, to, 0), 0)


def put_string_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    start, end = read_text(buf, at)
    return put_bytes(buf, start, end, 0x80, out, to) if start >= 0 else -1


def put_binary_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    marker = byte(buf, at)
    if marker == 0xC4:
        start, size = at + 2, byte(buf, at + 1)
    elif marker == 0xC5:
        start, size = at + 3, big16(buf, at + 1)
    elif marker == 0xC6:
        start, size = at + 5, big32(buf, at + 1)
    else:
        return -1
    return put_bytes(buf, start, start + size, 0x90, out, to)


def put_boolean_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    marker = byte(buf, at)
    if marker != 0xC2 and marker != 0xC3:
        return -1
    return poke(out, to, 0x08 + (marker & 1))


def put_uuid_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    if byte(buf, at) != 0xD8 or byte(buf, at + 1) != 2:
        return -1
    return copy(out, poke(out, to, 0xA0), buf, at + 2, 16)


def put_scalar_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    marker = byte(buf, at)
    if 0xA0 <= marker <= 0xBF or 0xD9 <= marker <= 0xDB:
        return put_string_at(buf, at, out, to)
    if 0xC4 <= marker <= 0xC6:
        return put_binary_at(buf, at, out, to)
    if marker == 0xC2 or marker == 0xC3:
        return put_boolean_at(buf, at, out, to)
    if marker == 0xD8:
        return put_uuid_at(buf, at, out, to)
    return put_number_at(buf, at, out, to)


def put_part(buf: Bytes, at: int, kind: int, out: Bytes, to: int) -> int:
    """Encode the complete value at `at` as a part of this kind; return the offset after the encoding, or -1."""
    if kind == PART_INTEGER:
        return put_integer_at(buf, at, out, to)
    if kind == PART_STRING:
        return put_string_at(buf, at, out, to)
    if kind == PART_NUMBER:
        return put_number_at(buf, at, out, to)
    if kind == PART_BINARY:
        return put_binary_at(buf, at, out, to)
    if kind == PART_BOOLEAN:
        return put_boolean_at(buf, at, out, to)
    if kind == PART_UUID:
        return put_uuid_at(buf, at, out, to)
    return put_scalar_at(buf, at, out, to)


def find_fields(buf: Bytes, at: int, end: int, fields: Cells, starts: Cells) -> int:
    """Set `starts` to the offsets of `fields` in the array at `at`; return 1 if all are complete, else 0."""
    last = 0
    for part in range(fields.shape[0]):
        last = max(last, fields[part])
    count, at = read_array(buf, at, end)
    if count <= last:
        return 0
    for field in range(last + 1):
        if at >= end:
            return 0
        for part in range(fields.shape[0]):
            if fields[part] == field:
                starts[part] = at
        marker = byte(buf, at)
        if byte(CHILDREN, marker) or byte(LENGTH, marker):
            at = value_end(buf, at, end)
            if at < 0:
                return 0
        else:
            at += 1 + byte(FIXED, marker)
            if at > end:
                return 0
    return 1


def encode_keys(
    buf: Bytes,
    offsets: Cells,
    fields: Cells,
    kinds: Cells,
    starts: Cells,
    out: Bytes,
    ends: Cells,
    is_done: Bytes,
) -> int:
    """Encode the keys of the arrays between `offsets[i]` and `offsets[i + 1]` consecutively; return how many are done.

    `fields` has the field number of each part, `kinds` its PART constant; `starts` is scratch space. Key `i` ends at
    `ends[i]`; a key that is not supported is empty, with `is_done[i]` 0. `out` has FIXED_SIZE_MAX bytes per part and
    row, plus twice the size of `buf` if there are strings.
    """
    with cython.nogil:
        return put_keys(source(buf), offsets, fields, kinds, starts, target(out), ends, is_done)


def put_keys(
    buf: Bytes,
    offsets: Cells,
    fields: Cells,
    kinds: Cells,
    starts: Cells,
    out: Bytes,
    ends: Cells,
    is_done: Bytes,
) -> int:
    """Run the loop of `encode_keys`."""
    to = 0
    done = 0
    for i in range(offsets.shape[0] - 1):
        begin = to
        fits = find_fields(buf, offsets[i], offsets[i + 1], fields, starts)
        if fits:
            for part in range(fields.shape[0]):
                to = put_part(buf, starts[part], kinds[part], out, to)
                if to < 0:
                    to = begin
                    fits = 0
                    break
        ends[i] = to
        is_done[i] = fits
        done += fits
    return done
