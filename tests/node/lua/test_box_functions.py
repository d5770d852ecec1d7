"""The API of box beyond what the comparison with a real server covers (tests/conformance): definitions and limits."""

from __future__ import annotations

import pytest

from flowstone.iproto import errors
from tests.node.instances import make_instance
from tests.node.lua.lua_clients import LuaClient, client_of


@pytest.fixture
async def client() -> LuaClient:
    return await client_of(make_instance())


async def test_definitions_are_created_used_and_dropped(client: LuaClient) -> None:
    text = """
        local space, created = box.schema.space.create('t', {format = {{'id', 'unsigned'}, {'name', 'string'}}})
        local index = space:create_index('pk', {sequence = true})
        box.space.t:create_index('by_name', {parts = {'name'}, unique = false})
        box.space.t:insert{nil, 'a'}
        box.space.t:auto_increment{'b'}
        local found = box.space.t.index.by_name:select('b')
        return created, index.name, found, box.space.t:frommap({name = 'c', id = 5}), box.space.t:len()
    """
    assert await client.evaluate(text) == ("created", "pk", ((2, "b"),), (5, "c"), 2)
    assert await client.evaluate("box.space.t:truncate() return box.space.t:len()") == (0,)
    assert await client.evaluate("box.space.t:drop() return box.space.t") == (None,)


async def test_sequences_users_and_grants(client: LuaClient) -> None:
    await client.evaluate("box.schema.sequence.create('n', {start = 5})")
    text = "return box.sequence.n:next(), box.sequence.n:next(), box.sequence.x"
    assert await client.evaluate(text) == (5, 6, None)
    text = "box.schema.user.create('eve') box.schema.user.grant('eve', 'read', 'space', 's')"
    assert await client.evaluate(f"{text} return box.schema.user.exists('eve')") == (True,)


async def test_definitions_in_a_transaction_are_rolled_back_with_it(client: LuaClient) -> None:
    text = "box.begin() box.schema.space.create('t') box.rollback() return box.space.t"
    assert await client.evaluate(text) == (None,)


async def test_new_definition_is_seen_by_the_next_statement(client: LuaClient) -> None:
    text = "local before = box.space.s:get(1).title box.space.s:format({{'id', 'unsigned'}, {'title', 'string'}})"
    assert await client.evaluate(f"{text} return before, box.space.s:get(1).title") == (None, "one")


async def test_pairs_reads_all_tuples_in_batches_and_from_any_position(client: LuaClient) -> None:
    for number in range(2, 3001):
        await client.replace(number, "x")
    text = "local n, last = 0, 0 for _, t in box.space.s:pairs(...) do n = n + 1 last = t[1] end return n, last"
    assert await client.evaluate(text) == (3000, 3000)
    assert await client.evaluate(text, 2990, {"iterator": "GT"}) == (10, 3000)
    assert await client.evaluate(text, 10, {"iterator": "LE"}) == (10, 1)
    assert await client.evaluate(text, None, {"after": (2000,)}) == (1000, 3000)
    text = "for _, t in box.space.s:pairs() do box.space.s:delete(t[1]) end return box.space.s:len()"
    assert await client.evaluate(text) == (0,)


async def test_pages_are_selected_by_position(client: LuaClient) -> None:
    for number in range(2, 6):
        await client.replace(number, "x")
    text = """
        local first, position = box.space.s:select({}, {limit = 2, fetch_pos = true})
        return #first, box.space.s:select({}, {limit = 2, after = position}), box.space.s:select({}, {after = {4}})
    """
    assert await client.evaluate(text) == (2, ((3, "x"), (4, "x")), ((5, "x"),))


async def test_read_only_node_refuses_writes_of_functions(client: LuaClient) -> None:
    client.instance.box.is_read_only = True
    client.instance.box.read_only_reason = "box.cfg.read_only is true"
    with pytest.raises(errors.Readonly):
        await client.evaluate("box.space.s:delete(1)")


async def test_sql_is_refused(client: LuaClient) -> None:
    with pytest.raises(errors.Unsupported, match="does not support SQL"):
        await client.evaluate("box.execute('SELECT 1')")
