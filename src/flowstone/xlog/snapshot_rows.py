"""Tuples of one space as rows of a snapshot, encoded in bulk with the same bytes as `SnapWriter.add_tuples`."""

from __future__ import annotations

import numpy as np

from flowstone.iproto.batches import float_bits
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row_batches import put_big, put_header, rows_bound
from flowstone.iproto.scan import COMMIT, Bytes, Cells
from flowstone.kernels import kernel
from flowstone.kernels.wide import copy, poke

INSERT = RequestType.INSERT.value
BODY_HEAD_SIZE = 8


@kernel
def gather_tuples(
    buf: Bytes, offsets: Cells, space_id: int, group_id: int, number: int, timestamp: int, out: Bytes
) -> int:
    """Rows that insert the tuples between `offsets[i]` and `offsets[i + 1]`, numbered from `number`; bytes written."""
    at = 0
    for i in range(offsets.shape[0] - 1):
        at = put_header(out, at, INSERT, 0, 0, group_id, number + i, timestamp, number + i, COMMIT, False)
        # The fixed-width space id is what real writers use.
        at = poke(out, poke(out, poke(out, at, 0x82), 0x10), 0xCE)
        at = poke(out, put_big(out, at, space_id, 4), 0x21)
        start = int(offsets[i])
        at = copy(out, at, buf, start, int(offsets[i + 1]) - start)
    return at


def tuple_rows(buf: Bytes, offsets: Cells, space_id: int, *, group_id: int, number: int, timestamp: float) -> bytes:
    """The rows, the first with number `number`; `group_id` is GROUP_LOCAL for a local space."""
    count = len(offsets) - 1
    content = int(offsets[-1] - offsets[0]) + count * BODY_HEAD_SIZE
    out = np.empty(rows_bound(count, content), np.uint8)
    size = gather_tuples(buf, offsets, space_id, group_id, number, float_bits(timestamp), out)
    return out[:size].tobytes()
