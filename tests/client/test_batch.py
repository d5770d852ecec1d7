"""Many rows at once: each has one outcome, whatever happens to its neighbours."""

from __future__ import annotations

import asyncio

import pytest

import flowstone
from flowstone.client.batch import BATCH_ROWS
from flowstone.iproto.errors import Readonly, TupleFound, WrongSchemaVersion
from tests.client.scripted_server import STORED, scripted
from tests.node.fake_server import refusal
from tests.node.upstream_server import Upstream


async def test_rows_that_fail_are_reported_by_their_position(node: Upstream) -> None:
    await node.fruit.insert((1500, "old"))
    async with flowstone.connect(node.uri) as client:
        rows = [(number, "new") for number in range(3 * BATCH_ROWS)]
        rows[7] = (7, 7)  # type: ignore[assignment]
        with pytest.raises(flowstone.RowsFailed, match=r"^2 of 3000 rows failed: row 7: .*; row 1500: ") as caught:
            await client.space("fruit").insert_many(rows)
        assert {number: type(error).__name__ for number, error in caught.value.errors.items()} == {
            7: "FieldType",
            1500: "TupleFound",
        }
        assert len(node.fruit) == 3 * BATCH_ROWS - 1
        assert isinstance(caught.value.errors[1500], TupleFound)


async def test_row_without_a_place_in_the_format_does_not_stop_the_others(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        rows = [{"id": 1, "name": "fig"}, {"id": 2, "colour": "red"}, {"id": 3, "name": "kiwi"}]
        with pytest.raises(flowstone.RowsFailed, match=r"1 of 3 rows failed: row 1: Field 'colour'"):
            await client.space("fruit").insert_many(rows)
        assert node.fruit.select() == [(1, "fig"), (3, "kiwi")]


async def test_refused_rows_are_sent_again() -> None:
    replies = [STORED, refusal(Readonly.code, "no"), STORED, refusal(WrongSchemaVersion.code, "old"), STORED]
    async with scripted(*replies) as (uri, script):
        async with flowstone.connect(uri) as client:
            assert await client.space("fruit").insert_many([(number,) for number in range(5)]) == 5
        assert len(script.asked) == 7


async def test_rows_without_an_answer_have_an_unknown_outcome(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await fruit.get(1)
        connection = client._pool.members[0].connection
        assert connection is not None
        writing = asyncio.ensure_future(fruit.insert_many((number, "fig") for number in range(10)))
        while connection._sync == connection._sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
        connection._flush()
        connection._fail(flowstone.ConnectionFailed("cut"))
        with pytest.raises(flowstone.RowsFailed, match="10 of 10 rows failed, the outcome of 10 is unknown"):
            await writing


async def test_rows_that_were_not_sent_are_sent_again(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await fruit.get(1)
        connection = client._pool.members[0].connection
        assert connection is not None
        writing = asyncio.ensure_future(fruit.insert_many((number, "fig") for number in range(10)))
        while connection._sync == connection._sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
        connection._fail(flowstone.ConnectionFailed("cut"))
        assert await writing == 10
    assert len(node.fruit) == 10
