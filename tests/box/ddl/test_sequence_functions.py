"""Sequences and functions: cases that test_functions.py does not compare with the real server."""

from __future__ import annotations

import pytest

from flowstone.box.box import Box
from flowstone.box.ddl import functions as ddl
from flowstone.iproto import errors
from tests.box.bootstrapped import bootstrapped, rows, run


@pytest.fixture
def box() -> Box:
    box = bootstrapped()
    run(box, ddl.create_sequence, "s", start=5)
    return box


def test_next_is_logged_and_current_is_not(box: Box) -> None:
    transaction = box.begin()
    assert ddl.next_value(transaction, "s") == 5
    assert ddl.current_value(transaction, "s") == 5
    assert [statement.space.name for statement in transaction.statements if statement.space] == ["_sequence_data"]
    assert rows(box, "_sequence_data") == [(1, 5)]


def test_current_before_next_raises_an_error(box: Box) -> None:
    with pytest.raises(errors.SequenceNotStarted, match="Sequence 's' is not started"):
        run(box, ddl.current_value, "s")


def test_reset_sequence_restarts(box: Box) -> None:
    run(box, ddl.set_value, "s", 100)
    assert run(box, ddl.next_value, "s") == 101
    run(box, ddl.reset_sequence, "s")
    assert rows(box, "_sequence_data") == []
    assert run(box, ddl.next_value, "s") == 5


def test_descending_sequence_starts_at_its_maximum(box: Box) -> None:
    made = run(box, ddl.create_sequence, "down", step=-1)
    assert made.next() == -1


def test_function_has_its_creation_time(box: Box) -> None:
    run(box, ddl.create_function, "f", time=1_700_000_000)
    assert run(box, ddl.function_exists, "f")
    assert rows(box, "_func", 68)[0][17:] == ("2023-11-14 22:13:20", "2023-11-14 22:13:20")
