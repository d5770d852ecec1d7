"""Rows of a replication stream in bulk: the progress of a scan of packets, and the size of encoded rows.

`scan_kernels.py` scans packets into the table of `scan.py`, `row_batch_kernels.py` encodes the rows of such tables. The
caller provides output buffers of the size that `rows_bound` returns.
"""

from __future__ import annotations

import numpy as np

from flowstone.iproto.scan import Bytes

ROW_OVERHEAD = 88
"""Maximum size of a packet's length (5), the marker of the map (1), and eight pairs of a key and a number (10 each)."""

NO_ROOM = -1
"""Returned by kernels if a row does not fit into their output."""

NEED = 0  # the next packet is incomplete
(
    BAD_LENGTH,  # the length is malformed, zero or too large
    BAD_ROW,
    BAD_REPLICA_ID,
    BAD_TSN,  # the first row of the transaction is missing
    INTERLEAVED,  # a row of another transaction before the end of the open one
    TOO_LARGE,  # the transaction exceeds the size limit
    ERROR_PACKET,
) = range(2, 9)
"""Why a scan of packets stopped, besides `scan.FULL`."""

AT, ROWS, WHOLE_AT, WHOLE_ROWS, OPEN, OPEN_TSN, NEEDED = range(7)
"""Elements of the progress of a scan: offset of the next packet and number of rows; the same at the end of the last
complete transaction; 1 if a transaction is open, and its TSN; the end offset of the bytes needed to continue."""

PROGRESS_SIZE = 7

ALL: Bytes = np.zeros(0, np.uint8)
"""Argument of `build_packets` that selects every row."""


def rows_bound(count: int, content: int) -> int:
    """Return a bound of the size of `count` rows or packets with `content` bytes of bodies in total."""
    return count * ROW_OVERHEAD + content
