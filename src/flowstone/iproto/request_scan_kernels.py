"""Compiled: the request scanner, which tabulates the packets of all connections of a turn in one pass.

The scanner recognizes simple requests: plain statements, which make up a heavy load. It marks any other request as not
simple; `requests.py` decodes those one by one, with all checks and errors. The scanner copies nothing.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import Key, RequestType
    from flowstone.iproto.request_scan import (
        AT,
        CODE,
        END,
        INDEX_BASE,
        INDEX_ID,
        ITERATOR,
        KEY_AT,
        KEY_END,
        LIMIT,
        OFFSET,
        OPS_AT,
        OPS_END,
        PACKET_AT,
        PACKET_END,
        SIZE_MAX,
        SPACE_ID,
        SPACE_ID_MAX,
        SPAN,
        STATUS,
        SYNC,
        TOO_LARGE,
        TUPLE_AT,
        TUPLE_END,
        TYPE,
        TYPE_SHIFT,
        WRONG_LENGTH,
    )
    from flowstone.iproto.scan import Bytes, Cells
    from flowstone.native.msgpack import read_array, read_map, read_uint, read_unsigned, value_end
    from flowstone.native.words import byte, source


def scan_request(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fill column `row` from the packet between `at` and `end`; return 1 if the request is simple, else 0."""
    kind = sync = 0
    pairs, at = read_map(buf, at, end)
    if at < 0:
        return 0
    for _ in range(pairs):
        key, at = read_uint(buf, at, end)
        if at < 0:
            return 0
        if key == Key.REQUEST_TYPE:
            kind, at = read_uint(buf, at, end)
        elif key == Key.SYNC:
            sync, at = read_unsigned(buf, at, end)
        else:  # a stream id, a schema version, or a key of a newer client
            return 0
        if at < 0:
            return 0
    cells[TYPE, row] = kind
    cells[SYNC, row] = sync
    if (kind < RequestType.SELECT or kind > RequestType.DELETE) and kind != RequestType.UPSERT:
        return 0
    return scan_statement(buf, at, end, cells, row)


def array_end(buf: Bytes, at: int, end: int) -> int:
    """Return the offset after the value at `at`, or -1 if it is not a complete array."""
    count, _ = read_array(buf, at, end)
    return value_end(buf, at, end) if count >= 0 else -1


def scan_statement(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Scan the body of a statement; return 1 if the request is simple, else 0."""
    space_id = key_at = key_end = tuple_at = tuple_end = ops_at = ops_end = -1
    index_id = iterator = offset = limit = index_base = 0
    pairs, at = read_map(buf, at, end)
    if at < 0:
        return 0
    for _ in range(pairs):
        key, at = read_uint(buf, at, end)
        if at < 0:
            return 0
        if key == Key.KEY:
            key_at = at
            at = key_end = array_end(buf, at, end)
        elif key == Key.TUPLE:
            tuple_at = at
            at = tuple_end = array_end(buf, at, end)
        elif key == Key.OPS:
            ops_at = at
            at = ops_end = array_end(buf, at, end)
        else:
            value, at = read_uint(buf, at, end)
            if key == Key.SPACE_ID:
                space_id = value
            elif key == Key.LIMIT:
                limit = value
            elif key == Key.INDEX_ID:
                index_id = value
            elif key == Key.OFFSET:
                offset = value
            elif key == Key.ITERATOR:
                iterator = value
            elif key == Key.INDEX_BASE:
                index_base = value
            else:
                return 0
        if at < 0:
            return 0
    cells[SPACE_ID, row] = space_id
    cells[KEY_AT, row], cells[KEY_END, row] = key_at, key_end
    cells[TUPLE_AT, row], cells[TUPLE_END, row] = tuple_at, tuple_end
    cells[OPS_AT, row], cells[OPS_END, row] = ops_at, ops_end
    cells[INDEX_ID, row], cells[ITERATOR, row] = index_id, iterator
    cells[OFFSET, row], cells[LIMIT, row], cells[INDEX_BASE, row] = offset, limit, index_base
    if at != end or space_id < 0 or space_id > SPACE_ID_MAX:
        return 0
    return is_statement(cells, row)


def is_statement(cells: Cells, row: int) -> int:
    """Return 1 if the request has the parts of its type, and no number that only other types use, else 0."""
    kind = cells[TYPE, row]
    parts = 1 if cells[KEY_AT, row] >= 0 else 0
    if cells[TUPLE_AT, row] >= 0:
        parts += 2
    if cells[OPS_AT, row] >= 0:
        parts += 4
    if kind == RequestType.SELECT:
        return 1 if parts == 1 and cells[LIMIT, row] > 0 and cells[INDEX_BASE, row] == 0 else 0
    if cells[ITERATOR, row] or cells[OFFSET, row]:
        return 0
    if kind == RequestType.UPDATE:
        return 1 if parts == 3 else 0
    if kind == RequestType.DELETE:
        return 1 if parts == 1 and cells[INDEX_BASE, row] == 0 else 0
    if cells[INDEX_ID, row]:
        return 0
    if kind == RequestType.UPSERT:
        return 1 if parts == 6 else 0
    return 1 if parts == 2 and cells[INDEX_BASE, row] == 0 else 0


def scan_packet(buf: Bytes, cells: Cells) -> int:
    """Fill the first column of the table from a packet without its length; return 1 if it is simple, else 0."""
    simple = scan_request(source(buf), 0, buf.shape[0], cells, 0)
    cells[CODE, 0] = (cells[TYPE, 0] << TYPE_SHIFT) + cells[SPACE_ID, 0] if simple else -1
    return simple


def scan_requests(buf: Bytes, spans: Cells, cells: Cells) -> int:
    """Tabulate the complete packets of all spans until the table is full; return the number of requests."""
    row = 0
    room = cells.shape[1]
    data = source(buf)
    for span in range(spans.shape[0]):
        at, end = spans[span, AT], spans[span, END]
        while at < end and row < room:
            head = byte(data, at)
            size, start = read_uint(data, at, end)
            if start < 0:
                if head < 0xCC or head > 0xCF or end - at >= 9:
                    spans[span, STATUS] = WRONG_LENGTH
                break
            if size == 0 or size > spans[span, SIZE_MAX]:
                spans[span, STATUS] = TOO_LARGE
                break
            if start + size > end:
                break
            cells[PACKET_AT, row] = start
            cells[PACKET_END, row] = start + size
            cells[SPAN, row] = span
            simple = scan_request(data, start, start + size, cells, row)
            cells[CODE, row] = (cells[TYPE, row] << TYPE_SHIFT) + cells[SPACE_ID, row] if simple else -1
            at = start + size
            row += 1
        spans[span, AT] = at
    return row
