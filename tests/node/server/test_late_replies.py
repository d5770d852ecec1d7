"""Writes that wait for a verdict have the same outcome in bulk and one by one, and delay no other client."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import pytest

from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import ADMIN
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.node.wal.journal import WalMode
from flowstone.replication.limbo.control_rows import Promote, decode_control
from flowstone.replication.limbo.tenures import Tenures
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from tests.box.spaces import definition, on, put
from tests.node.server.test_executor import (
    DELETE,
    INSERT,
    NUMBERS,
    REPLACE,
    SELECT,
    Served,
    in_bulk,
    numbered,
    plainly,
    statement,
)

SYNCHRONOUS = 600
WAYS = pytest.mark.parametrize("way", [in_bulk, plainly], ids=["bulk", "plain"])
SYNC_QUORUM_TIMEOUT, SYNC_ROLLBACK, WAL_IO, UNCLAIMED, FULL = 216, 217, 40, 227, 289


def served(dialect: Dialect = Dialect.V2_6, quorum: int = 2, mode: WalMode = WalMode.WRITE) -> Served:
    made = Served((ADMIN, ADMIN), mode)
    put(made.box, definition(SYNCHRONOUS, on("0:unsigned"), flags={"is_sync": True}))
    made.box.dialect = dialect
    queue = made.commits.queue
    queue.configure(quorum=quorum)
    queue.start(1, Promote(1, 0, 2) if dialect is Dialect.V2_11 else Promote(0, 0, 0), Tenures({}, (), {}), ())
    if dialect is Dialect.V2_11:
        queue.limbo._is_frozen_until_promotion = False
    return made


def kept(made: Served) -> list[Any]:
    return sorted(made.box.space(SYNCHRONOUS).tuples())


def answers(made: Served) -> list[list[tuple[int, int]]]:
    """Return sync and code of each answer, by connection."""
    return [sorted((response.sync, response.type & 0x7FFF) for response in peer.responses()) for peer in made.peers]


def rows(made: Served) -> list[Row]:
    disk = made.disk.outside().disk
    found: list[Row] = []
    for name in disk.list_directory("data"):
        with LogFile.open(disk, f"data/{name}") as log:
            for transaction in log.transactions():
                found += transaction.rows
    return found


@WAYS
@pytest.mark.parametrize("dialect", list(Dialect))
async def test_synchronous_writes_are_answered_by_a_quorum_and_reads_at_once(way: Any, dialect: Dialect) -> None:
    made = served(dialect)
    with way():
        await made.run([numbered(REPLACE, range(30), SYNCHRONOUS), numbered(SELECT, [1], SYNCHRONOUS, first=99)])
    assert answers(made) == [[], [(99, 0)]]
    assert (made.peers[0].postponed_count, len(kept(made)), len(made.commits.queue.limbo)) == (30, 30, 30)
    made.commits.queue.ack(2, made.journal.written_vclock)
    await made.journal.drain()
    await asyncio.sleep(0)
    assert answers(made)[0] == [(number, 0) for number in range(30)]
    assert (made.peers[0].postponed_count, list(made.box.in_flight)) == (0, [])
    written = rows(made)
    assert [row.lsn for row in written] == list(range(6, 37))
    assert {row.flags for row in written[:-1]} == {1 | (6 if dialect is Dialect.V2_11 else 0)}
    assert decode_control(written[-1].type, written[-1].body).lsn == 35  # type: ignore[union-attr]


@WAYS
async def test_writes_after_synchronous_ones_wait_with_them(way: Any) -> None:
    made = served()
    with way():
        await made.run([numbered(INSERT, range(20), SYNCHRONOUS) + numbered(REPLACE, range(20), NUMBERS, 20), b""])
        await made.run([b"", numbered(DELETE, range(5), SYNCHRONOUS)])
    assert len(made.commits.queue.limbo) == 45
    queue = made.commits.queue
    assert queue.limbo.deadline is not None
    queue._do(queue.limbo.tick(queue.limbo.deadline))  # the clock of these tests does not advance
    await made.journal.drain()
    await asyncio.sleep(0)
    codes = [(0, SYNC_QUORUM_TIMEOUT)] + [(number, SYNC_ROLLBACK) for number in range(1, 40)]
    assert answers(made) == [codes, [(number, SYNC_ROLLBACK) for number in range(5)]]
    assert (kept(made), list(made.box.space(NUMBERS).tuples()), list(made.box.in_flight)) == ([], [], [])


@WAYS
@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_failed_write_rolls_back_all_pending_transactions(way: Any, mode: WalMode) -> None:
    made = served(mode=mode)
    with way():
        await made.run([numbered(REPLACE, range(3), SYNCHRONOUS), b""])
        made.disk.room = 0
        await made.run([numbered(REPLACE, range(20), SYNCHRONOUS, 10), statement(DELETE, SYNCHRONOUS, (1,), 50)])
    await asyncio.sleep(0)
    assert answers(made) == [[(number, WAL_IO) for number in range(10, 30)], [(50, WAL_IO)]]
    # Three writes that arrive together form one run.
    assert (len(kept(made)), len(made.commits.queue.limbo)) == (3, 3)
    assert len(made.box.in_flight) == (1 if way is in_bulk else 3)


@WAYS
async def test_verdict_may_cover_some_of_the_transactions_of_a_batch(way: Any) -> None:
    made = served()
    with way():
        await made.run([numbered(REPLACE, range(10), SYNCHRONOUS), numbered(REPLACE, range(10, 20), SYNCHRONOUS)])
    queue = made.commits.queue
    queue.ack(2, VClock({1: 5 + 13}))
    await made.journal.drain()
    await asyncio.sleep(0)
    assert answers(made) == [[(number, 0) for number in range(10)], [(number, 0) for number in range(3)]]
    assert [peer.postponed_count for peer in made.peers] == [0, 7]
    view = made.box.open_view(confirmed=True)
    hidden = view.changes[made.box.space(SYNCHRONOUS).indexes[0]]
    assert sorted(key for key, old in hidden.items() if old is None) == list(range(13, 20))
    view.close()
    assert queue.limbo.deadline is not None
    queue._do(queue.limbo.tick(queue.limbo.deadline))
    await made.journal.drain()
    await asyncio.sleep(0)
    refused = [(3, SYNC_QUORUM_TIMEOUT), *((number, SYNC_ROLLBACK) for number in range(4, 10))]
    assert answers(made)[1] == [(number, 0) for number in range(3)] + refused
    assert (len(kept(made)), list(made.box.in_flight), made.peers[1].postponed_count) == (13, [], 0)


@WAYS
async def test_synchronous_write_that_cannot_be_executed_fails_alone(way: Any) -> None:
    made = served()
    with way():
        await made.run([numbered(INSERT, [1, 2, 3, 2, 4], SYNCHRONOUS), b""])
    made.commits.queue.ack(2, made.journal.written_vclock)
    await made.journal.drain()
    await asyncio.sleep(0)
    assert [code for _, code in answers(made)[0]] == [0, 0, 0, 3, 0]


@WAYS
async def test_queue_without_an_owner_or_room_rejects_writes(way: Any) -> None:
    made = served(Dialect.V2_11)
    made.commits.queue.start(1, Promote(0, 0, 2), Tenures({}, (), {}), ())
    with way():
        await made.run([numbered(REPLACE, range(20), SYNCHRONOUS), b""])
    await asyncio.sleep(0)
    assert {code for _, code in answers(made)[0]} == {UNCLAIMED}
    assert (kept(made), made.journal.vclock) == ([], VClock({1: 5}))
    made = served()
    made.commits.queue.configure(max_size=30)
    with way():
        await made.run([numbered(REPLACE, range(20), SYNCHRONOUS), b""])
    await asyncio.sleep(0)
    entered = len(made.commits.queue.limbo)
    assert 0 < entered < 20
    assert answers(made)[0] == [(number, FULL) for number in range(entered, 20)]
    assert len(kept(made)) == entered


async def acknowledge(made: Served) -> None:
    made.commits.queue.ack(2, made.journal.written_vclock)
    await made.journal.drain()
    await asyncio.sleep(0)


async def expire(made: Served) -> None:
    queue = made.commits.queue
    assert queue.limbo.deadline is not None
    queue._do(queue.limbo.tick(queue.limbo.deadline))  # the clock of these tests does not advance
    await made.journal.drain()
    await asyncio.sleep(0)


def mixed(count: int) -> bytes:
    """Return asynchronous statements of all kinds; the reads see the writes before them."""
    return b"".join(
        statement(REPLACE, NUMBERS, (key, "x"), 5 * key)
        + statement(SELECT, NUMBERS, (key,), 5 * key + 1)
        + statement(INSERT, NUMBERS, (key + count, "y"), 5 * key + 2)
        + statement(REPLACE, NUMBERS, (key, "z"), 5 * key + 3)
        + statement(DELETE, NUMBERS, (key + count,), 5 * key + 4)
        for key in range(count)
    )


@WAYS
@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("mode", [WalMode.WRITE, WalMode.FSYNC])
async def test_asynchronous_writes_after_a_pending_transaction_commit_with_it(
    way: Any, dialect: Dialect, mode: WalMode
) -> None:
    made = served(dialect, mode=mode)
    with way():
        await made.run([b"", statement(INSERT, SYNCHRONOUS, (1,), 999)])
        handled = made.peers[0].handled
        await made.run([mixed(20), b""])
    assert made.peers[0].handled - handled == (0 if way is in_bulk else 100)
    assert answers(made) == [[(5 * key + 1, 0) for key in range(20)], []]
    assert (made.peers[0].postponed_count, len(made.commits.queue.limbo)) == (80, 81)
    await acknowledge(made)
    assert answers(made) == [[(number, 0) for number in range(100)], [(999, 0)]]
    late = [response.sync for response in made.peers[0].responses()[20:]]
    assert late == sorted(late)
    assert sorted(made.box.space(NUMBERS).tuples()) == [pack((key, "z")) for key in range(20)]
    assert (made.peers[0].postponed_count, list(made.box.in_flight)) == (0, [])
    written = rows(made)
    assert [row.lsn for row in written] == list(range(6, 88))
    is_new = dialect is Dialect.V2_11
    assert [row.flags for row in written[:-1]] == [1 | (6 if is_new else 0), *[1 | (2 if is_new else 0)] * 80]


@WAYS
async def test_asynchronous_writes_after_a_pending_transaction_are_rolled_back_with_it(way: Any) -> None:
    made = served()
    made.fill(5)
    before = made.contents()
    with way():
        await made.run([b"", statement(INSERT, SYNCHRONOUS, (1,), 999)])
        await made.run([mixed(20), b""])
    await expire(made)
    first, second = answers(made)
    assert second == [(999, SYNC_QUORUM_TIMEOUT)]
    assert first == [(5 * key + kind, 0 if kind == 1 else SYNC_ROLLBACK) for key in range(20) for kind in range(5)]
    assert (made.contents(), list(made.box.in_flight), made.peers[0].postponed_count) == (before, [], 0)


@WAYS
async def test_asynchronous_writes_that_are_written_after_the_verdict_commit(way: Any) -> None:
    """The CONFIRM of the transaction before them is being written when they arrive."""
    made = served(mode=WalMode.FSYNC)
    with way():
        await made.run([b"", statement(INSERT, SYNCHRONOUS, (1,), 999)])
        made.commits.queue.ack(2, made.journal.written_vclock)
        await made.run([numbered(REPLACE, range(40)), b""])
    await asyncio.sleep(0)
    assert answers(made) == [[(number, 0) for number in range(40)], [(999, 0)]]
    assert (made.commits.queue.is_empty, list(made.box.in_flight)) == (True, [])
    assert len(made.box.space(NUMBERS)) == 40


@WAYS
async def test_failing_insert_among_pending_writes_fails_alone(way: Any) -> None:
    made = served()
    with way():
        await made.run([b"", statement(INSERT, SYNCHRONOUS, (1,), 999)])
        keys = [key - (key == 30) for key in range(60)]
        await made.run([numbered(INSERT, keys), numbered(INSERT, keys, SYNCHRONOUS, 100)])
    if way is in_bulk:
        assert sum(peer.handled for peer in made.peers) <= 6
    await acknowledge(made)
    assert answers(made)[0] == [(number, 3 if number == 30 else 0) for number in range(60)]
    assert answers(made)[1] == [(100 + number, 3 if number in (1, 30) else 0) for number in range(60)] + [(999, 0)]
    assert made.journal.vclock == VClock({1: 5 + 1 + 59 + 58 + 1})


@WAYS
async def test_deletes_in_a_synchronous_space_wait_for_their_verdicts(way: Any) -> None:
    made = served()
    with way():
        await made.run([numbered(INSERT, range(40), SYNCHRONOUS), b""])
        await acknowledge(made)
        handled = made.peers[0].handled
        await made.run([numbered(DELETE, range(30), SYNCHRONOUS, 100), b""])
        assert made.peers[0].handled - handled == (0 if way is in_bulk else 30)
        made.commits.queue.ack(2, VClock({1: made.journal.written_vclock.get(1) - 10}))
        await made.journal.drain()
    await expire(made)
    rest = [(120, SYNC_QUORUM_TIMEOUT), *((number, SYNC_ROLLBACK) for number in range(121, 130))]
    assert answers(made)[0][40:] == [(number, 0) for number in range(100, 120)] + rest
    assert made.peers[0].tuples()[40:60] == [((key, "x"),) for key in range(20)]
    assert (len(kept(made)), list(made.box.in_flight)) == (20, [])


async def test_pending_writes_are_rolled_back_when_their_replies_cannot_be_built() -> None:
    made = served()
    await made.run([b"", statement(INSERT, SYNCHRONOUS, (1,), 999)])
    for requests in (numbered(REPLACE, range(40)), numbered(REPLACE, range(40), SYNCHRONOUS)):
        with (
            patch("flowstone.iproto.batches.build_replies", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            await made.run([requests, b""])
        made.peers[0].unread.clear()
        assert (len(made.commits.queue.limbo), len(made.box.in_flight)) == (1, 1)
        assert (len(made.box.space(NUMBERS)), len(kept(made))) == (0, 1)
