"""Applies plain rows of a peer in bulk: each of them writes or deletes one tuple of a space, or is a NOP.

The kernels of `box/engine/bulk.py` check the rows and extract their keys; Python only updates the indexes, in the order
of the rows. If a kernel cannot decide about a row, or rows conflict, the whole range is left unchanged to
`row_applier.py`, which applies it row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.box.box import Box
from flowstone.box.engine import bulk
from flowstone.box.engine.bulk import BulkWrite, Lane
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.scan import Cells
from flowstone.iproto.slab import Slab

_INSERT, _REPLACE = RequestType.INSERT.value, RequestType.REPLACE.value
_DELETE, _NOP = RequestType.DELETE.value, RequestType.NOP.value
_COMMIT: Final = Flag.COMMIT.value
_WAIT: Final = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
_TYPE_SHIFT: Final = 33
"""Bits of the space id, which may be -1, in the code of a row; the type is in the bits above."""

Step = tuple[bool, Lane, Key, bytes | None]
"""A write: True if the key must be new, the lane, the key, and the tuple, or None for a deletion."""


class Replicated(BoxTransaction):
    """A transaction of another instance, applied while clients use the box."""

    keeps_spaces = True
    enforces_keys = True

    def put(self, space: EngineSpace, index: EngineIndex, key: Key, raw: bytes | None) -> None:
        """Write the tuple `raw`, which matches the format of `space`, at `key` of its primary `index`; None deletes."""
        if len(space.served) == 1:
            self._set(index, key, raw)
            return
        old = index.get(key)
        if old is not None or raw is not None:
            self.write(space, old, raw, None, None if raw is None else unpack(raw))


class PlainRows:
    """Finds the plain rows of a slab, and applies them."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def found(self, slab: Slab) -> NDArray[np.bool_]:
        """Return a mask of the plain rows."""
        cells = slab.cells
        codes = _codes(cells)
        found: NDArray[np.bool_] = (cells[scan.FLAGS] & _WAIT == 0) & (cells[scan.INDEX_ID] == 0)
        for code in distinct(codes):
            if not self._is_plain(code):
                found &= codes != code
        return found

    def _is_plain(self, code: int) -> bool:
        kind, space_id = code >> _TYPE_SHIFT, (code & ((1 << _TYPE_SHIFT) - 1)) - 1
        if kind == _NOP:
            return True
        return kind in (_INSERT, _REPLACE, _DELETE) and self._lane(space_id) is not None

    def may_wait(self, slab: Slab) -> NDArray[np.bool_]:
        """Return a mask of the rows that may be pending: single-row transactions that write or delete one tuple."""
        cells = slab.cells
        codes = _codes(cells)
        is_end = cells[scan.FLAGS] & _COMMIT != 0
        found: NDArray[np.bool_] = is_end & (cells[scan.INDEX_ID] == 0)
        found[1:] &= is_end[:-1]
        for code in distinct(codes):
            kind, space_id = code >> _TYPE_SHIFT, (code & ((1 << _TYPE_SHIFT) - 1)) - 1
            if kind not in (_INSERT, _REPLACE, _DELETE) or self._waiting_lane(space_id) is None:
                found &= codes != code
        return found

    def waiting_steps(self, slab: Slab, first: int, stop: int) -> list[Step] | None:
        """Return the writes of rows that may be pending, in their order; None if a row has to be applied on its own."""
        return self._steps(slab, first, _codes(slab.cells[:, first:stop]), self._waiting_lane)

    def apply_run(self, slab: Slab, first: int, stop: int) -> BulkWrite | None:
        """Apply rows that may be pending as one run; return their effect.

        All rows must have the same type, write tuples to one synchronous space, and have LSNs without gaps. If not, or
        if a row has to be applied on its own, change nothing and return None.
        """
        cells = slab.cells[:, first:stop]
        kind, space_id, lsn = (int(cells[line, 0]) for line in (scan.TYPE, scan.SPACE_ID, scan.LSN))
        lane = self._waiting_lane(space_id)
        if lane is None or kind == _DELETE or not lane.space.definition.is_sync:
            return None
        codes = _codes(cells)
        if not (codes == codes[0]).all() or int(cells[scan.LSN, -1]) - lsn != stop - first - 1:
            return None
        found = _keys(lane, kind, slab, cells)
        if found is None or len(set(found[0])) < stop - first:
            return None  # rolling back a part of the run would restore the wrong tuple of a repeated key
        written = BulkWrite()
        put = bulk.insert_many if kind == _INSERT else bulk.replace_many
        return written if put(lane, *found, written) else None

    def _waiting_lane(self, space_id: int) -> Lane | None:
        space = self._box.spaces.get(space_id)
        lane = bulk.lane_of(space) if space is not None else None
        return lane if lane is not None and bulk.takes_waiting_writes(lane) else None

    def _lane(self, space_id: int) -> Lane | None:
        space = self._box.spaces.get(space_id)
        lane = bulk.lane_of(space) if space is not None else None
        if lane is None or lane.space.sequence is not None or lane.space.guards is not None:
            return None
        definition = lane.space.definition
        is_special = definition.is_temporary or definition.is_local or definition.is_sync
        return None if is_special else lane

    def apply(self, slab: Slab, first: int, stop: int) -> BulkWrite | BoxTransaction | None:
        """Apply plain rows; return their effect, or None, with nothing changed, if a row needs to be applied alone."""
        codes = _codes(slab.cells[:, first:stop])
        if codes[0] >> _TYPE_SHIFT != _NOP and (codes == codes[0]).all():
            lane = self._lane(int(slab.cells[scan.SPACE_ID, first]))
            if lane is not None and lane.is_alone:
                return _uniform(lane, int(slab.cells[scan.TYPE, first]), slab, slab.cells[:, first:stop])
        steps = self._steps(slab, first, codes, self._lane)
        if steps is None:
            return None
        return _alone(steps) if all(lane.is_alone for _, lane, _, _ in steps) else self._with_others(steps)

    def _steps(self, slab: Slab, first: int, codes: Cells, lane_of: Callable[[int], Lane | None]) -> list[Step] | None:
        """Return the writes of the rows, in their order; None if a row has to be applied on its own."""
        steps: list[Step | None] = [None] * len(codes)
        for code in distinct(codes):
            kind = code >> _TYPE_SHIFT
            if kind == _NOP:
                continue
            which = np.flatnonzero(codes == code)
            # Kernels are compiled for contiguous arrays; compiling them for others would exceed the timeouts of peers.
            cells = np.ascontiguousarray(slab.cells[:, first + which])
            lane = lane_of(int(cells[scan.SPACE_ID, 0]))
            found = _keys(lane, kind, slab, cells) if lane is not None else None
            if lane is None or found is None:
                return None
            is_insert = kind == _INSERT
            tuples: Sequence[bytes | None] = found[1] or [None] * len(which)
            for number, key, raw in zip(which.tolist(), found[0], tuples, strict=True):
                steps[number] = (is_insert, lane, key, raw)
        return [step for step in steps if step is not None]

    def _with_others(self, steps: Sequence[Step]) -> BoxTransaction | None:
        """Apply writes to spaces with secondary indexes; return None, with nothing changed, on a conflict."""
        effect = Replicated(self._box)
        try:
            for must_be_new, lane, key, raw in steps:
                if must_be_new and key in lane.primary.entries:
                    raise lane.space.duplicate(lane.primary)
                effect.put(lane.space, lane.primary, key, raw)
        except FlowstoneError:
            effect.rollback()
            return None
        return effect


