"""The table that tells `row_kernels.py` the fields of a key or a value: one line per property, one column per field.

Numbers only. `row_columns.py` makes the table, `row_kernels.py` reads it. Its header has the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Layout = NDArray[np.int64]

# Lines: the form of the field, its size in bytes if that is fixed, the mask over its bytes (255 if they are inverted),
# whether a mark precedes it, and the line of the result.
FORM, SIZE, MASK, HAS_MARK, TARGET = range(5)
LAYOUT_LINES = 5

FIXED, TEXT, SIZED = 0, 1, 2
"""Forms of fields: `SIZE` bytes; text up to a terminator; a length and as many bytes."""

TERMINATOR_SIZE = 4
