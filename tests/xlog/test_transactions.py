"""Transactions are grouped as by a real receiver, and marked as by a real writer."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.iproto.constants import GROUP_LOCAL, Flag, RequestType
from flowstone.iproto.row import Row, decode_row
from flowstone.xlog.transactions import (
    Grouping,
    LogTransaction,
    TornTransaction,
    TransactionError,
    group,
    make_transaction,
)

SYNC = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value


def insert(lsn: int, replica_id: int = 1) -> Row:
    return Row(RequestType.INSERT, replica_id=replica_id, lsn=lsn, timestamp=1.5, body=b"\x81\x10\x07")


def local(lsn: int) -> Row:
    return Row(RequestType.INSERT, group_id=GROUP_LOCAL, lsn=lsn, timestamp=1.5, body=b"\x81\x10\x07")


def read_back(transaction: LogTransaction) -> list[Row]:
    return [decode_row(row.encode()) for row in transaction.rows]


def test_single_row_has_neither_tsn_nor_commit_on_disk() -> None:
    (row,) = make_transaction([insert(5)]).rows
    assert row.encode() == bytes.fromhex("840002020103 0504cb3ff8000000000000 811007".replace(" ", ""))


def test_rows_of_a_transaction_share_the_first_lsn_and_the_last_commits() -> None:
    transaction = make_transaction([insert(5), insert(6), insert(7)])
    assert [(row.tsn, row.flags) for row in transaction.rows] == [(5, 0), (5, 0), (5, 1)]
    assert [(row.tsn, row.flags) for row in read_back(transaction)] == [(5, 0), (5, 0), (5, 1)]
    assert (transaction.replica_id, transaction.lsn, transaction.tsn) == (1, 7, 5)


def test_tsn_difference_of_a_leading_local_row_wraps_around_zero() -> None:
    # The recorded 2.6 log has this transaction at byte 904, with a NOP as its last row.
    transaction = make_transaction([local(4), insert(28), local(5), insert(29)])
    assert b"\x08\xcf" + (18446744073709551592).to_bytes(8, "big") in transaction.rows[0].encode()
    assert b"\x08\xcf" + (18446744073709551593).to_bytes(8, "big") in transaction.rows[2].encode()
    assert [row.tsn for row in read_back(transaction)] == [28, 28, 28, 28]
    assert (transaction.replica_id, transaction.lsn, transaction.is_local) == (1, 29, False)


def test_local_transaction_has_the_lsn_of_its_first_row_as_tsn() -> None:
    transaction = make_transaction([local(8), local(9)])
    assert (transaction.is_local, transaction.replica_id, transaction.tsn, transaction.lsn) == (True, 0, 8, 9)


def test_last_local_row_whose_lsn_equals_the_tsn_belongs_to_its_transaction() -> None:
    # Real writers also omit the TSN here; the LSN that replaces it is equal.
    transaction = make_transaction([insert(5), local(5)])
    assert b"\x08" not in transaction.rows[1].encode()[:6]
    assert next(group(read_back(transaction))).rows[1].tsn == 5


@pytest.mark.parametrize(("count", "on_disk"), [(1, 6), (3, 7)])
def test_only_the_last_row_has_limbo_flags(count: int, on_disk: int) -> None:
    transaction = make_transaction([insert(lsn) for lsn in range(1, count + 1)], flags=SYNC)
    assert [row.flags for row in transaction.rows] == [0] * (count - 1) + [7]
    assert transaction.rows[-1].encode().endswith(bytes((9, on_disk)) + b"\x81\x10\x07")
    assert transaction.flags == 7


def test_valid_rows_keep_their_encoding() -> None:
    rows = read_back(make_transaction([insert(1), insert(2)]))
    kept = make_transaction(rows)
    assert all(ours is theirs for ours, theirs in zip(kept.rows, rows, strict=True))
    alone = make_transaction(rows[:1])
    assert alone.rows[0].encode() == insert(1).encode()


@pytest.mark.parametrize(
    ("rows", "flags", "word"),
    [
        ([], 0, "has no rows"),
        ([insert(0)], 0, "has no LSN"),
        ([insert(1)], 8, "unknown row flags"),
        ([insert(1), Row(RequestType.RAFT_CONFIRM, replica_id=1, lsn=2)], 0, "RAFT_CONFIRM .* cannot share"),
    ],
)
def test_invalid_transactions_are_rejected(rows: Sequence[Row], flags: int, word: str) -> None:
    with pytest.raises(LocalProtocolError, match=word):
        make_transaction(rows, flags)


@given(st.lists(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=5), max_size=20))
def test_written_transactions_are_grouped_again(origins: list[list[int]]) -> None:
    vclock = [0, 100, 2**40]
    made = []
    for transaction in origins:
        writer = max(transaction)
        rows = []
        for origin in transaction:
            origin = origin and writer
            vclock[origin] += 1
            rows.append(insert(vclock[origin], origin) if origin else local(vclock[0]))
        made.append(make_transaction(rows))
    found = list(group(row for transaction in made for row in read_back(transaction)))
    assert [[row.encode() for row in t.rows] for t in found] == [[row.encode() for row in t.rows] for t in made]
    assert [(t.replica_id, t.lsn, t.tsn, t.is_local) for t in found] == [
        (t.replica_id, t.lsn, t.tsn, t.is_local) for t in made
    ]


def row_of(lsn: int, tsn: int, flags: int, type_: int = RequestType.INSERT, replica_id: int = 1) -> Row:
    return Row(type_, replica_id=replica_id, lsn=lsn, tsn=tsn, flags=flags)


@pytest.mark.parametrize(
    ("rows", "lsn", "word"),
    [
        ([row_of(1, 1, 0), row_of(2, 2, 0)], 2, "belongs to transaction 2, but transaction 1 has not ended"),
        ([row_of(1, 1, 0), row_of(2, 2, 1)], 2, "has not ended"),
        ([row_of(1, 1, 0), row_of(2, 1, 1, RequestType.RAFT_CONFIRM)], 2, "RAFT_CONFIRM is inside"),
        ([row_of(1, 1, 0, RequestType.RAFT_PROMOTE)], 1, "RAFT_PROMOTE is inside"),
        ([row_of(3, 2, 0), row_of(4, 2, 1)], 3, "first global row of a transaction with TSN 2"),
        ([row_of(3, 2, 1)], 3, "with TSN 2"),
        ([row_of(1, 1, 1, replica_id=32)], 1, "replica id above 31"),
    ],
)
def test_error_has_the_lsn_of_the_row_that_breaks_a_transaction(rows: list[Row], lsn: int, word: str) -> None:
    with pytest.raises(TransactionError, match=word) as caught:
        list(group(rows))
    assert caught.value.lsn == lsn
    assert not isinstance(caught.value, TornTransaction)


def test_unfinished_transaction_is_reported_after_the_complete_ones_and_never_yielded() -> None:
    transactions = group([row_of(1, 1, 1), row_of(2, 2, 0), row_of(3, 2, 0)])
    assert next(transactions).lsn == 1
    with pytest.raises(TornTransaction, match=r"LSN 2 .* ends after 2 rows without a commit") as caught:
        next(transactions)
    assert [row.lsn for row in caught.value.rows] == [2, 3]


def test_control_row_is_a_transaction_of_its_own() -> None:
    rows = [row_of(1, 1, 1), row_of(2, 2, 1, RequestType.RAFT_CONFIRM), row_of(3, 3, 1)]
    assert [transaction.lsn for transaction in group(rows)] == [1, 2, 3]


def test_grouping_exposes_pending_rows() -> None:
    grouping = Grouping()
    assert grouping.push(row_of(1, 1, 0)) is None
    assert [row.lsn for row in grouping.pending] == [1]
    ended = grouping.push(row_of(2, 1, 1))
    assert ended is not None
    assert ended.lsn == 2
    assert not grouping.pending


def test_errors_can_be_pickled() -> None:
    error = TornTransaction((row_of(2, 2, 0),))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