def _uniform(lane: Lane, kind: int, slab: Slab, cells: Cells) -> BulkWrite | None:
    """Apply rows of one type to a space with one index; return None, with nothing changed, on a conflict."""
    found = _keys(lane, kind, slab, cells)
    if found is None:
        return None
    keys, tuples = found
    written = BulkWrite()
    if kind == _DELETE:
        bulk.delete_many(lane, keys, written)
        return written
    put = bulk.insert_many if kind == _INSERT else bulk.replace_many
    return written if put(lane, keys, tuples, written) else None


def _alone(steps: Sequence[Step]) -> BulkWrite | None:
    """Apply rows of several types to spaces with one index; return None, with nothing changed, on a conflict."""
    written = BulkWrite()
    place: EngineIndex | None = None
    keys: list[Key] = []
    olds: list[bytes | None] = []
    for must_be_new, lane, key, raw in steps:
        index = lane.primary
        if index is not place:
            place, keys, olds = index, [], []
            written.add(index, keys, olds)
        if must_be_new and key in index.entries:
            written.rollback()
            return None
        keys.append(key)
        olds.append(index.set(key, raw))
    return written


def _keys(lane: Lane, kind: int, slab: Slab, cells: Cells) -> tuple[list[Key], list[bytes]] | None:
    """Return the keys and tuples of rows of one type and space; None if a row has to be applied on its own."""
    at_line, end_line = (scan.KEY_AT, scan.KEY_END) if kind == _DELETE else (scan.TUPLE_AT, scan.TUPLE_END)
    ats, ends = cells[at_line], cells[end_line]
    if (ats < 0).any():
        return None
    if kind == _DELETE:
        keys = bulk.request_keys(lane, slab.payload, slab.buf, ats, ends)
        return None if keys is None else (keys, [])
    keys = bulk.tuple_keys(lane, slab.payload, slab.buf, ats, ends)
    return None if keys is None else (keys, bulk.slices(slab.payload, ats, ends))


def _codes(cells: Cells) -> Cells:
    """Return a code for each row: its type and its space."""
    codes: Cells = (cells[scan.TYPE] << _TYPE_SHIFT) + cells[scan.SPACE_ID] + 1
    return codes


def distinct(numbers: Cells) -> list[int]:
    """Return the distinct numbers in ascending order. Most arrays have only one, which is found without sorting."""
    first = numbers[0]
    if (numbers == first).all():
        return [int(first)]
    return [int(number) for number in np.unique(numbers)]
