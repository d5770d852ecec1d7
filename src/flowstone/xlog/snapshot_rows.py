"""Tuples of one space as rows of a snapshot, encoded in bulk with the same bytes as `SnapWriter.add_tuples`."""

from __future__ import annotations

import numpy as np

from flowstone.iproto.row_batch_kernels import gather_tuples
from flowstone.iproto.row_batches import rows_bound
from flowstone.iproto.scan import Bytes, Cells

BODY_HEAD_SIZE = 8


def tuple_rows(buf: Bytes, offsets: Cells, space_id: int, *, group_id: int, number: int, timestamp: float) -> bytes:
    """The rows, the first with number `number`; `group_id` is GROUP_LOCAL for a local space."""
    count = len(offsets) - 1
    content = int(offsets[-1] - offsets[0]) + count * BODY_HEAD_SIZE
    out = np.empty(rows_bound(count, content), np.uint8)
    size = gather_tuples(buf, offsets, space_id, group_id, number, timestamp, out)
    return out[:size].tobytes()
