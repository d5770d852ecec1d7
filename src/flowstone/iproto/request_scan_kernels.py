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
        KEY_AT,
        KEY_END,
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
    from flowstone.native.msgpack import read_map, read_uint, read_unsigned, value_end
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
    if kind < RequestType.SELECT or kind > RequestType.DELETE or kind == RequestType.UPDATE:
        return 0
    return scan_statement(buf, at, end, cells, row)


def scan_statement(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Scan the body of a SELECT, INSERT, REPLACE or DELETE; return 1 if the request is simple, else 0.

    A simple request has a tuple, or a key of the primary index.
    """
    space_id = key_at = key_end = tuple_at = tuple_end = -1
    limit = 0
    pairs, at = read_map(buf, at, end)
    if at < 0:
        return 0
    for _ in range(pairs):
        key, at = read_uint(buf, at, end)
        if at < 0:
            return 0
        if key == Key.KEY:
            key_at = at
            at = key_end = value_end(buf, at, end)
        elif key == Key.TUPLE:
            tuple_at = at
            at = tuple_end = value_end(buf, at, end)
        else:
            value, at = read_uint(buf, at, end)
            if key == Key.SPACE_ID:
                space_id = value
            elif key == Key.LIMIT:
                limit = value
            elif key == Key.INDEX_ID or key == Key.OFFSET or key == Key.ITERATOR:
                if value != 0:
                    return 0
            else:
                return 0
        if at < 0:
            return 0
    cells[SPACE_ID, row] = space_id
    cells[KEY_AT, row], cells[KEY_END, row] = key_at, key_end
    cells[TUPLE_AT, row], cells[TUPLE_END, row] = tuple_at, tuple_end
    kind = cells[TYPE, row]
    if at != end or space_id < 0 or space_id > SPACE_ID_MAX:
        return 0
    if kind == RequestType.SELECT:
        return 1 if key_at >= 0 and tuple_at < 0 and limit > 0 else 0
    if kind == RequestType.DELETE:
        return 1 if key_at >= 0 and tuple_at < 0 else 0
    return 1 if tuple_at >= 0 and key_at < 0 else 0


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
