"""A bank whose transfers are transactions: strict serializability, and a constant total.

Operations are `open` (`value`: the balance of each account), `transfer` (`value`: a Transfer) and `read` (`result`: per
account, its balance and the mark of the transfer that last changed it). Each transfer records the marks that it found,
so the version order of every account is known; the dependencies, including real time, must be free of cycles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.simulation.history import History, Operation, Outcome

OPENED: Final = 0
"""The mark of an account that no transfer has changed."""


class State(NamedTuple):
    """The state of an account: its balance, and the mark of the transfer that set it."""

    balance: int
    mark: int


@dataclass
class Transfer:
    """A transfer of `amount` from `source` to `target`.

    `found` is the state that it read of either account, as far as known.
    """

    mark: int
    source: int
    target: int
    amount: int = 0
    found: dict[int, State] = field(default_factory=dict)

    def left(self, account: int) -> State:
        """Return the state of an account after the transfer."""
        change = -self.amount if account == self.source else self.amount
        return State(self.found[account].balance + change, self.mark)


def check(history: History, workload: str = "bank") -> list[str]:
    """Return the violations as text; empty if the history is strictly serializable."""
    operations = history.of(workload)
    opened = next((operation for operation in operations if operation.kind == "open"), None)
    if opened is None:
        return []
    bank = _Bank(opened, operations)
    problems = [problem for read in bank.reads for problem in bank.problems_of_read(read)]
    problems += [problem for each in bank.happened.values() for problem in bank.problems_of_transfer(each)]
    problems += bank.lost_updates()
    return [f"{workload}: {problem}" for problem in problems or bank.circles()]


class _Bank:
    def __init__(self, opened: Operation, operations: list[Operation]) -> None:
        self._opening: dict[int, int] = opened.value
        self._total = sum(self._opening.values())
        self.reads = [each for each in operations if each.kind == "read" and each.is_ok]
        self._transfers = {each.value.mark: each for each in operations if each.kind == "transfer"}
        self.happened = self._find_happened()

    def _find_happened(self) -> dict[int, Operation]:
        """Find the transfers that happened: acknowledged ones, and those that a valid read returned."""
        marks = [mark for mark, each in self._transfers.items() if each.is_ok]
        marks += [state.mark for read in self.reads for state in read.result.values()]
        happened: dict[int, Operation] = {}
        while marks:
            transfer = self._transfers.get(mark := marks.pop())
            if transfer is not None and not transfer.is_failed and mark not in happened:
                happened[mark] = transfer
                marks += [state.mark for state in transfer.value.found.values()]
        return happened

    # --- violations under any order ---

    def problems_of_read(self, read: Operation) -> Iterator[str]:
        states: dict[int, State] = read.result
        total = sum(state.balance for state in states.values())
        if states.keys() != self._opening.keys():
            yield f"the accounts are {sorted(states)}: {read}"
        elif total != self._total:
            yield f"the total is {total} and not {self._total}: {read}"
        if any(state.balance < 0 for state in states.values()):
            yield f"a balance is negative: {read}"
        for account, state in states.items():
            yield from self._problems_of_state(read, account, state)

    def problems_of_transfer(self, operation: Operation) -> Iterator[str]:
        transfer: Transfer = operation.value
        for account, state in transfer.found.items():
            yield from self._problems_of_state(operation, account, state)
        if any(transfer.left(account).balance < 0 for account in transfer.found):
            yield f"a transfer takes what is not there: {operation}"

    def _problems_of_state(self, reader: Operation, account: int, state: State) -> Iterator[str]:
        if state.mark == OPENED:
            expected = State(self._opening.get(account, 0), OPENED)
        else:
            writer = self._transfers.get(state.mark)
            if writer is None:
                yield f"transfer {state.mark} was seen, which nobody made: {reader}"
                return
            if writer.outcome is Outcome.FAILED:
                yield f"a transfer was seen that has failed: {writer}; {reader}"
                return
            expected = writer.value.left(account) if account in writer.value.found else state
        if state != expected:
            yield f"account {account} had {state.balance}, where {expected.balance} was left: {reader}"

    def lost_updates(self) -> list[str]:
        problems: list[str] = []
        successors: dict[tuple[int, int], Operation] = {}
        for operation in self.happened.values():
            for account, state in operation.value.found.items():
                other = successors.setdefault((account, state.mark), operation)
                if other is not operation:
                    problems.append(f"two transfers changed the same state of account {account}: {other}; {operation}")
        return problems

    # --- the order ---

    def circles(self) -> list[str]:
        """Return violations of the order: at most one cycle, with its operations."""
        after = self._dependencies()
        state: dict[Operation, int] = {}
        for start in after:
            if (circle := _find_circle(start, after, state)) is not None:
                return [f"each of these must come before the next, in a circle: {'; '.join(map(str, circle))}"]
        return []

    def _dependencies(self) -> dict[Operation, list[Operation]]:
        """Return which operations must come after which, by account versions and by real time."""
        nodes = [*self.happened.values(), *self.reads]
        after: dict[Operation, list[Operation]] = {node: [] for node in nodes}
        successors = {
            (account, state.mark): operation
            for operation in self.happened.values()
            for account, state in operation.value.found.items()
        }
        for node in nodes:
            states: dict[int, State] = node.result if node.kind == "read" else node.value.found
            for account, state in states.items():
                if state.mark != OPENED:
                    after[self.happened[state.mark]].append(node)
                successor = successors.get((account, state.mark))
                if successor is not None and successor is not node:
                    after[node].append(successor)
            if node.is_ok and node.returned is not None:
                after[node] += [other for other in nodes if node.returned < other.invoked]
        return after


def _find_circle(
    start: Operation, after: dict[Operation, list[Operation]], state: dict[Operation, int]
) -> list[Operation] | None:
    """Depth-first search without recursion.

    `state`: 1 for operations on the path, 2 for those that lead to no cycle.
    """
    if state.get(start):
        return None
    path, rest = [start], [iter(after[start])]
    state[start] = 1
    while path:
        node = next(rest[-1], None)
        if node is None:
            state[path.pop()] = 2
            rest.pop()
        elif state.get(node) == 1:
            return path[path.index(node) :]
        elif node not in state:
            state[node] = 1
            path.append(node)
            rest.append(iter(after[node]))
    return None
