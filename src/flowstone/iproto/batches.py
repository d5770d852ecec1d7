"""Compiled: passes that encode many log rows and many replies from a table of requests.

The bytes equal those of `row.encode_header`, the bodies in `box/engine/statements.py`, and `replies.encode_data`; tests
compare them. The caller provides output buffers of at least the size that `rows_bound` and `replies_bound` return.
"""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    from flowstone.iproto.constants import Key, RequestType
    from flowstone.iproto.request_scan import (
        INDEX_BASE,
        INDEX_ID,
        KEY_AT,
        KEY_END,
        OPS_AT,
        OPS_END,
        SPACE_ID,
        SYNC,
        TUPLE_AT,
        TUPLE_END,
        TYPE,
    )
    from flowstone.iproto.row_batch_kernels import put_header
    from flowstone.iproto.scan import COMMIT, Bytes, Cells
    from flowstone.native.msgpack import put_big, put_pair, put_uint
    from flowstone.native.words import content, copy, float_bits, poke, signed, source, target

ROW_OVERHEAD = 96
"""What a row has besides its parts: at most 11 bytes of LSN, 10 of the timestamp, ids, markers."""

REPLY_OVERHEAD = 40
"""A reply's header and the head of its data."""


def rows_bound(content_size: int, logged: list[bytes | None]) -> int:
    """Return a bound of the size of the rows that `build_rows` makes of requests of `content_size` bytes in total."""
    size = content_size
    for key in logged:
        size += ROW_OVERHEAD
        if key is not None:
            size += len(key)
    return size


def replies_bound(results: list[bytes | list[bytes] | None]) -> int:
    """Return a bound of the size of the replies with these results."""
    size = 0
    for result in results:
        size += REPLY_OVERHEAD
        if isinstance(result, list):
            for raw in result:
                size += len(raw)
        elif result is not None:
            size += len(result)
    return size


def build_rows(
    buf: Bytes,
    cells: Cells,
    start: int,
    logged: list[bytes | None],
    out: Bytes,
    replica_id: int,
    lsn: int,
    timestamp: float,
    flags: int,
) -> tuple[int, int]:
    """Encode a row for each write among the requests from `start` on, as single-row transactions, numbered from `lsn`.

    `logged` has an entry per request: None, or the primary key to log in place of the request's own key. `flags` are
    the flags besides COMMIT. Return the number of bytes written and the number of rows.
    """
    at = count = 0
    row = start
    stamp = signed(float_bits(timestamp))
    data, to = source(buf), target(out)
    for key in logged:
        kind = cells[TYPE, row]
        if kind != RequestType.SELECT:
            row_lsn = lsn + count
            at = put_header(to, at, kind, 0, replica_id, 0, row_lsn, stamp, row_lsn, flags | COMMIT, False)
            if kind == RequestType.UPDATE or kind == RequestType.DELETE:
                at = put_key_body(data, cells, row, key, to, at)
            elif kind == RequestType.UPSERT:
                at = put_upsert_body(data, cells, row, to, at)
            else:
                at = poke(to, poke(to, at, 0x82), Key.SPACE_ID)
                at = poke(to, put_uint(to, at, cells[SPACE_ID, row]), Key.TUPLE)
                at = put_part(data, cells[TUPLE_AT, row], cells[TUPLE_END, row], to, at)
            count += 1
        row += 1
    return at, count


def put_part(buf: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Copy a part of a request."""
    return copy(out, at, buf, start, end - start)


def put_key_body(buf: Bytes, cells: Cells, row: int, key: bytes | None, out: Bytes, at: int) -> int:
    """Write the body of a DELETE or an UPDATE, with the request's own index and key if `key` is None."""
    is_update = cells[TYPE, row] == RequestType.UPDATE
    index_id = 0 if key is not None else cells[INDEX_ID, row]
    index_base = cells[INDEX_BASE, row]
    pairs = 2 + (1 if is_update else 0) + (1 if index_id else 0) + (1 if index_base else 0)
    at = put_pair(out, poke(out, at, 0x80 + pairs), Key.SPACE_ID, cells[SPACE_ID, row])
    if index_id:
        at = put_pair(out, at, Key.INDEX_ID, index_id)
    if index_base:
        at = put_pair(out, at, Key.INDEX_BASE, index_base)
    at = poke(out, at, Key.KEY)
    if key is None:
        at = put_part(buf, cells[KEY_AT, row], cells[KEY_END, row], out, at)
    else:
        at = copy(out, at, content(key), 0, len(key))
    if is_update:
        at = put_part(buf, cells[TUPLE_AT, row], cells[TUPLE_END, row], out, poke(out, at, Key.TUPLE))
    return at


def put_upsert_body(buf: Bytes, cells: Cells, row: int, out: Bytes, at: int) -> int:
    """Write the body of an UPSERT."""
    index_base = cells[INDEX_BASE, row]
    at = put_pair(out, poke(out, at, 0x84 if index_base else 0x83), Key.SPACE_ID, cells[SPACE_ID, row])
    if index_base:
        at = put_pair(out, at, Key.INDEX_BASE, index_base)
    at = put_part(buf, cells[OPS_AT, row], cells[OPS_END, row], out, poke(out, at, Key.OPS))
    return put_part(buf, cells[TUPLE_AT, row], cells[TUPLE_END, row], out, poke(out, at, Key.TUPLE))


def build_replies(
    results: list[bytes | list[bytes] | None],
    cells: Cells,
    start: int,
    out: Bytes,
    schema_version: int,
    wide: int,
    edges: Cells,
) -> int:
    """Encode the reply to each request from `start` on, with its result: a tuple, None, or a list of tuples.

    `edges[i]` receives the offset of reply i. Return the number of bytes written.
    """
    at = i = 0
    to = target(out)
    for result in results:
        edges[i] = at
        head = at
        sync = cells[SYNC, start + i]
        if isinstance(result, list):
            at = put_head(to, at, sync, schema_version, wide, len(result))
            for raw in result:
                at = copy(to, at, content(raw), 0, len(raw))
        elif result is None:
            at = put_head(to, at, sync, schema_version, wide, 0)
        else:
            at = put_head(to, at, sync, schema_version, wide, 1)
            at = copy(to, at, content(result), 0, len(result))
        put_big(to, poke(to, head, 0xCE), at - head - 5, 4)
        i += 1
    edges[i] = at
    return at


def put_head(out: Bytes, at: int, sync: int, schema_version: int, wide: int, count: int) -> int:
    """Write a reply up to its `count` tuples; leave room for its length."""
    width = 8 if wide else 4
    at = poke(out, poke(out, at + 5, 0x83), 0x00)
    at = put_big(out, poke(out, at, 0xCE), 0, 4)
    at = poke(out, poke(out, at, 0x01), 0xCF)
    at = put_big(out, at, sync, 8)
    at = poke(out, poke(out, at, 0x05), 0xCF if wide else 0xCE)
    at = put_big(out, at, schema_version, width)
    at = poke(out, poke(out, at, 0x81), 0x30)
    return put_big(out, poke(out, at, 0xDD), count, 4)
