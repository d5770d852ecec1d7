"""Compiled: the row scanner, which finds every row in a range of bytes and tabulates the offsets of its parts.

One pass serves all readers of many rows: log files, replication streams, the JSON printer, the columnar decoder. It
copies nothing. Every read is bounded, so any bytes give either a table or the offset of the first invalid byte, never a
wrong row.
"""

from __future__ import annotations

import cython

from flowstone.iproto.limits import ROW_HEADER_SIZE_MAX as _HEADER_SIZE_MAX

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import TYPE_ERROR, VCLOCK_MAX, Key, RequestType
    from flowstone.iproto.row_batches import (
        AT,
        BAD_LENGTH,
        BAD_REPLICA_ID,
        BAD_ROW,
        BAD_TSN,
        ERROR_PACKET,
        INTERLEAVED,
        NEED,
        NEEDED,
        OPEN,
        OPEN_TSN,
        ROWS,
        TOO_LARGE,
        WHOLE_AT,
        WHOLE_ROWS,
    )
    from flowstone.iproto.scan import (
        BODY_AT,
        COMMIT,
        DONE,
        FLAGS,
        FULL,
        GROUP_ID,
        INDEX_BASE,
        INDEX_ID,
        KEY_AT,
        KEY_END,
        LSN,
        MALFORMED,
        OPS_AT,
        OPS_END,
        REPLICA_ID,
        ROW_AT,
        ROW_END,
        SINGLE,
        SPACE_ID,
        SPAN,
        TIMESTAMP,
        TSN,
        TUPLE_AT,
        TUPLE_END,
        TYPE,
        Bytes,
        Cells,
    )
    from flowstone.native.msgpack import read_length, read_map, read_uint, read_unsigned, value_end
    from flowstone.native.words import big64, byte, signed, source, word

ROW_HEADER_SIZE_MAX = _HEADER_SIZE_MAX


def skip_value(buf: Bytes, at: int, end: int) -> int:
    """Return the offset after the value at `at`, or -1 if it is malformed or does not end by `end`."""
    return value_end(source(buf), at, min(end, buf.shape[0])) if at >= 0 else -1


