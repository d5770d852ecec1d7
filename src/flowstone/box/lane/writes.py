"""Writes that took effect together, for rolling them back: the undo log of the lane."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Self

from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key
from flowstone.box.engine.read_view import ReadView


class Writes:
    """The changes of some statements, which can be rolled back until they are in the log.

    As a context manager, it rolls them back if the block raises. `changes` is flat, because compiled code appends to
    it: an index, a key and the tuple that was there before, for each change of a statement, the primary index first.
    `marks` has the length of `changes` after each statement.
    """

    __slots__ = ("changes", "marks")

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.marks: list[int] = []

    def __bool__(self) -> bool:
        """True if there was a statement, even if it changed nothing."""
        return bool(self.marks)

    def olds(self) -> list[bytes | None]:
        """Return the tuple that each statement has changed, as it was before; None if there was none."""
        starts = [0, *self.marks]
        return [self.changes[at + 2] if at < end else None for at, end in pairwise(starts)]

    def take_first(self, count: int) -> Writes:
        """Split off the first `count` statements."""
        taken = Writes()
        end = self.marks[count - 1] if count else 0
        taken.changes, self.changes = self.changes[:end], self.changes[end:]
        taken.marks, self.marks = self.marks[:count], [mark - end for mark in self.marks[count:]]
        return taken

    def take_last(self, count: int) -> Writes:
        """Split off the last `count` statements."""
        first = self.take_first(len(self.marks) - count)
        last = Writes()
        last.changes, self.changes = self.changes, first.changes
        last.marks, self.marks = self.marks, first.marks
        return last

    def _newest_first(self) -> Iterator[tuple[EngineIndex, Key, bytes | None]]:
        changes = self.changes
        for at in range(len(changes) - 3, -1, -3):
            yield changes[at], changes[at + 1], changes[at + 2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.rollback()

    def rollback(self) -> None:
        for index, key, old in self._newest_first():
            index.set(key, old)

    def hide_from(self, view: ReadView) -> None:
        """Let `view`, which was just opened, see the state before the writes."""
        for index, key, old in self._newest_first():
            view.changes.setdefault(index, {})[key] = old
