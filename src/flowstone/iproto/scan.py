"""The row scanner: finds every row in a range of bytes and tabulates the offsets of its parts.

One compiled pass serves all readers of many rows: log files, replication streams, the JSON printer, the columnar
decoder. It copies nothing: a part is a pair of offsets into the scanned buffer. Every read is bounded, so any bytes
give either a table or the offset of the first invalid byte, never a wrong row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.limits import ROW_HEADER_SIZE_MAX
from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import big16, big32, big64, byte

Bytes = NDArray[np.uint8]
Cells = NDArray[np.int64]

# Lines of the table. `cells[LSN, i]` is the LSN of row i. Offsets are -1 where the row has no such part.
(
    TYPE,
    REPLICA_ID,
    GROUP_ID,
    LSN,
    TSN,  # absolute, see Row.tsn
    TIMESTAMP,  # the bits of a float64; 0 where absent
    FLAGS,  # COMMIT is set on the last row of every transaction
    SINGLE,  # 1: the row has no TSN key and so is a transaction of its own
    SPACE_ID,  # -1: none
    INDEX_ID,
    INDEX_BASE,
    KEY_AT,
    KEY_END,
    TUPLE_AT,
    TUPLE_END,
    OPS_AT,
    OPS_END,
    ROW_AT,
    BODY_AT,  # equals ROW_END where the row has no body
    ROW_END,
    SPAN,  # number of the span (block) that the row came from
) = range(21)
LINES = 21
COMMIT = Flag.COMMIT.value

DONE, FULL, MALFORMED = 0, 1, 2
"""Why a scan stopped: nothing left; no room left in the table; the bytes at the returned offset are no row."""


NO_VALUE = 255
"""In the table of lengths: no value starts with this byte."""


def _marker_tables() -> tuple[Bytes, Bytes, Bytes]:
    """Per first byte of a value: fixed bytes that follow, children that follow, bytes of an explicit length."""
    fixed, children, length = np.zeros((3, 256), np.uint8)
    for marker in range(0x80, 0x90):
        children[marker] = 2 * (marker & 0x0F)
    for marker in range(0x90, 0xA0):
        children[marker] = marker & 0x0F
    for marker in range(0xA0, 0xC0):
        fixed[marker] = marker & 0x1F
    for marker, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        fixed[marker] = size
    for marker, size in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        fixed[marker] = size
    for exponent in range(5):  # fixext 1, 2, 4, 8, 16: a type byte and the data
        fixed[0xD4 + exponent] = 1 + (1 << exponent)
    for marker, size in ((0xD9, 1), (0xDA, 2), (0xDB, 4), (0xC4, 1), (0xC5, 2), (0xC6, 4)):
        length[marker] = size
    for marker, size in ((0xC7, 1), (0xC8, 2), (0xC9, 4)):  # ext: a type byte as well
        length[marker], fixed[marker] = size, 1
    for marker, size in ((0xDC, 2), (0xDD, 4)):
        length[marker], children[marker] = size, 1
    for marker, size in ((0xDE, 2), (0xDF, 4)):
        length[marker], children[marker] = size, 2
    length[0xC1] = NO_VALUE
    return fixed, children, length


FIXED, CHILDREN, LENGTH = _marker_tables()


@inlined
def value_end(buf: Bytes, at: int, end: int) -> int:
    """The offset behind the value at `at`, or -1 where it is malformed or does not end by `end`.

    Without a stack: each value consumes at least a byte, so nesting costs nothing and cannot run away.
    """
    todo = 1
    while todo > 0:
        if at >= end:
            return -1
        marker = byte(buf, at)
        at += 1
        width = byte(LENGTH, marker)
        if width == 0:
            at += byte(FIXED, marker)
            todo += byte(CHILDREN, marker) - 1
        else:
            if width == NO_VALUE or at + width > end:
                return -1
            count = byte(buf, at) if width == 1 else (big16(buf, at) if width == 2 else big32(buf, at))
            at += width
            children = byte(CHILDREN, marker)
            todo -= 1
            if children:
                todo += count * children
            else:
                at += count + byte(FIXED, marker)
    return at if at <= end else -1


@kernel
def skip_value(buf: Bytes, at: int, end: int) -> int:
    """`value_end`, for callers that are no kernels."""
    return value_end(buf, at, end)


@inlined
def read_unsigned(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """An unsigned number, above 2^63 as its negative twin, and the offset behind it; -1 where there is none."""
    if at >= end:
        return 0, -1
    marker = byte(buf, at)
    if marker < 0x80:
        return marker, at + 1
    if marker < 0xCC or marker > 0xCF:
        return 0, -1
    after = at + 1 + (1 << (marker - 0xCC))
    if after > end:
        return 0, -1
    if marker == 0xCC:
        return byte(buf, at + 1), after
    if marker == 0xCD:
        return big16(buf, at + 1), after
    if marker == 0xCE:
        return big32(buf, at + 1), after
    return int(np.uint64(big64(buf, at + 1)).view(np.int64)), after


@inlined
def read_uint(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """An unsigned number below 2^63 and the offset behind it; the offset is -1 where there is none."""
    value, after = read_unsigned(buf, at, end)
    return value, (after if value >= 0 else -1)


@inlined
def read_map(buf: Bytes, at: int, end: int) -> tuple[int, int]:
    """The number of pairs of the map at `at` and the offset of its first key; the offset is -1 where there is none."""
    if at >= end:
        return 0, -1
    marker = byte(buf, at)
    if 0x80 <= marker <= 0x8F:
        return marker & 0x0F, at + 1
    if marker == 0xDE and at + 3 <= end:
        return big16(buf, at + 1), at + 3
    if marker == 0xDF and at + 5 <= end:
        return big32(buf, at + 1), at + 5
    return 0, -1


@inlined
def scan_header(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fills the header's lines of column `row`; the offset behind the header map, or -1."""
    kind = -1
    replica_id = group_id = lsn = tsn = timestamp = flags = 0
    single = True
    cells[ROW_AT, row] = at
    limit = min(end, at + ROW_HEADER_SIZE_MAX)
    pairs, at = read_map(buf, at, limit)
    if at < 0:
        return -1
    for _ in range(pairs):
        key, at = read_uint(buf, at, limit)  # real readers refuse keys that are no numbers, too
        if at < 0:
            return -1
        if key == Key.TIMESTAMP:
            if at + 9 > limit or byte(buf, at) != 0xCB:
                return -1
            timestamp = int(np.uint64(big64(buf, at + 1)).view(np.int64))
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
    cells[TSN, row] = np.int64(lsn) - np.int64(tsn)
    cells[TIMESTAMP, row] = timestamp
    cells[FLAGS, row] = flags | COMMIT if single else flags
    cells[SINGLE, row] = 1 if single else 0
    return at if kind >= 0 else -1


