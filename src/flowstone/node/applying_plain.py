"""Plain rows of a peer, many at once: each puts or takes away one tuple of a space, or does nothing at all.

Keys and checks are found by the kernels of `box/bulk.py`; Python only fills the indexes, in the order of the rows. What
a kernel cannot vouch for, and rows that are in each other's way, are left, as a whole, to who takes them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.box import bulk
from flowstone.box.box import Box
from flowstone.box.bulk import BulkWrite, Lane
from flowstone.box.index import Index
from flowstone.box.keys import Key
from flowstone.box.space import Space
from flowstone.box.transaction import Transaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.scan import Cells
from flowstone.xlog.reader import Slab

_INSERT, _REPLACE = RequestType.INSERT.value, RequestType.REPLACE.value
_DELETE, _NOP = RequestType.DELETE.value, RequestType.NOP.value
_COMMIT: Final = Flag.COMMIT.value
_WAIT: Final = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
_TYPE_SHIFT: Final = 33
"""A type and a space id, which may be -1, make one number."""

Step = tuple[bool, Lane, Key, bytes | None]
"""Whether the key must be new, and what is put there."""


class Replicated(Transaction):
    """A transaction of another instance, while others may look at the box."""

    keeps_spaces = True
    enforces_keys = True

    def put(self, space: Space, index: Index, key: Key, raw: bytes | None) -> None:
        """Puts a tuple that fits `space` at `key` of its primary `index`, or takes away what is there."""
        if len(space.served) == 1:
            self._set(index, key, raw)
            return
        old = index.map.get(key)
        if old is not None or raw is not None:
            self.write(space, old, raw, None, None if raw is None else unpack(raw))


class PlainRows:
    """Knows which rows of a slab are plain, and applies them."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def found(self, slab: Slab) -> NDArray[np.bool_]:
        """Which rows mean nothing beyond one tuple of one space, or nothing at all."""
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
        """Which rows put or take away one tuple each, as transactions of their own that can wait for a verdict."""
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
        """What rows that may wait do, in their order; None if one of them needs a closer look."""
        return self._steps(slab, first, _codes(slab.cells[:, first:stop]), self._waiting_lane)

    def apply_run(self, slab: Slab, first: int, stop: int) -> BulkWrite | None:
        """What rows that may wait did, if all are of one kind, put tuples into one synchronous space, and have their
        LSNs without gaps; None, with nothing done, if they are not like that or need a closer look."""
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
            return None  # of a key that stands there twice, a part would take back what stood there before both
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

    def apply(self, slab: Slab, first: int, stop: int) -> BulkWrite | Transaction | None:
        """What plain rows did; None, with nothing done, if they need a closer look."""
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
        """What each row does, in their order."""
        steps: list[Step | None] = [None] * len(codes)
        for code in distinct(codes):
            kind = code >> _TYPE_SHIFT
            if kind == _NOP:
                continue
            which = np.flatnonzero(codes == code)
            # Of the layout that kernels were compiled for: another compilation would take longer than peers wait.
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

    def _with_others(self, steps: Sequence[Step]) -> Transaction | None:
        """For spaces with several indexes, whose entries change with the tuples."""
        effect = Replicated(self._box)
        try:
            for must_be_new, lane, key, raw in steps:
                if must_be_new and key in lane.primary.map:
                    raise lane.space.duplicate(lane.primary)
                effect.put(lane.space, lane.primary, key, raw)
        except FlowstoneError:
            effect.rollback()
            return None
        return effect


def _uniform(lane: Lane, kind: int, slab: Slab, cells: Cells) -> BulkWrite | None:
    """Rows of one kind, of a space with one index."""
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
    """Rows of several kinds, of spaces with one index each."""
    written = BulkWrite()
    place: Index | None = None
    keys: list[Key] = []
    olds: list[bytes | None] = []
    for must_be_new, lane, key, raw in steps:
        index = lane.primary
        if index is not place:
            place, keys, olds = index, [], []
            written.add(index, keys, olds)
        if must_be_new and key in index.map:
            written.rollback()
            return None
        keys.append(key)
        olds.append(index.set(key, raw))
    return written


def _keys(lane: Lane, kind: int, slab: Slab, cells: Cells) -> tuple[list[Key], list[bytes]] | None:
    """The keys of rows of one kind and space, and their tuples; None if one of them needs a closer look."""
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
    """Type and space of each row, as one number."""
    codes: Cells = (cells[scan.TYPE] << _TYPE_SHIFT) + cells[scan.SPACE_ID] + 1
    return codes


def distinct(numbers: Cells) -> list[int]:
    """Each once, in ascending order. Mostly there is one, and that is quickly seen."""
    first = numbers[0]
    if (numbers == first).all():
        return [int(first)]
    return [int(number) for number in np.unique(numbers)]
