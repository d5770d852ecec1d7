"""Tables of rows: the rows of a buffer, however many there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowstone.iproto.scan import FULL, LINES, MALFORMED, SPAN, Bytes, Cells
from flowstone.iproto.scan_kernels import scan_spans


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows of a buffer, and the spans that contain something else.

    `wrong` lists the (number, offset) of each span with other contents; the offset is the start of the first item that
    is not a row. Rows of such a span are not in the table, unless the scan ended in this span.
    """

    buf: Bytes
    cells: Cells
    wrong: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return int(self.cells.shape[1])


ROW_SIZE_GUESS = 64
"""Bytes per row that the first table is sized for; a wrong guess costs one copy of the table."""

ROW_SIZE_MIN = 12
"""Every row of a log has a type and a float64 timestamp. Millions of shorter rows would exhaust
memory: a line of the table takes 168 bytes."""

ROWS_BELOW_SUSPICION = 1 << 20


def scan(buf: Bytes, spans: Cells, *, leave_out_wrong: bool = False) -> Scan:
    """All rows of `buf` inside `spans` (an n×2 table of start and end offsets, in ascending order).

    Ends at the first item that is not a row. With `leave_out_wrong`, omits the whole span of that item and continues.
    """
    total = int(np.sum(spans[:, 1] - spans[:, 0])) if len(spans) else 0
    cells: Cells = np.empty((LINES, total // ROW_SIZE_GUESS + 16), np.int64)
    rows_max = max(ROWS_BELOW_SUSPICION, total // ROW_SIZE_MIN)
    span = at = row = 0
    wrong: list[tuple[int, int]] = []
    while True:
        span, at, row, why = scan_spans(buf, spans, span, at, cells, row)
        if why == FULL and row >= rows_max:
            why = MALFORMED
        if why == MALFORMED:
            wrong.append((span, at))
            if leave_out_wrong:
                row = int(np.searchsorted(cells[SPAN, :row], span))
                at, span = int(spans[span, 1]), span + 1
                continue
        if why != FULL:
            return Scan(buf, cells[:, :row], tuple(wrong))
        grown: Cells = np.empty((LINES, min(cells.shape[1] * 2, rows_max)), np.int64)
        grown[:, :row] = cells[:, :row]
        cells = grown
