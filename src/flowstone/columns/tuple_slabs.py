"""Arrays of tuples as slabs of rows that insert them, so that the columns of a log can be filled from any tuples."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from flowstone.iproto import scan
from flowstone.iproto.constants import RequestType
from flowstone.iproto.scan import Bytes, Cells
from flowstone.iproto.slab import Slab


def slab_of_tuples(tuples: pa.Array, space_id: int, path: str) -> Slab:
    """Return a slab of rows that insert the tuples, without copying them. Errors name `path`."""
    if tuples.type != pa.binary():
        tuples = tuples.cast(pa.binary())  # delta-rs returns views, others large binaries; kernels take one layout
    count = len(tuples)
    _, offsets, data = tuples.buffers()
    edges: Cells = np.zeros(count + 1, np.int64)
    if count:
        edges[:] = np.frombuffer(offsets, np.int32, count + 1, 4 * tuples.offset)
    buf: Bytes = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return slab_of_spans(buf, edges[:-1], edges[1:], space_id, path)


def slab_of_spans(buf: Bytes, starts: Cells, ends: Cells, space_id: int, path: str) -> Slab:
    """Return a slab of rows that insert the tuples between `starts` and `ends` in `buf`."""
    count = len(starts)
    # One extra column, so that kernels see the same memory layout as in slabs of files.
    cells: Cells = np.zeros((scan.LINES, count + 1), np.int64)
    cells[scan.TYPE] = RequestType.INSERT.value
    cells[scan.SPACE_ID] = space_id
    for line in (scan.KEY_AT, scan.KEY_END, scan.OPS_AT, scan.OPS_END):
        cells[line] = -1
    cells[scan.LSN, :count] = np.arange(1, count + 1)
    cells[scan.TUPLE_AT, :count] = cells[scan.ROW_AT, :count] = cells[scan.BODY_AT, :count] = starts
    cells[scan.TUPLE_END, :count] = cells[scan.ROW_END, :count] = ends
    return Slab(path, b"", buf, cells[:, :count], np.zeros(1, np.int64))
