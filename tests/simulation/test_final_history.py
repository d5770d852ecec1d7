"""Changes received by followers are compared with the outcomes: each kind of error is found."""

from __future__ import annotations

import msgpack
import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from tests.simulation.final_history import FinalHistory, Heard, OnDone, contents_of
from tests.simulation.logs import CONFIRM, PROMOTE, ROLLBACK, NodeLog, Record, decide
from tests.simulation.test_logs import SYNC, SYNC_SPACE, put, record, verdict


def log(name: str, *records: Record, begin: int = 0) -> NodeLog:
    decide(list(records), None)
    return NodeLog(name, [], {1: begin} if begin else {}, list(records))


def raw(*fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


HISTORY = FinalHistory(
    [
        log("b", put(2, 7, "two"), put(5, 9, "five"), begin=1),
        log("a", put(1, 7, "one"), put(2, 7, "two"), put(3, 8, "gone", flags=SYNC), verdict(ROLLBACK, 4, 3)),
    ]
)
"""Keys 7 and 9; 8 was rolled back. No log has everything."""

ONE, TWO = OnDone((1, 1), None, raw(7, "one")), OnDone((1, 2), raw(7, "one"), raw(7, "two"))
THREE, FIVE = OnDone((1, 3), None, raw(8, "gone")), OnDone((1, 5), None, raw(9, "five"))
ALL = {SYNC_SPACE: {(7,): [7, "two"], (9,): [9, "five"]}}


def heard(*told: OnDone) -> Heard:
    return Heard("x", VClock(), {}, list(told), end=VClock({1: 5}), end_contents=ALL)


def test_prefix_of_the_history_is_accepted() -> None:
    assert heard(ONE, TWO, FIVE).check(HISTORY) == []
    assert Heard("x", VClock(), {}, [ONE, TWO]).check(HISTORY) == []


def test_follower_that_starts_later_gets_the_rest() -> None:
    start = {SYNC_SPACE: {(7,): [7, "two"]}}
    assert Heard("x", VClock({1: 4}), start, [FIVE]).check(HISTORY) == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (heard(ONE, TWO, THREE, FIVE), ["x was told (1, 3), which was rolled back"]),
        (heard(ONE, TWO, TWO, FIVE), ["x was told (1, 2) again, behind {1: 2}"]),
        (heard(TWO, ONE, FIVE), ["x was told (1, 1) again, behind {1: 2}"]),
        (heard(ONE, FIVE), ["x was not told [(1, 2)] and went on"]),
        (heard(ONE, TWO), ["x was not told [(1, 5)] and went on"]),
        (heard(ONE, TWO, FIVE, OnDone((1, 6), None, raw(1))), ["x was told (1, 6), which never happened"]),
        (
            heard(ONE, TWO._replace(new=raw(7, "else")), FIVE),
            ["x was told (1, 2) as [7, 'one'] → [7, 'else']: [7, 'one'] → [7, 'two']"],
        ),
        (
            heard(ONE, TWO._replace(old=None), FIVE),
            ["x was told (1, 2) as None → [7, 'two']: [7, 'one'] → [7, 'two']"],
        ),
        (Heard("x", VClock(), {}, [FIVE]), ["x was not told [(1, 1), (1, 2)] and went on"]),
    ],
)
def test_each_deviation_from_a_prefix_is_reported(what: Heard, words: list[str]) -> None:
    assert what.check(HISTORY) == words


FIRST, SECOND, NEXT_LEADERS = (
    OnDone((1, 1), None, raw(7, "one")),
    OnDone((1, 2), None, raw(8, "two")),
    OnDone((2, 1), None, raw(9, "three")),
)
LEADERS = FinalHistory([log("a", put(1, 7, "one"), put(2, 8, "two"), put(1, 9, "three", replica_id=2))])
"""Two members that write one after the other."""


@pytest.mark.parametrize("count", range(4))
def test_prefix_of_the_history_of_two_leaders_is_accepted(count: int) -> None:
    told = [FIRST, SECOND, NEXT_LEADERS][:count]
    assert Heard("x", VClock(), {}, told).check(LEADERS, has_one_order=True) == []


