"""Rows may be lost only with expelled members that had the only copies."""

from __future__ import annotations

import pytest

from flowstone.iproto.row import Row
from tests.simulation.final_history import FinalHistory
from tests.simulation.logs import CONFIRM, NOP, PROMOTE, NodeLog, Record, decide, without_lost_verdicts
from tests.simulation.lost_rows import wrongly_lost
from tests.simulation.test_logs import SYNC, put, record, verdict

LOST = ((1, 2, 4),)
"""The CONFIRM of row 1, and two transactions."""


def log(name: str, *records: Record, replica_id: int, start: dict[int, int] | None = None) -> NodeLog:
    decide(list(records), None)
    return NodeLog(name, [], start or {}, list(records), replica_id)


def gone(*records: Record, replica_id: int = 1) -> NodeLog:
    """Return the log of a leader that was isolated when it had confirmed its first transaction."""
    begin = put(1, flags=SYNC), verdict(CONFIRM, 2, 1), put(3, flags=SYNC), put(4, flags=SYNC)
    return log("c", *begin, *records, replica_id=replica_id)


def left(*records: Record, start: dict[int, int] | None = None) -> NodeLog:
    """Return the log of a member whose PROMOTE confirmed the same transaction."""
    begin = put(1, flags=SYNC), verdict(PROMOTE, 1, 1, term=2, replica_id=2)
    return log("a", *begin, *records, replica_id=2, start=start)


def check(logs: list[NodeLog], departed: list[NodeLog]) -> list[str]:
    history = FinalHistory(logs, without_lost_verdicts(departed, [*logs, *departed]))
    return wrongly_lost(LOST, logs, departed, history)


def test_rows_that_only_an_expelled_member_had_may_be_lost() -> None:
    assert check([left()], [gone()]) == []
    assert check([left()], [gone(), log("x", put(3, flags=SYNC), replica_id=0)]) == []


@pytest.mark.parametrize(
    ("logs", "departed", "words"),
    [
        ([left(put(3, flags=SYNC))], [gone()], ["a had (1, 3)"]),
        ([left(record(Row(NOP, 1, lsn=4, tsn=4)))], [gone()], ["a had (1, 4)"]),
        ([left(start={1: 3})], [gone()], ["a had (1, 2)", "a had (1, 3)"]),
        ([left()], [gone(verdict(CONFIRM, 5, 3))], ["(1, 3) was a fact"]),
        ([left(), gone()], [], [f"no member that has gone has written {(1, lsn)}" for lsn in (2, 3, 4)]),
        ([left()], [gone(replica_id=3)], [f"no member that has gone has written {(1, lsn)}" for lsn in (2, 3, 4)]),
    ],
)
def test_rows_that_others_had_or_that_were_committed_may_not_be_lost(
    logs: list[NodeLog], departed: list[NodeLog], words: list[str]
) -> None:
    assert check(logs, departed) == words


def test_asynchronous_rows_are_committed_when_written() -> None:
    lone = log("c", put(2), verdict(CONFIRM, 3, 1), put(4, flags=SYNC), replica_id=1)
    assert check([left()], [lone]) == ["(1, 2) was a fact"]


def test_rows_of_a_member_with_a_reused_id_are_not_copies() -> None:
    heir = log("n", put(2, 7), replica_id=1, start={1: 1, 2: 1})
    later = log("m", replica_id=4, start={1: 9, 2: 1})
    assert check([left(put(2, 7)), heir, later], [gone()]) == []
