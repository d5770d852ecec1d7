"""Sequences: numbers that are handed out once, and how a space takes its keys from one.

The definition is a row of `_sequence`. A value that was set or asked for is a row of `_sequence_data`, and logged. One
that a space takes for an inserted tuple is neither: whoever replays the insert sees the number in the tuple
(`Sequence.update`), and snapshots write the rows of `_sequence_data` from what the sequences have come to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from flowstone.box.access import Privilege
from flowstone.iproto import errors

if TYPE_CHECKING:
    from flowstone.box.transaction import Transaction

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
    """The sequence that a tuple of `_sequence`, of the format of that space, defines."""
    return SequenceDefinition(*row[:9])


class Sequence:
    """`value` is the last number handed out; None before the first."""

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
        """The number that `next` would hand out."""
        definition, value = self.definition, self.value
        if value is None:
            return definition.start
        low, high, step = definition.min, definition.max, definition.step
        # A definition may have been altered, and then the value is outside of its bounds.
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
        """Hands out the next number."""
        self.value = value = self.peek()
        return value

    def set(self, value: int | None) -> None:
        """Makes `value` the last one handed out; None: `next` begins at the start again."""
        self.value = value

    def update(self, value: int) -> None:
        """Takes note of a number that a tuple came with; one behind the current value changes nothing."""
        step = self.definition.step
        if value > INT64_MAX:
            return  # no sequence gets there
        if self.value is None or (value > self.value if step > 0 else value < self.value):
            self.value = value


class SpaceSequence(msgspec.Struct, frozen=True):
    """A row of `_space_sequence`: what fills `field` (from 0) of the space's tuples, at `path` in it, where it is nil.

    `is_generated`: the sequence was made for this space by `sequence = true` and goes with it.
    """

    sequence: Sequence
    field: int
    path: str | None = None
    is_generated: bool = False


def check_sequence(transaction: Transaction, sequence: Sequence) -> None:
    """Raises AccessDenied unless the user may take numbers from the sequence."""
    definition = sequence.definition
    transaction.box.access.check(
        transaction.user, Privilege.WRITE, "sequence", definition.id, definition.owner, definition.name
    )
