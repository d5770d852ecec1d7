"""Rows of a replication stream in bulk: scans packets into the table of `scan.py`, encodes rows for logs and peers.

The bytes written equal those of `row.encode_header`; tests compare them. Headers are built anew from the table, as in
real servers, so keys that a peer adds to a header (SYNC, a schema version, keys of a newer release) are not passed on;
bodies are copied unchanged. The caller provides output buffers of the size that `rows_bound` returns. A kernel stops
at the first row that does not fit and returns NO_ROOM.
"""

from __future__ import annotations

import numpy as np

from flowstone.iproto.constants import GROUP_LOCAL, TYPE_ERROR, VCLOCK_MAX, RequestType
from flowstone.iproto.scan import (
    BODY_AT,
    COMMIT,
    FLAGS,
    GROUP_ID,
    LSN,
    REPLICA_ID,
    ROW_END,
    SINGLE,
    SPAN,
    TIMESTAMP,
    TSN,
    TYPE,
    Bytes,
    Cells,
    read_uint,
    scan_body,
    scan_header,
)
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte, copy, number, poke

ROW_OVERHEAD = 88
"""A packet's length (5), the map's marker (1) and eight numbers of a key and at most nine bytes each."""

NO_ROOM = -1

NOP = RequestType.NOP.value

(
    NEED,  # the last packet is not whole, or there is none
    FULL,  # no room left in the table
    BAD_LENGTH,  # no length, none at all, or one that is not accepted
    BAD_ROW,
    BAD_REPLICA_ID,
    BAD_TSN,  # a transaction that does not begin with its first row
    INTERLEAVED,  # a row of another transaction before the end of this one
    TOO_LARGE,  # a transaction beyond what is accepted
    ERROR_PACKET,
) = range(9)
"""Why a scan of packets stopped."""

AT, ROWS, WHOLE_AT, WHOLE_ROWS, OPEN, OPEN_TSN, NEEDED = range(7)
"""Places of a scan's progress: offset of the next packet and the rows so far; offset and rows behind the last whole
transaction; whether one is open, and which; the offset up to which bytes must be there before it can go on."""

PROGRESS_SIZE = 7


def rows_bound(count: int, content: int) -> int:
    """Bytes for `count` rows or packets with `content` bytes of bodies among them."""
    return count * ROW_OVERHEAD + content


