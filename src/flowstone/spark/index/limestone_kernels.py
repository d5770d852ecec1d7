"""Compiled passes over Limestone entries: conversion to MessagePack tuples, and assignment of keys to shares.

The caller provides output buffers of the size that each kernel documents. Row numbers refer to the entries of a table
of `limestone/format/entry_table.py`, whose offsets point into the walked buffer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flowstone.iproto.row_batches import put_big, put_uint
from flowstone.iproto.scan import Bytes, Cells
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte, copy, little64, number, poke
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

TUPLE_ROOM: Final = 40
"""Upper limit of a tuple's bytes besides its key, its value and its blobs."""

BLOB_ROOM: Final = 9

_TOP: Final = np.uint64(63)
_LOW: Final = np.uint64(0x7FFF_FFFF_FFFF_FFFF)
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_SHIFT: Final = np.uint64(32)


@inlined
def _put_bytes(out: Bytes, at: int, buf: Bytes, start: int, end: int) -> int:
    """Write a value of type bin."""
    size = end - start
    if size < 0x100:
        at = poke(out, poke(out, at, 0xC4), size)
    elif size < 0x10000:
        at = put_big(out, poke(out, at, 0xC5), size, 2)
    else:
        at = put_big(out, poke(out, at, 0xC6), size, 4)
    return copy(out, at, buf, start, size)


@inlined
def _put_word(out: Bytes, at: int, value: np.uint64) -> int:
    """Write an unsigned 64-bit number."""
    if value <= _LOW:
        return put_uint(out, at, number(value))
    at = poke(out, at, 0xCF)
    for place in range(8):
        at = poke(out, at, number((value >> np.uint64(8 * (7 - place))) & np.uint64(0xFF)))
    return at


@kernel
def entry_tuples(buf: Bytes, table: Table, rows: Cells, out: Bytes, ends: Cells) -> int:
    """Encode tuples `[key, value, major, minor without its top bit, that bit, blob ids]`; return their total size.

    `ends` receives the end offset of each tuple. `out` has TUPLE_ROOM bytes per row, the size of the keys and values,
    and BLOB_ROOM per blob.
    """
    at = 0
    for place in range(rows.shape[0]):
        row = rows[place]
        at = poke(out, at, 0x96)
        at = _put_bytes(out, at, buf, number(table[KEY_AT, row]), number(table[KEY_END, row]))
        value_end = number(table[VALUE_END, row])
        at = _put_bytes(out, at, buf, number(table[VALUE_AT, row]), value_end)
        at = _put_word(out, at, table[MAJOR, row])
        minor = table[MINOR, row]
        at = put_uint(out, at, number(minor & _LOW))
        at = poke(out, at, 0xC3 if minor >> _TOP else 0xC2)
        count = number(table[BLOB_COUNT, row])
        if count < 16:
            at = poke(out, at, 0x90 | count)
        elif count < 0x10000:
            at = put_big(out, poke(out, at, 0xDC), count, 2)
        else:
            at = put_big(out, poke(out, at, 0xDD), count, 4)
        for blob in range(count):
            at = _put_word(out, at, little64(buf, value_end + 4 + 8 * blob))
        ends[place] = at
    return at


@kernel
def key_shares(buf: Bytes, table: Table, rows: Cells, shares: int, out: Cells) -> int:
    """Assign each entry to one of `shares` shares by its storage and key; equal keys get the same share."""
    for place in range(rows.shape[0]):
        row = rows[place]
        found = table[STORAGE_ID, row] * _MIX
        for at in range(number(table[KEY_AT, row]), number(table[KEY_END, row])):
            found = (found ^ np.uint64(byte(buf, at))) * _MIX
            found ^= found >> _SHIFT
        out[place] = number((found >> np.uint64(1)) % np.uint64(shares))
    return 0
