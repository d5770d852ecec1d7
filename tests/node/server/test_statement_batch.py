"""Batches of plain statements: which they execute, which they leave to the sessions, and the state after a failure."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from flowstone.box.engine.transaction import Statement
from flowstone.iproto.msgpack import unpack
from flowstone.node.server import statement_batch
from flowstone.node.server.statement_batch import StatementBatches
from flowstone.replication.vclock import VClock
from tests.node.server.test_executor import DELETE, INSERT, NUMBERS, REPLACE, SELECT, TEXTS, Served, numbered, statement


async def test_batch_executes_long_runs_without_sessions() -> None:
    served = Served()
    count = 3000
    for kind in (INSERT, SELECT, REPLACE, DELETE):
        served.peers[0].sent.clear()
        await served.run([numbered(kind, range(count))])
        assert served.peers[0].codes() == [0] * count
        assert [response.sync for response in served.peers[0].responses()] == list(range(count))
    assert served.peers[0].handled == 0
    assert served.journal.vclock == VClock({1: 5 + 3 * count})


async def test_batch_leaves_writes_to_sessions_when_read_only() -> None:
    served = Served()
    served.box.is_read_only = True
    await served.run([numbered(REPLACE, range(30)) + numbered(SELECT, range(30))])
    assert served.peers[0].codes() == [7] * 30 + [0] * 30
    assert served.rows == []


async def test_batch_leaves_writes_to_sessions_when_listeners_are_registered() -> None:
    served = Served()
    heard: list[Statement] = []
    served.commits.on_commit.append(heard.extend)
    await served.run([numbered(REPLACE, range(30))])
    assert [unpack(each.body)[0x21][0] for each in heard] == list(range(30))


async def test_batch_leaves_requests_of_a_held_connection_to_its_session() -> None:
    served = Served()
    served.fill(40)
    served.peers[0].is_waiting = True
    await served.run([numbered(SELECT, range(40))])
    assert served.peers[0].handled == 40


async def test_batch_counts_the_bytes_of_its_replies() -> None:
    served = Served()
    served.fill(40)
    await served.run([numbered(SELECT, range(40))])
    assert served.peers[0].handled == 0
    assert served.peers[0].replied == len(b"".join(served.peers[0].sent))


async def test_batch_rolls_back_when_replies_cannot_be_built() -> None:
    served = Served()
    with (
        patch("flowstone.iproto.batches.build_replies", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        await served.run([numbered(REPLACE, range(40))])
    assert len(served.box.space(NUMBERS)) == 0
    assert not served.box.in_flight


async def test_batch_leaves_only_a_failing_insert_to_its_session() -> None:
    served = Served()
    served.fill(5)
    before = [statement(REPLACE, NUMBERS, (key, "new"), key) + statement(SELECT, NUMBERS, (key,)) for key in range(20)]
    after = [statement(SELECT, TEXTS, (str(key),)) + statement(DELETE, NUMBERS, (key,), key) for key in range(20)]
    await served.run([b"".join([*before, statement(INSERT, NUMBERS, (3, "bad"), 99), *after])])
    assert served.peers[0].handled == 1
    assert served.peers[0].codes() == [0] * 40 + [3] + [0] * 40
    assert [response.sync for response in served.peers[0].responses()][40] == 99
    found = [((str(key),),) if key < 5 else () for key in range(20)]
    deleted = [((key, "new"),) for key in range(20)]
    assert served.peers[0].tuples()[41:] == [each for pair in zip(found, deleted, strict=True) for each in pair]
    assert len(served.box.space(NUMBERS)) == 0
    assert served.journal.vclock == VClock({1: 5 + 40})


async def test_batch_leaves_each_failing_insert_of_a_run_to_its_session() -> None:
    served = Served()
    keys = [key - (key % 20 == 19) for key in range(400)]
    await served.run([numbered(INSERT, keys)])
    assert served.peers[0].handled == 20
    assert served.peers[0].codes() == [3 if key % 20 == 19 else 0 for key in range(400)]
    assert served.journal.vclock == VClock({1: 5 + 380})


async def test_batch_is_not_tried_often_when_all_statements_fail() -> None:
    served = Served()
    served.fill(1000)
    with patch.object(StatementBatches, "execute", autospec=True, side_effect=StatementBatches.execute) as tried:
        await served.run([numbered(INSERT, range(1000))])
    assert served.peers[0].codes() == [3] * 1000
    assert tried.call_count < 12


async def test_batch_executes_alternating_statements_on_several_spaces_in_order() -> None:
    served = Served()
    steps = [
        statement(REPLACE, NUMBERS, (key, "x"))
        + statement(SELECT, NUMBERS, (key,))
        + statement(INSERT, TEXTS, (str(key),))
        + statement(DELETE, NUMBERS, (key,))
        + statement(SELECT, NUMBERS, (key,))
        for key in range(10)
    ]
    await served.run([b"".join(steps)])
    assert served.peers[0].handled == 0
    expected = [[((key, "x"),), ((key, "x"),), ((str(key),),), ((key, "x"),), ()] for key in range(10)]
    assert served.peers[0].tuples() == [each for step in expected for each in step]
    assert served.journal.vclock == VClock({1: 5 + 30})


async def test_batch_leaves_a_read_to_its_session_when_the_replies_are_too_large() -> None:
    served = Served()
    served.fill(40)
    with patch.object(statement_batch, "REPLIES_SIZE_MAX", 60):  # 20 tuples
        await served.run([numbered(SELECT, range(40))])
    assert served.peers[0].handled == 1
    assert served.peers[0].tuples() == [((key, key),) for key in range(40)]


async def test_batch_leaves_all_reads_to_sessions_when_each_reply_is_too_large() -> None:
    served = Served()
    served.fill(40)
    with patch.object(statement_batch, "REPLIES_SIZE_MAX", 2):
        await served.run([numbered(SELECT, range(40))])
    assert served.peers[0].handled == 40
