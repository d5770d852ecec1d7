"""The table of rows that a scan fills: one column per row, one line per part of a row.

A part of a row is a pair of offsets into the scanned buffer. `scan_kernels` fills tables, `row_scanner` makes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowstone.iproto.constants import Flag

Bytes = NDArray[np.uint8]
Cells = NDArray[np.int64]

# Lines of the table. `cells[LSN, i]` is the LSN of row i. Offsets are -1 if the row has no such part.
(
    TYPE,
    REPLICA_ID,
    GROUP_ID,
    LSN,
    TSN,  # absolute, see Row.tsn
    TIMESTAMP,  # the bits of a float64; 0 if absent
    FLAGS,  # COMMIT is set on the last row of every transaction
    SINGLE,  # 1: the row has no TSN key and so is a transaction of its own
    SPACE_ID,  # -1 if absent
    INDEX_ID,
    INDEX_BASE,
    KEY_AT,
    KEY_END,
    TUPLE_AT,
    TUPLE_END,
    OPS_AT,
    OPS_END,
    ROW_AT,
    BODY_AT,  # equals ROW_END if the row has no body
    ROW_END,
    SPAN,  # number of the span (block) of the row
) = range(21)
LINES = 21
COMMIT = Flag.COMMIT.value

DONE, FULL, MALFORMED = 0, 1, 2
"""Why a scan stopped: end of input; table full; no valid row at the returned offset."""

IMAGE_LINES = 4
"""Lines of the table of images: start and end of the old tuple, and of the new one; -1 if absent."""
