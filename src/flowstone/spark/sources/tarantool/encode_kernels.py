"""Compiled: passes that encode columns to MessagePack and assemble rows into requests, without Python objects per row.

Each column is encoded into a buffer of its own; `edges` receives the offset of each value and the end offset. The
pieces of a row are then joined after the head of its request. The caller provides output buffers of the size that each
kernel documents. A kernel returns the number of the first row that it cannot encode, or -1.
"""

from __future__ import annotations

from typing import Final

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.iproto.constants import TYPE_ERROR, Key
    from flowstone.iproto.extensions import DECIMAL_DIGITS_MAX, ExtensionType
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import (
        NIL,
        put_big,
        put_pair,
        put_uint,
        read_length,
        read_map,
        read_uint,
        value_end,
    )
    from flowstone.native.words import byte, copy, poke, poke64, source, target, word

    Offsets = NDArray[np.int32]

NUMBER_SIZE: Final = 9
HEAD_SIZE_MAX: Final = 5
REQUEST_SIZE: Final = 32
"""Bytes of a request before the fields of its tuple: length, header, space and the head of an array."""

UUID_SIZE: Final = 18
DATETIME_SIZE: Final = 18
DECIMAL_SIZE: Final = 48
"""76 digits and a sign in 39 bytes, a scale of up to 3 bytes, and the head of the extension."""


def put_int(out: Bytes, at: int, value: int) -> int:
    """Write a signed integer in its shortest form."""
    if value >= 0:
        return put_uint(out, at, value)
    if value >= -0x20:
        return poke(out, at, value)
    if value >= -0x80:
        return poke(out, poke(out, at, 0xD0), value)
    if value >= -0x8000:
        return put_big(out, poke(out, at, 0xD1), value, 2)
    if value >= -0x8000_0000:
        return put_big(out, poke(out, at, 0xD2), value, 4)
    return put_big(out, poke(out, at, 0xD3), value, 8)


def put_ints(values: Cells, valid: Bytes, least: int, out: Bytes, edges: Cells) -> int:
    """Encode integers of at least `least`; `out` has NUMBER_SIZE bytes per row."""
    pieces, count, at = target(out), values.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            if values[row] < least:
                return row
            at = put_int(pieces, at, values[row])
        edges[count] = at
    return -1


def put_wide_ints(words: Cells, valid: Bytes, least: int, out: Bytes, edges: Cells) -> int:
    """Encode 128-bit integers, low word first, that fit into 64 bits. `least` is 0 or below; `out` as in `put_ints`."""
    pieces, count, at = target(out), valid.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            low, high = words[2 * row], words[2 * row + 1]
            if high == 0 and low < 0:  # 2^63 or above
                at = put_big(pieces, poke(pieces, at, 0xCF), low, 8)
            elif (high == 0 and low >= 0) or (high == -1 and low < 0 and least < 0):
                at = put_int(pieces, at, low)
            else:
                return row
        edges[count] = at
    return -1


