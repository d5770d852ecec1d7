"""Linearizability of lists under append: the longest list that a client read is the order of all appends.

Operations are `append` (of `value`; `result` is the list after it, or None) and `read` (`result` is the list). Every
value is appended once. Reads return whole histories, so no search is needed: each list read is a prefix of the longest,
which gives each operation a place, and the places must not contradict the order of events.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from tests.simulation.checkers.elements import impossible
from tests.simulation.history import History, Operation, by_key


class Placed(NamedTuple):
    """An operation and its place: for an append, that of its value; for a read, after the last value returned."""

    place: float
    operation: Operation


def check(history: History, workload: str = "append") -> list[str]:
    """Return the violations as text; empty if the history is linearizable."""
    violations: list[str] = []
    for key, operations in by_key(history.of(workload)).items():
        violations += [f"{workload} {key}: {problem}" for problem in _check_key(operations)]
    return violations


def _check_key(operations: list[Operation]) -> list[str]:
    appends = {operation.value: operation for operation in operations if operation.kind == "append"}
    seen = [operation for operation in operations if operation.is_ok and operation.result is not None]
    problems = [problem for operation in seen for problem in impossible(operation, appends, "appended")]
    problems += [problem for operation in seen for problem in _misplaced(operation)]
    if problems:
        return problems
    longest: Sequence[Hashable] = max((operation.result for operation in seen), key=len, default=())
    problems = [
        f"{_list(operation.result)} is no prefix of {_list(longest)}: {operation}"
        for operation in seen
        if tuple(operation.result) != tuple(longest[: len(operation.result)])
    ]
    return problems or _check_order(_places(operations, longest))


def _misplaced(operation: Operation) -> Iterator[str]:
    if operation.kind == "append" and (not operation.result or operation.result[-1] != operation.value):
        yield f"{operation.value} was not appended at the end: {operation}"


def _places(operations: list[Operation], longest: Sequence[Hashable]) -> list[Placed]:
    """Return the operations in order of invocation.

    Failed operations, and unknown ones that no read returned, have no place.
    """
    places = {value: float(number) for number, value in enumerate(longest)}
    placed: list[Placed] = []
    for operation in operations:
        if operation.kind == "append" and (operation.is_ok or operation.value in places):
            placed.append(Placed(places.get(operation.value, inf), operation))
        elif operation.kind == "read" and operation.is_ok:
            placed.append(Placed(len(operation.result) - 0.5, operation))
    return placed


def _check_order(placed: list[Placed]) -> list[str]:
    """Check that no operation has a place before one that returned before its invocation."""
    problems: list[str] = []
    returned = sorted((each for each in placed if each.operation.is_ok), key=lambda each: each.operation.returned or 0)
    last: Placed | None = None
    number = 0
    for each in placed:
        while number < len(returned) and (returned[number].operation.returned or 0) < each.operation.invoked:
            if last is None or returned[number].place > last.place:
                last = returned[number]
            number += 1
        if last is not None and last.place > each.place:
            problems.append(_in_words(last, each))
    return problems


def _in_words(earlier: Placed, later: Placed) -> str:
    pair = f"{earlier.operation}; {later.operation}"
    if later.operation.kind == "append":
        return f"an append stands before what had returned when it began: {pair}"
    if earlier.operation.kind == "append":
        return f"an acknowledged append is not read: {pair}"
    return f"a read is older than one before it: {pair}"


def _list(values: Sequence[Hashable]) -> str:
    return f"[{' '.join(str(value) for value in values)}]"
