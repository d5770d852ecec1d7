"""Compiled: the order-preserving bytes (`key_encoding.py`) of the keys of many tuples, or of many requests, at once.

Numbers, strings, booleans and UUIDs as servers write them are encoded here. Whatever else there is (fractions,
decimals, datetimes, odd spellings) is marked as not done, row by row, and left to the plain encoders.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flowstone.box.engine.tuple_kernels import read_array, read_integer, read_text
from flowstone.iproto.scan import CHILDREN, FIXED, LENGTH, Bytes, Cells, value_end
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import big16, big32, big64, byte, copy, poke

PART_INTEGER: Final = 1
PART_NUMBER: Final = 2
PART_STRING: Final = 3
PART_BINARY: Final = 4
PART_BOOLEAN: Final = 5
PART_UUID: Final = 6
PART_SCALAR: Final = 7
"""What `kinds` says of a part."""

FIXED_SIZE_MAX: Final = 18
"""Bytes that a part takes beside those of a text in it."""

_INTEGERS_END: Final = 9.2e18
"""Doubles below it, a little less than 2^63, are numbers of 64 bits."""


@inlined
def put_integer(out: Bytes, to: int, value: int) -> int:
    """Nine bytes; the offset behind them."""
    to = poke(out, to, 0x3F if value < 0 else 0x40)
    for shift in range(56, -8, -8):
        to = poke(out, to, (value >> shift) & 0xFF)
    return to


@inlined
def put_integer_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    """The number written at `at`; -1 if there is none."""
    if byte(buf, at) == 0xCF:
        to = poke(out, to, 0x40)
        return copy(out, to, buf, at + 1, 8)
    value, fits = read_integer(buf, at)
    return put_integer(out, to, value) if fits else -1


@inlined
def put_number_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    """An integer, or a double that is one; -1 for anything else."""
    if byte(buf, at) == 0xCB:
        value = np.uint64(big64(buf, at + 1)).view(np.float64)
        if not (value > -_INTEGERS_END and value < _INTEGERS_END) or np.floor(value) != value:
            return -1
        return poke(out, put_integer(out, to, int(value)), 0)
    to = put_integer_at(buf, at, out, to)
    return poke(out, to, 0) if to >= 0 else -1


@inlined
def put_bytes(buf: Bytes, start: int, end: int, first: int, out: Bytes, to: int) -> int:
    """The class `first`, the bytes with each zero followed by 0xff, two zeros."""
    to = poke(out, to, first)
    for at in range(start, end):
        value = byte(buf, at)
        to = poke(out, to, value)
        if value == 0:
            to = poke(out, to, 0xFF)
    return poke(out, poke(out, to, 0), 0)


@inlined
def put_string_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    start, end = read_text(buf, at)
    return put_bytes(buf, start, end, 0x80, out, to) if start >= 0 else -1


@inlined
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


@inlined
def put_boolean_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    marker = byte(buf, at)
    if marker != 0xC2 and marker != 0xC3:
        return -1
    return poke(out, to, 0x08 + (marker & 1))


@inlined
def put_uuid_at(buf: Bytes, at: int, out: Bytes, to: int) -> int:
    if byte(buf, at) != 0xD8 or byte(buf, at + 1) != 2:
        return -1
    return copy(out, poke(out, to, 0xA0), buf, at + 2, 16)


@inlined
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


@inlined
def put_part(buf: Bytes, at: int, kind: int, out: Bytes, to: int) -> int:
    """The encoding of the value at `at`, which is whole; the offset behind it, or -1."""
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


@inlined
def find_fields(buf: Bytes, at: int, end: int, fields: Cells, starts: Cells) -> int:
    """Notes where those fields of an array begin that are asked for; 1 if all are there and whole."""
    last = 0
    for part in range(fields.shape[0]):
        last = max(last, int(fields[part]))
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


@kernel
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
    """Writes the keys of the arrays between `offsets[i]` and `offsets[i + 1]` one after the other; how many are done.

    `fields` are the positions of the parts, `kinds` what they hold. Key `i` ends at `ends[i]`; one that cannot be made
    here is empty, and `is_done[i]` is 0. `out` has FIXED_SIZE_MAX per part and row, and, if there are texts, twice
    the bytes of `buf`.
    """
    to = 0
    done = 0
    for i in range(offsets.shape[0] - 1):
        begin = to
        fits = find_fields(buf, int(offsets[i]), int(offsets[i + 1]), fields, starts)
        if fits:
            for part in range(fields.shape[0]):
                to = put_part(buf, int(starts[part]), int(kinds[part]), out, to)
                if to < 0:
                    to = begin
                    fits = 0
                    break
        ends[i] = to
        poke(is_done, i, fits)
        done += fits
    return done
