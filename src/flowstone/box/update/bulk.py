"""Updates in bulk: the buffers of `kernels.py`, which executes them."""

from __future__ import annotations

from typing import Final

import numpy as np

from flowstone.iproto.scan import Cells

OPERATIONS_MAX: Final = 16
"""Maximum number of operations of an update that kernels execute; larger updates are rare."""

HEAD_MAX: Final = 8
"""Bytes reserved per tuple for growth of its array header."""

INTEGER, SHORTEST, DOUBLE = range(3)
"""Forms of a sum that is not an integer: not supported; a float if it can hold the number, else a double; a double."""

FIELD, CODE, ARGUMENT, ARGUMENT_END = range(4)
"""Lines of the scratch table, which has a column per operation."""


def scratch() -> Cells:
    """Return the scratch table in which `update_tuples` collects the operations of a row."""
    return np.empty((4, OPERATIONS_MAX), np.int64)


def update_bound(tuples: int, operations: int, count: int) -> int:
    """Return a bound of the size of the results of `count` updates, from the total size of tuples and operations.

    An operation has at least five bytes, and a number in its result at most nine.
    """
    return tuples + 2 * operations + HEAD_MAX * count
