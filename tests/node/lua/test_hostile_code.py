"""Hostile Lua: it stops nothing but its own request, and finds no way out of the sandbox."""

from __future__ import annotations

import time
from typing import Final

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import TYPE_ERROR, RequestType
from flowstone.node.lua import runtime
from tests.node.instances import make_instance
from tests.node.lua.lua_clients import LuaClient, client_of

PATIENT: Final = 10.0
"""Seconds of a slice for code that ends, on a machine that is busy with other things."""

SECONDS: Final = 5.0
"""Far more than a slice, far less than the loops would take."""

ENDLESS: Final = {
    "loop": "while true do end",
    "loop in pcall": "while true do pcall(function() while true do end end) end",
    "nested pcalls": "local function f() while true do pcall(f) end end f()",
    "loop in the handler of xpcall": "xpcall(function() error('x') end, function() while true do end end)",
    "loop in the handler of an exceeded slice": "xpcall(function() while true do end end,"
    " function() while true do end end)",
    "loop in a coroutine": "coroutine.wrap(function() while true do end end)()",
    "coroutines that hide the loop": "while true do local co = coroutine.create(function() while true do end end)"
    " coroutine.resume(co) end",
    "repeat of a wait in a coroutine": "local co = coroutine.wrap(function() while true do coroutine.yield() end end)"
    " while true do co() end",
    "loop in a metamethod": "local t = setmetatable({}, {__index = function() while true do end end}) return t.x",
    "loop in __tostring": "error(setmetatable({}, {__tostring = function() while true do end end}))",
    "loop in a comparison of sort": "table.sort({1, 2, 3}, function() while true do end end)",
    "loop in a replacement": "return (string.gsub('a', '.', function() while true do end end))",
    "loop in a reader": "load(function() return ' ' end)",
    "loop of calls": "while true do box.space.s:get(1) end",
    "loop of failing calls": "while true do pcall(box.space.s.get, box.space.s, 'x') end",
    "pattern of find": "return string.find(string.rep('a', 30000), '.-.-.-.-b')",
    "pattern of match": "return string.match(string.rep('a', 30000), '.*.*.*.*b')",
    "pattern of gmatch": "for _ in string.gmatch(string.rep('a', 30000), '.-.-.-b') do end",
    "pattern of gsub": "return string.gsub(string.rep('a', 30000), '.-.-.-b', '')",
    "pattern of a method": "return ('a'):rep(30000):find('.-.-.-b')",
    "pattern with balances": "return string.find(string.rep('(', 100000), '%b()%b()')",
    "iterator without end": "return require('fun').range(1, math.huge):length()",
}


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> LuaClient:
    monkeypatch.setattr(runtime, "SLICE_SECONDS", PATIENT)
    return await client_of(make_instance())


async def check_alive(client: LuaClient) -> None:
    assert await client.evaluate("return #('x'):rep(10), box.space.s:get(1), ('ab'):find('b')") == (
        10,
        (1, "one"),
        2,
        2,
    )


