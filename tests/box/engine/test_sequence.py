"""Sequence values, with the limits of the real server."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.engine.sequence import INT64_MAX, INT64_MIN, Sequence, SequenceDefinition, read_sequence
from flowstone.iproto import errors


def sequence(value: int | None = None, **options: Any) -> Sequence:
    return Sequence(SequenceDefinition(1, 1, "s", **options), value)


def test_sequence_starts_at_its_start_and_advances_by_its_step() -> None:
    numbers = sequence(start=10, step=5)
    assert [numbers.next(), numbers.next(), numbers.next()] == [10, 15, 20]
    assert numbers.current == 20


def test_descending_sequence_counts_down() -> None:
    numbers = sequence(start=-1, step=-2, min=-4, max=-1)
    assert [numbers.next(), numbers.next()] == [-1, -3]
    with pytest.raises(errors.SequenceOverflow) as caught:
        numbers.next()
    assert caught.value.message == "Sequence 's' has overflowed"
    assert numbers.current == -3


def test_current_before_the_first_value_raises_an_error() -> None:
    with pytest.raises(errors.SequenceNotStarted) as caught:
        sequence().current
    assert caught.value.message == "Sequence 's' is not started"


def test_sequence_cycles_at_either_end() -> None:
    assert sequence(3, min=1, max=3, cycle=True).next() == 1
    assert sequence(1, step=-1, min=1, max=3, cycle=True).next() == 3
    assert sequence(INT64_MAX, cycle=True, min=INT64_MIN).next() == INT64_MIN


def test_value_outside_altered_bounds_continues_at_the_next_bound() -> None:
    assert sequence(1, min=100, max=200).next() == 100
    assert sequence(500, step=-1, min=100, max=200).next() == 200
    with pytest.raises(errors.SequenceOverflow):
        sequence(500, min=100, max=200).next()


def test_update_ignores_values_already_passed() -> None:
    numbers = sequence()
    numbers.update(7)
    numbers.update(5)
    assert numbers.current == 7
    down = sequence(step=-1, min=-10, max=-1)
    down.update(-5)
    down.update(-2)
    assert down.next() == -6


def test_sequence_set_to_nil_restarts() -> None:
    numbers = sequence(5)
    numbers.set(None)
    assert numbers.next() == 1


def test_sequence_is_read_from_its_row() -> None:
    row = (3, 1, "s", -1, -100, -1, -1, 0, True)
    assert read_sequence(row) == SequenceDefinition(3, 1, "s", -1, -100, -1, -1, 0, True)
