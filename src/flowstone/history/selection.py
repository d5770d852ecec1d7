"""Which rows a reader wants: by LSN, time, space and origin, decided for whole columns at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.box.schema import Schema
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.iproto.scan import LSN, REPLICA_ID, SPACE_ID, TIMESTAMP, Cells

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Selection:
    """The filters of `tt cat`, under its names. `to` and `timestamp` are exclusive, as there.

    `spaces` are ids or names; a name means the space that has it as of the row. Without `spaces` the rows of system
    spaces are left out unless `show_system`; rows that belong to no space (NOP, CONFIRM, RAFT) are in.
    """

    from_lsn: int | None = None
    to_lsn: int | None = None
    timestamp: float | None = None
    spaces: tuple[int | str, ...] = ()
    replicas: tuple[int, ...] = ()
    show_system: bool = False

    def mask(self, cells: Cells, schema: Schema) -> Mask:
        """True for the wanted rows of the table."""
        wanted: Mask = np.ones(cells.shape[1], np.bool_)
        if self.from_lsn is not None:
            wanted &= cells[LSN] >= self.from_lsn
        if self.to_lsn is not None:
            wanted &= cells[LSN] < self.to_lsn
        if self.timestamp is not None:
            wanted &= np.ascontiguousarray(cells[TIMESTAMP]).view(np.float64) < self.timestamp
        if self.replicas:
            wanted &= _is_any(cells[REPLICA_ID], self.replicas)
        if self.spaces:
            wanted &= _is_any(cells[SPACE_ID], self.space_ids(schema))
        elif not self.show_system:
            wanted &= (cells[SPACE_ID] < 0) | (cells[SPACE_ID] >= FIRST_USER_SPACE_ID)
        return wanted

    def space_ids(self, schema: Schema) -> list[int]:
        """The ids that `spaces` mean under `schema`; a name that no space has means none."""
        found = (schema.get(space) if isinstance(space, str) else space for space in self.spaces)
        return [space if isinstance(space, int) else space.id for space in found if space is not None]


def _is_any(line: Cells, values: Sequence[int]) -> Mask:
    """Few values are asked for, so comparing with each beats `np.isin`, which sorts."""
    found: Mask = np.zeros(len(line), np.bool_)
    for value in values:
        found |= line == value
    return found
