"""The table that a walk over a log file fills: one column per entry, one row per field, offsets instead of bytes.

For readers of millions of entries: recovery, compaction, Spark. `entry_table_kernels` fills tables, `entry_walk` reads
files with them. `entries.decode` classifies the place where a walk stopped, `log_scan.py` interprets the entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Table = NDArray[np.uint64]

# Rows of the table, with one column per entry. Offsets are into the walked buffer. MAJOR of a marker is its epoch.
AT, END, TYPE, STORAGE_ID, KEY_AT, KEY_END, VALUE_AT, VALUE_END, MAJOR, MINOR, BLOB_COUNT = range(11)
TABLE_ROWS = 11

FULL, NEED, OTHER = 0, 1, 2
"""Why a walk stopped: the table is full; the buffer ends, possibly inside an entry; the next byte begins no entry."""
