"""Compiled: encodes the rows of a table (`scan.py`) for logs, snapshots and peers.

The bytes equal those of `row.encode_header`, and tests compare them.
Headers are built from the table, as in real servers, so keys that a peer adds to a header (SYNC, a schema version, keys
of a newer release) are not forwarded; bodies are copied unchanged.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import GROUP_LOCAL, RequestType
    from flowstone.iproto.row_batches import NO_ROOM, ROW_OVERHEAD
    from flowstone.iproto.scan import (
        BODY_AT,
        COMMIT,
        FLAGS,
        GROUP_ID,
        LSN,
        REPLICA_ID,
        ROW_END,
        SINGLE,
        TIMESTAMP,
        TSN,
        TYPE,
        Bytes,
        Cells,
    )
    from flowstone.native.msgpack import put_big, put_pair
    from flowstone.native.words import copy, float_bits, poke, signed, source, target, word

    NOT_SIGN = 0x7FFF_FFFF_FFFF_FFFF


def put_header(
    out: Bytes,
    at: int,
    kind: int,
    sync: int,
    replica_id: int,
    group_id: int,
    lsn: int,
    timestamp: int,
    tsn: int,
    flags: int,
    is_explicit: bool,
) -> int:
    """Write a header as `row.encode_header` does, with the same order of keys and the same omissions."""
    alone = not is_explicit and (flags & COMMIT) != 0 and (tsn == lsn or tsn == 0)
    if alone:
        flags &= ~COMMIT
    map_at = at
    pairs = 1
    at = put_pair(out, at + 1, 0x00, kind)
    if sync:
        at = put_pair(out, at, 0x01, sync)
        pairs += 1
    if replica_id:
        at = put_pair(out, at, 0x02, replica_id)
        pairs += 1
    if group_id:
        at = put_pair(out, at, 0x07, group_id)
        pairs += 1
    if lsn:
        at = put_pair(out, at, 0x03, lsn)
        pairs += 1
    if timestamp & NOT_SIGN:  # neither 0.0 nor -0.0
        at = put_big(out, poke(out, poke(out, at, 0x04), 0xCB), timestamp, 8)
        pairs += 1
    if not alone:
        at = put_pair(out, at, 0x08, signed(word(word(lsn) - word(tsn))))
        pairs += 1
    if flags:
        at = put_pair(out, at, 0x09, flags)
        pairs += 1
    poke(out, map_at, 0x80 + pairs)
    return at


def was_control(cells: Cells, row: int) -> bool:
    """Return True for a NOP that replaces a control row: a single-row transaction with explicit TSN and COMMIT."""
    if cells[TYPE, row] != RequestType.NOP or cells[SINGLE, row] or not cells[FLAGS, row] & COMMIT:
        return False
    return bool(cells[TSN, row] == cells[LSN, row])


def put_body(buf: Bytes, cells: Cells, row: int, out: Bytes, at: int) -> int:
    """Copy the body of a row unchanged."""
    start = cells[BODY_AT, row]
    return copy(out, at, buf, start, cells[ROW_END, row] - start)


def fits(cells: Cells, row: int, room: int, at: int) -> bool:
    """Return True if the row fits between `at` and `room`."""
    return bool(at + ROW_OVERHEAD + cells[ROW_END, row] - cells[BODY_AT, row] <= room)


def put_log_row(buf: Bytes, cells: Cells, row: int, timestamp: int, out: Bytes, at: int) -> int:
    """Write a row for a log; `timestamp` has the bits of a float64."""
    at = put_header(
        out,
        at,
        cells[TYPE, row],
        0,
        cells[REPLICA_ID, row],
        cells[GROUP_ID, row],
        cells[LSN, row],
        timestamp,
        cells[TSN, row],
        cells[FLAGS, row],
        was_control(cells, row),
    )
    return put_body(buf, cells, row, out, at)


def build_log_rows(buf: Bytes, cells: Cells, first: int, stop: int, timestamp: float, out: Bytes) -> int:
    """Encode rows `first` to `stop` for a log, with `timestamp`. Return the number of bytes written, or NO_ROOM."""
    at = 0
    stamp = signed(float_bits(timestamp))
    data, to, room = source(buf), target(out), out.shape[0]
    for row in range(first, stop):
        if not fits(cells, row, room, at):
            return NO_ROOM
        at = put_log_row(data, cells, row, stamp, to, at)
    return at


def gather_log_rows(buf: Bytes, cells: Cells, first: int, stop: int, out: Bytes) -> int:
    """Encode rows `first` to `stop` for a log, each with its own timestamp. Return the number of bytes written."""
    at = 0
    data, to = source(buf), target(out)
    for row in range(first, stop):
        at = put_log_row(data, cells, row, cells[TIMESTAMP, row], to, at)
    return at


def gather_snapshot_rows(
    buf: Bytes, cells: Cells, first: int, stop: int, number: int, timestamp: float, out: Bytes
) -> int:
    """Encode rows `first` to `stop` for a snapshot, numbered from `number`. Return the number of bytes written."""
    at = 0
    stamp = signed(float_bits(timestamp))
    data, to = source(buf), target(out)
    for row in range(first, stop):
        lsn = number + row - first
        group_id = cells[GROUP_ID, row]
        at = put_header(to, at, RequestType.INSERT, 0, 0, group_id, lsn, stamp, lsn, COMMIT, False)
        at = put_body(data, cells, row, to, at)
    return at


def gather_tuples(
    buf: Bytes, offsets: Cells, space_id: int, group_id: int, number: int, timestamp: float, out: Bytes
) -> int:
    """Encode rows of a snapshot that insert the tuples between `offsets[i]` and `offsets[i + 1]`.

    They are numbered from `number`. Return the number of bytes written.
    """
    at = 0
    stamp = signed(float_bits(timestamp))
    data, to = source(buf), target(out)
    for i in range(offsets.shape[0] - 1):
        lsn = number + i
        at = put_header(to, at, RequestType.INSERT, 0, 0, group_id, lsn, stamp, lsn, COMMIT, False)
        # The fixed-width space id is what real writers use.
        at = poke(to, poke(to, poke(to, at, 0x82), 0x10), 0xCE)
        at = poke(to, put_big(to, at, space_id, 4), 0x21)
        start = offsets[i]
        at = copy(to, at, data, start, offsets[i + 1] - start)
    return at


def is_sent(cells: Cells, row: int, keep: Bytes) -> bool:
    """Return True if the row is selected and not local; local rows in the form of old logs are sent as well."""
    if keep.shape[0] and keep[row] == 0:
        return False
    return bool(cells[GROUP_ID, row] != GROUP_LOCAL or cells[REPLICA_ID, row] != 0)


def build_packets(buf: Bytes, cells: Cells, keep: Bytes, sync: int, out: Bytes) -> int:
    """Encode rows as packets for a replica: those where `keep` is not 0, or all if it is empty.

    The sent rows of a transaction form a transaction. A transaction that contains only NOPs has no limbo flags. Return
    the number of bytes written, or NO_ROOM.
    """
    at = first = 0
    count = cells.shape[1]
    data, to, room = source(buf), target(out), out.shape[0]
    while first < count:
        stop = first + 1
        while stop < count and not cells[FLAGS, stop - 1] & COMMIT:
            stop += 1
        last = -1
        has_effect = False
        for row in range(first, stop):
            if is_sent(cells, row, keep):
                last = row
            if cells[TYPE, row] != RequestType.NOP:
                has_effect = True
        tsn = 0
        is_first = True
        for row in range(first, last + 1):
            if not is_sent(cells, row, keep):
                continue
            if not fits(cells, row, room, at):
                return NO_ROOM
            lsn = cells[LSN, row]
            if is_first:
                tsn = lsn
                is_first = False
            # The flags of a transaction are on its last row, which may not be sent.
            flags = cells[FLAGS, stop - 1 if row == last else row]
            if not has_effect:
                flags &= COMMIT  # NOPs never wait for a quorum, but have limbo flags in logs of earlier releases
            is_local = cells[GROUP_ID, row] == GROUP_LOCAL
            length_at = at
            at = put_header(
                to,
                at + 5,
                RequestType.NOP if is_local else cells[TYPE, row],
                sync,
                cells[REPLICA_ID, row],
                0 if is_local else cells[GROUP_ID, row],
                lsn,
                cells[TIMESTAMP, row],
                tsn,
                flags,
                was_control(cells, row),
            )
            if not is_local:
                at = put_body(data, cells, row, to, at)
            put_big(to, poke(to, length_at, 0xCE), at - length_at - 5, 4)
        first = stop
    return at
