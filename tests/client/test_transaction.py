"""Transactions of a client on streams."""

from __future__ import annotations

import asyncio

import pytest

import flowstone
from flowstone.iproto.errors import IllegalParams, NoTransaction, TransactionConflict, TupleFound, Unsupported
from tests.node.upstream_server import Upstream
from tests.real_tarantool import Server


async def test_statements_are_visible_when_the_block_has_ended(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        async with client.transaction(isolation="read-confirmed", timeout=10) as transaction:
            fruit = transaction.space("fruit")
            first = fruit.insert((1, "fig"))  # not awaited: the end of the block waits
            assert await fruit.insert_many([(2, "kiwi"), (3, "plum")]) == 2
            assert await fruit.get(2) == (2, "kiwi")
            assert await client.space("fruit").get(2) is None
        assert first.result() == (1, "fig")
        assert len(node.fruit) == 3
        with pytest.raises(NoTransaction):
            fruit.insert((4, "late"))
        with pytest.raises(flowstone.LocalProtocolError, match="already used"):
            async with transaction:
                pass


async def test_exception_rolls_back(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client.transaction() as transaction:
                await transaction.space("fruit").insert((1, "fig"))
                raise ZeroDivisionError
        with pytest.raises(TupleFound):  # noqa: PT012
            async with client.transaction() as transaction:
                await transaction.space("fruit").insert((1, "fig"))
                transaction.space("fruit").insert((1, "again"))  # fails after the block
        with pytest.raises(flowstone.RowsFailed, match="row 1: Duplicate key"):
            async with client.transaction() as transaction:
                await transaction.space("fruit").insert_many([(1, "fig"), (1, "fig")])
        assert len(node.fruit) == 0


async def test_conflict_is_an_error_of_the_commit(node: Upstream) -> None:
    await node.fruit.insert((1, "fig"))
    async with flowstone.connect(node.uri) as client:
        with pytest.raises(TransactionConflict):  # noqa: PT012
            async with client.transaction() as transaction:
                assert await transaction.space("fruit").get(1) == (1, "fig")
                await client.space("fruit").replace((1, "kiwi"))
                await transaction.space("fruit").replace((1, "plum"))
        assert node.fruit.get(1) == (1, "kiwi")


async def test_lost_answer_of_the_commit_is_an_unknown_outcome(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        transaction = await client.transaction().__aenter__()
        await transaction.space("fruit").insert((1, "fig"))
        ending = asyncio.ensure_future(transaction.__aexit__(None, None, None))
        while transaction._is_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        transaction._connection._flush()
        transaction._connection._fail(flowstone.ConnectionFailed("cut"))
        with pytest.raises(flowstone.OutcomeUnknown, match=r"outcome of COMMIT at .* is unknown: cut"):
            await ending


async def test_lost_connection_before_the_commit_rolls_back(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        with pytest.raises(flowstone.ConnectionFailed):  # noqa: PT012
            async with client.transaction() as transaction:
                await transaction.space("fruit").insert((1, "fig"))
                await transaction._connection.close()
        assert len(node.fruit) == 0


async def test_wrong_options_are_rejected(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        with pytest.raises(IllegalParams, match="must be one of default, read-committed"):
            client.transaction(isolation="serial")
        with pytest.raises(IllegalParams, match="greater than 0"):
            client.transaction(timeout=0)


@pytest.mark.real
async def test_old_server_has_no_transactions_for_clients(fruit_server: Server) -> None:
    async with flowstone.connect(fruit_server.uri) as client:
        with pytest.raises(Unsupported, match=r"version 2\.6\.0, which has no transactions for clients"):
            async with client.transaction():
                pass
