"""Encodes rows of a replication stream for the log files and snapshots of an archive.

A row in the log keeps the timestamp of the upstream: an archive that catches up receives hours of changes in a minute,
and `restore` needs the time of the change. Headers are encoded again, bodies are copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flowstone.iproto import scan
from flowstone.iproto.row_batch_kernels import gather_log_rows, gather_snapshot_rows
from flowstone.iproto.row_batches import rows_bound
from flowstone.iproto.scan import Bytes
from flowstone.iproto.slab import Slab

SNAPSHOT_BLOCK_ROWS = 1000
"""Rows of a snapshot that are encoded together; the writer combines them into blocks."""


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
        size = gather_snapshot_rows(slab.buf, slab.cells, start, end, lsn, timestamp, out)
        yield out[:size].tobytes(), end - start


def _room(slab: Slab, first: int, stop: int) -> Bytes:
    content = int(slab.cells[scan.ROW_END, stop - 1]) - int(slab.cells[scan.ROW_AT, first]) if stop > first else 0
    return np.empty(rows_bound(stop - first, content), np.uint8)
