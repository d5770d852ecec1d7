"""Compiled: passes that encode many log rows and many replies from a table of requests.

The bytes equal those of `row.encode_header` and `replies.encode_data`; tests compare them. The caller provides output
buffers of at least the size that `rows_bound` and `replies_bound` return.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import Key, RequestType
    from flowstone.iproto.request_scan import KEY_AT, KEY_END, SPACE_ID, SYNC, TUPLE_AT, TUPLE_END, TYPE
    from flowstone.iproto.row_batch_kernels import put_header
    from flowstone.iproto.scan import COMMIT, Bytes, Cells
    from flowstone.native.msgpack import put_big, put_uint
    from flowstone.native.words import copy, float_bits, poke, signed, source, target

ROW_OVERHEAD = 64
"""What a row has besides its tuple or key: at most 11 bytes of LSN, 10 of the timestamp, ids, markers."""

REPLY_OVERHEAD = 40
"""A reply's header and the head of its data."""


def rows_bound(count: int, content: int) -> int:
    """Return a bound of the size of `count` rows with `content` bytes of tuples or keys in total."""
    return count * ROW_OVERHEAD + content


def replies_bound(count: int, content: int) -> int:
    """Return a bound of the size of `count` replies with `content` bytes of tuples in total."""
    return count * REPLY_OVERHEAD + content


def build_rows(
    buf: Bytes, cells: Cells, start: int, end: int, out: Bytes, replica_id: int, lsn: int, timestamp: float, flags: int
) -> tuple[int, int]:
    """Encode a row for each write in requests `start` to `end`, as single-row transactions with LSNs from `lsn` on.

    `flags` are the flags besides COMMIT. Return the number of bytes written and the number of rows.
    """
    at = count = 0
    stamp = signed(float_bits(timestamp))
    data, to = source(buf), target(out)
    for row in range(start, end):
        kind = cells[TYPE, row]
        if kind == RequestType.SELECT:
            continue
        row_lsn = lsn + count
        at = put_header(to, at, kind, 0, replica_id, 0, row_lsn, stamp, row_lsn, flags | COMMIT, False)
        at = poke(to, poke(to, at, 0x82), 0x10)
        at = put_uint(to, at, cells[SPACE_ID, row])
        if kind == RequestType.DELETE:
            at = poke(to, at, Key.KEY)
            part, part_end = cells[KEY_AT, row], cells[KEY_END, row]
        else:
            at = poke(to, at, Key.TUPLE)
            part, part_end = cells[TUPLE_AT, row], cells[TUPLE_END, row]
        at = copy(to, at, data, part, part_end - part)
        count += 1
    return at, count


def build_replies(
    tuples: Bytes,
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
    """Encode replies to requests `start` to `end`, each with the tuple of `sizes[i]` bytes at `ats[i]` of `tuples`.

    A size of -1 means no tuple. `edges[i]` receives the offset of reply i. Return the number of bytes written.
    """
    at = 0
    width = 8 if wide else 4
    data, to = source(tuples), target(out)
    for row in range(start, end):
        i = row - start
        edges[i] = at
        size = sizes[i]
        present = 1 if size >= 0 else 0
        content = size if present else 0
        at = put_big(to, poke(to, at, 0xCE), 1 + 6 + 10 + 2 + width + 2 + 5 + content, 4)
        at = poke(to, poke(to, at, 0x83), 0x00)
        at = put_big(to, poke(to, at, 0xCE), 0, 4)
        at = poke(to, poke(to, at, 0x01), 0xCF)
        at = put_big(to, at, cells[SYNC, row], 8)
        at = poke(to, poke(to, at, 0x05), 0xCF if wide else 0xCE)
        at = put_big(to, at, schema_version, width)
        at = poke(to, poke(to, at, 0x81), 0x30)
        at = put_big(to, poke(to, at, 0xDD), present, 4)
        if present:
            at = copy(to, at, data, ats[i], content)
    edges[end - start] = at
    return at
