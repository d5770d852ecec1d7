"""The bank checker finds torn, lost and reordered transfers, and accepts correct histories."""

from __future__ import annotations

from random import Random

import pytest

from tests.simulation.checkers import bank
from tests.simulation.checkers.bank import OPENED, State, Transfer
from tests.simulation.history import History, Operation, Outcome

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN

OPENING = {1: 10, 2: 10, 3: 10}
FIRST = {account: State(balance, OPENED) for account, balance in OPENING.items()}


class Story:
    """A history, built operation by operation with explicit times."""

    def __init__(self) -> None:
        self.history = History()
        self._add(0, 0, "open", OPENING, OK)

    def _add(self, begin: int, end: int, kind: str, value: object, outcome: Outcome) -> Operation:
        operation = self.history.invoke("1", "bank", kind, None, value)
        operation.invoked, operation.returned, operation.outcome = begin, end, outcome
        return operation

    def transfer(self, begin: int, end: int, transfer: Transfer, outcome: Outcome = OK) -> Story:
        self._add(begin, end, "transfer", transfer, outcome)
        return self

    def read(self, begin: int, end: int, **states: tuple[int, int]) -> Story:
        """`a1=(balance, mark)`; accounts that are not named have their initial state."""
        result = FIRST | {int(name[1:]): State(*state) for name, state in states.items()}
        self._add(begin, end, "read", None, OK).result = result
        return self

    def problems(self) -> list[str]:
        return bank.check(self.history)


def move(mark: int, source: int, target: int, amount: int, *found: tuple[int, int]) -> Transfer:
    """Return a transfer with the states that it found; by default the initial ones."""
    states = [State(*state) for state in found] or [FIRST[source], FIRST[target]]
    return Transfer(mark, source, target, amount, dict(zip((source, target), states, strict=True)))


def test_sequential_transfers_and_reads_have_no_violations() -> None:
    story = Story().read(1, 2).transfer(3, 4, move(1, 1, 2, 4)).read(5, 6, a1=(6, 1), a2=(14, 1))
    story.transfer(7, 8, move(2, 2, 3, 5, (14, 1), (10, 0))).read(9, 10, a1=(6, 1), a2=(9, 2), a3=(15, 2))
    assert story.problems() == []


def test_read_during_a_transfer_may_return_either_state() -> None:
    assert Story().transfer(1, 6, move(1, 1, 2, 4)).read(2, 3).read(4, 5, a1=(6, 1), a2=(14, 1)).problems() == []


def test_transfer_of_unknown_outcome_may_happen_late_or_never() -> None:
    assert Story().transfer(1, 2, move(1, 1, 2, 4), UNKNOWN).read(3, 4).problems() == []
    story = Story().transfer(1, 2, move(1, 1, 2, 4), UNKNOWN).read(3, 4)
    assert story.read(5, 6, a1=(6, 1), a2=(14, 1)).problems() == []
    story = Story().transfer(1, 2, move(1, 1, 2, 4), UNKNOWN).transfer(3, 4, move(2, 1, 2, 4))
    assert story.read(5, 6, a1=(6, 2), a2=(14, 2)).problems() == []


def test_failed_transfer_may_have_read_any_state() -> None:
    assert Story().transfer(1, 2, move(1, 1, 2, 4, (3, 9), (4, 9)), FAILED).read(3, 4).problems() == []