@pytest.mark.parametrize("told", [[FIRST, NEXT_LEADERS], [FIRST, NEXT_LEADERS, SECOND]])
def test_rows_of_two_leaders_in_the_wrong_order_are_reported(told: list[OnDone]) -> None:
    heard = Heard("x", VClock(), {}, told)
    assert heard.check(LEADERS, has_one_order=True) == ["x was told (2, 1) where (1, 2) was next"]
    assert heard.check(LEADERS) == [], "only possible if members write at the same time"


def test_follower_that_starts_later_gets_the_rows_of_two_leaders_in_order() -> None:
    start = {SYNC_SPACE: {(7,): [7, "one"]}}
    heard = Heard("x", VClock({1: 1}), start, [SECOND, NEXT_LEADERS])
    assert heard.check(LEADERS, has_one_order=True) == []


def test_changes_skipped_by_a_snapshot_may_be_missing() -> None:
    told = heard(ONE, FIVE)
    told.leaps.append((VClock({1: 1}), VClock({1: 4})))
    assert told.check(HISTORY) == []


def test_contents_are_compared_at_the_position() -> None:
    told = heard(ONE, TWO, FIVE)
    told.end = VClock({1: 6})  # with no other changes
    assert told.check(HISTORY) == []
    told.start_contents = {SYNC_SPACE: {(8,): [8, "gone"]}}
    assert "x began at {} with 1 wrong tuples" in told.check(HISTORY)[0]


def test_position_ahead_of_the_received_changes_is_reported() -> None:
    told = Heard("x", VClock(), {}, [ONE, TWO], end=VClock({1: 5}), end_contents={SYNC_SPACE: {(7,): [7, "two"]}})
    assert len(told.check(HISTORY)) == 2


def change(lsn: int, kind: RequestType, key: int, *operations: tuple[object, ...]) -> Record:
    body = {Key.SPACE_ID.value: SYNC_SPACE, Key.KEY.value: [key], Key.TUPLE.value: operations}
    return record(Row(kind, 1, lsn=lsn, tsn=lsn, flags=1, body=msgpack.packb(body)))


UPDATES = FinalHistory(
    [
        log(
            "a",
            put(1, 7, 1),
            change(2, RequestType.UPDATE, 7, ("+", 1, 4)),
            change(3, RequestType.UPDATE, 8, ("+", 1, 4)),
            change(4, RequestType.UPDATE, 7, ("+", 1, 0)),
            change(5, RequestType.DELETE, 8),
            change(6, RequestType.DELETE, 7),
        )
    ]
)
"""Key 8 never existed."""

TOLD = (
    OnDone((1, 1), None, raw(7, 1)),
    OnDone((1, 2), raw(7, 1), raw(7, 5)),
    OnDone((1, 4), raw(7, 5), raw(7, 5)),
    OnDone((1, 6), raw(7, 5), None),
)


def test_updates_and_deletions_without_effect_are_not_expected() -> None:
    assert Heard("x", VClock(), {}, list(TOLD), end=VClock({1: 6})).check(UPDATES) == []


@pytest.mark.parametrize("left_out", range(len(TOLD)))
def test_each_missing_change_is_found(left_out: int) -> None:
    told = [each for number, each in enumerate(TOLD) if number != left_out]
    expected = f"x was not told [{TOLD[left_out].position}] and went on"
    assert Heard("x", VClock(), {}, told, end=VClock({1: 6})).check(UPDATES) == [expected]


