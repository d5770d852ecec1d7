"""The list checker finds lost, duplicate and reordered values, and accepts correct histories."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.simulation.checkers import append
from tests.simulation.history import History, Operation, Outcome

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN

Story = list[tuple[int, int, str, Any, Any]]


def tell(story: Story) -> History:
    """Build a history: invocation, return, kind, value, and the list that a read returned or the outcome of an append.

    An append that returned the list has the list as its outcome.
    """
    history = History()
    for begin, end, kind, value, result in story:
        operation = history.invoke("1", "append", kind, 0, value)
        operation.invoked, operation.returned = begin, end
        operation.outcome = result if isinstance(result, Outcome) else OK
        operation.result = None if isinstance(result, Outcome) else result
    return history


@pytest.mark.parametrize(
    "story",
    [
        pytest.param([(1, 2, "append", 1, OK), (3, 4, "read", None, (1,))], id="one by one"),
        pytest.param(
            [(1, 4, "append", 1, OK), (2, 3, "append", 2, OK), (5, 6, "read", None, (2, 1))], id="concurrent appends"
        ),
        pytest.param(
            [(1, 6, "append", 1, OK), (2, 3, "read", None, ()), (4, 5, "read", None, (1,))], id="concurrent reads"
        ),
        pytest.param([(1, 2, "append", 1, UNKNOWN), (3, 4, "read", None, ())], id="unknown, not there"),
        pytest.param(
            [
                (1, 2, "append", 1, UNKNOWN),
                (3, 4, "append", 2, (2,)),
                (5, 6, "read", None, (2,)),
                (7, 8, "read", None, (2, 1)),
            ],
            id="unknown, comes late",
        ),
        pytest.param([(1, 2, "append", 1, FAILED), (3, 4, "append", 2, (2,))], id="failed, not there"),
    ],
)
def test_correct_lists_have_no_violations(story: Story) -> None:
    assert append.check(tell(story)) == []


@pytest.mark.parametrize(
    ("story", "words"),
    [
        pytest.param([(1, 2, "append", 1, OK), (3, 4, "read", None, ())], "is not read", id="lost append"),
        pytest.param(
            [(1, 2, "append", 1, (1,)), (3, 4, "append", 2, (1, 2)), (5, 6, "read", None, (2,))],
            "is no prefix",
            id="lost from the middle",
        ),
        pytest.param([(1, 2, "append", 1, OK), (3, 4, "read", None, (1, 1))], "is there twice", id="duplicated append"),
        pytest.param(
            [(1, 2, "append", 1, OK), (3, 4, "append", 2, OK), (5, 6, "read", None, (2, 1))],
            "stands before",
            id="order against real time",
        ),
        pytest.param(
            [(1, 8, "append", 1, OK), (2, 3, "read", None, (1,)), (4, 5, "read", None, ())],
            "older than one before",
            id="stale read",
        ),
        pytest.param(
            [(1, 8, "append", 1, UNKNOWN), (2, 3, "read", None, (1,)), (4, 5, "read", None, ())],
            "older than one before",
            id="an unknown append was seen and is gone",
        ),
        pytest.param(
            [(1, 2, "append", 1, FAILED), (3, 4, "read", None, (1,))],
            "could not be appended",
            id="rolled back, yet there",
        ),
        pytest.param([(1, 2, "read", None, (7,))], "nobody appended", id="from nowhere"),
        pytest.param([(1, 2, "read", None, (7,)), (3, 4, "append", 7, OK)], "before it was", id="from the future"),
        pytest.param(
            [
                (1, 9, "append", 1, OK),
                (2, 8, "append", 2, OK),
                (3, 7, "read", None, (1,)),
                (4, 6, "read", None, (2,)),
            ],
            "is no prefix",
            id="readers disagree",
        ),
        pytest.param([(1, 4, "append", 1, (1, 2)), (2, 3, "append", 2, OK)], "at the end", id="not at the end"),
        pytest.param(
            [(1, 2, "append", 1, (1,)), (3, 6, "append", 2, (1, 2)), (4, 5, "append", 3, (1, 3))],
            "is no prefix",
            id="two appends to the same list",
        ),
    ],
)
def test_incorrect_lists_are_found(story: Story, words: str) -> None:
    problems = append.check(tell(story))
    assert any(words in problem for problem in problems), problems
    assert all(problem.startswith("append 0: ") for problem in problems)


def real_history(rng: Random, count: int, *, keys: int = 3) -> History:
    """Return a history of correct lists; some operations get no answer, and some of those take effect much later."""
    history, running, late = History(), list[Operation](), list[Operation]()
    lists: dict[Any, tuple[int, ...]] = dict.fromkeys(range(keys), ())
    while len(history.operations) < count:
        if late and rng.random() < 0.1:
            operation = late.pop(rng.randrange(len(late)))
            lists[operation.key] += (operation.value,)
        if len(running) < 5 and rng.random() < 0.6:
            kind = rng.choice(["read", "append"])
            running.append(history.invoke("1", "append", kind, rng.randrange(keys), len(history.operations)))
        elif running:
            operation = running.pop(rng.randrange(len(running)))
            if operation.kind == "append" and rng.random() < 0.3:
                history.unknown(operation)
                late.append(operation)
                continue
            if operation.kind == "append":
                lists[operation.key] += (operation.value,)
            history.ok(operation, lists[operation.key])
    return history


def test_generated_lists_have_no_violations() -> None:
    rng = Random(1)
    for _ in range(100):
        assert append.check(real_history(rng, 200)) == []


def test_value_missing_from_one_read_is_found() -> None:
    rng, found = Random(2), 0
    for _ in range(100):
        history = real_history(rng, 100)
        appended = [each for each in history.operations if each.kind == "append" and each.is_ok]
        lost = rng.choice(appended)
        for operation in history.operations:
            if operation.result is not None and operation.invoked > lost.invoked and operation is not lost:
                operation.result = tuple(value for value in operation.result if value != lost.value)
        found += bool(append.check(history))
    assert found > 90, "no other value was read again"
