"""The LuaJIT state: a missing extra, its limits, and what Python gives to it."""

from __future__ import annotations

import sys

import pytest

from flowstone.node.lua import runtime
from flowstone.node.lua.runtime import LuaMissing, LuaState
from flowstone.outside import production
from tests.node.instances import make_instance
from tests.node.lua.lua_clients import client_of


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lupa", None)
    with pytest.raises(LuaMissing, match=r"pip install 'flowstone\[lua\]'"):
        LuaState(production().clock, {})


async def test_values_larger_than_the_memory_that_is_left_cross_to_lua(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MEMORY_MAX", 24 * 1024 * 1024)
    monkeypatch.setattr(runtime, "MEMORY_OF_REQUESTS_MAX", 20 * 1024 * 1024)
    client = await client_of(make_instance())
    for number in range(2, 12):
        await client.replace(number, "x" * 900_000)
    for _ in range(3):
        text = "local kept = {} for i = 1, 100 do pcall(function() kept[i] = box.space.s:select() end) end return #kept"
        assert await client.response(0x08, {0x27: text, 0x21: ()}) is not None
    assert await client.evaluate("return #box.space.s:get(2).name") == (900_000,)
    assert await client.evaluate("return #..., box.space.s:get(1)", "y" * 8_000_000) == (8_000_000, (1, "one"))


async def test_memory_of_ended_requests_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MEMORY_MAX", 24 * 1024 * 1024)
    client = await client_of(make_instance())
    for _ in range(20):
        text = "local t = {} for i = 1, 10 do t[i] = ('x'):rep(1000000) .. i end return #t"
        assert await client.evaluate(text) == (10,)
