"""The verdict of a chaos run finds violations, here in fake sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowstone.iproto.msgpack import pack
from tests.chaos.jobs import bucket
from tests.chaos.seats import LISTS, NAMES, REGISTERS, SETS, Seats
from tests.chaos.verdict import broken_promises, lost, read_finally, slips
from tests.simulation.history import History


class Dummy:
    """A member with rows, and a log."""

    def __init__(self, name: str, rows: dict[int, list[tuple[Any, ...]]], said: str = "ready\n") -> None:
        self.name = name
        self._rows = rows
        self._said = said

    def tuples(self, space: int) -> list[bytes]:
        return [pack(row) for row in self._rows.get(space, [])]

    def log(self) -> str:
        return self._said


def set_of(*members: Dummy) -> Seats:
    seats = SimpleNamespace(
        members=list(members), nodes=list(members), synchronous=(SETS, REGISTERS, LISTS), asynchronous=()
    )
    return cast("Seats", seats)


@pytest.fixture
def history() -> History:
    """Two elements, of which the second may be missing; a register and a list of two values."""
    history = History()
    history.ok(history.invoke("1", NAMES[SETS], "add", bucket(1), 1))
    history.unknown(history.invoke("1", NAMES[SETS], "add", bucket(2), 2))
    for value in (1, 2):
        history.ok(history.invoke("2", NAMES[REGISTERS], "write", 0, value))
        history.ok(history.invoke("3", NAMES[LISTS], "append", 0, value))
    return history


GOOD: dict[int, list[tuple[Any, ...]]] = {SETS: [(1,)], REGISTERS: [(0, 2)], LISTS: [(0, 1, 2)]}


def verdict(seats: Seats, history: History) -> list[str]:
    read_finally(seats, history)
    return list(broken_promises(seats, history))


def test_allowed_histories_are_not_violations(history: History) -> None:
    seats = set_of(Dummy("a", GOOD), Dummy("b", GOOD))
    assert lost(seats, history) == 0
    assert verdict(seats, history) == []


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({SETS: []}, "1 is missing"),
        ({SETS: [(1,), (3,)]}, "3 is there, which nobody added"),
        ({REGISTERS: [(0, 1)]}, "no order explains this"),
        ({REGISTERS: []}, "no order explains this"),
        ({LISTS: [(0, 1)]}, "lists"),
        ({LISTS: [(0, 2, 1)]}, "lists"),
    ],
)
def test_unexpected_and_missing_rows_are_violations(
    history: History, bad: dict[int, list[tuple[Any, ...]]], text: str
) -> None:
    violations = verdict(set_of(Dummy("a", GOOD), Dummy("b", GOOD | bad)), history)
    assert any(text in violation for violation in violations), violations


def test_acknowledged_rows_are_counted_on_every_member(history: History) -> None:
    assert lost(set_of(Dummy("a", GOOD), Dummy("b", {}), Dummy("c", {})), history) == 2


@pytest.mark.parametrize(
    ("said", "text"),
    [("Traceback (most recent call last):", "unforeseen"), ("uri replicator:secret@127.0.0.1", "has told a secret")],
)
def test_traceback_or_secret_in_a_log_is_a_violation(said: str, text: str) -> None:
    (slip,) = slips(set_of(Dummy("a", {}), Dummy("b", {}, said)))
    assert text in slip
