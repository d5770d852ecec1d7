"""Constants shared by column kernels and their callers: reasons why a value does not fit its column, buffer sizes.

`column_kernels` is compiled with the same values, from the .pxd beside this module.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Starts = NDArray[np.int32]
"""The start offset of a field in each row. Arrow's offsets have the same type."""

FITS, WRONG_TYPE, TOO_LARGE, TOO_PRECISE, OUT_OF_RANGE, COLUMN_FULL = range(6)
"""Reasons why a value does not fit its column. `arrow_columns.ColumnError` has the messages."""

OFFSET_MAX = 2**31 - 1
"""Maximum size of a column of strings or binary values: Arrow's offsets have 32 bits."""

COPY_ROOM = 32
"""Bytes after the last value that the copying kernels may write to: they copy short values in one move."""

ARRAY_HEADER_SIZE = 5
"""Bytes before the values of a row in the output of `gather_extra`."""

DECIMAL_DIGITS_MAX = 38
"""Maximum number of digits of an Arrow decimal128."""

DIGITS_ROOM = 80
"""Size of the scratch buffer of the kernels that decode decimals."""
