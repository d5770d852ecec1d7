"""Slabs: scanned rows in bulk, as the table of `scan.py` over one buffer. Log files and peers are read as slabs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowstone.iproto import scan as rowscan
from flowstone.iproto.row import Row
from flowstone.iproto.scan import Bytes, Cells


@dataclass(frozen=True, slots=True)
class Skipped:
    """A range of the file that `force` skipped, and why."""

    path: str
    offset: int
    end: int
    why: str


@dataclass(frozen=True, slots=True)
class Slab:
    """Decompressed, scanned rows of consecutive blocks. `payload` and `buf` are the same bytes."""

    path: str
    payload: bytes
    buf: Bytes
    cells: Cells
    offsets: Cells  # file offset of the block per span, indexed by cells[SPAN]
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return int(self.cells.shape[1])

    def newest(self) -> dict[int, int]:
        """Return the highest LSN of each originator that has rows here."""
        replica_ids, lsns = self.cells[rowscan.REPLICA_ID], self.cells[rowscan.LSN]
        if len(self) <= 1:
            return dict(zip(replica_ids.tolist(), lsns.tolist(), strict=True))
        if replica_ids.min() == replica_ids.max():
            return {int(replica_ids[0]): int(lsns.max())}
        return {number: int(lsns[replica_ids == number].max()) for number in np.unique(replica_ids).tolist()}

    def rows(self, selected: Cells | None = None) -> Iterator[Row]:
        """Yield the rows as objects: all rows, or the rows with the numbers `selected`."""
        cells = self.cells if selected is None else self.cells[:, selected]
        payload = self.payload
        lines = (
            rowscan.TYPE,
            rowscan.REPLICA_ID,
            rowscan.GROUP_ID,
            rowscan.LSN,
            rowscan.TSN,
            rowscan.FLAGS,
            rowscan.ROW_AT,
            rowscan.BODY_AT,
            rowscan.ROW_END,
        )
        timestamps = np.ascontiguousarray(cells[rowscan.TIMESTAMP]).view(np.float64).tolist()
        for kind, replica, grp, lsn, tsn, flags, at, body, end, timestamp in zip(
            *(cells[line].tolist() for line in lines), timestamps, strict=True
        ):
            yield Row(kind, replica, grp, lsn, timestamp, tsn, flags, 0, 0, payload[body:end], payload[at:end])
