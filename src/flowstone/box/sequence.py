"""Sequences: numbers that are handed out once, and how a space takes its keys from one.

The definition is a row of `_sequence`, the last value one of `_sequence_data`. A value that a space takes for an
inserted tuple is not logged: whoever replays the insert sees the number in the tuple (`Sequence.update`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from flowstone.box.access import Privilege
from flowstone.box.field_types import KIND_ARRAY, KIND_MAP, children_of, end_of, kind_at
from flowstone.box.paths import Step, parse_path
from flowstone.box.system import SEQUENCE_DATA_ID
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack, unpack

if TYPE_CHECKING:
    from flowstone.box.box import Box
    from flowstone.box.transaction import Transaction

_NIL: Final = 0xC0

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
        self.value = self.peek()
        return self.value

    def set(self, value: int | None) -> None:
        """Makes `value` the last one handed out; None: `next` begins at the start again."""
        self.value = value

    def update(self, value: int) -> None:
        """Takes note of a number that a tuple came with; one behind the current value changes nothing."""
        step = self.definition.step
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

    def fill(self, transaction: Transaction, raw: bytes, values: tuple[Any, ...]) -> tuple[bytes, tuple[Any, ...]]:
        """The tuple with the next number in the place of nil; a number that is there moves the sequence.

        As on real servers the sequence does not go back if the transaction does.
        """
        box, sequence = transaction.box, self.sequence
        if not self.is_generated and not box.is_recovering:
            check_sequence(transaction, sequence)
        at = self._place(raw) if len(values) > self.field else None
        if at is None:
            return raw, values
        if raw[at] == _NIL:
            sequence.next()
            raw = raw[:at] + pack(sequence.value) + raw[at + 1 :]
            values = unpack(raw)
        else:
            number = unpack(raw[at : end_of(raw, at)])
            if type(number) is not int or number > INT64_MAX:
                return raw, values
            sequence.update(number)
        store(box, sequence)
        return raw, values

    def _place(self, raw: bytes) -> int | None:
        """Where in the tuple the number or nil is; None: there is no such place."""
        _, at = children_of(raw, 0)
        for _ in range(self.field):
            at = end_of(raw, at)
        for step in parse_path(self.path) if self.path else ():
            found = _child(raw, at, step)
            if found is None:
                return None
            at = found
        return at


def check_sequence(transaction: Transaction, sequence: Sequence) -> None:
    """Raises AccessDenied unless the user may take numbers from the sequence."""
    definition = sequence.definition
    transaction.box.access.check(
        transaction.user, Privilege.WRITE, "sequence", definition.id, definition.owner, definition.name
    )


def store(box: Box, sequence: Sequence) -> None:
    """Puts the value into `_sequence_data` without a row for the log, so that a snapshot has it."""
    primary = box.spaces[SEQUENCE_DATA_ID].primary
    if primary is not None and sequence.value is not None:
        row = (sequence.definition.id, sequence.value)
        primary.set(primary.key.entries(row)[0], pack(row))


def _child(raw: bytes, at: int, step: Step) -> int | None:
    kind = kind_at(raw, at)
    if kind == KIND_ARRAY and isinstance(step, int):
        count, at = children_of(raw, at)
        if step >= count:
            return None
        for _ in range(step):
            at = end_of(raw, at)
        return at
    if kind == KIND_MAP and isinstance(step, str):
        count, at = children_of(raw, at)
        for _ in range(count // 2):
            value_at = end_of(raw, at)
            if unpack(raw[at:value_at]) == step:
                return value_at
            at = end_of(raw, value_at)
    return None
