"""A chaos run judges the data again after all members were killed, here with fake sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.jobs import bucket
from tests.chaos.run import Report, Run
from tests.chaos.seats import LISTS, NAMES, OPTIONS, REGISTERS, SETS, Seats
from tests.chaos.test_verdict import GOOD, Dummy


class Forgetful(Dummy):
    """A member whose data changes when it is killed."""

    def __init__(self, name: str, before: dict[int, list[tuple[Any, ...]]], after: dict[int, list[tuple[Any, ...]]]):
        super().__init__(name, before)
        self._after = after

    def kill(self) -> None:
        self._rows = self._after


@contextmanager
def calm(members: Sequence[Dummy]) -> Iterator[None]:
    yield


def judged(after: dict[int, list[tuple[Any, ...]]]) -> list[str]:
    """Return the verdict of a run on a set that has `after` when all were killed."""
    members = [Forgetful(name, GOOD, after) for name in "abc"]
    seats = SimpleNamespace(
        members=members,
        nodes=members,
        master=None,
        has_elections=True,
        synchronous=(SETS, REGISTERS, LISTS),
        asynchronous=(),
        calm=calm,
        start=lambda *_: None,
        assert_equal=lambda: None,
    )
    report = Report("nobody", 1)
    run = Run(cast("Seats", seats), report)
    history = run._clients.history
    history.ok(history.invoke("1", NAMES[SETS], "add", bucket(1), 1))
    for value in (1, 2):
        history.ok(history.invoke("2", NAMES[REGISTERS], "write", 0, value))
        history.ok(history.invoke("3", NAMES[LISTS], "append", 0, value))
    run._judge("before")
    assert report.violations == []
    run._end_all_at_once()
    run._judge("after")
    return report.violations


def test_kept_data_is_not_a_violation() -> None:
    assert judged(GOOD) == []


def test_data_lost_by_all_members_is_a_violation() -> None:
    assert "after: 3 acknowledged rows are not there" in judged(GOOD | {SETS: []})
    assert any(each.startswith("after: registers 0: no order") for each in judged(GOOD | {REGISTERS: [(0, 1)]}))
    assert any(each.startswith("after: lists 0: ") for each in judged(GOOD | {LISTS: [(0, 1)]}))


def test_isolated_leader_steps_down_before_it_rolls_back() -> None:
    assert OPTIONS["replication_synchro_timeout"] > 4 * OPTIONS["replication_timeout"]
