"""Compiled passes that encode columns to MessagePack and assemble rows into requests, without Python objects per row.

Each column is encoded into a buffer of its own; `edges` receives the offset of each value and the end offset. The
pieces of a row are then joined after the head of its request. The caller provides output buffers of the size that each
kernel documents. A kernel returns the number of the first row that it cannot encode, or -1.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.constants import TYPE_ERROR
from flowstone.iproto.extensions import DECIMAL_DIGITS_MAX, ExtensionType
from flowstone.iproto.row_batches import put_big, put_pair, put_uint, read_length
from flowstone.iproto.scan import Bytes, Cells, read_map, read_uint, value_end
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte, copy, poke

Offsets = NDArray[np.int32]

NIL: Final = 0xC0
NUMBER_SIZE: Final = 9
HEAD_SIZE_MAX: Final = 5
REQUEST_SIZE: Final = 32
"""Bytes of a request before the fields of its tuple: length, header, space and the head of an array."""

UUID_SIZE: Final = 18
DATETIME_SIZE: Final = 18
DECIMAL_SIZE: Final = 48
"""76 digits and a sign in 39 bytes, a scale of up to 3 bytes, and the head of the extension."""

UUID: Final = ExtensionType.UUID.value
DECIMAL: Final = ExtensionType.DECIMAL.value
DATETIME: Final = ExtensionType.DATETIME.value


@inlined
def put_int(out: Bytes, at: int, value: int) -> int:
    """Write a signed integer in its shortest form."""
    if value >= 0:
        return put_uint(out, at, value)
    if value >= -0x20:
        return poke(out, at, value & 0xFF)
    if value >= -0x80:
        return poke(out, poke(out, at, 0xD0), value & 0xFF)
    if value >= -0x8000:
        return put_big(out, poke(out, at, 0xD1), value, 2)
    if value >= -0x8000_0000:
        return put_big(out, poke(out, at, 0xD2), value, 4)
    return put_big(out, poke(out, at, 0xD3), value, 8)


@kernel
def put_ints(values: Cells, valid: Bytes, least: int, out: Bytes, edges: Cells) -> int:
    """Encode integers of at least `least`; `out` has NUMBER_SIZE bytes per row."""
    at = 0
    for row in range(values.size):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        if values[row] < least:
            return row
        at = put_int(out, at, int(values[row]))
    edges[values.size] = at
    return -1


@kernel
def put_wide_ints(words: Cells, valid: Bytes, least: int, out: Bytes, edges: Cells) -> int:
    """Encode 128-bit integers, low word first, that fit into 64 bits. `least` is 0 or below; `out` as in `put_ints`."""
    at = 0
    count = valid.size
    for row in range(count):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        low, high = int(words[2 * row]), int(words[2 * row + 1])
        if high == 0 and low < 0:  # 2^63 or above
            at = put_big(out, poke(out, at, 0xCF), low, 8)
        elif (high == 0 and low >= 0) or (high == -1 and low < 0 and least < 0):
            at = put_int(out, at, low)
        else:
            return row
    edges[count] = at
    return -1


@kernel
def put_doubles(bits: Cells, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode doubles, given as their bits; `out` has NUMBER_SIZE bytes per row."""
    at = 0
    for row in range(bits.size):
        edges[row] = at
        at = put_big(out, poke(out, at, 0xCB), int(bits[row]), 8) if valid[row] else poke(out, at, NIL)
    edges[bits.size] = at
    return -1


