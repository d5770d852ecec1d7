"""The rows of winning entries: one per key, with the location of the entry in its file.

`winner_kernels` fills and sorts rows, `latest_entries` keeps them, `cursor` reads the entries that they locate.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint64]
Slots = NDArray[np.uint64]
Order = NDArray[np.int64]

# Columns of a winner. AT and SIZE locate the whole entry in its file; ORIGIN combines the file number and the type.
STORAGE_ID, KEY_AT, KEY_SIZE, MAJOR, MINOR, AT, SIZE, ORIGIN = range(8)
ROW_WORDS: Final = 8

COMPACTED: Final = 0
"""File number of the compacted file. Entries of all other files are newer."""
