"""Compiled: log rows as JSON lines, in the format that `json_rows` describes."""

from __future__ import annotations

import cython

from flowstone.text.json_row_names import KEY_LENGTHS as _KEY_LENGTHS
from flowstone.text.json_row_names import KEY_TEXTS as _KEY_TEXTS
from flowstone.text.json_row_names import TYPE_LENGTHS as _TYPE_LENGTHS
from flowstone.text.json_row_names import TYPE_TEXTS as _TYPE_TEXTS

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import Flag, Key, RaftKey, RequestType
    from flowstone.iproto.scan import (
        BODY_AT,
        COMMIT,
        FLAGS,
        GROUP_ID,
        LSN,
        REPLICA_ID,
        ROW_END,
        SINGLE,
        SPACE_ID,
        TIMESTAMP,
        TSN,
        TYPE,
        Bytes,
        Cells,
    )
    from flowstone.native.msgpack import read_map
    from flowstone.native.words import byte, copy, copy32, float64, numbers, poke, put, source, target, word
    from flowstone.text.float_text import write_double
    from flowstone.text.integer_text import write_short, write_signed
    from flowstone.text.json_limits import FULL, MALFORMED, OK, ROOM, UNSUPPORTED
    from flowstone.text.json_row_names import KEYS_MAX, SLOT
    from flowstone.text.json_text_kernels import Integers, write_value

TYPE_TEXTS, TYPE_LENGTHS = _TYPE_TEXTS, _TYPE_LENGTHS
KEY_TEXTS, KEY_LENGTHS = _KEY_TEXTS, _KEY_LENGTHS


def write_rare(value: int, out: Bytes, to: int) -> int:
    """Write a signed number with a shared copy of the inline `write_signed`, for rarely executed code."""
    return write_signed(value, out, to)


def write_header(
    lsn: int, single: bool, flags: int, replica_id: int, group_id: int, kind: int, tsn: int, out: Bytes, to: int
) -> int:
    """Write the header up to the timestamp; return the offset after it."""
    to = put(out, to, b'{"HEADER":{')
    if lsn != 0:
        to = put(out, to, b'"lsn":')
        to = write_signed(lsn, out, to)
        to = poke(out, to, 44)
    if flags & COMMIT and not single:
        to = put(out, to, b'"commit":true,')
    if flags & Flag.WAIT_SYNC:
        to = put(out, to, b'"wait_sync":true,')
    if flags & Flag.WAIT_ACK:
        to = put(out, to, b'"wait_ack":true,')
    if replica_id != 0:
        to = put(out, to, b'"replica_id":')
        to = write_rare(replica_id, out, to)
        to = poke(out, to, 44)
    if group_id != 0:
        to = put(out, to, b'"group_id":')
        to = write_rare(group_id, out, to)
        to = poke(out, to, 44)
    length = byte(source(TYPE_LENGTHS), kind) if 0 <= kind < TYPE_LENGTHS.shape[0] else 0
    if length != 0:
        copy32(out, to, source(TYPE_TEXTS), kind * SLOT)
        to += length
    else:
        to = put(out, to, b'"type":')
        to = write_rare(kind, out, to)
    if not single:
        to = put(out, to, b',"tsn":')
        to = write_rare(tsn, out, to)
    return to


