"""Statements in bulk: many plain statements on one space, checked by a compiled pass and executed together.

A space has a lane if its only index is on one field that is a number or a string, and its format looks at nothing
below the top level: then key and checks are found by kernels, and Python only fills the index. Everything here
has the effect of `statements.py`, one by one; a batch that a kernel cannot check is rejected, with nothing done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self

import numpy as np

from flowstone.box.engine.field_types import ACCEPTS
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key, KeyKind
from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.space import NOT_KNOWN, EngineSpace
from flowstone.box.engine.tuple_kernels import STACK_SIZE, check_keys, check_tuples
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.scan import Bytes, Cells


class Lane(NamedTuple):
    """The properties of a space that the kernels need."""

    space: EngineSpace
    primary: EngineIndex
    masks: Cells
    count_min: int
    count_exact: int
    key_field: int
    key_kinds: int
    is_text: int
    is_alone: bool
    """True if a write without a sequence changes one entry of one index, and adds one row to the log.

    False if the space has constraints, or foreign keys refer to it: each of its statements must be checked."""


_KINDS: Final = (KeyKind.INTEGER, KeyKind.STRING)


def lane_of(space: EngineSpace) -> Lane | None:
    """Return the lane of `space`, if it has one; cached, as only the box changes a space, with its constraints."""
    if space.lane is NOT_KNOWN:
        space.lane = _find_lane(space)
    lane: Lane | None = space.lane
    return lane


def _find_lane(space: EngineSpace) -> Lane | None:
    index, format = space.primary, space.format
    if index is None or format.masks is None or index.key.kind not in _KINDS or space.id < FIRST_USER_SPACE_ID:
        return None
    part, definition = index.definition.parts[0], space.definition
    is_special = definition.is_temporary or definition.is_local
    return Lane(
        space,
        index,
        format.masks,
        format.field_count_min,
        format.field_count_exact,
        part.field,
        ACCEPTS[part.type],
        int(index.key.kind is KeyKind.STRING),
        len(space.served) == 1 and not is_special and space.guards is None,
    )


def takes_writes(lane: Lane) -> bool:
    """Return True if writes may use the lane and are committed once they are in the log."""
    return takes_waiting_writes(lane) and not lane.space.definition.is_sync


def takes_waiting_writes(lane: Lane) -> bool:
    """Return True if writes may use the lane, including writes to a synchronous space, which wait for a verdict."""
    return lane.is_alone and lane.space.sequence is None


def tuple_keys(lane: Lane, data: bytes, buf: Bytes, ats: Cells, ends: Cells) -> list[Key] | None:
    """Return the keys of the tuples; None if a tuple may not match the format."""
    keys: Cells = np.empty((2, len(ats)), np.int64)
    stack: Cells = np.empty(STACK_SIZE, np.int64)
    starts: Cells = np.empty(lane.key_field + 1, np.int64)
    wrong = check_tuples(
        buf, ats, ends, lane.masks, lane.count_min, lane.count_exact, lane.key_field, lane.is_text, keys, stack, starts
    )
    return None if wrong >= 0 else _python_keys(lane, data, keys)


def request_keys(lane: Lane, data: bytes, buf: Bytes, ats: Cells, ends: Cells) -> list[Key] | None:
    """Return the keys of requests; None if one is not a complete key of the lane's index."""
    keys: Cells = np.empty((2, len(ats)), np.int64)
    wrong = check_keys(buf, ats, ends, lane.key_kinds, lane.is_text, keys)
    return None if wrong >= 0 else _python_keys(lane, data, keys)


def _python_keys(lane: Lane, data: bytes, keys: Cells) -> list[Key]:
    if lane.is_text:
        return [data[at:end] for at, end in zip(keys[0].tolist(), keys[1].tolist(), strict=True)]
    found: list[Key] = keys[0].tolist()
    return found


class SingleWrite:
    """One write that took effect and can be rolled back."""

    __slots__ = ("_index", "_key", "_old")

    def __init__(self, index: EngineIndex, key: Key, raw: bytes | None) -> None:
        """Store `raw` at `key`; None deletes the tuple there."""
        self._index = index
        self._key = key
        self._old = index.set(key, raw)

    @property
    def old(self) -> bytes | None:
        return self._old

    def rollback(self) -> None:
        self._index.set(self._key, self._old)

    def hide_from(self, view: ReadView) -> None:
        """Let `view`, which was just opened, see the state before the write."""
        view.changes.setdefault(self._index, {})[self._key] = self._old


