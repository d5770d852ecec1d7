"""Sequences: generators of unique numbers, and their use for the keys of a space.

The definition is a row of `_sequence`. A value that a client sets or requests is stored in `_sequence_data` and logged.
A number that a space takes for an inserted tuple is neither: replaying the insert advances the sequence by the number
in the tuple (`Sequence.update`), and snapshots write rows of `_sequence_data` with the current values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from flowstone.box.access import Privilege
from flowstone.iproto import errors

if TYPE_CHECKING:
    from flowstone.box.engine.transaction import BoxTransaction

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1


class SequenceDefinition(msgspec.Struct, frozen=True):
    """A row of `_sequence`."""

    id: int
    owner: int
    name: str
    step: int = 1
    min: int = 1
    max: int = INT64_MAX
    start: int = 1
    cache: int = 0
    cycle: bool = False


def read_sequence(row: tuple[Any, ...]) -> SequenceDefinition:
    """Return the sequence that a tuple of `_sequence` defines; the tuple has passed the format of that space."""
    return SequenceDefinition(*row[:9])


class Sequence:
    """A sequence. `value` is the last number generated, or None before the first."""

    __slots__ = ("definition", "value")

    def __init__(self, definition: SequenceDefinition, value: int | None = None) -> None:
        self.definition = definition
        self.value = value

    @property
    def current(self) -> int:
        if self.value is None:
            raise errors.SequenceNotStarted(f"Sequence '{self.definition.name}' is not started")
        return self.value

    def peek(self) -> int:
        """Return the number that `next` would return."""
        definition, value = self.definition, self.value
        if value is None:
            return definition.start
        low, high, step = definition.min, definition.max, definition.step
        # The value may be out of bounds after the definition was altered.
        if step > 0 and value < low:
            return low
        if step < 0 and value > high:
            return high
        value += step
        if low <= value <= high:
            return value
        if not definition.cycle:
            raise errors.SequenceOverflow(f"Sequence '{definition.name}' has overflowed")
        return low if step > 0 else high

    def next(self) -> int:
        """Generate the next number."""
        self.value = value = self.peek()
        return value

    def set(self, value: int | None) -> None:
        """Set the last number generated; None makes `next` begin at the start value."""
        self.value = value

    def update(self, value: int) -> None:
        """Advance to an explicit number in a tuple, unless the sequence is already past it."""
        step = self.definition.step
        if value > INT64_MAX:
            return  # beyond the range of sequences
        if self.value is None or (value > self.value if step > 0 else value < self.value):
            self.value = value


class SpaceSequence(msgspec.Struct, frozen=True):
    """A row of `_space_sequence`: the sequence that replaces nil in `field` (from 0), at `path` in it, of new tuples.

    `is_generated`: the sequence was created for this space by `sequence = true` and is dropped with it.
    """

    sequence: Sequence
    field: int
    path: str | None = None
    is_generated: bool = False


def check_sequence(transaction: BoxTransaction, sequence: Sequence) -> None:
    """Raise AccessDenied unless the user may write to the sequence."""
    definition = sequence.definition
    transaction.box.access.check(
        transaction.user, Privilege.WRITE, "sequence", definition.id, definition.owner, definition.name
    )