def write_space(
    space_ids: Integers, count: int, offsets: Integers, texts: Bytes, space_id: int, out: Bytes, room: int, to: int
) -> int:
    """Write the name of a space, if known; return the offset after it, or -1 if `out` is full."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if space_ids[middle] < space_id:
            low = middle + 1
        else:
            high = middle
    if low == count or space_ids[low] != space_id:
        return to
    start, length = offsets[low], offsets[low + 1] - offsets[low]
    if to + length + ROOM > room:
        return -1
    return copy(out, to, texts, start, length)


def write_key(key: int, slot: int, out: Bytes, to: int) -> int:
    """Write the name of a body key, or its number if it has no name; return the offset after it."""
    length = byte(source(KEY_LENGTHS), slot)
    if length != 0:
        copy32(out, to, source(KEY_TEXTS), slot * SLOT)
        return to + length
    to = write_short(word(key), out, poke(out, to, 34))
    return put(out, to, b'":')


def write_state(state: int, out: Bytes, to: int) -> int:
    """Write the name of Raft state 1, 2 or 3; return the offset after it."""
    if state == 1:
        return put(out, to, b'"follower"')
    return put(out, to, b'"candidate"') if state == 2 else put(out, to, b'"leader"')


def write_body(
    buf: Bytes,
    size: int,
    at: int,
    end: int,
    kind: int,
    space_id: int,
    space_ids: Integers,
    count: int,
    offsets: Integers,
    texts: Bytes,
    out: Bytes,
    room: int,
    to: int,
    stack: Integers,
) -> tuple[int, int]:
    """Write the body of a row of type `kind`, with names of keys; return (end of the text, status)."""
    pairs, at = read_map(buf, at, end)
    if at < 0:
        return to, MALFORMED
    raft = kind == RequestType.RAFT
    to = put(out, to, b',"BODY":{')
    for i in range(pairs):
        if to + ROOM > room:
            return to, FULL
        if at + 1 >= end:
            return to, MALFORMED
        key = byte(buf, at)
        if key >= KEYS_MAX:
            return to, UNSUPPORTED
        if i:
            to = poke(out, to, 44)
        to = write_key(key, key + KEYS_MAX if raft else key, out, to)
        at += 1
        if raft and key == RaftKey.STATE and 1 <= byte(buf, at) <= 3:
            to = write_state(byte(buf, at), out, to)
            at += 1
            continue
        at, to, status = write_value(buf, size, at, end, out, room, to, stack)
        if status != OK:
            return to, status
        if key == Key.SPACE_ID and not raft:
            to = write_space(space_ids, count, offsets, texts, space_id, out, room, to)
            if to < 0:
                return to, FULL
    return poke(out, to, 125), (OK if at == end else MALFORMED)


def write_rows(
    buf: Bytes,
    cells: Cells,
    selected: Integers,
    first: int,
    space_ids: Integers,
    offsets: Integers,
    texts: Bytes,
    out: Bytes,
    to: int,
    stack: Integers,
) -> tuple[int, int, int]:
    """Write the lines of the rows `selected[first:]`; return (rows done, end of the lines, status of the next row).

    `space_ids` has the ids of spaces in ascending order; the text of space i is `texts[offsets[i]:offsets[i + 1]]`.
    """
    data, size, text, room = source(buf), buf.shape[0], target(out), out.shape[0]
    ids, places, names, scratch = numbers(space_ids), numbers(offsets), source(texts), numbers(stack)
    stamp = stamp_at = stamp_size = 0
    status = OK
    with cython.nogil:
        while first < selected.shape[0]:
            if to + 3 * ROOM > room:
                status = FULL
                break
            row = selected[first]
            at = write_header(
                cells[LSN, row],
                cells[SINGLE, row] == 1,
                cells[FLAGS, row],
                cells[REPLICA_ID, row],
                cells[GROUP_ID, row],
                cells[TYPE, row],
                cells[TSN, row],
                text,
                to,
            )
            if cells[TIMESTAMP, row] != 0:
                at = put(text, at, b',"timestamp":')
                if cells[TIMESTAMP, row] == stamp:  # rows of one write have the same timestamp
                    copy32(text, at, text, stamp_at)
                else:
                    stamp, stamp_at = cells[TIMESTAMP, row], at
                    stamp_size = write_double(float64(word(stamp)), text, at) - at
                at += stamp_size
            at = poke(text, at, 125)
            if cells[BODY_AT, row] < cells[ROW_END, row]:
                at, status = write_body(
                    data,
                    size,
                    cells[BODY_AT, row],
                    cells[ROW_END, row],
                    cells[TYPE, row],
                    cells[SPACE_ID, row],
                    ids,
                    space_ids.shape[0],
                    places,
                    names,
                    text,
                    room,
                    at,
                    scratch,
                )
                if status != OK:
                    break
            if at + ROOM > room:
                status = FULL
                break
            to = put(text, at, b"}\n")
            first += 1
    return first, to, status
