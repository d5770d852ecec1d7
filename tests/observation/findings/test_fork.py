"""The fork of two histories is found by their rows, and reported with the exclusive rows of each side."""

from __future__ import annotations

from flowstone.box.schema import SchemaTracker
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.observation.findings.fork import (
    SHOWN_MAX,
    Alone,
    Fork,
    are_used_twice,
    common_point,
    digests,
    transaction_text,
    transactions_after,
)
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import LogTransaction, make_transaction

SCHEMA = SchemaTracker().schema


def _insert(replica_id: int, lsn: int, value: int, *, at: float = 1.0) -> LogTransaction:
    body = pack({Key.SPACE_ID.value: 512, Key.TUPLE.value: [value]})
    return make_transaction([Row(RequestType.INSERT, replica_id, 0, lsn, at, lsn, 0, 0, 0, body)])


def _nop(replica_id: int, lsn: int) -> LogTransaction:
    return make_transaction([Row(RequestType.NOP, replica_id, 0, lsn, 1.0, lsn, 0, 0, 0, b"")])


def _promote(replica_id: int, lsn: int) -> LogTransaction:
    body = Promote(1, 2, 3).encode()
    return make_transaction([Row(RequestType.RAFT_PROMOTE, replica_id, 0, lsn, 1.0, lsn, 0, 0, 0, body)])


COMMON = [_insert(1, 1, 10), _insert(1, 2, 20)]


def test_fork_is_the_smaller_position_of_each_origin() -> None:
    ours, theirs = [*COMMON, _insert(1, 3, 30)], [*COMMON, _promote(2, 1)]
    assert common_point(VClock({1: 3}), VClock({1: 2, 2: 1}), digests(ours), digests(theirs)) == VClock({1: 2})
    assert not are_used_twice(digests(ours), digests(theirs))


def test_timestamps_of_rows_may_differ() -> None:
    ours, theirs = [_insert(1, 1, 10, at=1.0)], [_insert(1, 1, 10, at=2.0)]
    assert common_point(VClock({1: 1}), VClock({1: 1}), digests(ours), digests(theirs)) == VClock({1: 1})


def test_conflicting_lsn_moves_the_fork_before_it() -> None:
    ours, theirs = [*COMMON, _insert(1, 3, 30)], [*COMMON, _insert(1, 3, 31), _insert(1, 4, 40)]
    assert common_point(VClock({1: 3}), VClock({1: 4}), digests(ours), digests(theirs)) == VClock({1: 2})
    assert are_used_twice(digests(ours), digests(theirs))


def test_dropped_row_moves_the_fork_and_is_not_a_second_row() -> None:
    ours, theirs = [*COMMON, _insert(1, 3, 30)], [*COMMON, _nop(1, 3)]
    assert common_point(VClock({1: 3}), VClock({1: 3}), digests(ours), digests(theirs)) == VClock({1: 2})
    assert not are_used_twice(digests(ours), digests(theirs))


def test_rows_of_both_sides_are_listed() -> None:
    ours, theirs = [*COMMON, _insert(1, 3, 30)], [*COMMON, _promote(2, 1), _insert(2, 2, 50)]
    point = VClock({1: 2})
    fork = Fork(
        point,
        (Alone("a", transactions_after(ours, point), SCHEMA), Alone("b", transactions_after(theirs, point), SCHEMA)),
    )
    assert fork.is_fork
    assert fork.sentence() == (
        "both histories are the same up to {1: 2}; only a has 1 row, beginning with 1:3 INSERT 512 [30]; only b has "
        "2 rows, beginning with 2:1 PROMOTE replica_id: 1, lsn: 2, term: 3"
    )
    assert fork.evidence()[-1] == "b: 2:2 INSERT 512 [50]"


def test_side_without_own_rows_is_not_a_fork() -> None:
    point = VClock({1: 2})
    fork = Fork(point, (Alone("a", (), SCHEMA), Alone("b", transactions_after([_insert(1, 3, 1)], point), SCHEMA)))
    assert not fork.is_fork


def test_only_the_first_transactions_and_the_verdicts_are_shown() -> None:
    many = tuple(_insert(1, lsn, lsn) for lsn in range(1, 50))
    lines = Alone("a", (*many, _promote(2, 1)), SCHEMA).lines()
    assert len(lines) == SHOWN_MAX + 2
    assert lines[-2].startswith("a: 2:1 PROMOTE")
    assert lines[-1] == f"a: and {50 - SHOWN_MAX - 1} more transactions"


def test_transaction_states_its_number_of_rows() -> None:
    rows = [_insert(1, lsn, lsn).rows[0] for lsn in (1, 2, 3)]
    assert transaction_text(make_transaction(rows), SCHEMA) == "1:3 INSERT 512 [1] and 2 more rows"