@inlined
def read_length(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """A packet's length and the offset behind it; the length is -1 where there is none, -2 where it is not whole."""
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


@inlined
def scan_packet(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fills column `row` from the packet between `at` and `end`; NEED if that is right, else what is wrong with it."""
    after = scan_header(buf, at, end, cells, row)
    if after < 0:
        return BAD_ROW
    kind = cells[TYPE, row]
    if kind >= TYPE_ERROR:
        return ERROR_PACKET
    cells[BODY_AT, row] = after
    if after < end and (kind == NOP or scan_body(buf, after, end, cells, row) != end):
        return BAD_ROW
    if after == end:
        scan_body(buf, end, end, cells, row)
    cells[ROW_END, row] = end
    cells[SPAN, row] = 0
    return BAD_REPLICA_ID if cells[REPLICA_ID, row] >= VCLOCK_MAX else NEED


@kernel
def scan_packets(
    buf: Bytes, cells: Cells, room: int, packet_size_max: int, transaction_size_max: int, progress: Cells
) -> int:
    """Tabulates packets from where `progress` says, `room` rows at most, and moves `progress`; why it stopped.

    A packet is one row. What comes behind the last whole transaction stays in the table for the next call.
    """
    at, row = int(progress[AT]), int(progress[ROWS])
    is_open, open_tsn = int(progress[OPEN]), int(progress[OPEN_TSN])
    whole_at, whole_rows = int(progress[WHOLE_AT]), int(progress[WHOLE_ROWS])
    why, needed, end = NEED, at + 1, buf.size
    while True:
        if row >= room:
            why = FULL
            break
        size, start = read_length(buf, at, end)
        if size == -2:
            needed = start
            break
        if size <= 0 or size > packet_size_max:
            why = BAD_LENGTH
            break
        needed = start + size
        if needed - whole_at > transaction_size_max:
            why = TOO_LARGE
            break
        if needed > end:
            break
        why = scan_packet(buf, start, needed, cells, row)
        if why != NEED:
            break
        tsn = int(cells[TSN, row])
        if is_open and tsn != open_tsn:
            why = INTERLEAVED
            break
        if not is_open and tsn != cells[LSN, row]:
            why = BAD_TSN
            break
        at = needed
        row += 1
        is_open, open_tsn = 1, tsn
        if cells[FLAGS, row - 1] & COMMIT:
            is_open, whole_at, whole_rows = 0, at, row
    progress[AT], progress[ROWS] = at, row
    progress[OPEN], progress[OPEN_TSN] = is_open, open_tsn
    progress[WHOLE_AT], progress[WHOLE_ROWS] = whole_at, whole_rows
    progress[NEEDED] = needed
    return why


@inlined
def put_uint(out: Bytes, at: int, value: int) -> int:
    """MessagePack of an unsigned number, as short as it can be; a negative number is its twin above 2^63."""
    if value < 0 or value >= 0x1_0000_0000:
        return put_big(out, poke(out, at, 0xCF), value, 8)
    if value < 0x80:
        return poke(out, at, value)
    if value < 0x100:
        return poke(out, poke(out, at, 0xCC), value)
    if value < 0x10000:
        return put_big(out, poke(out, at, 0xCD), value, 2)
    return put_big(out, poke(out, at, 0xCE), value, 4)


@inlined
def put_big(out: Bytes, at: int, value: int, width: int) -> int:
    """The `width` lowest bytes of `value`, most significant first; the offset behind them."""
    for i in range(width):
        poke(out, at + i, (value >> (8 * (width - 1 - i))) & 0xFF)
    return at + width


@inlined
def put_pair(out: Bytes, at: int, key: int, value: int) -> int:
    """A key and an unsigned number."""
    return put_uint(out, poke(out, at, key), value)


@inlined
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
    """`row.encode_header`: order, omissions and the rules for rows that stand alone are the same."""
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
    if timestamp & 0x7FFF_FFFF_FFFF_FFFF:  # neither 0.0 nor -0.0
        at = put_big(out, poke(out, poke(out, at, 0x04), 0xCB), timestamp, 8)
        pairs += 1
    if not alone:
        at = put_pair(out, at, 0x08, lsn - tsn)
        pairs += 1
    if flags:
        at = put_pair(out, at, 0x09, flags)
        pairs += 1
    poke(out, map_at, 0x80 + pairs)
    return at


@inlined
def was_control(cells: Cells, row: int) -> bool:
    """True for a NOP that replaces a control row: a transaction of one row with explicit TSN and COMMIT."""
    if cells[TYPE, row] != NOP or cells[SINGLE, row] or not cells[FLAGS, row] & COMMIT:
        return False
    return bool(cells[TSN, row] == cells[LSN, row])


@inlined
def put_body(buf: Bytes, cells: Cells, row: int, out: Bytes, at: int) -> int:
    """The row's body as it is."""
    start = int(cells[BODY_AT, row])
    return copy(out, at, buf, start, int(cells[ROW_END, row]) - start)


@inlined
def fits(cells: Cells, row: int, out: Bytes, at: int) -> bool:
    """Whether there is room for the row behind `at`."""
    return at + ROW_OVERHEAD + int(cells[ROW_END, row]) - int(cells[BODY_AT, row]) <= out.size


@kernel
def build_log_rows(buf: Bytes, cells: Cells, first: int, stop: int, timestamp: int, out: Bytes) -> int:
    """Rows `first` to `stop` for a log, stamped with the float64 whose bits are `timestamp`; the bytes written."""
    at = 0
    for row in range(first, stop):
        if not fits(cells, row, out, at):
            return NO_ROOM
        at = put_header(
            out,
            at,
            int(cells[TYPE, row]),
            0,
            int(cells[REPLICA_ID, row]),
            int(cells[GROUP_ID, row]),
            int(cells[LSN, row]),
            timestamp,
            int(cells[TSN, row]),
            int(cells[FLAGS, row]),
            was_control(cells, row),
        )
        at = put_body(buf, cells, row, out, at)
    return at


@inlined
def is_sent(cells: Cells, row: int, keep: Bytes) -> bool:
    """Whether the row is wanted and of anybody's business: local rows are not, but for those of old logs."""
    if keep.size and number(keep[row]) == 0:
        return False
    return int(cells[GROUP_ID, row]) != GROUP_LOCAL or int(cells[REPLICA_ID, row]) != 0


@kernel
def build_packets(buf: Bytes, cells: Cells, keep: Bytes, sync: int, out: Bytes) -> int:
    """Rows as packets for a replica, those where `keep` is not 0 (all if it is empty); the bytes written.

    The sent rows of a transaction are a transaction again, from the first to the last of them. A transaction of NOPs
    only has no limbo flags.
    """
    at = first = 0
    count = cells.shape[1]
    while first < count:
        stop = first + 1
        while stop < count and not cells[FLAGS, stop - 1] & COMMIT:
            stop += 1
        last = -1
        has_effect = False
        for row in range(first, stop):
            if is_sent(cells, row, keep):
                last = row
            if cells[TYPE, row] != NOP:
                has_effect = True
        tsn = 0
        is_first = True
        for row in range(first, last + 1):
            if not is_sent(cells, row, keep):
                continue
            if not fits(cells, row, out, at):
                return NO_ROOM
            lsn = int(cells[LSN, row])
            if is_first:
                tsn = lsn
                is_first = False
            # Only the last row of a transaction has flags, and they hold for all of it.
            flags = int(cells[FLAGS, stop - 1 if row == last else row])
            if not has_effect:
                flags &= COMMIT  # NOPs never wait; in logs of earlier releases they have flags
            is_local = cells[GROUP_ID, row] == GROUP_LOCAL
            kind = NOP if is_local else int(cells[TYPE, row])
            length_at = at
            at = put_header(
                out,
                at + 5,
                kind,
                sync,
                int(cells[REPLICA_ID, row]),
                0 if is_local else int(cells[GROUP_ID, row]),
                lsn,
                int(cells[TIMESTAMP, row]),
                tsn,
                flags,
                was_control(cells, row),
            )
            if not is_local:
                at = put_body(buf, cells, row, out, at)
            put_big(out, poke(out, length_at, 0xCE), at - length_at - 5, 4)
        first = stop
    return at


ALL: Bytes = np.zeros(0, np.uint8)
"""For `build_packets`: every row is wanted."""
