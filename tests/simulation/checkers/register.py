"""Linearizability of registers: is there an order in which each operation takes effect between its invocation and its
return?

Operations are `write` (of `value`), `read` (`result`) and `cas` (`value` is the expected and the new value). None is
the value of a register that was never written. Every value is written once, so a read identifies its writer. The search
is that of Wing and Gong, with Lowe's cache of visited states, separately per key.

An operation with unknown outcome costs nothing: if its value was read, it happened before that read returned; if not,
it can be left out.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

from tests.simulation.history import History, Operation, Outcome, by_key

STATES_MAX: Final = 200_000
"""Number of states after which the search gives up and reports that."""

NEVER: Final = 1 << 60

UNREAD: Final = "unread"
"""Stands for any value that no operation reads."""

Place = tuple[int, Hashable]


class Step(NamedTuple):
    """An operation that took effect, as the search sees it: it finds `before` and leaves `after`."""

    invoked: int
    returned: int
    before: Hashable
    after: Hashable
    is_blind: bool
    """True if the operation does not read the register."""
    operation: Operation


def check(history: History, workload: str = "register") -> list[str]:
    """Return the violations as text; empty if the history is linearizable."""
    violations: list[str] = []
    for key, operations in by_key(history.of(workload)).items():
        violations += [f"{workload} {key}: {problem}" for problem in _check_key(operations)]
    return violations


def _check_key(operations: list[Operation]) -> list[str]:
    writers = _writers(operations)
    problems = [problem for reader in operations if (problem := _impossible(reader, writers)) is not None]
    return problems or _search(_steps(operations, writers))


def _writers(operations: list[Operation]) -> dict[Hashable, Operation]:
    writers: dict[Hashable, Operation] = {}
    for operation in operations:
        if operation.kind != "read":
            value = _after(operation)
            assert value not in writers, f"{value} is written twice"
            writers[value] = operation
    return writers


def _after(operation: Operation) -> Hashable:
    value: Hashable = operation.value[1] if operation.kind == "cas" else operation.value
    return value


def _seen(operation: Operation) -> Hashable:
    """Return the value that an operation read; None if it read none or its outcome is unknown."""
    value: Hashable = operation.value[0] if operation.kind == "cas" else operation.result
    return value


def _impossible(reader: Operation, writers: dict[Hashable, Operation]) -> str | None:
    """Return a violation that no order can explain."""
    if reader.kind == "write" or not reader.is_ok:
        return None
    value = _seen(reader)
    writer = writers.get(value)
    if value is None:
        return None
    if writer is None:
        return f"{value} was read, which nobody wrote: {reader}"
    if writer.is_failed:
        return f"{value} was read, whose write has failed: {writer}; {reader}"
    if reader.returned is not None and reader.returned < writer.invoked:
        return f"{value} was read before it was written: {reader}; {writer}"
    return None


def _steps(operations: list[Operation], writers: dict[Hashable, Operation]) -> list[Step]:
    """Return the steps that took effect; those of unknown outcome only if their value was read, ending when it was."""
    deadlines: dict[Operation, int] = {}
    due = [(each, each.returned) for each in operations if each.is_ok and each.returned is not None]
    while due:
        operation, returned = due.pop()
        if returned >= deadlines.get(operation, NEVER):
            continue
        deadlines[operation] = returned
        writer = writers.get(_seen(operation)) if operation.kind != "write" else None
        if writer is not None and writer.outcome is Outcome.UNKNOWN:
            due.append((writer, returned))
    return sorted(_step(operation, returned) for operation, returned in deadlines.items())


def _step(operation: Operation, returned: int) -> Step:
    if operation.kind == "read":
        return Step(operation.invoked, returned, operation.result, operation.result, False, operation)
    if operation.kind == "cas":
        expected, new = operation.value
        return Step(operation.invoked, returned, expected, new, False, operation)
    return Step(operation.invoked, returned, None, operation.value, True, operation)


def _search(steps: list[Step]) -> list[str]:
    search = _Search(steps)
    everything = (1 << len(steps)) - 1
    start: Place = 0, None
    todo, visited = [start], {start}
    best, best_value = start
    while todo:
        done, value = todo.pop()
        if done == everything:
            return []
        if done.bit_count() > best.bit_count():
            best, best_value = done, value
        if len(visited) > STATES_MAX:
            return [f"no order was found in {STATES_MAX} tries"]
        for place in search.next_places(done, value):
            if place not in visited:
                visited.add(place)
                todo.append(place)
    stuck = "; ".join(str(steps[number].operation) for number in search.candidates(best))
    return [f"no order explains this: with {best_value} there, none of these could be next: {stuck}"]


class _Search:
    """The search. A state is the set of completed steps, as bits, and the value of the register.

    Each value is written once, so a value must not be overwritten before all its readers have run. A write that is
    never read can always run directly before another write, so only writes that are read need to be tried.
    """

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self._readers: dict[Hashable, int] = {}
        """Per value, its readers as bits."""
        for number, step in enumerate(steps):
            if not step.is_blind:
                self._readers[step.before] = self._readers.get(step.before, 0) | 1 << number

    def next_places(self, done: int, value: Hashable) -> list[Place]:
        left = self._readers.get(value, 0) & ~done
        if left:
            return self._places_of_readers(done, left)
        absorbed = self._absorb(done)
        read = [number for number in self.candidates(absorbed) if self._is_read_write(number)]
        if not read and absorbed != done:
            return [(absorbed, UNREAD)]
        return [(absorbed | 1 << number, self._steps[number].after) for number in read]

    def _places_of_readers(self, done: int, left: int) -> list[Place]:
        for number in self.candidates(done):
            # A read blocks nothing; a CAS must be the last reader of its value.
            if left >> number & 1 and (self._steps[number].operation.kind == "read" or left == 1 << number):
                return [(done | 1 << number, self._steps[number].after)]
        return []

    def _absorb(self, done: int) -> int:
        """Add all writes that may be next and are never read, repeatedly."""
        while unread := [number for number in self.candidates(done) if self._is_unread_write(number)]:
            for number in unread:
                done |= 1 << number
        return done

    def _is_read_write(self, number: int) -> bool:
        return self._steps[number].is_blind and self._steps[number].after in self._readers

    def _is_unread_write(self, number: int) -> bool:
        return self._steps[number].is_blind and self._steps[number].after not in self._readers

    def candidates(self, done: int) -> list[int]:
        """Yield the steps that may be next: no remaining step returned before their invocation."""
        steps, found = self._steps, []
        first_return = NEVER
        number = (~done & (done + 1)).bit_length() - 1  # the first remaining step
        while number < len(steps) and steps[number].invoked < first_return:
            if not done >> number & 1:
                found.append(number)
                first_return = min(first_return, steps[number].returned)
            number += 1
        return [number for number in found if steps[number].invoked < first_return]
