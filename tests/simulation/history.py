"""The requests of clients and their answers, in one total order of events: the input of the checkers.

`invoked` and `returned` are positions in that order: an operation that returned before another was invoked came first;
two that overlap may have happened in either order. Knows nothing of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Outcome(Enum):
    OK = "ok"
    FAILED = "failed"
    """The operation did not happen and never will."""
    UNKNOWN = "unknown"
    """The operation may have happened, or may still happen: there was no answer, or no conclusive one."""


FINAL: Final = "final"
"""The process that reads after all faults."""


@dataclass(slots=True, eq=False)
class Operation:
    """One request or transaction of a client. The fields about its end are unset while it runs."""

    number: int
    process: str
    workload: str
    kind: str
    key: Hashable
    value: Any
    member: str
    invoked: int
    invoked_at: float
    returned: int | None = None
    returned_at: float | None = None
    outcome: Outcome = Outcome.UNKNOWN
    result: Any = None
    error: str = ""
    is_answered: bool = False
    """True if a server answered, even with a rejection."""

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_failed(self) -> bool:
        return self.outcome is Outcome.FAILED

    @property
    def what(self) -> str:
        return " ".join(str(part) for part in (self.kind, self.key, self.value) if part is not None)

    @property
    def end(self) -> str:
        told = self.result if self.is_ok else self.error
        return f"{self.outcome.value}{'' if told is None else f': {told}'}"

    def __str__(self) -> str:
        returned_at = "" if self.returned_at is None else f"{self.returned_at:.3f}"
        return (
            f"#{self.number} {self.workload} {self.what} by {self.process} on {self.member} "
            f"[{self.invoked_at:.3f}, {returned_at}] {self.end}"
        )


class History:
    """All operations of a run, in order of invocation."""

    def __init__(
        self, time: Callable[[], float] = lambda: 0.0, tell: Callable[[str, str], None] = lambda process, what: None
    ) -> None:
        """`tell` is called with each start and end of an operation, as text, and with its process."""
        self._time = time
        self._tell = tell
        self._position = 0
        self.operations: list[Operation] = []
        self.answered = 0
        """Number of operations that a server answered."""

    def invoke(
        self, process: str, workload: str, kind: str, key: Hashable = None, value: Any = None, *, member: str = ""
    ) -> Operation:
        number = len(self.operations)
        position, now = self._next(), self._time()
        operation = Operation(number, process, workload, kind, key, value, member, position, now)
        self.operations.append(operation)
        self._tell(process, f"#{number} {workload} {operation.what} on {member}")
        return operation

    def ok(self, operation: Operation, result: Any = None) -> None:
        operation.result = result
        self._end(operation, Outcome.OK, is_answered=True)

    def failed(self, operation: Operation, error: object = "", *, is_answered: bool = True) -> None:
        operation.error = str(error)
        self._end(operation, Outcome.FAILED, is_answered=is_answered)

    def unknown(self, operation: Operation, error: object = "", *, is_answered: bool = False) -> None:
        operation.error = str(error)
        self._end(operation, Outcome.UNKNOWN, is_answered=is_answered)

    def _end(self, operation: Operation, outcome: Outcome, *, is_answered: bool) -> None:
        assert operation.returned is None, f"{operation} has ended"
        operation.outcome, operation.is_answered = outcome, is_answered
        operation.returned, operation.returned_at = self._next(), self._time()
        self.answered += is_answered
        self._tell(operation.process, f"#{operation.number} {operation.end}")

    def _next(self) -> int:
        self._position += 1
        return self._position

    def of(self, workload: str) -> list[Operation]:
        return [operation for operation in self.operations if operation.workload == workload]


def by_key(operations: list[Operation]) -> dict[Hashable, list[Operation]]:
    """Return the operations of each key, in order."""
    found: dict[Hashable, list[Operation]] = {}
    for operation in operations:
        found.setdefault(operation.key, []).append(operation)
    return found
