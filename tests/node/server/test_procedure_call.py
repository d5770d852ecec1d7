"""Procedures in Python: their transaction, their rights, their arguments, and messages to the client."""

from __future__ import annotations

import asyncio

import pytest

import flowstone
from flowstone.box.ddl import functions as ddl
from flowstone.iproto import errors
from flowstone.iproto.constants import TYPE_PUSH, RequestType
from flowstone.node.server.procedure_call import PythonProcedure
from tests.node.conversations import Conversation
from tests.node.instances import make_instance


def sell(call: flowstone.ProcedureCall, product: int, count: int = 1) -> object:
    return call.space(512).update(product, [("-", 1, count)])


async def sell_and_fail(call: flowstone.ProcedureCall, product: int) -> None:
    call.space(512).update(product, [("-", 1, 1)])
    await asyncio.sleep(0)
    raise LookupError("no price")


@flowstone.procedure(transaction=False)
async def restock(call: flowstone.ProcedureCall, product: int) -> str:
    async with call.transaction() as transaction:
        transaction.space(512).replace((product, 100))
    return call.user


@flowstone.procedure(transaction=False)
def read_without(call: flowstone.ProcedureCall) -> None:
    call.space(512)


def announce(call: flowstone.ProcedureCall) -> int:
    call.push({"step": (1, "half")})
    return call.session_id


@pytest.fixture
async def client() -> Conversation:
    made = Conversation(make_instance())
    transaction = made.instance.box.begin()
    ddl.create_space(transaction, "products")
    ddl.create_index(transaction, "products", "pk")
    await made.instance.commits.commit(transaction)
    for function in (sell, sell_and_fail, restock, read_without, announce):
        made.instance.functions[function.__name__] = PythonProcedure(function.__name__, function)
    await made.replace(1, 10)
    return made


async def test_procedure_commits_its_transaction(client: Conversation) -> None:
    assert await client.call("sell", 1, 3) == ((1, 7),)
    assert await client.call("sell", 1) == ((1, 6),)
    assert await client.select() == ((1, 6),)


async def test_failed_procedure_is_rolled_back(client: Conversation) -> None:
    with pytest.raises(errors.ProcLua, match="LookupError: no price"):
        await client.call("sell_and_fail", 1)
    assert await client.select() == ((1, 10),)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1",), "sell: argument 'product': Expected `int`, got `str`"),
        ((1, None), "sell: argument 'count': Expected `int`, got `null`"),
        ((), "sell: missing a required argument: 'product'"),
        ((1, 2, 3), "sell: too many positional arguments"),
    ],
)
async def test_arguments_are_checked_against_the_annotations(
    client: Conversation, arguments: tuple, problem: str
) -> None:
    with pytest.raises(errors.IllegalParams, match=problem):
        await client.call("sell", *arguments)
    assert await client.select() == ((1, 10),)


async def test_procedure_without_transaction_begins_its_own(client: Conversation) -> None:
    assert await client.call("restock", 1) == ("admin",)
    assert await client.select() == ((1, 100),)
    with pytest.raises(errors.NoTransaction):
        await client.call("read_without")


async def test_procedure_is_part_of_the_transaction_of_its_stream(client: Conversation) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    assert await client.call("sell", 1, 4, stream=1) == ((1, 6),)
    with pytest.raises(errors.ProcLua):
        await client.call("sell_and_fail", 1, stream=1)
    with pytest.raises(errors.ActiveTransaction):
        await client.call("restock", 1, stream=1)
    assert await client.select() == ((1, 10),), "not committed yet"
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == ((1, 6),), "only the failed procedure was rolled back"


async def test_pushed_value_is_a_message_with_the_sync_of_the_call(client: Conversation) -> None:
    assert await client.call("announce") == (5,)
    (message,) = client.events
    assert (message.type, message.values()[0x30]) == (TYPE_PUSH, ({"step": (1, "half")},))


@pytest.mark.parametrize("is_setuid", [False, True])
async def test_procedure_has_the_rights_of_its_caller_or_with_setuid_of_the_owner(
    client: Conversation, is_setuid: bool
) -> None:
    instance = client.instance
    transaction = instance.box.begin()
    ddl.create_user(transaction, "bob", password="secret", if_not_exists=False, time=0)
    ddl.create_function(transaction, "sell", setuid=is_setuid)
    ddl.grant(transaction, "bob", "execute", "function", "sell")
    await instance.commits.commit(transaction)
    found = instance.box.access.find("bob")
    assert found is not None
    bob = Conversation(instance, user=found.id)
    with pytest.raises(errors.AccessDenied, match="Execute access to function 'restock'"):
        await bob.call("restock", 1)
    if is_setuid:
        assert await bob.call("sell", 1) == ((1, 9),)
        return
    with pytest.raises(errors.AccessDenied, match="Write access to space"):
        await bob.call("sell", 1)