@kernel
def put_booleans(values: Bytes, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode booleans; `out` has one byte per row."""
    for row in range(values.size):
        edges[row] = row
        poke(out, row, (0xC3 if values[row] else 0xC2) if valid[row] else NIL)
    edges[values.size] = values.size
    return -1


@inlined
def put_sized_head(out: Bytes, at: int, size: int, is_text: int) -> int:
    if is_text:
        if size < 32:
            return poke(out, at, 0xA0 + size)
        if size < 0x100:
            return poke(out, poke(out, at, 0xD9), size)
        if size < 0x10000:
            return put_big(out, poke(out, at, 0xDA), size, 2)
        return put_big(out, poke(out, at, 0xDB), size, 4)
    if size < 0x100:
        return poke(out, poke(out, at, 0xC4), size)
    if size < 0x10000:
        return put_big(out, poke(out, at, 0xC5), size, 2)
    return put_big(out, poke(out, at, 0xC6), size, 4)


@kernel
def put_sized(data: Bytes, offsets: Offsets, valid: Bytes, is_text: int, out: Bytes, edges: Cells) -> int:
    """Encode strings or binary values; `out` has HEAD_SIZE_MAX bytes per row besides the values."""
    at = 0
    for row in range(valid.size):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        start, size = int(offsets[row]), int(offsets[row + 1]) - int(offsets[row])
        at = copy(out, put_sized_head(out, at, size, is_text), data, start, size)
    edges[valid.size] = at
    return -1


@kernel
def put_raw(data: Bytes, offsets: Offsets, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Copy values that are already MessagePack, one per row; `out` has one byte per row besides the values."""
    at = 0
    for row in range(valid.size):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        start, size = int(offsets[row]), int(offsets[row + 1]) - int(offsets[row])
        if value_end(data, start, start + size) != start + size:
            return row
        at = copy(out, at, data, start, size)
    edges[valid.size] = at
    return -1


@inlined
def hex_digit(character: int) -> int:
    if 0x30 <= character <= 0x39:
        return character - 0x30
    lower = character | 0x20
    return lower - 0x57 if 0x61 <= lower <= 0x66 else -1


@kernel
def put_uuids(data: Bytes, offsets: Offsets, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode UUIDs given as 36 characters; `out` has UUID_SIZE bytes per row."""
    at = 0
    for row in range(valid.size):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        start = int(offsets[row])
        if int(offsets[row + 1]) - start != 36:
            return row
        at = poke(out, poke(out, at, 0xD8), UUID)
        place = 0
        while place < 36:
            if place == 8 or place == 13 or place == 18 or place == 23:
                if byte(data, start + place) != 0x2D:
                    return row
                place += 1
            high, low = hex_digit(byte(data, start + place)), hex_digit(byte(data, start + place + 1))
            if high < 0 or low < 0:
                return row
            at = poke(out, at, high << 4 | low)
            place += 2
    edges[valid.size] = at
    return -1


@inlined
def put_little(out: Bytes, at: int, value: int, width: int) -> int:
    for i in range(width):
        poke(out, at + i, (value >> (8 * i)) & 0xFF)
    return at + width


@kernel
def put_datetimes(microseconds: Cells, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode timestamps without a time zone; `out` has DATETIME_SIZE bytes per row."""
    at = 0
    for row in range(microseconds.size):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        value = int(microseconds[row])
        seconds = value // 1_000_000
        rest = value - seconds * 1_000_000
        if rest:
            at = put_little(out, poke(out, poke(out, at, 0xD8), DATETIME), seconds, 8)
            at = put_little(out, put_little(out, at, rest * 1000, 4), 0, 4)
        else:
            at = put_little(out, poke(out, poke(out, at, 0xD7), DATETIME), seconds, 8)
    edges[microseconds.size] = at
    return -1


@inlined
def read_decimal(data: Bytes, at: int, end: int, digits: Bytes) -> tuple[int, int, int]:
    """Read a number into `digits` without leading zeros; return the digit count, the scale, and 1 if negative.

    The count is -1 if the text is not a number.
    """
    minus = count = scale = seen = point = 0
    if at < end and (byte(data, at) == 0x2D or byte(data, at) == 0x2B):
        minus = 1 if byte(data, at) == 0x2D else 0
        at += 1
    while at < end:
        character = byte(data, at)
        if 0x30 <= character <= 0x39:
            seen = 1
            if point:
                scale += 1
            if count or character != 0x30:
                if count >= DECIMAL_DIGITS_MAX:
                    return -1, 0, 0
                digits[count] = character - 0x30
                count += 1
        elif character == 0x2E and not point:
            point = 1
        else:
            break
        at += 1
    if not seen:
        return -1, 0, 0
    if at < end:
        if byte(data, at) | 0x20 != 0x65 or at + 1 >= end:
            return -1, 0, 0
        at += 1
        down = 0
        if byte(data, at) == 0x2D or byte(data, at) == 0x2B:
            down = 1 if byte(data, at) == 0x2D else 0
            at += 1
        if at >= end or end - at > 3:
            return -1, 0, 0
        exponent = 0
        while at < end:
            character = byte(data, at)
            if character < 0x30 or character > 0x39:
                return -1, 0, 0
            exponent = exponent * 10 + character - 0x30
            at += 1
        scale += exponent if down else -exponent
    return count, scale, minus


@kernel
def put_decimals(data: Bytes, offsets: Offsets, valid: Bytes, digits: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode decimals given as text; `digits` has room for DECIMAL_DIGITS_MAX, `out` has DECIMAL_SIZE bytes per row."""
    at = 0
    for row in range(valid.size):
        edges[row] = at
        if not valid[row]:
            at = poke(out, at, NIL)
            continue
        count, scale, minus = read_decimal(data, int(offsets[row]), int(offsets[row + 1]), digits)
        if count < 0:
            return row
        if count == 0:
            digits[0] = 0
            count = 1
        head = at
        at = put_int(out, poke(out, poke(out, poke(out, at, 0xC7), 0), DECIMAL), scale)
        pending = 0
        # The sign is the last nibble, so an even number of digits is padded with a leading zero.
        half = 1 - (count & 1)
        for place in range(count + 1):
            nibble = int(digits[place]) if place < count else (0x0D if minus else 0x0C)
            if half:
                at = poke(out, at, pending << 4 | nibble)
                half = 0
            else:
                pending = nibble
                half = 1
        poke(out, head + 1, at - head - 3)
    edges[valid.size] = at
    return -1


@kernel
def build_requests(
    data: Bytes, edges: Cells, extra: Cells, is_whole: int, kind: int, space_id: int, sync: int, out: Bytes, ends: Cells
) -> int:
    """Build one request per row, with SYNCs from `sync` on; return the number of bytes written.

    The piece of column c is `edges[c, row]` to `edges[c, row + 1]`. `extra` has the number of fields in the last
    column's piece; with `is_whole`, the only piece is the tuple itself. `out` has REQUEST_SIZE bytes per row besides
    the pieces. `ends` receives the end offset of each request.
    """
    at = 0
    columns, count = edges.shape[0], edges.shape[1] - 1
    for row in range(count):
        start = at
        at = put_pair(out, poke(out, at + 5, 0x82), 0x00, kind)
        at = put_pair(out, at, 0x01, sync + row)
        at = put_pair(out, poke(out, at, 0x82), 0x10, space_id)
        at = poke(out, at, 0x21)
        if not is_whole:
            fields = columns - 1 + int(extra[row])
            at = poke(out, at, 0x90 + fields) if fields < 16 else put_big(out, poke(out, at, 0xDC), fields, 2)
        for column in range(columns):
            piece = int(edges[column, row])
            at = copy(out, at, data, piece, int(edges[column, row + 1]) - piece)
        put_big(out, poke(out, start, 0xCE), at - start - 5, 4)
        ends[row] = at
    return at


@kernel
def scan_replies(buf: Bytes, syncs: Cells, refused: Cells) -> tuple[int, int, int, int]:
    """Scan whole replies; return their end offset, their number, the number of errors, and 1 if a non-reply follows.

    `syncs` receives the SYNC of each reply. `refused` receives, for each error, its SYNC, its code, and the start and
    end of its packet without the length. There is room for as many errors as replies; the scan stops when `syncs` is
    full.
    """
    at = count = errors = 0
    end = buf.size
    while count < syncs.size:
        size, start = read_length(buf, at, end)
        if size == -2 or (size > 0 and start + size > end):
            return at, count, errors, 0
        if size <= 0:
            return at, count, errors, 1
        limit = start + size
        pairs, place = read_map(buf, start, limit)
        kind, sync = -1, -1
        for _ in range(pairs):
            if place < 0:
                break
            key, place = read_uint(buf, place, limit)
            if place < 0:
                break
            if key == 0:
                kind, place = read_uint(buf, place, limit)
            elif key == 1:
                sync, place = read_uint(buf, place, limit)
            else:
                place = value_end(buf, place, limit)
        if place < 0 or kind < 0 or sync < 0:
            return at, count, errors, 1
        if kind >= TYPE_ERROR:
            refused[0, errors], refused[1, errors] = sync, kind - TYPE_ERROR
            refused[2, errors], refused[3, errors] = start, limit
            errors += 1
        syncs[count] = sync
        count += 1
        at = limit
    return at, count, errors, 0
