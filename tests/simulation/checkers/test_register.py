"""The register checker finds violations, and accepts correct histories."""

from __future__ import annotations

import time
from itertools import permutations
from random import Random
from typing import Any

import pytest

from tests.simulation.checkers import register
from tests.simulation.history import History, Operation, Outcome

NONE = -1
"""In stories: no answer."""


def tell(*story: tuple[int, int, str, Any, Any]) -> History:
    """Build operations on one register: invocation, return, kind, value and result.

    The result of a write is its outcome.
    """
    history = History()
    for begin, end, kind, value, result in story:
        operation = history.invoke("1", "register", kind, 0, value)
        operation.invoked, operation.returned = begin, None if end == NONE else end
        if kind == "read":
            operation.outcome, operation.result = Outcome.OK, result
        else:
            operation.outcome = result
    history.operations.sort(key=lambda operation: operation.invoked)
    return history


OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN


@pytest.mark.parametrize(
    "story",
    [
        pytest.param([(1, 2, "read", None, None), (3, 4, "write", 1, OK), (5, 6, "read", None, 1)], id="one by one"),
        pytest.param([(1, 6, "write", 1, OK), (2, 3, "read", None, None), (4, 5, "read", None, 1)], id="concurrent"),
        pytest.param(
            [(1, 8, "write", 1, OK), (2, 7, "write", 2, OK), (3, 4, "read", None, 2), (5, 6, "read", None, 1)],
            id="two writes in the order of the reads",
        ),
        pytest.param([(1, NONE, "write", 1, UNKNOWN), (2, 3, "read", None, None)], id="unknown, not there"),
        pytest.param(
            [(1, 2, "write", 1, UNKNOWN), (3, 4, "read", None, None), (5, 6, "read", None, 1)], id="unknown, comes late"
        ),
        pytest.param([(1, 2, "write", 1, FAILED), (3, 4, "read", None, None)], id="failed, not there"),
        pytest.param(
            [(1, 2, "write", 1, OK), (3, 4, "cas", [1, 2], OK), (5, 6, "read", None, 2)], id="compared and swapped"
        ),
        pytest.param(
            [(1, 2, "cas", [None, 1], UNKNOWN), (3, 4, "cas", [1, 2], UNKNOWN), (5, 6, "read", None, 2)],
            id="unknown swaps, the second seen",
        ),
        pytest.param(
            [(1, 2, "write", 1, OK), (3, 4, "cas", [1, 2], FAILED), (5, 6, "cas", [1, 3], OK)], id="a conflict"
        ),
    ],
)
def test_correct_registers_have_no_violations(story: list[tuple[int, int, str, Any, Any]]) -> None:
    assert register.check(tell(*story)) == []


@pytest.mark.parametrize(
    ("story", "words"),
    [
        pytest.param(
            [(1, 2, "write", 1, OK), (3, 4, "write", 2, OK), (5, 6, "read", None, 1)], "no order", id="stale read"
        ),
        pytest.param([(1, 2, "write", 1, OK), (3, 4, "read", None, None)], "no order", id="lost write"),
        pytest.param(
            [(1, 6, "write", 1, OK), (2, 3, "read", None, 1), (4, 5, "read", None, None)],
            "no order",
            id="read goes back",
        ),
        pytest.param(
            [(1, 9, "write", 1, UNKNOWN), (2, 3, "read", None, 1), (4, 5, "read", None, None)],
            "no order",
            id="an unknown write was seen and is gone",
        ),
        pytest.param(
            [
                (1, 2, "write", 1, UNKNOWN),
                (3, 4, "read", None, 1),
                (5, 6, "write", 2, OK),
                (7, 8, "read", None, 2),
                (9, 10, "read", None, 1),
            ],
            "no order",
            id="an unknown write happens twice",
        ),
        pytest.param([(1, 2, "write", 1, FAILED), (3, 4, "read", None, 1)], "has failed", id="failed, yet there"),
        pytest.param([(1, 2, "read", None, 7)], "nobody wrote", id="from nowhere"),
        pytest.param([(1, 2, "read", None, 7), (3, 4, "write", 7, OK)], "before it was written", id="from the future"),
        pytest.param(
            [(1, 2, "write", 1, OK), (3, 6, "cas", [1, 2], OK), (4, 5, "cas", [1, 3], OK)], "no order", id="lost update"
        ),
        pytest.param(
            [(1, 2, "write", 1, FAILED), (3, 4, "cas", [1, 2], UNKNOWN), (5, 6, "read", None, 2)],
            "no order",
            id="a swap of what has failed",
        ),
        pytest.param(
            [
                (1, 2, "write", 1, OK),
                (3, 10, "write", 2, OK),
                (4, 9, "write", 3, OK),
                (5, 6, "read", None, 2),
                (7, 8, "read", None, 3),
                (11, 12, "read", None, 2),
            ],
            "no order",
            id="readers disagree on the order",
        ),
    ],
)
def test_incorrect_registers_are_found(story: list[tuple[int, int, str, Any, Any]], words: str) -> None:
    (problem,) = register.check(tell(*story))
    assert words in problem
    assert problem.startswith("register 0: ")