def put_doubles(bits: Cells, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode doubles, given as their bits; `out` has NUMBER_SIZE bytes per row."""
    pieces, count, at = target(out), bits.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            at = put_big(pieces, poke(pieces, at, 0xCB), bits[row], 8)
        edges[count] = at
    return -1


def put_booleans(values: Bytes, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode booleans; `out` has one byte per row."""
    pieces, count = target(out), values.shape[0]
    with cython.nogil:
        for row in range(count):
            edges[row] = row
            poke(pieces, row, 0xC2 + (values[row] != 0) if valid[row] else NIL)
        edges[count] = count
    return -1


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


def put_sized(data: Bytes, offsets: Offsets, valid: Bytes, is_text: int, out: Bytes, edges: Cells) -> int:
    """Encode strings or binary values; `out` has HEAD_SIZE_MAX bytes per row besides the values."""
    texts, pieces, count, at = source(data), target(out), valid.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            start, size = offsets[row], offsets[row + 1] - offsets[row]
            at = copy(pieces, put_sized_head(pieces, at, size, is_text), texts, start, size)
        edges[count] = at
    return -1


def put_raw(data: Bytes, offsets: Offsets, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Copy values that are already MessagePack, one per row; `out` has one byte per row besides the values."""
    values, pieces, count, at = source(data), target(out), valid.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            start, end = offsets[row], offsets[row + 1]
            if value_end(values, start, end) != end:
                return row
            at = copy(pieces, at, values, start, end - start)
        edges[count] = at
    return -1


def hex_value(character: int) -> int:
    """Return the value of a hexadecimal digit, or -1. No branches: which digits are letters is unpredictable."""
    lower = character | 0x20
    no_digit = (character - 0x30) | (0x39 - character)  # negative unless it is 0 to 9
    no_letter = (lower - 0x61) | (0x66 - lower)  # negative unless it is a to f
    return ((no_digit & no_letter) >> 8) | ((character & 15) + 9 * (character >> 6))


def put_uuids(data: Bytes, offsets: Offsets, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode UUIDs given as 36 characters; `out` has UUID_SIZE bytes per row."""
    texts, pieces, count, at = source(data), target(out), valid.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            start = offsets[row]
            if offsets[row + 1] - start != 36:
                return row
            at = poke(pieces, poke(pieces, at, 0xD8), ExtensionType.UUID)
            place = 0
            while place < 36:
                if place == 8 or place == 13 or place == 18 or place == 23:
                    if byte(texts, start + place) != 0x2D:
                        return row
                    place += 1
                high, low = hex_value(byte(texts, start + place)), hex_value(byte(texts, start + place + 1))
                if high < 0 or low < 0:
                    return row
                at = poke(pieces, at, high << 4 | low)
                place += 2
        edges[count] = at
    return -1


def put_datetimes(microseconds: Cells, valid: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode timestamps without a time zone; `out` has DATETIME_SIZE bytes per row."""
    pieces, count, at = target(out), microseconds.shape[0], 0
    with cython.nogil:
        for row in range(count):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            value = microseconds[row]
            # Rounded down, before 1970 too: compiled, only division of a positive number is Python's.
            seconds = value // 1_000_000 if value >= 0 else -1 - (-1 - value) // 1_000_000
            rest = value % 1_000_000 if value >= 0 else 999_999 - (-1 - value) % 1_000_000
            at = poke(pieces, poke(pieces, at, 0xD8 if rest else 0xD7), ExtensionType.DATETIME)
            poke64(pieces, at, word(seconds))
            at += 8
            if rest:
                poke64(pieces, at, word(rest * 1000))  # nanoseconds, and no zone
                at += 8
        edges[count] = at
    return -1


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
                count = poke(digits, count, character - 0x30)
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


def put_decimals(data: Bytes, offsets: Offsets, valid: Bytes, digits: Bytes, out: Bytes, edges: Cells) -> int:
    """Encode decimals given as text; `digits` has room for DECIMAL_DIGITS_MAX, `out` has DECIMAL_SIZE bytes per row."""
    texts, found, pieces, rows, at = source(data), target(digits), target(out), valid.shape[0], 0
    with cython.nogil:
        for row in range(rows):
            edges[row] = at
            if not valid[row]:
                at = poke(pieces, at, NIL)
                continue
            count, scale, minus = read_decimal(texts, offsets[row], offsets[row + 1], found)
            if count < 0:
                return row
            if count == 0:
                count = poke(found, 0, 0)
            head = at
            at = put_int(pieces, poke(pieces, poke(pieces, poke(pieces, at, 0xC7), 0), ExtensionType.DECIMAL), scale)
            pending = 0
            # The sign is the last nibble, so an even number of digits is padded with a leading zero.
            half = 1 - (count & 1)
            for place in range(count + 1):
                nibble = byte(found, place) if place < count else (0x0D if minus else 0x0C)
                if half:
                    at = poke(pieces, at, pending << 4 | nibble)
                    half = 0
                else:
                    pending = nibble
                    half = 1
            poke(pieces, head + 1, at - head - 3)
        edges[rows] = at
    return -1


def build_requests(
    data: Bytes, edges: Cells, extra: Cells, is_whole: int, kind: int, space_id: int, sync: int, out: Bytes, ends: Cells
) -> int:
    """Build one request per row, with SYNCs from `sync` on; return the number of bytes written.

    The piece of column c is `edges[c, row]` to `edges[c, row + 1]`. `extra` has the number of fields in the last
    column's piece; with `is_whole`, the only piece is the tuple itself. `out` has REQUEST_SIZE bytes per row besides
    the pieces. `ends` receives the end offset of each request.
    """
    pieces, packets, at = source(data), target(out), 0
    columns, count = edges.shape[0], edges.shape[1] - 1
    with cython.nogil:
        for row in range(count):
            start = at
            at = put_pair(packets, poke(packets, at + 5, 0x82), Key.REQUEST_TYPE, kind)
            at = put_pair(packets, at, Key.SYNC, sync + row)
            at = put_pair(packets, poke(packets, at, 0x82), Key.SPACE_ID, space_id)
            at = poke(packets, at, Key.TUPLE)
            if not is_whole:
                fields = columns - 1 + extra[row]
                if fields < 16:
                    at = poke(packets, at, 0x90 + fields)
                elif fields < 0x10000:
                    at = put_big(packets, poke(packets, at, 0xDC), fields, 2)
                else:
                    at = put_big(packets, poke(packets, at, 0xDD), fields, 4)
            for column in range(columns):
                piece = edges[column, row]
                at = copy(packets, at, pieces, piece, edges[column, row + 1] - piece)
            put_big(packets, poke(packets, start, 0xCE), at - start - 5, 4)
            ends[row] = at
    return at


def scan_replies(buf: Bytes, syncs: Cells, refused: Cells) -> tuple[int, int, int, int]:
    """Scan complete replies; return their end offset, their number, the number of errors, and 1 if a non-reply follows.

    `syncs` receives the SYNC of each reply. `refused` receives, for each error, its SYNC, its code, and the start and
    end of its packet without the length. There is room for as many errors as replies; the scan stops when `syncs` is
    full.
    """
    data, end, room = source(buf), buf.shape[0], syncs.shape[0]
    at = count = errors = 0
    with cython.nogil:
        while count < room:
            size, start = read_length(data, at, end)
            if size == -2 or size > end - start:
                return at, count, errors, 0
            if size <= 0:
                return at, count, errors, 1
            limit = start + size
            kind, sync = read_reply_header(data, start, limit)
            if kind < 0 or sync < 0:
                return at, count, errors, 1
            if kind >= TYPE_ERROR:
                refused[0, errors], refused[1, errors] = sync, kind - TYPE_ERROR
                refused[2, errors], refused[3, errors] = start, limit
                errors += 1
            syncs[count] = sync
            count += 1
            at = limit
    return at, count, errors, 0


def read_reply_header(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the type and the SYNC in the header of a reply; -1 for a missing one, twice if the header is malformed."""
    pairs, at = read_map(buf, at, end)
    kind = sync = -1
    for _ in range(pairs):
        key, at = read_uint(buf, at, end)
        if at < 0:
            return -1, -1
        if key == Key.REQUEST_TYPE:
            kind, at = read_uint(buf, at, end)
        elif key == Key.SYNC:
            sync, at = read_uint(buf, at, end)
        else:
            at = value_end(buf, at, end)
        if at < 0:
            return -1, -1
    return kind, sync