@inlined
def scan_body(buf: Bytes, at: int, end: int, cells: Cells, row: int) -> int:
    """Fills the body's lines of column `row`; the offset behind the body map, or -1. `at` may be `end`: no body."""
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


@kernel
def scan_spans(buf: Bytes, spans: Cells, span: int, at: int, cells: Cells, row: int) -> tuple[int, int, int, int]:
    """Scans from offset `at` of span number `span` on, filling the table from column `row`.

    `spans[i]` is the (start, end) of one block's rows. Returns (span, at, row, why it stopped).
    """
    room = cells.shape[1]
    while span < spans.shape[0]:
        end = spans[span, 1]
        at = max(at, spans[span, 0])
        while at < end:
            if row >= room:
                return span, at, row, FULL
            after = scan_header(buf, at, end, cells, row)
            if after < 0:
                return span, at, row, MALFORMED
            cells[BODY_AT, row] = after
            # A NOP has no body; what follows it is the next row.
            after = scan_body(buf, after, after if cells[TYPE, row] == RequestType.NOP else end, cells, row)
            if after < 0:
                return span, at, row, MALFORMED
            cells[ROW_END, row] = after
            cells[SPAN, row] = span
            at = after
            row += 1
        span += 1
    return span, at, row, DONE


IMAGE_LINES = 4
"""Lines of the table of images: where the old tuple begins and ends, and the new one; -1 where there is none."""


@kernel
def scan_images(buf: Bytes, cells: Cells, rows: Cells, out: Cells) -> None:
    """Where the bodies of scanned rows have OLD_TUPLE and NEW_TUPLE, which few logs have: a second look at them."""
    for i in range(rows.shape[0]):
        out[0, i] = out[1, i] = out[2, i] = out[3, i] = -1
        at, end = cells[BODY_AT, rows[i]], cells[ROW_END, rows[i]]
        if at >= end:
            continue
        pairs, at = read_map(buf, at, end)
        for _ in range(pairs):
            key, value_at = read_unsigned(buf, at, end)
            if value_at < 0:
                key, value_at = -1, value_end(buf, at, end)
            at = value_end(buf, value_at, end)
            if key == Key.OLD_TUPLE:
                out[0, i], out[1, i] = value_at, at
            elif key == Key.NEW_TUPLE:
                out[2, i], out[3, i] = value_at, at


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows of a buffer, and what is none of them.

    `wrong` has the (number, offset) of each span that holds something else, the offset being that of the first thing
    that is no row. Rows of such a span are not in the table, unless it is where the scan ended.
    """

    buf: Bytes
    cells: Cells
    wrong: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return int(self.cells.shape[1])


ROW_SIZE_GUESS = 64
"""Bytes per row that the first table is sized for; a wrong guess costs one copy of the table."""

ROW_SIZE_MIN = 12
"""Every row of a log has a type and a float64 timestamp. Millions of shorter rows would exhaust
memory: a line of the table takes 168 bytes."""

ROWS_BELOW_SUSPICION = 1 << 20


def scan(buf: Bytes, spans: Cells, *, leave_out_wrong: bool = False) -> Scan:
    """All rows of `buf` inside `spans` (an n×2 table of start and end offsets, in ascending order).

    Ends at the first thing that is no row, or, with `leave_out_wrong`, leaves its whole span out and goes on.
    """
    total = int(np.sum(spans[:, 1] - spans[:, 0])) if len(spans) else 0
    cells: Cells = np.empty((LINES, total // ROW_SIZE_GUESS + 16), np.int64)
    rows_max = max(ROWS_BELOW_SUSPICION, total // ROW_SIZE_MIN)
    span = at = row = 0
    wrong: list[tuple[int, int]] = []
    while True:
        span, at, row, why = scan_spans(buf, spans, span, at, cells, row)
        if why == FULL and row >= rows_max:
            why = MALFORMED
        if why == MALFORMED:
            wrong.append((span, at))
            if leave_out_wrong:
                row = int(np.searchsorted(cells[SPAN, :row], span))
                at, span = int(spans[span, 1]), span + 1
                continue
        if why != FULL:
            return Scan(buf, cells[:, :row], tuple(wrong))
        grown: Cells = np.empty((LINES, min(cells.shape[1] * 2, rows_max)), np.int64)
        grown[:, :row] = cells[:, :row]
        cells = grown
