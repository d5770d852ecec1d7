"""Encodes rows of a replication stream for the log files and snapshots of an archive.

A row in the log keeps the timestamp of the upstream: an archive that catches up receives hours of changes in a minute,
and `restore` needs the time of the change. Headers are encoded again, bodies are copied.
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
from flowstone.iproto.slab import Slab
from flowstone.kernels import kernel
from flowstone.replication.row_stream import RowStream, slab_of_rows

INSERT = RequestType.INSERT.value

SNAPSHOT_BLOCK_ROWS = 1000
"""Rows of a snapshot that are encoded together; the writer combines them into blocks."""


@kernel
def gather_log_rows(buf: Bytes, cells: Cells, first: int, stop: int, out: Bytes) -> int:
    """Encode rows `first` to `stop` for a log, each with its own timestamp. Return the number of bytes written."""
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
    """Encode rows `first` to `stop` for a snapshot, numbered from `number`. Return the number of bytes written."""
    at = 0
    for row in range(first, stop):
        lsn = number + row - first
        group_id = int(cells[scan.GROUP_ID, row])
        at = put_header(out, at, INSERT, 0, 0, group_id, lsn, timestamp, lsn, scan.COMMIT, False)
        at = put_body(buf, cells, row, out, at)
    return at


def log_rows(slab: Slab, first: int, stop: int) -> bytes:
    """Return rows `first` to `stop` encoded for a log, with their timestamps."""
    out = _room(slab, first, stop)
    size = gather_log_rows(slab.buf, slab.cells, first, stop, out)
    return out[:size].tobytes()


def snapshot_rows(slab: Slab, first: int, stop: int, number: int, timestamp: float) -> Iterator[tuple[bytes, int]]:
    """Yield rows of a JOIN or FETCH_SNAPSHOT encoded for a snapshot, numbered from `number`: bytes and row count."""
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
    """Compile the kernels for rows before a server waits for ACKs."""
    row = encode_header(Row(INSERT, 1, lsn=1, timestamp=1.0, tsn=1)) + b"\x82\x10\x01\x21\x90"
    stream = RowStream("nobody")
    stream.feed(b"\xce" + len(row).to_bytes(4, "big") + row)
    slab = stream.take()
    assert slab is not None
    slab_of_rows(log_rows(slab, 0, 1), "nowhere")
    for _ in snapshot_rows(slab, 0, 1, 0, 1.0):
        pass
