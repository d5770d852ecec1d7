"""What clients asked for and what they were told, in the one order in which it happened: what checkers read.

`invoked` and `returned` are positions in that order: an operation that returned before another was invoked came first,
and of two that overlap either may have. Knows nothing of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Outcome(Enum):
    OK = "ok"
    FAILED = "failed"
    """It has not happened and never will."""
    UNKNOWN = "unknown"
    """It may have happened, or happen yet: nobody answered, or not so that it could be known."""


FINAL: Final = "final"
"""The process that reads when all faults are over."""


@dataclass(slots=True, eq=False)
class Operation:
    """One request of a client, or one transaction. Of one under way all that its end tells is missing."""

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
    """Whether a server has said anything, be it that it refuses."""

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
    """All operations of a run, in the order in which they were invoked."""

    def __init__(
        self, time: Callable[[], float] = lambda: 0.0, tell: Callable[[str, str], None] = lambda process, what: None
    ) -> None:
        """`tell` is called with each beginning and end, in words, and whose it is."""
        self._time = time
        self._tell = tell
        self._position = 0
        self.operations: list[Operation] = []
        self.answered = 0
        """Operations that a server has said something to."""

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
    """The operations of each key, in their order."""
    found: dict[Hashable, list[Operation]] = {}
    for operation in operations:
        found.setdefault(operation.key, []).append(operation)
    return found
