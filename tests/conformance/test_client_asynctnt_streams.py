"""Streams and transactions of asynctnt, on a node of dialect 2.11."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asynctnt
import pytest
from asynctnt.exceptions import TarantoolDatabaseError

from tests import served_node
from tests.conformance.case import truncate
from tests.conformance.library import LOANS, Library, open_library

WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    with served_node.serve(tmp_path_factory.mktemp("node"), dialect="2.11") as node:
        yield open_library(node.port, is_node=True)


async def connect(library: Library) -> Any:
    login = {"username": library.user, "password": library.password}
    return await asynctnt.connect(host="127.0.0.1", port=library.port, reconnect_timeout=0, **login)


@pytest.fixture
async def connection(library: Library) -> AsyncIterator[Any]:
    """Yield a connection; the space `loans` is empty."""
    library.run(truncate(LOANS))
    opened = await connect(library)
    yield opened
    await opened.disconnect()


def rows(response: Any) -> list[list[Any]]:
    return [list(row) for row in response.body]


async def test_commit_on_a_stream_is_visible_to_others(connection: Any) -> None:
    async with connection.stream() as stream:
        await stream.insert("loans", [1, "ann"])
        await stream.update("loans", [1], [["=", 1, "bob"]])
        assert rows(await stream.select("loans")) == [[1, "bob"]]
        assert rows(await connection.select("loans")) == []
    assert rows(await connection.select("loans")) == [[1, "bob"]]


async def test_rollback_on_a_stream_undoes_everything(connection: Any) -> None:
    await connection.insert("loans", [1, "ann"])
    stream = connection.stream()
    await stream.begin()
    await stream.delete("loans", [1])
    await stream.insert("loans", [2, "bob"])
    assert rows(await stream.select("loans")) == [[2, "bob"]]
    await stream.rollback()
    assert rows(await connection.select("loans")) == [[1, "ann"]]


async def test_failed_statement_does_not_change_its_transaction(connection: Any) -> None:
    await connection.insert("loans", [1, "ann"])
    stream = connection.stream()
    await stream.begin()
    await stream.insert("loans", [2, "bob"])
    with pytest.raises(TarantoolDatabaseError) as caught:
        await stream.insert("loans", [1, "twice"])
    assert caught.value.code == 3
    await stream.commit()
    assert rows(await connection.select("loans")) == [[1, "ann"], [2, "bob"]]


async def test_first_commit_wins_on_streams(connection: Any) -> None:
    await connection.insert("loans", [1, 10])
    first, second = connection.stream(), connection.stream()
    await first.begin()
    await second.begin()
    for stream in (first, second):
        assert rows(await stream.select("loans", [1])) == [[1, 10]]
        await stream.update("loans", [1], [["+", 1, 1]])
    await first.commit()
    with pytest.raises(TarantoolDatabaseError) as caught:
        await second.commit()
    assert (caught.value.code, caught.value.message) == (97, "Transaction has been aborted by conflict")
    assert rows(await connection.select("loans")) == [[1, 11]]


async def test_transaction_errors_are_reported(connection: Any) -> None:
    stream = connection.stream()
    await stream.begin()
    with pytest.raises(TarantoolDatabaseError) as caught:
        await stream.begin()
    assert caught.value.code == 79
    await stream.rollback()
    with pytest.raises(TarantoolDatabaseError) as caught:
        await connection.begin()
    assert caught.value.code == 230


async def test_transaction_that_times_out_is_rolled_back(connection: Any) -> None:
    stream = connection.stream()
    await stream.begin(tx_timeout=0.05)
    await stream.insert("loans", [1, "ann"])
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                await stream.select("loans")
            except TarantoolDatabaseError as error:
                assert error.code == 231  # noqa: PT017
                break
    await stream.rollback()
    assert rows(await connection.select("loans")) == []


async def test_transactions_of_a_lost_connection_are_rolled_back_by_the_server(
    library: Library, connection: Any
) -> None:
    other = await connect(library)
    stream = other.stream()
    await stream.begin()
    await stream.insert("loans", [1, "ann"])
    await other.disconnect()
    await connection.insert("loans", [1, "bob"])
    assert rows(await connection.select("loans")) == [[1, "bob"]]
