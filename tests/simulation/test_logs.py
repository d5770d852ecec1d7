"""Logs read without a node: the outcome of each transaction, and the effect of rows on spaces."""

from __future__ import annotations

import msgpack
import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.row import Row
from flowstone.xlog.transactions import LogTransaction
from tests.simulation.logs import (
    CONFIRM,
    DEMOTE,
    NOP,
    PROMOTE,
    ROLLBACK,
    WAIT_ACK,
    WAIT_SYNC,
    NodeLog,
    Record,
    decide,
)
from tests.simulation.replay import Change, Replay, replayed

SYNC_SPACE, PLAIN_SPACE = 512, 513


def put(lsn: int, *fields: object, flags: int = 0, replica_id: int = 1, space: int = SYNC_SPACE) -> Record:
    body = msgpack.packb({Key.SPACE_ID.value: space, Key.TUPLE.value: fields or (lsn,)})
    return record(Row(RequestType.REPLACE, replica_id, lsn=lsn, tsn=lsn, flags=1 | flags, body=body))


def record(*rows: Row) -> Record:
    return Record(LogTransaction(rows))


def verdict(kind: int, lsn: int, about: int, *, owner: int = 1, term: int = 0, replica_id: int = 1) -> Record:
    body = {Key.REPLICA_ID.value: owner, Key.LSN.value: about}
    if term:
        body[Key.TERM.value] = term
    return record(Row(kind, replica_id, lsn=lsn, tsn=lsn, body=msgpack.packb(body)))


def decided(*records: Record, synchronous: frozenset[int] | None = None) -> list[bool | None]:
    decide(list(records), synchronous)
    return [each.is_kept for each in records]


SYNC = WAIT_SYNC | WAIT_ACK


def test_confirm_keeps_all_up_to_its_lsn_and_asynchronous_rows_after_it() -> None:
    waiting = put(1, flags=SYNC), put(2, flags=SYNC), put(3, flags=WAIT_SYNC), put(4, flags=SYNC)
    assert decided(*waiting, verdict(CONFIRM, 5, 2)) == [True, True, True, None, True]


def test_rollback_withdraws_all_from_its_lsn_on() -> None:
    waiting = put(1, flags=SYNC), put(2, flags=SYNC), put(3, flags=WAIT_SYNC)
    assert decided(*waiting, verdict(ROLLBACK, 4, 2)) == [None, False, False, True]


@pytest.mark.parametrize("kind", [PROMOTE, DEMOTE])
def test_transfer_decides_all_pending_transactions(kind: int) -> None:
    waiting = put(1, flags=SYNC), put(2, flags=SYNC)
    assert decided(*waiting, verdict(kind, 1, 1, term=2, replica_id=2)) == [True, False, True]


def test_transfer_from_another_owner_keeps_nothing() -> None:
    assert decided(put(1, flags=SYNC), verdict(PROMOTE, 1, 9, owner=3, term=2, replica_id=2)) == [False, True]


def test_transfer_with_an_old_term_decides_nothing() -> None:
    first = verdict(PROMOTE, 1, 0, owner=0, term=5)
    stale = verdict(PROMOTE, 1, 9, term=4, replica_id=2)
    assert decided(first, put(2, flags=SYNC), stale) == [True, None, True]


def test_verdict_on_another_owner_decides_nothing() -> None:
    verdicts = verdict(CONFIRM, 2, 9, owner=2), verdict(ROLLBACK, 3, 1, owner=2)
    assert decided(put(1, flags=SYNC), *verdicts) == [None, True, True]


def test_asynchronous_transaction_is_kept_at_once() -> None:
    assert decided(put(1, flags=SYNC), put(1, replica_id=2), verdict(ROLLBACK, 2, 1)) == [False, True, True]


def test_rows_without_flags_are_synchronous_by_space_and_block_later_rows() -> None:
    records = put(1), put(2, space=PLAIN_SPACE), verdict(ROLLBACK, 3, 1), put(4, space=PLAIN_SPACE)
    assert decided(*records, synchronous=frozenset({SYNC_SPACE})) == [False, False, True, True]


def test_nop_is_kept_at_once() -> None:
    assert decided(record(Row(NOP, 1, lsn=1, tsn=1, flags=1 | SYNC))) == [True]


def test_replay_applies_rows() -> None:
    def row(kind: RequestType, **body: object) -> Row:
        return Row(kind, 1, body=msgpack.packb({Key[key].value: value for key, value in body.items()}))

    replay = Replay()
    put_row = row(RequestType.INSERT, SPACE_ID=600, TUPLE=(1, 5, ["a"]))
    replay.apply([put_row, row(RequestType.REPLACE, SPACE_ID=600, TUPLE=(2,))])
    update = row(RequestType.UPDATE, SPACE_ID=600, KEY=(1,), TUPLE=[("+", 1, 2), ("!", 3, "z"), ("!", "[2][0]", "b")])
    replay.apply([update, row(RequestType.DELETE, SPACE_ID=600, KEY=(2,))])
    assert replay.spaces[600] == {(1,): [1, 7, ["b", "a"], "z"]}
    subtract = row(RequestType.UPDATE, SPACE_ID=600, KEY=(1,), TUPLE=[("-", 1, 9), ("#", 2, 2)])
    assert replay.change(subtract) == Change(600, [1, 7, ["b", "a"], "z"], [1, -2])
    assert replay.change(row(RequestType.UPDATE, SPACE_ID=600, KEY=(2,), TUPLE=[("=", 1, 9)])) is None
    assert replay.change(row(RequestType.DELETE, SPACE_ID=600, KEY=(2,))) is None
    replay.apply([row(RequestType.REPLACE, SPACE_ID=330, TUPLE=(600, 1))])
    assert 600 not in replay.spaces
    with pytest.raises(NotImplementedError, match="unsupported row type in a run: 9"):
        replay.apply([row(RequestType.UPSERT, SPACE_ID=600, TUPLE=(3, 1), OPS=[("-", 1, 4)])])


def test_replay_skips_withdrawn_rows_and_rows_in_the_snapshot() -> None:
    snapshot = [put(0, 1, "old").rows[0]]
    records = [put(1, 1, "older"), put(2, 2, "new"), put(3, 3, "gone", flags=SYNC), verdict(ROLLBACK, 4, 3)]
    decide(records, None)
    log = NodeLog("a", snapshot, {1: 1}, records)
    assert replayed(log)[SYNC_SPACE] == {(1,): [1, "old"], (2,): [2, "new"]}
