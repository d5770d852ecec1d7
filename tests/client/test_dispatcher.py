"""What is sent again and what is not, by the answer of the server."""

from __future__ import annotations

import asyncio

import pytest

import flowstone
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.errors import Readonly, TarantoolError, TupleFound
from tests.client.scripted_server import Script, scripted
from tests.node.fake_server import refusal

INSERT, CALL = RequestType.INSERT, RequestType.CALL


@pytest.mark.parametrize(
    "error", ["Readonly", "Loading", "SyncQueueForeign", "SyncQueueUnclaimed", "WrongSchemaVersion"]
)
async def test_refused_statement_is_sent_again(error: str) -> None:
    async with scripted(refusal(getattr(errors, error).code, "not here")) as (uri, script):
        async with flowstone.connect(uri) as client:
            assert await client.space("fruit").insert((1,)) == (1,)
        assert script.asked == [INSERT, INSERT]


async def test_refused_call_is_not_sent_again() -> None:
    async with scripted(refusal(Readonly.code, "in the middle")) as (uri, script):
        async with flowstone.connect(uri) as client:
            with pytest.raises(Readonly, match="in the middle"):
                await client.call("f")
            assert await client.call("f", read_from="any") == ((1,),)
        assert script.asked == [CALL, CALL]


@pytest.mark.parametrize("error", ["SyncQuorumTimeout", "SyncRollback"])
async def test_rollback_that_a_new_leader_may_not_know_is_an_unknown_outcome(error: str) -> None:
    async with scripted(refusal(getattr(errors, error).code, "rolled back")) as (uri, script):
        async with flowstone.connect(uri) as client:
            with pytest.raises(flowstone.OutcomeUnknown, match="rolled back") as caught:
                await client.space("fruit").insert((1,))
            assert isinstance(caught.value.__cause__, TarantoolError)
        assert script.asked == [INSERT]


async def test_other_error_is_that_of_the_server() -> None:
    async with scripted(refusal(TupleFound.code, "Duplicate key")) as (uri, script):
        async with flowstone.connect(uri) as client:
            with pytest.raises(TupleFound, match=r"^Duplicate key \(ER_TUPLE_FOUND, 3\)$"):
                await client.space("fruit").insert((1,))
        assert script.asked == [INSERT]


def silent(script: Script) -> None:
    script.silence = asyncio.Event()


async def test_write_without_an_answer_in_time_is_an_unknown_outcome() -> None:
    async with scripted(prepare=silent) as (uri, script):
        async with flowstone.connect(uri, request_timeout=0.1) as client:
            with pytest.raises(flowstone.OutcomeUnknown, match="did not answer in time"):
                await client.space("fruit").insert((1,))
            assert script.silence is not None
            script.silence.set()
            assert await client.space("fruit").insert((1,)) == (1,)  # the late answer to the first is ignored
        assert script.asked == [INSERT, INSERT]


async def test_cancelled_request_does_not_disturb_others() -> None:
    async with scripted(prepare=silent) as (uri, script), flowstone.connect(uri) as client:
        first, second = client.space("fruit").insert((1,)), client.space("fruit").insert((1,))
        first.cancel()
        assert script.silence is not None
        script.silence.set()
        assert await second == (1,)


async def test_malformed_answer_of_a_write_is_an_unknown_outcome() -> None:
    async with scripted((0, b"\x81\x30\x01")) as (uri, script), flowstone.connect(uri) as client:
        with pytest.raises(flowstone.OutcomeUnknown, match="no array of tuples"):
            await client.space("fruit").insert((1,))
        assert await client.space("fruit").insert((1,)) == (1,)
        assert script.asked == [INSERT, INSERT]


async def test_value_that_cannot_be_encoded_is_an_error_of_its_request() -> None:
    async with scripted() as (uri, _), flowstone.connect(uri) as client:
        fruit = client.space("fruit")
        with pytest.raises(flowstone.LocalProtocolError, match="type object is not supported"):
            await fruit.insert((object(),))
        assert await fruit.insert((1,)) == (1,)
