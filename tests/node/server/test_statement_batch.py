"""Batches of plain statements: what they execute, what they leave to the sessions, and what a failure leaves."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from flowstone.box.engine.transaction import Statement
from flowstone.iproto.msgpack import unpack
from flowstone.node.server import statement_batch
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


async def test_batch_leaves_the_rest_to_sessions_after_an_insert_of_an_existing_key() -> None:
    served = Served()
    served.fill(5)
    reads = b"".join(numbered(SELECT, [key]) + statement(SELECT, TEXTS, (str(key),)) for key in range(10))
    await served.run([numbered(REPLACE, range(3)) + numbered(INSERT, [3]) + reads])
    assert served.peers[0].codes() == [0, 0, 0, 3] + [0] * 20
    assert served.peers[0].handled == 21


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


async def test_batch_leaves_reads_to_sessions_when_their_replies_are_too_large() -> None:
    served = Served()
    served.fill(40)
    with patch.object(statement_batch, "REPLIES_SIZE_MAX", 10):
        await served.run([numbered(SELECT, range(40))])
    assert served.peers[0].handled == 40
