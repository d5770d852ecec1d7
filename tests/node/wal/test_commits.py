"""Commits: a transaction's rows in the log as a real server writes them, or no effect at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.space import EngineSpace
from flowstone.box.engine.transaction import BoxTransaction, Statement
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from tests.box.spaces import box_with, definition, on
from tests.node.fault_disk import FaultDisk

UUID = "11111111-0000-4000-8000-000000000001"
PLAIN, LOCAL, TEMPORARY, SYNC = 512, 513, 514, 515


class Node:
    """A box, its journal on a disk that can fail, and the commits between them."""

    def __init__(
        self,
        mode: WalMode = WalMode.WRITE,
        vclock: dict[int, int] | None = None,
        dialect: Dialect = Dialect.V2_6,
    ) -> None:
        self.box: Box = box_with(
            definition(PLAIN, on("0:unsigned")),
            definition(LOCAL, on("0:unsigned"), flags={"group_id": 1}),
            definition(TEMPORARY, on("0:unsigned"), flags={"temporary": True}),
            definition(SYNC, on("0:unsigned"), flags={"is_sync": True}),
        )
        self.box.dialect = dialect
        self.disk = FaultDisk()
        outside = self.disk.outside()
        self.journal = Journal(
            outside, "data", instance_uuid=UUID, vclock=VClock(vclock or {}), replica_id=1, mode=mode
        )
        self.commits = Commits(self.box, self.journal, outside.clock)
        self.commits.queue.registered(1)

    def transaction(self, *rows: tuple[int, int]) -> BoxTransaction:
        """Return replaces of (space, key)."""
        transaction = self.box.begin()
        for space_id, key in rows:
            statements.replace(transaction, self.box.space(space_id), pack((key,)))
        return transaction

    def keys(self, space_id: int = PLAIN) -> list[int]:
        return [unpack(raw)[0] for raw in self.box.space(space_id).tuples()]

    def rows(self) -> list[Row]:
        disk = self.disk.outside().disk
        found: list[Row] = []
        for name in disk.list_directory("data"):
            with LogFile.open(disk, f"data/{name}") as log:
                for transaction in log.transactions():
                    found += transaction.rows
        return found


async def test_single_statement_writes_one_row() -> None:
    node = Node()
    await node.commits.commit(node.transaction((PLAIN, 7)))
    (row,) = node.rows()
    assert (row.type, row.replica_id, row.lsn, row.tsn, row.flags) == (RequestType.REPLACE, 1, 1, 1, Flag.COMMIT)
    assert row.body == pack({0x10: PLAIN, 0x21: (7,)})
    assert decode_row(row.raw) == row
    assert list(node.box.in_flight) == []


async def test_statements_of_a_transaction_share_its_tsn_and_the_last_has_the_flag() -> None:
    node = Node(vclock={1: 10})
    await node.commits.commit(node.transaction((PLAIN, 1), (PLAIN, 2), (PLAIN, 3)))
    assert [(row.lsn, row.tsn, row.is_commit) for row in node.rows()] == [
        (11, 11, False),
        (12, 11, False),
        (13, 11, True),
    ]
    assert len({row.timestamp for row in node.rows()}) == 1


async def test_rows_of_local_spaces_have_separate_lsns() -> None:
    node = Node(vclock={0: 4, 1: 10})
    await node.commits.commit(node.transaction((LOCAL, 1)))
    await node.commits.commit(node.transaction((PLAIN, 1)))
    assert [(row.replica_id, row.group_id, row.lsn) for row in node.rows()] == [(0, 1, 5), (1, 0, 11)]
    assert node.journal.vclock == VClock({0: 5, 1: 11})


async def test_a_mixed_transaction_ends_with_a_global_row_in_dialect_2_6() -> None:
    node = Node()
    await node.commits.commit(node.transaction((PLAIN, 1), (LOCAL, 1)))
    nop = RequestType.NOP
    assert [(row.type, row.group_id, row.lsn) for row in node.rows()] == [(3, 0, 1), (3, 1, 1), (nop, 0, 2)]
    assert [row.is_commit for row in node.rows()] == [False, False, True]


async def test_confirm_directly_follows_a_synchronous_transaction() -> None:
    """While the replica set is this one instance, which is its own quorum."""
    node = Node()
    await node.commits.commit(node.transaction((SYNC, 1), (PLAIN, 2)))
    rows = node.rows()
    assert [(row.type, row.lsn) for row in rows] == [(3, 1), (3, 2), (RequestType.RAFT_CONFIRM, 3)]
    assert unpack(rows[2].body) == {2: 1, 3: 2}


async def test_synchronous_transaction_is_rolled_back_if_the_queue_has_no_owner() -> None:
    node = Node(dialect=Dialect.V2_11)
    transaction = node.transaction((SYNC, 1))
    with pytest.raises(errors.SyncQueueUnclaimed):
        await node.commits.commit(transaction)
    assert node.keys(SYNC) == []
    assert list(node.box.in_flight) == []


async def test_changes_of_temporary_spaces_write_no_rows() -> None:
    node = Node()
    await node.commits.commit(node.transaction((TEMPORARY, 1)))
    await node.commits.commit(node.transaction((TEMPORARY, 2), (PLAIN, 2)))
    assert [row.body for row in node.rows()] == [pack({0x10: PLAIN, 0x21: (2,)})]
    assert node.keys(TEMPORARY) == [1, 2]


async def test_commits_of_one_turn_of_the_loop_share_a_write() -> None:
    node = Node()
    await node.commits.commit(node.transaction((PLAIN, 0)))
    before = node.disk.appends
    await asyncio.gather(*(node.commits.commit(node.transaction((PLAIN, key))) for key in range(1, 20)))
    assert node.disk.appends == before + 1
    assert [row.lsn for row in node.rows()] == list(range(1, 21))


@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_failed_write_rolls_back_all_pending_commits_and_the_next_may_succeed(mode: WalMode) -> None:
    node = Node(mode)
    await node.commits.commit(node.transaction((PLAIN, 1)))
    node.disk.room = 0
    waiting = [node.commits.commit(node.transaction((PLAIN, key), (PLAIN, 1))) for key in (2, 3, 4)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in results] == [errors.WalIo] * 3
    assert [str(error.message) for error in results if isinstance(error, errors.WalIo)] == [
        "Failed to write to disk"
    ] * 3
    assert all("cannot write at byte" in str(error) for error in results)  # with the disk's error, for the operator
    assert node.keys() == [1]
    assert list(node.box.in_flight) == []
    node.disk.room = None
    await node.commits.commit(node.transaction((PLAIN, 5)))
    assert node.keys() == [1, 5]
    assert [(row.lsn, row.body) for row in node.rows()] == [
        (lsn, pack({0x10: PLAIN, 0x21: (key,)})) for lsn, key in ((1, 1), (2, 5))
    ]


async def test_pending_commits_are_rolled_back_newest_first() -> None:
    node, told = Node(), []
    for note in ("a", "b", "c"):
        transaction = node.box.begin()
        statements.replace(transaction, node.box.space(PLAIN), pack((1, note)))

        def done(error: FlowstoneError | None, note: str = note) -> None:
            assert error is not None
            told.append((note, [unpack(raw)[1] for raw in node.box.space(PLAIN).tuples()]))

        node.commits.submit(transaction, done)
    assert len(node.box.in_flight) == 3
    node.disk.room = 0
    await node.journal.drain()
    assert told == [("c", ["b"]), ("b", ["a"]), ("a", [])]


async def test_transaction_too_large_for_the_log_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    monkeypatch.setattr("flowstone.node.wal.journal.TRANSACTION_SIZE_MAX", 50)
    with pytest.raises(errors.WalIo):
        await node.commits.commit(node.transaction((PLAIN, 1), (PLAIN, 2), (PLAIN, 3)))
    assert node.keys() == []
    assert list(node.box.in_flight) == []
    await node.commits.commit(node.transaction((PLAIN, 4)))
    assert [row.lsn for row in node.rows()] == [1]


async def test_cancelled_commit_is_not_rolled_back() -> None:
    node = Node()
    task = asyncio.ensure_future(node.commits.commit(node.transaction((PLAIN, 1))))
    await asyncio.sleep(0)
    task.cancel()
    await node.journal.drain()
    assert task.cancelled() or task.cancelling()
    assert node.keys() == [1]
    assert [row.lsn for row in node.rows()] == [1]


async def test_listeners_are_notified_of_commits_and_rollbacks() -> None:
    node = Node()
    told: list[Any] = []
    node.commits.on_commit.append(lambda done: told.append(("commit", len(done), node.journal.written_vclock)))
    node.commits.on_rollback.append(lambda done: told.append(("rollback", len(done), node.keys())))
    await node.commits.commit(node.transaction((PLAIN, 1), (PLAIN, 2)))
    node.disk.room = 0
    with pytest.raises(errors.WalIo):
        await node.commits.commit(node.transaction((PLAIN, 3)))
    assert told == [("commit", 2, VClock({1: 2})), ("rollback", 1, [1, 2])]


BODIES = st.sampled_from([pack(body) for body in ({}, {0x10: 512, 0x21: (1, "x" * 300)})])


@given(
    st.sampled_from([edge + more for edge in (0, 127, 255, 65535, 2**32 - 1, 2**62) for more in (0, 1)]),
    st.sampled_from((1, 2, 31)),
    st.sampled_from((2, 3, 4, 5, 9)),
    BODIES,
)
def test_row_of_a_single_statement_equals_that_of_the_plain_encoder(
    lsn: int, replica_id: int, type: int, body: bytes
) -> None:
    node = Node(WalMode.NONE, vclock={replica_id: lsn})
    node.journal.replica_id = replica_id
    space: EngineSpace = node.box.space(PLAIN)
    transaction = node.box.begin()
    transaction.statements.append(Statement(type, space, body))
    written: list[Any] = []
    node.journal.on_written.append(lambda rows, _: written.append(rows))
    node.commits.submit(transaction, lambda error: None)
    node.journal.flush()
    (raw,) = written
    row = decode_row(raw)
    assert raw == encode_header(Row(type, replica_id, 0, lsn + 1, row.timestamp)) + body
