"""Values that cross to Lua and back, and the functions of modules on them."""

from __future__ import annotations

import asyncio
import datetime
import math
import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowstone.iproto import errors
from flowstone.iproto.extensions import Datetime, Extension, Interval
from flowstone.iproto.msgpack import pack, unpack
from tests.node.instances import make_instance
from tests.node.lua.lua_clients import LuaClient, client_of

PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=40),
    st.just("x" * 70_000),
    st.decimals(-1000, 1000, places=3),
    st.uuids(),
    st.builds(Interval, year=st.integers(-10, 10), day=st.integers(0, 5)),
    st.builds(Extension, st.integers(20, 90), st.binary(max_size=20)),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(st.lists(inner, max_size=20), st.dictionaries(st.text(max_size=5), inner, max_size=5)),
    max_leaves=30,
)


@pytest.fixture
async def client() -> LuaClient:
    return await client_of(make_instance())


def same(one: Any, other: Any) -> bool:
    """Compare values; Lua has one type of numbers, and does not keep the zero's sign."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, int | float):
        return one == other or math.isclose(one, other, rel_tol=0)
    return bool(one == other)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, max_size=4))
def test_values_return_from_lua_unchanged(values: list[Any]) -> None:
    async def check() -> None:
        client = await client_of(make_instance())
        returned = await client.evaluate("return ...", *values)
        assert same(unpack(pack(values)), returned)
        (again,) = await client.evaluate("local t = box.tuple.new(...) return t:totable()", values)
        assert same(unpack(pack(values)), again)

    asyncio.run(check())


async def test_datetime_has_its_parts_and_its_text(client: LuaClient) -> None:
    moment = Datetime.from_datetime(datetime.datetime(2026, 11, 19, 20, 30, 5, tzinfo=datetime.UTC))
    text = """
        local d = ... local datetime = require('datetime')
        return d.year, d.month, d.day, d.hour, d.min, d.sec, tostring(d), datetime.is_datetime(d), d.timestamp,
            datetime.new({year = 2026, month = 11, day = 19, hour = 20, min = 30, sec = 5}) == d,
            datetime.parse('2026-11-19T20:30:05') == d, datetime.now() > d or datetime.now() < d
    """
    assert await client.evaluate(text, moment) == (
        *(2026, 11, 19, 20, 30, 5, "2026-11-19T20:30:05Z", True, moment.seconds, True, True, True),
    )


async def test_decimals_keep_their_digits_in_arithmetic(client: LuaClient) -> None:
    text = (
        "local d = require('decimal') return d.new(...) / 3, -d.new('1.50'), d.new('1.5') == d.new('1.50'), d.abs(-2)"
    )
    assert await client.evaluate(text, Decimal(1)) == (
        Decimal("0.33333333333333333333333333333333333333"),
        Decimal("-1.50"),
        True,
        Decimal(2),
    )
    for wrong in ("'x'", "'nan'", "'1e99'"):
        with pytest.raises(errors.ProcLua, match="incorrect value to convert to decimal"):
            await client.evaluate(f"return require('decimal').new({wrong})")
    with pytest.raises(errors.ProcLua, match="decimal operation failed"):
        await client.evaluate("return require('decimal').new(1) / 0")


async def test_uuids_are_read_and_made(client: LuaClient) -> None:
    (made, text, size) = await client.evaluate("local u = require('uuid') return u.new(), u.str(), #u.bin()")
    assert isinstance(made, uuid.UUID)
    assert uuid.UUID(text) != made
    assert size == 16


@pytest.mark.parametrize(
    "text",
    ["require('json').decode('{')", "require('msgpack').decode('\\xc1')", "require('msgpack').decode('\\x92\\1')"],
)
async def test_invalid_text_is_an_error(client: LuaClient, text: str) -> None:
    with pytest.raises(errors.ProcLua):
        await client.evaluate(f"return {text}")


async def test_digests_and_random_bytes(client: LuaClient) -> None:
    text = "local d = require('digest') return d.sha512_hex('x'):sub(1, 8), #d.urandom(9), d.base64_decode('eA==')"
    assert await client.evaluate(text) == ("a4abd444", 9, "x")


async def test_yaml_is_written(client: LuaClient) -> None:
    assert await client.evaluate("return require('yaml').encode({a = 1})") == ("---\na: 1\n...\n",)