class BulkWrite:
    """Writes that took effect together and can be rolled back until they are in the log.

    As a context manager, it rolls them back if the block raises.
    """

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: list[tuple[EngineIndex, Sequence[Key], Sequence[bytes | None]]] = []

    def add(self, index: EngineIndex, keys: Sequence[Key], olds: Sequence[bytes | None]) -> None:
        """Record the tuples at `keys` before each of them was written."""
        self._changes.append((index, keys, olds))

    def __bool__(self) -> bool:
        """True if anything was written."""
        return bool(self._changes)

    def take_first(self, count: int) -> BulkWrite:
        """Split off the first `count` writes of a single `add`."""
        ((index, keys, olds),) = self._changes
        self._changes = [(index, keys[count:], olds[count:])]
        return self._of(index, keys[:count], olds[:count])

    def take_last(self, count: int) -> BulkWrite:
        """Split off the last `count` writes of a single `add`."""
        ((index, keys, olds),) = self._changes
        self._changes = [(index, keys[:-count], olds[:-count])]
        return self._of(index, keys[-count:], olds[-count:])

    @staticmethod
    def _of(index: EngineIndex, keys: Sequence[Key], olds: Sequence[bytes | None]) -> BulkWrite:
        written = BulkWrite()
        written.add(index, keys, olds)
        return written

    def _newest_first(self) -> Iterator[tuple[EngineIndex, Key, bytes | None]]:
        for index, keys, olds in reversed(self._changes):
            for key, old in zip(reversed(keys), reversed(olds), strict=True):
                yield index, key, old

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.rollback()

    def rollback(self) -> None:
        for index, key, old in self._newest_first():
            index.set(key, old)

    def hide_from(self, view: ReadView) -> None:
        """Let `view`, which was just opened, see the state before the write."""
        for index, key, old in self._newest_first():
            view.changes.setdefault(index, {})[key] = old


def slices(data: bytes, ats: Cells, ends: Cells) -> list[bytes]:
    """Return copies of the tuples, for the index to keep."""
    return [data[at:end] for at, end in zip(ats.tolist(), ends.tolist(), strict=True)]


def replace_many(lane: Lane, keys: list[Key], tuples: list[bytes], written: BulkWrite) -> bool:
    """Execute REPLACEs. Returns True: a checked REPLACE always succeeds."""
    index = lane.primary
    olds = index.entries.replace_many(keys, tuples)
    _keep(index, keys, olds)
    written.add(index, keys, olds)
    return True


def insert_many(lane: Lane, keys: list[Key], tuples: list[bytes], written: BulkWrite) -> bool:
    """Execute INSERTs. Return False, with nothing done, if a key exists already or occurs twice."""
    index = lane.primary
    if not index.entries.insert_many(keys, tuples):
        return False
    olds: list[bytes | None] = [None] * len(keys)
    _keep(index, keys, olds)
    written.add(index, keys, olds)
    return True


def delete_many(lane: Lane, keys: list[Key], written: BulkWrite) -> list[bytes | None]:
    """Execute DELETEs; return the deleted tuples, None for a key that did not exist."""
    index = lane.primary
    olds = [index.set(key, None) for key in keys]
    written.add(index, keys, olds)
    return olds


def _keep(index: EngineIndex, keys: list[Key], olds: Sequence[bytes | None]) -> None:
    for view in index.views:
        for key, old in zip(keys, olds, strict=True):
            view.keep(index, key, old)


def load(space: EngineSpace, data: bytes, buf: Bytes, ats: Cells, ends: Cells) -> bool:
    """Insert tuples of a snapshot into all indexes. Return False, with nothing done, if a kernel cannot check them."""
    lane = lane_of(space)
    keys = tuple_keys(lane, data, buf, ats, ends) if lane is not None else None
    if lane is None or keys is None:
        return False
    tuples = slices(data, ats, ends)
    if not insert_many(lane, keys, tuples, BulkWrite()):
        return False
    others = tuple(index for index in space.served if index is not lane.primary)
    for raw in tuples if others else ():
        values = unpack(raw)
        for index in others:
            for entry in index.key.entries(values):
                if index.set(entry, raw) is not None:
                    raise space.duplicate(index)
    return True