@pytest.mark.parametrize(
    ("story", "words"),
    [
        pytest.param(Story().transfer(1, 4, move(1, 1, 2, 4)).read(2, 3, a1=(6, 1)), "the total is 26", id="torn"),
        pytest.param(Story().read(1, 2, a1=(9, 0), a2=(11, 0)), "had 9, where 10 was left", id="made of nothing"),
        pytest.param(
            Story().transfer(1, 2, move(1, 1, 2, 12)).read(3, 4, a1=(-2, 1), a2=(22, 1)), "negative", id="overdrawn"
        ),
        pytest.param(Story().transfer(1, 2, move(1, 1, 2, 4)).read(3, 4), "circle", id="lost, or a stale read"),
        pytest.param(
            Story().transfer(1, 9, move(1, 1, 2, 4)).read(2, 3, a1=(6, 1), a2=(14, 1)).read(4, 5),
            "circle",
            id="a read goes back",
        ),
        pytest.param(
            Story().transfer(1, 2, move(1, 1, 2, 4), UNKNOWN).read(2, 3, a1=(6, 1), a2=(14, 1)).read(4, 5),
            "circle",
            id="an unknown transfer was seen and is gone",
        ),
        pytest.param(
            Story().transfer(1, 2, move(1, 1, 2, 4), FAILED).read(3, 4, a1=(6, 1), a2=(14, 1)),
            "that has failed",
            id="rolled back, yet there",
        ),
        pytest.param(
            Story().transfer(1, 4, move(1, 1, 2, 4)).transfer(2, 3, move(2, 1, 2, 5)),
            "the same state",
            id="lost update",
        ),
        pytest.param(
            Story()
            .transfer(1, 2, move(1, 1, 2, 4))
            .transfer(3, 4, move(2, 1, 3, 1, (6, 1), (10, 0)))
            .read(5, 6, a1=(5, 2), a2=(10, 0), a3=(11, 2)),
            "total",
            id="half a transfer is lost",
        ),
        pytest.param(
            Story()
            .transfer(1, 9, move(1, 1, 2, 0))
            .transfer(2, 8, move(2, 3, 2, 0, (10, 0), (10, 1)))
            .read(3, 4, a2=(10, 2), a3=(10, 2)),
            "circle",
            id="a read sees the second half of history only",
        ),
        pytest.param(Story().read(1, 2, a1=(10, 7)), "nobody made", id="from nowhere"),
        pytest.param(
            Story().read(1, 2, a1=(6, 1), a2=(14, 1)).transfer(3, 4, move(1, 1, 2, 4)), "circle", id="from the future"
        ),
        pytest.param(
            Story().transfer(1, 2, move(1, 1, 2, 4, (11, 0), (10, 0))), "had 11", id="a transfer that saw what was not"
        ),
    ],
)
def test_incorrect_transfers_are_found(story: Story, words: str) -> None:
    problems = story.problems()
    assert any(words in problem for problem in problems), problems
    assert all(problem.startswith("bank: ") for problem in problems)


def test_missing_account_is_found() -> None:
    story = Story().read(1, 2)
    del story.history.operations[-1].result[3]
    assert "the accounts are [1, 2]" in story.problems()[0]


def real_history(rng: Random, count: int) -> History:
    """Return a history of a correct bank; some operations get no answer."""
    story = Story()
    history, states, running = story.history, dict(FIRST), list[Operation]()
    while len(history.operations) < count:
        if len(running) < 5 and rng.random() < 0.6:
            if rng.random() < 0.5:
                running.append(history.invoke("1", "bank", "read"))
            else:
                source, target = rng.sample(sorted(OPENING), 2)
                transfer = Transfer(len(history.operations), source, target)
                running.append(history.invoke("1", "bank", "transfer", None, transfer))
        elif running:
            operation = running.pop(rng.randrange(len(running)))
            if operation.kind == "read":
                history.ok(operation, dict(states))
                continue
            transfer = operation.value
            transfer.found = {account: states[account] for account in (transfer.source, transfer.target)}
            transfer.amount = min(rng.randint(1, 5), states[transfer.source].balance)
            states |= {account: transfer.left(account) for account in transfer.found} if rng.random() < 0.8 else {}
            if states[transfer.source].mark == transfer.mark and rng.random() < 0.8:
                history.ok(operation)
            else:
                history.unknown(operation)
    return history


def test_generated_banks_have_no_violations() -> None:
    rng = Random(1)
    for _ in range(30):
        assert bank.check(real_history(rng, 150)) == []


def test_stale_read_is_found() -> None:
    rng, found = Random(2), 0
    for _ in range(30):
        history = real_history(rng, 100)
        reads = [each for each in history.operations if each.kind == "read" and each.is_ok]
        reads[-1].result = reads[len(reads) // 2].result
        found += bool(bank.check(history))
    assert found == 30
