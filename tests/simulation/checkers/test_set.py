"""The set checker finds lost, duplicate and unexpected elements, and accepts correct histories."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.checkers import set
from tests.simulation.history import History, Outcome

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN

Story = list[tuple[int, int, str, Any, Any]]


def tell(story: Story) -> History:
    """Build a history: invocation, return, kind, value, and the result of a read, the result of a removal, or an
    outcome."""
    history = History()
    for begin, end, kind, value, result in story:
        is_glance = kind == set.GLANCE
        operation = history.invoke("1", "set", "read" if is_glance else kind, kind if is_glance else None, value)
        operation.invoked, operation.returned = begin, end
        operation.outcome = result if isinstance(result, Outcome) else OK
        operation.result = None if isinstance(result, Outcome) else result
    return history


@pytest.mark.parametrize(
    "story",
    [
        pytest.param([(1, 2, "add", 1, OK), (3, 4, "read", None, (1,))], id="one by one"),
        pytest.param(
            [(1, 6, "add", 1, OK), (2, 3, "read", None, ()), (4, 5, "read", None, (1,))], id="concurrent reads"
        ),
        pytest.param([(1, 2, "add", 1, UNKNOWN), (3, 4, "read", None, ())], id="unknown, not there"),
        pytest.param(
            [(1, 2, "add", 1, UNKNOWN), (3, 4, "read", None, ()), (5, 6, "read", None, (1,))], id="unknown, comes late"
        ),
        pytest.param([(1, 2, "add", 1, FAILED), (3, 4, "read", None, ())], id="failed, not there"),
        pytest.param([(1, 2, "add", 1, OK), (3, 4, set.GLANCE, None, ())], id="a glance at what is old"),
        pytest.param([(1, 2, "add", 1, OK), (3, 4, "remove", 1, True), (5, 6, "read", None, ())], id="removed"),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 8, "remove", 1, True), (4, 5, "read", None, (1,)), (6, 7, "read", None, ())],
            id="removed while others read",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "remove", 1, UNKNOWN), (5, 6, "read", None, (1,)), (7, 8, "read", None, ())],
            id="unknown, removed late",
        ),
        pytest.param(
            [(1, 2, "add", 1, UNKNOWN), (3, 4, "remove", 1, True), (5, 6, "read", None, (1,))],
            id="added by somebody who had not ended",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "remove", 1, False), (5, 6, "read", None, (1,))],
            id="a removal that found nothing, where others had it",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "remove", 1, True), (5, 6, set.GLANCE, None, (1,))],
            id="a glance at what is removed",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "add", 2, OK), (5, 6, "read", (1,), (1,))], id="only one was asked for"
        ),
    ],
)
def test_correct_sets_have_no_violations(story: Story) -> None:
    assert set.check(tell(story)) == []


@pytest.mark.parametrize(
    ("story", "words"),
    [
        pytest.param([(1, 2, "add", 1, OK), (3, 4, "read", None, ())], "1 is missing", id="lost"),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "remove", 1, True), (5, 6, "read", None, (1,))],
            "1 is there again after it was removed",
            id="removed in vain",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "read", None, ()), (5, 6, "remove", 1, True)],
            "1 is missing",
            id="lost before it was removed",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "remove", 1, False), (5, 6, "read", None, ())],
            "1 is missing",
            id="a removal that found nothing",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "remove", 1, FAILED), (5, 6, "read", None, ())],
            "1 is missing",
            id="removed by somebody who was refused",
        ),
        pytest.param(
            [(1, 9, "add", 1, UNKNOWN), (2, 3, set.GLANCE, None, (1,)), (4, 5, "read", None, ())],
            "1 is missing",
            id="glanced at before it was confirmed",
        ),
        pytest.param(
            [(1, 2, "add", 1, OK), (3, 4, "read", (1,), ())], "1 is missing", id="lost, found by a read of one element"
        ),
        pytest.param(
            [(1, 8, "add", 1, OK), (2, 3, "read", None, (1,)), (4, 5, "read", None, ())],
            "1 is missing",
            id="stale read",
        ),
        pytest.param(
            [(1, 2, "add", 1, UNKNOWN), (3, 4, "read", None, (1,)), (5, 6, "read", None, ())],
            "1 is missing",
            id="an unknown element was seen and is gone",
        ),
        pytest.param(
            [(1, 2, "add", 1, FAILED), (3, 4, "read", None, (1,))], "could not be added", id="rolled back, yet there"
        ),
        pytest.param([(1, 2, "add", 1, OK), (3, 4, "read", None, (1, 1))], "is there twice", id="duplicated"),
        pytest.param([(1, 2, "read", None, (7,))], "nobody added", id="from nowhere"),
        pytest.param([(1, 2, "read", None, (7,)), (3, 4, "add", 7, OK)], "before it was added", id="from the future"),
        pytest.param(
            [(1, 9, "add", 1, OK), (2, 8, "add", 2, OK), (3, 7, "read", None, (1,)), (4, 6, "read", None, (2,))],
            "what the other lacks",
            id="readers disagree",
        ),
    ],
)
def test_incorrect_sets_are_found(story: Story, words: str) -> None:
    problems = set.check(tell(story))
    assert any(words in problem for problem in problems), problems
    assert all(problem.startswith("set: ") for problem in problems)


def test_sets_of_other_names_are_checked_separately() -> None:
    history = tell([(1, 2, "add", 1, OK), (3, 4, "read", None, ())])
    for operation in history.operations:
        operation.workload = "notes"
    assert set.check(history) == []
    assert set.check(history, "notes")[0].startswith("notes: 1 is missing")
