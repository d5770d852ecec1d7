"""The table of requests that a scan fills: one column per request, one line per part of it.

A part of a request is a pair of offsets into the scanned buffer, inside the packet of the request.
`request_scan_kernels.py` fills tables.
"""

from __future__ import annotations

import numpy as np

from flowstone.iproto.scan import Cells

# Lines of the table. Offsets are -1 if the request has no such part.
(
    TYPE,
    SYNC,  # as int64: negative from 2^63 on
    SPACE_ID,
    KEY_AT,
    KEY_END,
    TUPLE_AT,
    TUPLE_END,
    PACKET_AT,  # the first byte after the length
    PACKET_END,
    CODE,  # type and space, equal for requests that can be executed together; -1 if not simple
    SPAN,  # number of the span (connection) of the request
    INDEX_ID,
    ITERATOR,
    OFFSET,
    LIMIT,
    INDEX_BASE,
    OPS_AT,  # the operations of an UPSERT; those of an UPDATE are in the place of a tuple
    OPS_END,
) = range(18)
LINES = 18

# Columns of the table of spans. The scan sets AT to the end of the last complete packet, and STATUS.
START, END, AT, SIZE_MAX, STATUS = range(5)
SPAN_COLUMNS = 5
WAITING, WRONG_LENGTH, TOO_LARGE = range(3)
"""Why the scan of a span stopped: the next packet is incomplete, has no valid length, or is too large."""

TYPE_SHIFT = 32
SPACE_ID_MAX = 0xFFFFFFFF


def runs(codes: Cells) -> list[tuple[int, int, int]]:
    """Return the ranges of equal codes, in order: (code, start, end)."""
    if not len(codes):
        return []
    edges = np.flatnonzero(np.diff(codes)) + 1
    starts = [0, *edges.tolist()]
    ends = [*starts[1:], len(codes)]
    return list(zip(codes[starts].tolist(), starts, ends, strict=True))