@pytest.mark.parametrize(
    ("number", "wrong", "words"),
    [
        (1, OnDone((1, 2), None, raw(7, 5)), "x was told (1, 2) as None → [7, 5]: [7, 1] → [7, 5]"),
        (1, OnDone((1, 2), raw(7, 1), raw(7, 4)), "x was told (1, 2) as [7, 1] → [7, 4]: [7, 1] → [7, 5]"),
        (2, OnDone((1, 4), raw(7, 5), raw(7, 5.0)), "x was told (1, 4) as [7, 5] → [7, 5.0]: [7, 5] → [7, 5]"),
        (3, OnDone((1, 6), None, None), "x was told (1, 6) as None → None: [7, 5] → None"),
    ],
)
def test_each_wrong_change_is_found(number: int, wrong: OnDone, words: str) -> None:
    told = [*TOLD[:number], wrong, *TOLD[number + 1 :]]
    assert Heard("x", VClock(), {}, told, end=VClock({1: 6})).check(UPDATES) == [words]


def test_change_by_a_row_without_effect_is_found() -> None:
    told = [*TOLD[:2], OnDone((1, 3), None, raw(8, 4)), *TOLD[2:]]
    found = Heard("x", VClock(), {}, told, end=VClock({1: 6})).check(UPDATES)
    assert found == ["x was told (1, 3), which changed nothing"]


def test_row_committed_in_any_log_is_committed() -> None:
    waiting = put(1, flags=SYNC)
    history = FinalHistory([log("a", waiting, verdict(CONFIRM, 2, 1)), log("b", verdict(PROMOTE, 1, 1, term=2))])
    assert list(history.rows) == [(1, 1), (1, 2)]
    assert not history.withdrawn


def test_log_of_a_former_member_provides_the_beginning() -> None:
    founder = log("a", put(1, 7, "one"), put(2, 8, "gone", flags=SYNC), verdict(ROLLBACK, 3, 2), put(4, 9, "four"))
    history = FinalHistory([log("n1", put(5, 9, "five"), begin=4)], [founder])
    assert list(history.rows) == [(1, 1), (1, 3), (1, 4), (1, 5)]
    assert list(history.withdrawn) == [(1, 2)]
    assert history.contents(VClock({1: 5})) == {SYNC_SPACE: {(7,): [7, "one"], (9,): [9, "five"]}}
    assert heard(OnDone((1, 2), None, raw(8, "gone"))).check(history)[0] == "x was told (1, 2), which was rolled back"


def test_pending_transaction_of_a_former_member_has_no_outcome() -> None:
    founder = log("a", put(1, 7, "one", flags=SYNC), put(2, 8, "two", flags=SYNC))
    history = FinalHistory(
        [log("b", put(1, 7, "one", flags=SYNC), verdict(PROMOTE, 1, 1, term=2, replica_id=2))], [founder]
    )
    assert list(history.rows) == [(1, 1), (2, 1)]
    assert not history.withdrawn
    told = Heard("x", VClock(), {}, [ONE, OnDone((1, 2), None, raw(8, "two"))])
    assert told.check(history) == ["x was told (1, 2), which never happened"]


@pytest.mark.parametrize("has_gone", [True, False])
def test_contradictory_logs_are_reported_and_remaining_nodes_prevail(has_gone: bool) -> None:
    alone = log("a", put(1, 7, "one", flags=SYNC), verdict(ROLLBACK, 2, 1))
    other = log("b", put(1, 7, "one", flags=SYNC), verdict(PROMOTE, 1, 1, term=2, replica_id=2))
    history = FinalHistory([other], [alone]) if has_gone else FinalHistory([other, alone])
    assert history.conflicts == ["(1, 1) is a fact by the log of b, and none by that of a"]
    assert (1, 1) in history.rows
    assert not history.withdrawn


def test_final_history_takes_the_outcome_from_others_if_a_node_joined_again_before_the_verdict() -> None:
    later = put(5, 9, "five")
    later.is_behind_gap = True
    rejoined = log("y", put(1, 7, "one", flags=SYNC), later)
    other = log("b", put(1, 7, "one", flags=SYNC), verdict(CONFIRM, 2, 1), put(5, 9, "five"))
    history = FinalHistory([rejoined, other])
    assert history.conflicts == []
    assert (1, 1) in history.rows


def test_contents_omit_system_spaces() -> None:
    assert contents_of([(280, [raw(1)]), (600, []), (601, [raw(1, "a")])]) == {601: {(1,): [1, "a"]}}
