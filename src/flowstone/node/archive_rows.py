"""Rows of a replication stream as the files of an archive have them.

A log keeps the time that the followed instance stamped: what an archive that was away takes in a minute happened over
hours, and `restore` goes by when it happened. Headers are made anew, bodies are copied as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flowstone.iproto import scan
from flowstone.iproto.batches import float_bits
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.iproto.row_batches import put_body, put_header, rows_bound, was_control
from flowstone.iproto.scan import Bytes, Cells
from flowstone.kernels import kernel
from flowstone.replication.row_stream import RowStream, slab_of_rows
from flowstone.xlog.reader import Slab

INSERT = RequestType.INSERT.value

SNAPSHOT_BLOCK_ROWS = 1000
"""Rows of a snapshot that are laid out together; the writer makes blocks of them."""


@kernel
def gather_log_rows(buf: Bytes, cells: Cells, first: int, stop: int, out: Bytes) -> int:
    """Rows `first` to `stop` for a log, each with its own time; the bytes written."""
    at = 0
    for row in range(first, stop):
        at = put_header(
            out,
            at,
            int(cells[scan.TYPE, row]),
            0,
            int(cells[scan.REPLICA_ID, row]),
            int(cells[scan.GROUP_ID, row]),
            int(cells[scan.LSN, row]),
            int(cells[scan.TIMESTAMP, row]),
            int(cells[scan.TSN, row]),
            int(cells[scan.FLAGS, row]),
            was_control(cells, row),
        )
        at = put_body(buf, cells, row, out, at)
    return at


@kernel
def gather_snapshot_rows(
    buf: Bytes, cells: Cells, first: int, stop: int, number: int, timestamp: int, out: Bytes
) -> int:
    """Rows `first` to `stop` for a snapshot, numbered from `number`, all of one time; the bytes written."""
    at = 0
    for row in range(first, stop):
        lsn = number + row - first
        group_id = int(cells[scan.GROUP_ID, row])
        at = put_header(out, at, INSERT, 0, 0, group_id, lsn, timestamp, lsn, scan.COMMIT, False)
        at = put_body(buf, cells, row, out, at)
    return at


def log_rows(slab: Slab, first: int, stop: int) -> bytes:
    """Rows `first` to `stop` as a log has them, with the time they came with."""
    out = _room(slab, first, stop)
    size = gather_log_rows(slab.buf, slab.cells, first, stop, out)
    return out[:size].tobytes()


def snapshot_rows(slab: Slab, first: int, stop: int, number: int, timestamp: float) -> Iterator[tuple[bytes, int]]:
    """Rows of a JOIN or FETCH_SNAPSHOT as a snapshot has them, numbered from `number`: bytes, and how many rows."""
    for start in range(first, stop, SNAPSHOT_BLOCK_ROWS):
        end = min(start + SNAPSHOT_BLOCK_ROWS, stop)
        out = _room(slab, start, end)
        lsn = number + start - first
        size = gather_snapshot_rows(slab.buf, slab.cells, start, end, lsn, float_bits(timestamp), out)
        yield out[:size].tobytes(), end - start


def _room(slab: Slab, first: int, stop: int) -> Bytes:
    content = int(slab.cells[scan.ROW_END, stop - 1]) - int(slab.cells[scan.ROW_AT, first]) if stop > first else 0
    return np.empty(rows_bound(stop - first, content), np.uint8)


def warm_up() -> None:
    """Has everything compiled that rows will pass, while no server waits for our ACKs."""
    row = encode_header(Row(INSERT, 1, lsn=1, timestamp=1.0, tsn=1)) + b"\x82\x10\x01\x21\x90"
    stream = RowStream("nobody")
    stream.feed(b"\xce" + len(row).to_bytes(4, "big") + row)
    slab = stream.take()
    assert slab is not None
    slab_of_rows(log_rows(slab, 0, 1), "nowhere")
    for _ in snapshot_rows(slab, 0, 1, 0, 1.0):
        pass