def test_each_key_is_a_register_of_its_own() -> None:
    history = History()
    history.ok(history.invoke("1", "register", "write", 1, 5))
    history.ok(history.invoke("1", "register", "read", 2), None)
    history.ok(history.invoke("1", "other", "read", 1), None)
    assert register.check(history) == []


def is_linearizable(operations: list[Operation]) -> bool:
    """Decide by trying all orders and all choices of operations with unknown outcome."""
    sure = [each for each in operations if each.is_ok]
    unsure = [each for each in operations if each.outcome is UNKNOWN]
    choices = [
        [each for number, each in enumerate(unsure) if chosen >> number & 1] for chosen in range(1 << len(unsure))
    ]
    return any(explains(order) for chosen in choices for order in permutations([*sure, *chosen]))


def explains(order: tuple[Operation, ...]) -> bool:
    value = None
    for number, operation in enumerate(order):
        if any(later.is_ok and (later.returned or 0) < operation.invoked for later in order[number + 1 :]):
            return False
        if operation.kind == "write":
            value = operation.value
        elif operation.kind == "cas":
            if operation.value[0] != value:
                return False
            value = operation.value[1]
        elif operation.result != value:
            return False
    return True


def end(history: History, operation: Operation, outcome: Outcome) -> None:
    if outcome is OK:
        history.ok(operation)
    elif outcome is FAILED:
        history.failed(operation)
    else:
        history.unknown(operation)


def any_history(rng: Random, count: int) -> History:
    """Return a few highly concurrent operations with plausible results."""
    history, running = History(), list[Operation]()
    while len(history.operations) < count or running:
        if running and (len(running) == 3 or len(history.operations) == count or rng.random() < 0.5):
            operation = running.pop(rng.randrange(len(running)))
            written = [None, *range(1, len(history.operations) + 1)]
            if operation.kind == "read":
                history.ok(operation, rng.choice(written))
                continue
            if operation.kind == "cas":
                operation.value[0] = rng.choice(written)
            end(history, operation, rng.choice([OK, OK, FAILED, UNKNOWN]))
            continue
        kind = rng.choice(["read", "read", "write", "cas"])
        new = len(history.operations) + 1
        value = {"read": None, "write": new, "cas": [None, new]}[kind]
        running.append(history.invoke("1", "register", kind, 0, value))
    return history


def test_search_agrees_with_brute_force() -> None:
    rng, found = Random(1), {True: 0, False: 0}
    for _ in range(3000):
        history = any_history(rng, rng.randrange(1, 6))
        expected = is_linearizable(history.operations)
        assert (register.check(history) == []) == expected, [str(each) for each in history.operations]
        found[expected] += 1
    assert min(found.values()) > 300


def real_history(rng: Random, count: int, *, keys: int = 1, processes: int = 6) -> History:
    """Return a history of a correct register; some operations get no answer."""
    history, running = History(), list[Operation]()
    values: dict[Any, Any] = {}
    late: list[Operation] = []
    while len(history.operations) < count:
        if late and rng.random() < 0.1:
            operation = late.pop(rng.randrange(len(late)))
            values[operation.key] = operation.value
        if len(running) < processes and rng.random() < 0.6:
            kind, number = rng.choice(["read", "write"]), len(history.operations) + 1
            value = number if kind == "write" else None
            running.append(history.invoke("1", "register", kind, rng.randrange(keys), value))
        elif running:
            operation = running.pop(rng.randrange(len(running)))
            if operation.kind == "read":
                history.ok(operation, values.get(operation.key))
            elif rng.random() < 0.3:
                history.unknown(operation)
                late.append(operation)
            else:
                values[operation.key] = operation.value
                history.ok(operation)
    return history


@pytest.mark.parametrize("processes", [6, 30])
def test_generated_registers_have_no_violations_and_are_checked_quickly(processes: int) -> None:
    rng, seconds = Random(2), []
    for _ in range(20):
        history = real_history(rng, 300, processes=processes)
        begun = time.process_time()
        assert register.check(history) == []
        seconds.append(time.process_time() - begun)
    assert sorted(seconds)[10] < 0.05


def test_stale_read_among_many_concurrent_operations_is_found() -> None:
    rng = Random(4)
    for _ in range(20):
        history = real_history(rng, 300, processes=30)
        written = [each.value for each in history.operations if each.kind == "write" and each.is_ok]
        history.ok(history.invoke("2", "register", "write", 0, "newest"))
        history.ok(history.invoke("2", "register", "read", 0), rng.choice(written))
        (problem,) = register.check(history)
        assert "no order explains this" in problem


def test_search_gives_up_with_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "STATES_MAX", 3)
    assert "in 3 tries" in register.check(real_history(Random(3), 100))[0]