@pytest.mark.parametrize("name", ENDLESS)
async def test_endless_request_is_stopped(client: LuaClient, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_alive(client)
    monkeypatch.setattr(runtime, "SLICE_SECONDS", 0.05)
    begun = time.monotonic()
    with pytest.raises(errors.ProcLua, match="fiber slice is exceeded"):
        await client.evaluate(ENDLESS[name])
    assert time.monotonic() - begun < SECONDS
    monkeypatch.setattr(runtime, "SLICE_SECONDS", PATIENT)
    await check_alive(client)


DEEP: Final = {
    "recursion": ("local function f() return 1 + f() end f()", "stack overflow"),
    "recursion through gsub": ("local function f(s) return (s:gsub('.', f)) end f('a')", "stack overflow"),
    "recursion through sort": ("local function f() table.sort({1, 2, 3}, f) end f()", "stack overflow"),
    "recursion through coroutines": (
        "local function f() return coroutine.wrap(f)() end f()",
        "stack overflow",
    ),
    "recursion through __tostring": (
        "local t t = setmetatable({}, {__tostring = function() return tostring(t) end}) tostring(t)",
        "stack overflow",
    ),
    "recursion through string.format": (
        "local t t = setmetatable({}, {__tostring = function() return ('%s'):format(t) end}) return tostring(t)",
        "stack overflow",
    ),
    "recursion through __index": (
        "local t = setmetatable({}, {}) getmetatable(t).__index = function(t, k) return t[k .. 'x'] end return t.x",
        "stack overflow",
    ),
    "deep nesting in the text": ("return load(string.rep('(', 100000))()", "attempt to call a nil value"),
    "deep value": ("local t = {} for i = 1, 100000 do t = {t} end return t", "Too high nest level"),
    "value that contains itself": ("local t = {} t[1] = t return t", "Too high nest level"),
}


@pytest.mark.parametrize("name", DEEP)
async def test_deep_recursion_is_an_error(client: LuaClient, name: str) -> None:
    text, problem = DEEP[name]
    with pytest.raises(errors.ProcLua, match=problem):
        await client.evaluate(text)
    await check_alive(client)


LARGE: Final = {
    "string.rep": "return #string.rep('x', 1e10)",
    "rep with a separator": "return #string.rep('x', 1e6, string.rep('y', 1e6))",
    "doubled string": "local s = 'x' while true do s = s .. s end",
    "table of strings": "local t = {} for i = 1, 1e9 do t[i] = string.rep('x', 1e6) .. i end",
    "global that grows": "kept = {} for i = 1, 1e9 do kept[i] = string.rep('x', 1e6) .. i end",
    "growth that ignores errors": "kept = {} while true do pcall(function()"
    " kept[#kept + 1] = string.rep('x', 1e6) .. #kept end) end",
    "full memory and calls": "kept = {} while true do pcall(function() kept[#kept + 1] = string.rep('x', 1e6) .. #kept"
    " end) pcall(function() kept[#kept + 1] = box.space.s:select() end) end",
}


@pytest.mark.parametrize("name", LARGE)
async def test_memory_is_limited(client: LuaClient, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "SLICE_SECONDS", 0.5)
    with pytest.raises(errors.ProcLua, match=r"not enough memory|fiber slice is exceeded"):
        await client.evaluate(LARGE[name])
    monkeypatch.setattr(runtime, "SLICE_SECONDS", PATIENT)
    await check_alive(client)
    assert await client.evaluate("local t = {} for i = 1, 50 do t[i] = string.rep('x', 1e6) .. i end return #t") == (
        50,
    )


async def test_values_that_functions_keep_do_not_fill_the_memory_for_ever(client: LuaClient) -> None:
    for _ in range(3):
        with pytest.raises(errors.ProcLua, match="not enough memory"):
            await client.evaluate(LARGE["full memory and calls"])
    assert await client.evaluate("return kept") == (None,), "the state was replaced"
    await check_alive(client)


ESCAPES: Final = (
    "io",
    "package",
    "dofile",
    "loadfile",
    "newproxy",
    "jit",
    "getfenv",
    "setfenv",
    "python",
    "ffi",
    "module",
    "os.execute",
    "os.exit",
    "os.getenv",
    "os.remove",
    "os.tmpname",
    "debug.sethook",
    "debug.getregistry",
    "debug.getupvalue",
    "debug.getfenv",
    "debug.setmetatable",
    "string.dump",
    "_G.io",
    "_G.python",
    "box.internal",
    "getmetatable('').__index",
)


@pytest.mark.parametrize("name", ESCAPES)
async def test_way_out_of_the_sandbox_does_not_exist(client: LuaClient, name: str) -> None:
    found = await client.evaluate(f"return pcall(function() return type({name}) end)")
    assert found == (True, "nil") or (found[0] is False and "attempt to index" in found[1])


@pytest.mark.parametrize(
    "text",
    [
        "return require('ffi')",
        "return require('io')",
        "return require('jit')",
        "return require('tests.node.conversations')",
        "return assert(load('\\27LJ\\2'))",
        "return assert(loadstring('\\27LJ\\2\\2'))",
        "return load(function() return nil end, 'x', 'b')(5).x",
        "getmetatable('').__index = {}",
        "getmetatable(box.space.s).__index = nil",
        "setmetatable(box.space, {})",
        "setmetatable(box.error, {})",
        "box.space.s:get(1)._at = 100",
        "box.space.s:get(1)[1] = 2",
        "return box.space.s:get(1)._at.x",
    ],
)
async def test_trick_is_an_error_of_its_own_request(client: LuaClient, text: str) -> None:
    with pytest.raises(errors.ProcLua):
        await client.evaluate(text)
    await check_alive(client)


async def test_changed_libraries_do_not_change_the_kernel_or_a_sandbox(client: LuaClient) -> None:
    await client.evaluate(
        "string.rep = nil string.find = nil table.concat = nil pairs = nil type = nil error = nil tostring = nil"
        " box.space.s.get = function() return 5 end",
    )
    assert await client.evaluate("return ('x'):rep(2), box.space.s:select()") == ("xx", ((1, "one"),))
    body = "function() return string.rep('x', 2), type(pairs), box, require, setmetatable, load end"
    await client.evaluate(f"box.schema.func.create('f', {{is_sandboxed = true, body = [[{body}]]}})")
    assert await client.call("f") == ("xx", "function", None, None, None, None)
    await client.evaluate(
        "box.schema.func.create('g', {is_sandboxed = true, body ="
        " [[function() string.rep = 5 n = (n or 0) + 1 return n, type(string.rep) end]]})"
    )
    assert await client.call("g") == (1, "number")
    assert await client.call("f") == ("xx", "function", None, None, None, None)


async def test_python_errors_and_objects_never_reach_lua(client: LuaClient) -> None:
    results = await client.evaluate(
        "local kinds = {} for _, f in ipairs{function() box.space.s:get({}, {}) end,"
        " function() box.space.s:insert(5) end,"
        " function() box.session.su('nobody') end, function() require('json').decode('{') end,"
        " function() require('msgpack').decode('\\xc1') end, function() box.error(1) end,"
        " function() require('decimal').new('x') end} do"
        " local ok, e = pcall(f) kinds[#kinds + 1] = ok == false and (type(e) == 'cdata' or type(e) == 'string') end"
        " return kinds",
    )
    assert results == ((True,) * 7,)


async def test_garbage_as_text_is_an_error(client: LuaClient) -> None:
    for text in ("\x00", "return", "return ...", "'", "\\", "return function() end", "for", "goto x"):
        response = await client.response(RequestType.EVAL, {0x27: text, 0x21: ()})
        assert response is not None
        assert not response.is_error or response.type == TYPE_ERROR + errors.ProcLua.code, text
    await check_alive(client)
