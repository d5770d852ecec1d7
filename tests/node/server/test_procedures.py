"""CALL: user functions, unknown names, and the shapes of results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.box.ddl import functions as ddl
from flowstone.box.tuples import Tuple
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.server.procedures import array, rows_of_call_16
from tests.node.conversations import Conversation
from tests.node.instances import make_instance


@pytest.fixture
def client() -> Conversation:
    return Conversation(make_instance())


@pytest.mark.parametrize(
    ("returned", "results"),
    [
        (None, ()),
        (5, (5,)),
        ((1, "a"), (1, "a")),
        ([1, "a"], ((1, "a"),)),
        ({"a": [1]}, ({"a": (1,)},)),
        (Tuple(pack((1, 2)), {}), ((1, 2),)),
        ([Tuple(pack((1, 2)), {})], (((1, 2),),)),
        ({"t": Tuple(pack((1, 2)), {})}, ({"t": (1, 2)},)),
    ],
)
async def test_call_replies_with_the_results_of_the_function(
    client: Conversation, returned: Any, results: tuple
) -> None:
    client.instance.functions["f"] = lambda: returned
    assert await client.call("f") == results


async def test_function_receives_its_arguments_and_may_be_async(client: Conversation) -> None:
    async def add(left: int, right: int = 1) -> int:
        await asyncio.sleep(0)
        return left + right

    client.instance.functions["math.add"] = add
    assert await client.call("math.add", 2, 3) == (5,)
    assert await client.call("math.add", 2) == (3,)


async def test_exception_in_a_function_is_a_lua_error(client: Conversation, caplog: pytest.LogCaptureFixture) -> None:
    async def later() -> None:
        raise KeyError("x")

    client.instance.functions.update(now=lambda: 1 / 0, later=later)
    with pytest.raises(errors.ProcLua, match="ZeroDivisionError: division by zero"):
        await client.call("now")
    with pytest.raises(errors.ProcLua, match="KeyError: 'x'"):
        await client.call("later")
    with pytest.raises(errors.ProcLua, match="TypeError"):
        await client.call("now", 1, 2)
    assert "function now failed" in caplog.text


async def test_function_may_raise_an_error_with_a_code(client: Conversation) -> None:
    def refuse() -> None:
        raise errors.Readonly("not today")

    client.instance.functions["refuse"] = refuse
    with pytest.raises(errors.Readonly, match="not today"):
        await client.call("refuse")


async def test_unserializable_result_is_an_error(client: Conversation) -> None:
    client.instance.functions["f"] = object
    with pytest.raises(errors.ProcLua, match="cannot encode as MessagePack"):
        await client.call("f")


@pytest.mark.parametrize(
    "name", ["nothing", "box.nothing.x", "box.space.none:len", "box.space._space:none", "box.space._space.index.no:len"]
)
async def test_unknown_name_is_error_33(client: Conversation, name: str) -> None:
    with pytest.raises(errors.NoSuchProc, match=f"Procedure '{name}' is not defined"):
        await client.call(name)


async def test_user_function_hides_a_built_in_one(client: Conversation) -> None:
    client.instance.functions["box.info"] = lambda: "mine"
    assert await client.call("box.info") == ("mine",)


async def test_execute_can_be_granted_on_one_function(client: Conversation) -> None:
    transaction = client.instance.box.begin()
    ddl.create_function(transaction, "f")
    ddl.create_function(transaction, "as_admin", setuid=True)
    ddl.create_user(transaction, "u", password="p")
    for function in ("f", "as_admin"):
        ddl.grant(transaction, "u", "execute", "function", function)
    client.instance.functions.update(f=lambda: "f", g=lambda: "g")
    user = Conversation(client.instance)
    await user.log_in("u", "p")
    assert await user.call("f") == ("f",)
    with pytest.raises(errors.AccessDenied, match="Execute access to function 'g' is denied for user 'u'"):
        await user.call("g")
    with pytest.raises(errors.NoSuchProc):
        await user.call("as_admin")


@pytest.mark.parametrize(
    ("results", "rows"),
    [
        ([1, [2, 3], {"a": 1}], [[1], [2, 3], [{"a": 1}]]),
        ([[[1, 2], [3]]], [[1, 2], [3]]),
        ([None], [[None]]),
        ([], []),
        ([[1, [2]]], [[1, [2]]]),
        ([{"a": 1}], [[{"a": 1}]]),
        ([[[1, 2], 3]], [[1, 2], [3]]),
        ([[]], [[]]),
    ],
)
async def test_call_16_returns_tuples_like_a_real_server(results: list, rows: list, client: Conversation) -> None:
    assert [unpack(raw) for raw in rows_of_call_16([pack(one) for one in results])] == [
        unpack(pack(row)) for row in rows
    ]
    client.instance.functions["f"] = lambda: tuple(results)
    assert list(await client.call("f", type=RequestType.CALL_16)) == [unpack(pack(row)) for row in rows]


@pytest.mark.parametrize("count", [0, 15, 16, 70000])
def test_array_of_raw_values_is_encoded_as_messagepack(count: int) -> None:
    assert unpack(array([b"\x01"] * count)) == (1,) * count
