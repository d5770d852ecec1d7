"""Applies plain rows of a peer in bulk: each of them is a statement on one user space, or a NOP.

The lane (`box/lane/`) executes them in their order. If it cannot execute a row, the whole range is left unchanged to
`row_applier.py`, which applies it row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.box.box import Box
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.lane.rows import codes_of, distinct, tables_of, type_of
from flowstone.box.lane.statement_lane import StatementLane
from flowstone.box.lane.table import Table
from flowstone.box.lane.writes import Writes
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.slab import Slab

_INSERT, _REPLACE = RequestType.INSERT.value, RequestType.REPLACE.value
_NOP = RequestType.NOP.value
_COMMIT: Final = Flag.COMMIT.value
_WAIT: Final = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value


class Replicated(BoxTransaction):
    """A transaction of another instance, applied while clients use the box."""

    keeps_spaces = True
    enforces_keys = True


class PlainRows:
    """Finds the plain rows of a slab, and applies them."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._lane = StatementLane(box)

    def found(self, slab: Slab) -> NDArray[np.bool_]:
        """Return a mask of the plain rows."""
        found: NDArray[np.bool_] = slab.cells[scan.FLAGS] & _WAIT == 0
        codes = codes_of(slab.cells)
        tables = tables_of(self._box, codes, _is_asynchronous)
        for code in distinct(codes):
            if code not in tables and type_of(code) != _NOP:
                found &= codes != code
        return found

    def may_wait(self, slab: Slab) -> NDArray[np.bool_]:
        """Return a mask of the rows that may be pending: single-row transactions with a statement on a user space."""
        codes = codes_of(slab.cells)
        found: NDArray[np.bool_] = slab.cells[scan.FLAGS] & _COMMIT != 0
        found[1:] &= found[:-1].copy()
        tables = tables_of(self._box, codes, _is_any)
        for code in distinct(codes):
            if code not in tables:
                found &= codes != code
        return found

    def apply(self, slab: Slab, first: int, stop: int) -> Writes | None:
        """Apply plain rows; return their effect, or None, with nothing changed, if a row needs to be applied alone."""
        codes = codes_of(slab.cells[:, first:stop])
        return self._apply(slab, first, stop, tables_of(self._box, codes, _is_asynchronous))

    def apply_each(self, slab: Slab, first: int, stop: int) -> Iterator[Writes]:
        """Apply rows that may be pending; yield the effect of each, up to one that has to be applied on its own."""
        tables = tables_of(self._box, codes_of(slab.cells[:, first:stop]), _is_any)
        for number in range(first, stop):
            effect = self._apply(slab, number, number + 1, tables)
            if effect is None:
                return
            yield effect

    def apply_run(self, slab: Slab, first: int, stop: int) -> Writes | None:
        """Apply rows that may be pending as one run; return their effect.

        All rows must have the same type, write tuples to one synchronous space, and have LSNs without gaps. If not, or
        if a row has to be applied on its own, change nothing and return None.
        """
        cells = slab.cells[:, first:stop]
        codes = codes_of(cells)
        if type_of(int(codes[0])) not in (_INSERT, _REPLACE) or not (codes == codes[0]).all():
            return None
        if int(cells[scan.LSN, -1]) - int(cells[scan.LSN, 0]) != stop - first - 1:
            return None
        tables = tables_of(self._box, codes, lambda table: table.is_sync)
        return self._apply(slab, first, stop, tables)

    def is_synchronous(self, slab: Slab, number: int) -> bool:
        """Return True if row `number` changes a synchronous space."""
        space = self._box.spaces.get(int(slab.cells[scan.SPACE_ID, number]))
        return space is not None and space.definition.is_sync

    def _apply(self, slab: Slab, first: int, stop: int, tables: dict[int, Table]) -> Writes | None:
        written = Writes()
        self._lane.begin(written, 0)
        was_recovering, self._box.is_recovering = self._box.is_recovering, True  # the originator has checked the rows
        try:
            count = self._lane.execute_rows(slab.buf, slab.cells, first, stop, tables)
        except BaseException:
            written.rollback()
            raise
        finally:
            self._box.is_recovering = was_recovering
        if count == stop - first:
            return written
        written.rollback()
        return None


def _is_any(table: Table) -> bool:
    return True


def _is_asynchronous(table: Table) -> bool:
    return not table.is_sync
