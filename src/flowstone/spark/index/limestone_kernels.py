"""Compiled: passes over Limestone entries, which convert them to MessagePack tuples and assign keys to shares.

The caller provides output buffers of the size that each function documents. Row numbers refer to the entries of a table
of `limestone/format/entry_table.py`, whose offsets point into the walked buffer.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.limestone.format.entry_table import (
        BLOB_COUNT,
        KEY_AT,
        KEY_END,
        MAJOR,
        MINOR,
        STORAGE_ID,
        VALUE_AT,
        VALUE_END,
        Table,
    )
    from flowstone.native.msgpack import put_big, put_uint
    from flowstone.native.words import byte, copy, little64, poke, signed, source, target, word

    TUPLE_ROOM = 40
    """Upper limit of a tuple's bytes besides its key, its value and its blobs."""

    BLOB_ROOM = 9

    HEAD_ROOM = 3
    """Upper limit of the bytes before the fields of a tuple."""

    Edges = NDArray[np.int64]

MIX = 0x9E37_79B9_7F4A_7C15


def _put_bytes(out: Bytes, at: int, data: Bytes, start: int, end: int) -> int:
    """Write a value of type bin."""
    size = end - start
    if size < 0x100:
        at = poke(out, poke(out, at, 0xC4), size)
    elif size < 0x10000:
        at = put_big(out, poke(out, at, 0xC5), size, 2)
    else:
        at = put_big(out, poke(out, at, 0xC6), size, 4)
    return copy(out, at, data, start, size)


def entry_tuples(buf: Bytes, table: Table, rows: Cells, out: Bytes, ends: Cells) -> int:
    """Encode tuples `[key, value, major, minor without its top bit, that bit, blob ids]`; return their total size.

    `ends` receives the end offset of each tuple. `out` has TUPLE_ROOM bytes per row, the size of the keys and values,
    and BLOB_ROOM per blob.
    """
    data, written = source(buf), target(out)
    at = 0
    with cython.nogil:
        for place in range(rows.shape[0]):
            row = rows[place]
            at = poke(written, at, 0x96)
            at = _put_bytes(written, at, data, signed(table[KEY_AT, row]), signed(table[KEY_END, row]))
            value_end = signed(table[VALUE_END, row])
            at = _put_bytes(written, at, data, signed(table[VALUE_AT, row]), value_end)
            at = put_uint(written, at, signed(table[MAJOR, row]))
            minor = word(table[MINOR, row])
            at = put_uint(written, at, signed(minor ^ (minor >> 63 << 63)))
            at = poke(written, at, 0xC3 if minor >> 63 else 0xC2)
            count = signed(table[BLOB_COUNT, row])
            if count < 16:
                at = poke(written, at, 0x90 | count)
            elif count < 0x10000:
                at = put_big(written, poke(written, at, 0xDC), count, 2)
            else:
                at = put_big(written, poke(written, at, 0xDD), count, 4)
            for blob in range(count):
                at = put_uint(written, at, signed(little64(data, value_end + 4 + 8 * blob)))
            ends[place] = at
    return at


def join_fields(data: Bytes, edges: Edges, out: Bytes, ends: Cells) -> int:
    """Build tuples from encoded fields; return their total size.

    Field f of row i is at `edges[f, i]` to `edges[f, i + 1]`. `ends` receives the end offset of each tuple. `out` has
    HEAD_ROOM bytes per row and the size of the fields.
    """
    pieces, tuples, at = source(data), target(out), 0
    fields, count = edges.shape[0], edges.shape[1] - 1
    with cython.nogil:
        for row in range(count):
            at = poke(tuples, at, 0x90 | fields if fields < 16 else 0xDC)
            if fields >= 16:
                at = put_big(tuples, at, fields, 2)
            for field in range(fields):
                start = edges[field, row]
                at = copy(tuples, at, pieces, start, edges[field, row + 1] - start)
            ends[row] = at
    return at


def key_shares(buf: Bytes, table: Table, rows: Cells, shares: int, out: Cells) -> None:
    """Assign each entry to one of `shares` shares by its storage and key; equal keys get the same share."""
    data = source(buf)
    with cython.nogil:
        for place in range(rows.shape[0]):
            row = rows[place]
            found = word(word(table[STORAGE_ID, row]) * MIX)
            for at in range(signed(table[KEY_AT, row]), signed(table[KEY_END, row])):
                found = word((found ^ word(byte(data, at))) * MIX)
                found ^= found >> 32
            out[place] = signed((found >> 1) % word(shares))
