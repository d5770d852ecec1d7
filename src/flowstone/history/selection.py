"""Selection of rows by LSN, time, space and origin, computed for whole columns at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowstone.box.schema import Schema
from flowstone.box.system import FIRST_USER_SPACE_ID, TRUNCATE_ID
from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.scan import LSN, REPLICA_ID, SPACE_ID, TIMESTAMP, Cells
from flowstone.iproto.slab import Slab

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Selection:
    """The filters of `tt cat`, with its names. `to_lsn` and `timestamp` are exclusive, as in `tt cat`.

    `spaces` are ids or names; a name is looked up in the schema at the row. Without `spaces`, rows of system spaces are
    omitted unless `show_system`, and rows that belong to no space (NOP, CONFIRM, RAFT) are included. `truncates` adds
    rows of `_truncate` that empty a selected space, for callers that apply the rows elsewhere.
    """

    from_lsn: int | None = None
    to_lsn: int | None = None
    timestamp: float | None = None
    spaces: tuple[int | str, ...] = ()
    replicas: tuple[int, ...] = ()
    show_system: bool = False
    truncates: bool = False

    def mask(self, slab: Slab, rows: Cells, schema: Schema, *, comes_before_logs: bool = False) -> Mask:
        """Return which of the given rows of the slab are selected.

        Rows of a snapshot have sequence numbers instead of LSNs; with `comes_before_logs` they are before any
        `from_lsn` and `to_lsn`.
        """
        cells = slab.cells if len(rows) == len(slab) else slab.cells[:, rows]
        wanted: Mask = np.ones(len(rows), np.bool_)
        if self.from_lsn is not None:
            wanted &= cells[LSN] >= self.from_lsn
            wanted &= not comes_before_logs
        if self.to_lsn is not None and not comes_before_logs:
            wanted &= cells[LSN] < self.to_lsn
        if self.timestamp is not None:
            wanted &= np.ascontiguousarray(cells[TIMESTAMP]).view(np.float64) < self.timestamp
        if self.replicas:
            wanted &= _is_any(cells[REPLICA_ID], self.replicas)
        if self.spaces or not self.show_system:
            in_space = self._in_space(cells[SPACE_ID], schema)
            if self.truncates:
                for number in np.flatnonzero(cells[SPACE_ID] == TRUNCATE_ID).tolist():
                    target = np.array([truncated_space(slab, rows[number : number + 1])])
                    in_space[number] |= target[0] >= 0 and self._in_space(target, schema)[0]
            wanted &= in_space
        return wanted

    def _in_space(self, space_ids: Cells, schema: Schema) -> Mask:
        if self.spaces:
            return _is_any(space_ids, self.space_ids(schema))
        user: Mask = (space_ids < 0) | (space_ids >= FIRST_USER_SPACE_ID)
        return user

    def space_ids(self, schema: Schema) -> list[int]:
        """Return the ids of `spaces` in `schema`; names that no space has are ignored."""
        found = (schema.get(space) if isinstance(space, str) else space for space in self.spaces)
        return [space if isinstance(space, int) else space.id for space in found if space is not None]


def truncated_space(slab: Slab, row: Cells) -> int:
    """Return the id of the space that a row of `_truncate` empties; -1 if the row does not name one."""
    (found,) = slab.rows(row)
    body = unpack_body(found.body)
    named = body.get(Key.TUPLE) or body.get(Key.KEY) or (-1,)
    return named[0] if isinstance(named, tuple) and isinstance(named[0], int) else -1


def _is_any(line: Cells, values: Sequence[int]) -> Mask:
    """Return which elements are among `values`. For few values this is faster than `np.isin`, which sorts."""
    found: Mask = np.zeros(len(line), np.bool_)
    for value in values:
        found |= line == value
    return found
