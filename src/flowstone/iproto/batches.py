"""Compiled passes that encode many log rows and many replies from a table of requests.

The bytes equal those of `row.encode_header` and `replies.encode_data`; tests compare them. The caller provides output
buffers of at least the size that `rows_bound` and `replies_bound` return.
"""

from __future__ import annotations

import numpy as np

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.request_scan import KEY_AT, KEY_END, SPACE_ID, SYNC, TUPLE_AT, TUPLE_END, TYPE
from flowstone.iproto.row_batches import put_big, put_header, put_uint
from flowstone.iproto.scan import COMMIT, Bytes, Cells
from flowstone.kernels import kernel
from flowstone.kernels.wide import copy, poke

ROW_OVERHEAD = 64
"""What a row has besides its tuple or key: at most 11 bytes of LSN, 10 of the timestamp, ids, markers."""

REPLY_OVERHEAD = 40
"""A reply's header and the head of its data."""


def rows_bound(count: int, content: int) -> int:
    """Bytes for `count` rows with `content` bytes of tuples or keys among them."""
    return count * ROW_OVERHEAD + content


def replies_bound(count: int, content: int) -> int:
    """Bytes for `count` replies with `content` bytes of tuples among them."""
    return count * REPLY_OVERHEAD + content


@kernel
def build_rows(
    buf: Bytes, cells: Cells, start: int, end: int, out: Bytes, replica_id: int, lsn: int, timestamp: int, flags: int
) -> tuple[int, int]:
    """A row for each write among the requests `start` to `end`, each a transaction of its own, LSNs from `lsn`.

    `timestamp` has the bits of a float64; `flags` are those besides COMMIT. Returns the bytes written and the
    number of rows.
    """
    at = count = 0
    for row in range(start, end):
        kind = int(cells[TYPE, row])
        if kind == RequestType.SELECT:
            continue
        row_lsn = lsn + count
        at = put_header(out, at, kind, 0, replica_id, 0, row_lsn, timestamp, row_lsn, flags | COMMIT, False)
        at = poke(out, poke(out, at, 0x82), 0x10)
        at = put_uint(out, at, int(cells[SPACE_ID, row]))
        if kind == RequestType.DELETE:
            at = poke(out, at, Key.KEY)
            source, source_end = int(cells[KEY_AT, row]), int(cells[KEY_END, row])
        else:
            at = poke(out, at, Key.TUPLE)
            source, source_end = int(cells[TUPLE_AT, row]), int(cells[TUPLE_END, row])
        at = copy(out, at, buf, source, source_end - source)
        count += 1
    return at, count


@kernel
def build_replies(
    source: Bytes,
    ats: Cells,
    sizes: Cells,
    cells: Cells,
    start: int,
    end: int,
    out: Bytes,
    schema_version: int,
    wide: int,
    edges: Cells,
) -> int:
    """Replies to the requests `start` to `end`, each with the tuple `sizes[i]` bytes long at `ats[i]` of `source`.

    A size of -1 is a reply without a tuple. `edges[i]` gets the offset of reply i. Returns the bytes written.
    """
    at = 0
    width = 8 if wide else 4
    for row in range(start, end):
        i = row - start
        edges[i] = at
        size = int(sizes[i])
        present = 1 if size >= 0 else 0
        content = size if present else 0
        at = put_big(out, poke(out, at, 0xCE), 1 + 6 + 10 + 2 + width + 2 + 5 + content, 4)
        at = poke(out, poke(out, at, 0x83), 0x00)
        at = put_big(out, poke(out, at, 0xCE), 0, 4)
        at = poke(out, poke(out, at, 0x01), 0xCF)
        at = put_big(out, at, int(cells[SYNC, row]), 8)
        at = poke(out, poke(out, at, 0x05), 0xCF if wide else 0xCE)
        at = put_big(out, at, schema_version, width)
        at = poke(out, poke(out, at, 0x81), 0x30)
        at = put_big(out, poke(out, at, 0xDD), present, 4)
        if present:
            at = copy(out, at, source, int(ats[i]), content)
    edges[end - start] = at
    return at


def float_bits(value: float) -> int:
    """The bits of a float64, as a number that kernels take."""
    return int(np.float64(value).view(np.int64))
