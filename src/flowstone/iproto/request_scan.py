"""The request scanner: tabulates the packets of all connections of a turn in one compiled pass.

`requests.py` decodes one request with all checks and errors. The scanner finds the requests that need none of these:
the plain statements that make up a heavy load. It marks any other request as not simple, and `requests.py` decodes it.
Nothing is copied: the parts of a request are offsets into the scanned buffer, inside its packet.
"""

from __future__ import annotations

import numpy as np

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.scan import Bytes, Cells, read_map, read_uint, read_unsigned, value_end
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import byte

# Lines of the table. Offsets are -1 where the request has no such part.
(
    TYPE,
    SYNC,  # above 2^63 as its negative twin
    SPACE_ID,
    KEY_AT,
    KEY_END,
    TUPLE_AT,
    TUPLE_END,
    PACKET_AT,  # after the length
    PACKET_END,
    CODE,  # equal for requests that can be executed in one go: type and space; -1: not simple
    SPAN,  # number of the span (connection) that it came from
) = range(11)
LINES = 11

# Columns of the table of spans. The scan sets AT to the first byte that it has not taken, and STATUS.
START, END, AT, SIZE_MAX, STATUS = range(5)
SPAN_COLUMNS = 5
WAITING, WRONG_LENGTH, TOO_LARGE = range(3)
"""Why the scan of a span stopped: the next packet is incomplete, has no valid length, or is too large."""

TYPE_SHIFT = 32
SPACE_ID_MAX = 0xFFFFFFFF


@inlined
def scan_request(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fills column `row` from the packet between `at` and `end`; 1 if it is simple."""
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
        else:  # a stream, a schema version, anything that a newer client may say
            return 0
        if at < 0:
            return 0
    cells[TYPE, row] = kind
    cells[SYNC, row] = sync
    if kind < RequestType.SELECT or kind > RequestType.DELETE or kind == RequestType.UPDATE:
        return 0
    return scan_statement(buf, at, end, cells, row)


@inlined
def scan_statement(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """The body of a SELECT, INSERT, REPLACE or DELETE that names a tuple, or one key of the primary index."""
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


@kernel
def scan_requests(buf: Bytes, spans: Cells, cells: Cells) -> int:
    """Tabulates the whole packets of all spans until the table is full; the number of requests."""
    row = 0
    room = cells.shape[1]
    for span in range(spans.shape[0]):
        at, end = int(spans[span, AT]), int(spans[span, END])
        while at < end and row < room:
            head = byte(buf, at)
            size, start = read_uint(buf, at, end)
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
            simple = scan_request(buf, start, start + size, cells, row)
            cells[CODE, row] = (cells[TYPE, row] << TYPE_SHIFT) + cells[SPACE_ID, row] if simple else -1
            at = start + size
            row += 1
        spans[span, AT] = at
    return row


def runs(codes: Cells) -> list[tuple[int, int, int]]:
    """Stretches of equal codes, in order: (code, start, end)."""
    if not len(codes):
        return []
    edges = np.flatnonzero(np.diff(codes)) + 1
    starts = [0, *edges.tolist()]
    ends = [*starts[1:], len(codes)]
    return list(zip(codes[starts].tolist(), starts, ends, strict=True))