def scan_header(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fill the header lines of column `row`; return the offset after the header map, or -1 if it is malformed."""
    kind = -1
    replica_id = group_id = lsn = tsn = timestamp = flags = 0
    single = True
    cells[ROW_AT, row] = at
    limit = min(end, at + ROW_HEADER_SIZE_MAX)
    pairs, at = read_map(buf, at, limit)
    if at < 0:
        return -1
    for _ in range(pairs):
        key, at = read_uint(buf, at, limit)  # real servers also reject keys that are not numbers
        if at < 0:
            return -1
        if key == Key.TIMESTAMP:
            if at + 9 > limit or byte(buf, at) != 0xCB:
                return -1
            timestamp = signed(big64(buf, at + 1))
            at += 9
        elif key == Key.TSN:
            tsn, at = read_unsigned(buf, at, limit)  # a difference modulo 2^64
            single = False
        elif key <= Key.STREAM_ID and key != Key.SERVER_VERSION:
            value, at = read_uint(buf, at, limit)
            if key == Key.REQUEST_TYPE:
                kind = value
            elif key == Key.REPLICA_ID:
                replica_id = value
            elif key == Key.LSN:
                lsn = value
            elif key == Key.GROUP_ID:
                group_id = value
            elif key == Key.FLAGS:
                flags = value
        else:
            at = value_end(buf, at, limit)
        if at < 0:
            return -1
    cells[TYPE, row] = kind
    cells[REPLICA_ID, row] = replica_id
    cells[GROUP_ID, row] = group_id
    cells[LSN, row] = lsn
    cells[TSN, row] = signed(word(word(lsn) - word(tsn)))
    cells[TIMESTAMP, row] = timestamp
    cells[FLAGS, row] = flags | COMMIT if single else flags
    cells[SINGLE, row] = 1 if single else 0
    return at if kind >= 0 else -1


def scan_body(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fill the body lines of column `row`; return the offset after the body map, or -1 if it is malformed.

    A row without a body has `at` equal to `end`.
    """
    space_id = key_at = key_end = tuple_at = tuple_end = ops_at = ops_end = -1
    index_id = index_base = pairs = 0
    if at < end:
        pairs, at = read_map(buf, at, end)
        if at < 0:
            return -1
    for _ in range(pairs):
        key, value_at = read_unsigned(buf, at, end)
        if value_at < 0:  # a body of a type that we know nothing of
            key, value_at = -1, value_end(buf, at, end)
        if value_at < 0:
            return -1
        if key == Key.SPACE_ID:
            space_id, at = read_uint(buf, value_at, end)
        elif key == Key.INDEX_ID:
            index_id, at = read_uint(buf, value_at, end)
        elif key == Key.INDEX_BASE:
            index_base, at = read_uint(buf, value_at, end)
        else:
            at = value_end(buf, value_at, end)
            if key == Key.TUPLE:
                tuple_at, tuple_end = value_at, at
            elif key == Key.KEY:
                key_at, key_end = value_at, at
            elif key == Key.OPS:
                ops_at, ops_end = value_at, at
        if at < 0:
            return -1
    cells[SPACE_ID, row] = space_id
    cells[INDEX_ID, row] = index_id
    cells[INDEX_BASE, row] = index_base
    cells[KEY_AT, row], cells[KEY_END, row] = key_at, key_end
    cells[TUPLE_AT, row], cells[TUPLE_END, row] = tuple_at, tuple_end
    cells[OPS_AT, row], cells[OPS_END, row] = ops_at, ops_end
    return at


def scan_spans(buf: Bytes, spans: Cells, span: int, at: int, cells: Cells, row: int) -> tuple[int, int, int, int]:
    """Fill the table from column `row` on with the rows from offset `at` of span number `span` on.

    `spans[i]` has the start and end of the rows of a block. Return the span, offset and column where the scan stopped,
    and why.
    """
    room = cells.shape[1]
    data = source(buf)
    while span < spans.shape[0]:
        end = spans[span, 1]
        at = max(at, spans[span, 0])
        while at < end:
            if row >= room:
                return span, at, row, FULL
            after = scan_header(data, at, end, cells, row)
            if after < 0:
                return span, at, row, MALFORMED
            cells[BODY_AT, row] = after
            # A NOP has no body; what follows it is the next row.
            after = scan_body(data, after, after if cells[TYPE, row] == RequestType.NOP else end, cells, row)
            if after < 0:
                return span, at, row, MALFORMED
            cells[ROW_END, row] = after
            cells[SPAN, row] = span
            at = after
            row += 1
        span += 1
    return span, at, row, DONE


def scan_packet(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fill column `row` from the packet between `at` and `end`; return NEED, or what is wrong with the packet."""
    after = scan_header(buf, at, end, cells, row)
    if after < 0:
        return BAD_ROW
    kind = cells[TYPE, row]
    if kind >= TYPE_ERROR:
        return ERROR_PACKET
    cells[BODY_AT, row] = after
    if after < end and (kind == RequestType.NOP or scan_body(buf, after, end, cells, row) != end):
        return BAD_ROW
    if after == end:
        scan_body(buf, end, end, cells, row)
    cells[ROW_END, row] = end
    cells[SPAN, row] = 0
    return BAD_REPLICA_ID if cells[REPLICA_ID, row] >= VCLOCK_MAX else NEED


def scan_packets(
    buf: Bytes, cells: Cells, room: int, packet_size_max: int, transaction_size_max: int, progress: Cells
) -> int:
    """Tabulate packets, `room` rows at most, from `progress` on; update `progress` and return why the scan stopped.

    A packet is one row. Rows after the last complete transaction stay in the table for the next call.
    """
    at, row = progress[AT], progress[ROWS]
    is_open, open_tsn = progress[OPEN], progress[OPEN_TSN]
    whole_at, whole_rows = progress[WHOLE_AT], progress[WHOLE_ROWS]
    why, needed, end = NEED, at + 1, buf.shape[0]
    data = source(buf)
    while True:
        if row >= room:
            why = FULL
            break
        size, start = read_length(data, at, end)
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
        why = scan_packet(data, start, needed, cells, row)
        if why != NEED:
            break
        tsn = cells[TSN, row]
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


def scan_images(buf: Bytes, cells: Cells, rows: Cells, out: Cells) -> None:
    """Set `out` to the spans of OLD_TUPLE and NEW_TUPLE in the bodies of scanned rows.

    A separate pass, because few logs have these keys.
    """
    data = source(buf)
    for i in range(rows.shape[0]):
        out[0, i] = out[1, i] = out[2, i] = out[3, i] = -1
        at, end = cells[BODY_AT, rows[i]], cells[ROW_END, rows[i]]
        if at >= end:
            continue
        pairs, at = read_map(data, at, end)
        for _ in range(pairs):
            key, value_at = read_unsigned(data, at, end)
            if value_at < 0:
                key, value_at = -1, value_end(data, at, end)
            at = value_end(data, value_at, end)
            if key == Key.OLD_TUPLE:
                out[0, i], out[1, i] = value_at, at
            elif key == Key.NEW_TUPLE:
                out[2, i], out[3, i] = value_at, at
