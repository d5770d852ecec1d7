"""Requests in Lua: stored functions, EVAL, rights, waiting, and fairness between requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import TYPE_PUSH, RequestType
from flowstone.node.lua import host, runtime
from flowstone.node.wal.journal import WalMode
from tests.node.instances import make_instance
from tests.node.lua.lua_clients import LuaClient, client_of, user_of

READ = "function(key) return box.space.s:get(key) end"


@pytest.fixture
async def client() -> LuaClient:
    return await client_of(make_instance())


async def create(client: LuaClient, name: str, body: str, **options: object) -> None:
    await client.call("box.schema.func.create", name, {"body": body, **options})


async def test_stored_function_is_called_with_its_arguments(client: LuaClient) -> None:
    await create(client, "f", "function(...) return select('#', ...), ... end")
    assert await client.call("f", 1, None, "x") == (3, 1, None, "x")
    assert await client.call("f") == (0,)


async def test_function_is_compiled_again_when_it_is_redefined(client: LuaClient) -> None:
    for number in (1, 2):
        await create(client, "f", f"function() return {number} end")
        assert await client.call("f") == (number,)
        await client.call("box.schema.func.drop", "f")
    with pytest.raises(errors.NoSuchProc):
        await client.call("f")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("function(", "Failed to dynamically load function 'f': .*near '<eof>'"),
        ("5", "given body doesn't define a function"),
    ],
)
async def test_body_that_is_no_function_is_an_error(client: LuaClient, body: str, problem: str) -> None:
    await create(client, "f", body)
    with pytest.raises(errors.LoadFunction, match=problem):
        await client.call("f")


async def test_global_function_is_called_by_its_path(client: LuaClient) -> None:
    await client.evaluate("function f(x) return x end m = {n = {g = function(self, x) return self.y, x end, y = 5}}")
    assert await client.call("f", 3) == (3,)
    assert await client.call("m.n:g", 3) == (5, 3)
    for name in ("nosuch", "m.nosuch", "m.n.y", "m.n.y.z"):
        with pytest.raises(errors.NoSuchProc):
            await client.call(name)


async def test_eval_needs_the_right_to_execute_everything(client: LuaClient) -> None:
    bob = await user_of(client.instance, "bob")
    with pytest.raises(errors.AccessDenied, match="Execute access to universe '' is denied for user 'bob'"):
        await bob.evaluate("return 1")
    await client.call("box.schema.user.grant", "bob", "execute", "universe")
    assert await bob.evaluate("return box.session.user()") == ("bob",)
    with pytest.raises(errors.AccessDenied, match="Read access to space 's' is denied for user 'bob'"):
        await bob.evaluate("return box.space.s:get(1)")


@pytest.mark.parametrize("is_setuid", [False, True])
async def test_function_has_the_rights_of_its_caller_or_with_setuid_of_its_owner(
    client: LuaClient, is_setuid: bool
) -> None:
    await create(client, "f", READ, setuid=is_setuid)
    bob = await user_of(client.instance, "bob")
    with pytest.raises(errors.AccessDenied, match="Execute access to function 'f'"):
        await bob.call("f", 1)
    await client.call("box.schema.user.grant", "bob", "execute", "function", "f")
    if is_setuid:
        assert await bob.call("f", 1) == ((1, "one"),)
        return
    with pytest.raises(errors.AccessDenied, match="Read access to space 's'"):
        await bob.call("f", 1)


async def test_su_changes_the_rights_for_one_function(client: LuaClient) -> None:
    await user_of(client.instance, "bob")
    assert await client.evaluate(
        "return box.session.su('bob', function() return box.session.effective_user(),"
        " (pcall(box.space.s.get, box.space.s, 1)) end)"
    ) == ("bob", False)
    text = "pcall(box.session.su, 'bob', error) return box.session.effective_user(), box.space.s:get(1)"
    assert await client.evaluate(text) == ("admin", (1, "one"))
    await client.call("box.schema.user.disable", "bob")
    with pytest.raises(errors.AccessDenied, match="Session access to universe '' is denied for user 'bob'"):
        await client.evaluate("box.session.su('bob')")


async def test_sleeping_requests_wait_at_the_same_time(client: LuaClient) -> None:
    order: list[int] = []

    async def sleep(number: int, seconds: float) -> None:
        assert await client.evaluate("require('fiber').sleep(...) return 'slept'", seconds) == ("slept",)
        order.append(number)

    await asyncio.gather(sleep(1, 0.2), sleep(2, 0.01))
    assert order == [2, 1]


@pytest.mark.parametrize("wrapper", ["(...)", "coroutine.wrap(f)(...)", "select(2, pcall(f, ...))"])
async def test_wait_inside_of_a_coroutine_or_a_protected_call(client: LuaClient, wrapper: str) -> None:
    call = wrapper if wrapper != "(...)" else "f(...)"
    text = f"local function f(x) require('fiber').sleep(0) return x, box.space.s:get(1) end return {call}"
    assert await client.evaluate(text, 7) == (7, (1, "one"))


@pytest.mark.parametrize("mode", [WalMode.NONE, WalMode.WRITE, WalMode.FSYNC])
async def test_statement_returns_when_it_is_in_the_log(tmp_path: Path, mode: WalMode) -> None:
    client = await client_of(make_instance(tmp_path, mode=mode))
    before = client.instance.journal.next_lsn(1)
    text = "for i = 2, 5 do box.space.s:replace{i, 'x'} end box.begin() box.space.s:delete(2) box.space.s:delete(3)"
    text += " box.commit() return box.space.s:count()"
    assert await client.evaluate(text) == (3,)
    assert client.instance.journal.next_lsn(1) == before + 6
    await client.instance.journal.close()


async def test_transaction_of_a_stream_is_committed_by_its_client(client: LuaClient) -> None:
    await client.request(RequestType.BEGIN, stream=1)
    assert await client.evaluate("return box.space.s:delete(1), box.is_in_txn()", stream=1) == ((1, "one"), True)
    with pytest.raises(errors.Unsupported, match="ending the transaction of a stream"):
        await client.evaluate("box.commit()", stream=1)
    assert await client.select() == ((1, "one"),)
    await client.request(RequestType.COMMIT, stream=1)
    assert await client.select() == ()


async def test_push_is_a_message_with_the_sync_of_the_request(client: LuaClient) -> None:
    await client.evaluate("box.session.push({1, 'a'})")
    (message,) = client.events
    assert (message.type, message.values()[0x30]) == (TYPE_PUSH, ((1, "a"),))


async def test_other_work_is_done_between_long_requests(client: LuaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SLICE_SECONDS", 0.03)
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0)
            beats += 1

    heart = asyncio.create_task(beat())
    loops = [asyncio.create_task(client.response(RequestType.EVAL, {0x27: "while true do end", 0x21: ()}))]
    loops += [asyncio.create_task(client.response(RequestType.EVAL, {0x27: "while true do end"})) for _ in range(9)]
    answers = await asyncio.gather(*loops)
    heart.cancel()
    assert all(answer is not None and answer.is_error for answer in answers)
    assert beats >= 10, "at least one between any two slices"


async def test_cancelled_request_leaves_nothing_behind(client: LuaClient) -> None:
    text = "box.begin() box.space.s:delete(1) require('fiber').sleep(1000)"
    waiting = asyncio.create_task(client.evaluate(text))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await client.evaluate("return box.space.s:get(1), box.is_in_txn()") == ((1, "one"), False)


async def test_waiting_requests_are_limited(client: LuaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WAITING_MAX", 1)
    first = asyncio.create_task(client.evaluate("require('fiber').sleep(0.1) return 1"))
    await asyncio.sleep(0)
    with pytest.raises(errors.Unsupported, match="more than 1 waiting requests"):
        await client.evaluate("require('fiber').sleep(0.1)")
    assert await first == (1,)
