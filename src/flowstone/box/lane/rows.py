"""Rows for the lane: which are transactions of their own, a code for each, and the table of the space for each code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from flowstone.box.box import Box
from flowstone.box.lane.table import Table, table_of
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.scan import Cells

TYPE_SHIFT: Final = 33
"""Bits of the space id, which may be -1, in the code of a row; the type is in the bits above."""

WRITES: Final = (
    RequestType.INSERT.value,
    RequestType.REPLACE.value,
    RequestType.UPDATE.value,
    RequestType.DELETE.value,
    RequestType.UPSERT.value,
)

_COMMIT: Final = Flag.COMMIT.value
_WAIT: Final = (Flag.WAIT_ACK | Flag.WAIT_SYNC).value


def are_alone(cells: Cells) -> npt.NDArray[np.bool_]:
    """Return for each row whether it is an asynchronous transaction of its own. The first row begins a transaction.

    The last row of a transaction that begins with rows of local spaces has no TSN either: all its rows have the LSN of
    the first row that is not local as TSN.
    """
    is_end = (cells[scan.SINGLE] == 1) | (cells[scan.FLAGS] & _COMMIT != 0)
    found: npt.NDArray[np.bool_] = (cells[scan.SINGLE] == 1) & (cells[scan.FLAGS] & _WAIT == 0)
    found[1:] &= is_end[:-1]
    return found


def codes_of(cells: Cells) -> Cells:
    """Return a code for each row: its type and its space."""
    codes: Cells = (cells[scan.TYPE] << TYPE_SHIFT) + cells[scan.SPACE_ID] + 1
    return codes


def type_of(code: int) -> int:
    return code >> TYPE_SHIFT


def space_of(code: int) -> int:
    return (code & ((1 << TYPE_SHIFT) - 1)) - 1


def distinct(numbers: Cells) -> list[int]:
    """Return the distinct numbers in ascending order. Most arrays have only one, which is found without sorting."""
    first = numbers[0]
    if (numbers == first).all():
        return [int(first)]
    return [int(number) for number in np.unique(numbers)]


def tables_of(box: Box, codes: Cells, accepts: Callable[[Table], bool]) -> dict[int, Table]:
    """Return the table for each code of a statement whose only effect is on the indexes of a space.

    `accepts` tells which tables may be used.
    """
    found: dict[int, Table] = {}
    for code in distinct(codes) if len(codes) else ():
        space = box.spaces.get(space_of(code)) if type_of(code) in WRITES else None
        table = table_of(space) if space is not None else None
        if table is not None and table.takes(type_of(code)) and accepts(table):
            found[code] = table
    return found
