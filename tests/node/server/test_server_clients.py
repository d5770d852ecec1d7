"""The real clients `tarantool` (blocking, in a thread), `asynctnt` and `net.box` against a server in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import asynctnt
import asynctnt.exceptions
import pytest
import tarantool as tarantool_python

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.node.server.server import Server
from tests.node.instances import make_instance

HOST = "127.0.0.1"
FORMAT = (
    {"name": "id", "type": "unsigned"},
    {"name": "name", "type": "string"},
    {"name": "extra", "is_nullable": True},
)


@asynccontextmanager
async def serving(directory: Path, dialect: Dialect) -> AsyncIterator[Server]:
    """Serve with user `app`, who has all privileges, and a space `people`."""
    instance = make_instance(directory, dialect)
    transaction = instance.box.begin()
    ddl.create_user(transaction, "app", password="secret")
    ddl.grant(transaction, "app", "super")
    ddl.create_space(transaction, "people", format=FORMAT)
    ddl.create_index(transaction, "people", "pk")
    ddl.create_index(transaction, "people", "by_name", parts=["name"], unique=False)
    instance.functions["add"] = lambda left, right: left + right
    server = Server(instance)
    await server.listen(HOST, 0)
    try:
        yield server
    finally:
        await server.close()
        await instance.journal.close()


def everything_of_tarantool_python(port: int) -> None:
    connection = tarantool_python.Connection(HOST, port, user="app", password="secret")
    space = connection.space("people")
    assert space.insert((1, "ann")).data == [[1, "ann"]]
    assert space.replace((2, "bob", [Decimal("1.5"), UUID(int=5)])).data[0][2] == [Decimal("1.5"), UUID(int=5)]
    assert connection.select("people", "ann", index="by_name").data == [[1, "ann"]]
    assert connection.update("people", 1, [("=", "name", "eve")]).data == [[1, "eve"]]
    connection.upsert("people", (3, "joe"), [("=", 1, "jim")])
    assert connection.delete("people", 3).data == [[3, "joe"]]
    assert [row[0] for row in connection.select("people", iterator=2)] == [1, 2]
    assert connection.call("add", 2, 3).data == [5]
    assert connection.call("box.space.people:len").data == [2]
    with pytest.raises(tarantool_python.DatabaseError) as caught:
        space.insert((1, "ann"))
    assert caught.value.args[0] == 3
    with pytest.raises(tarantool_python.DatabaseError) as caught:
        connection.execute("SELECT 1")
    assert caught.value.args[0] == 5
    assert connection.ping(notime=True) == "Success"
    connection.call("box.schema.space.create", "later")
    connection.call("box.space.later:create_index", "pk")
    assert connection.insert("later", (5,)).data == [[5]]
    connection.close()
    with pytest.raises(tarantool_python.DatabaseError, match="Incorrect password supplied for user 'app'"):
        tarantool_python.Connection(HOST, port, user="app", password="wrong")


@pytest.mark.parametrize("dialect", Dialect)
async def test_official_client_supports_all_of_its_requests(dialect: Dialect, tmp_path: Path) -> None:
    async with serving(tmp_path, dialect) as server:
        assert server.port is not None
        await asyncio.to_thread(everything_of_tarantool_python, server.port)


@pytest.mark.parametrize("dialect", Dialect)
async def test_asynctnt_loads_the_schema_and_supports_its_requests(dialect: Dialect, tmp_path: Path) -> None:
    async with serving(tmp_path, dialect) as server:
        connection = asynctnt.Connection(host=HOST, port=server.port, username="app", password="secret")
        await connection.connect()
        assert connection.version[:2] == dialect.greeting_version[:2]
        inserted = await connection.insert("people", {"id": 1, "name": "ann"})
        assert inserted[0]["name"] == "ann"
        await asyncio.gather(*(connection.replace("people", [key, "x"]) for key in range(2, 300)))
        assert len(await connection.select("people", ["x"], index="by_name")) == 298
        await connection.update("people", [1], [["=", "name", "eve"]])
        await connection.upsert("people", [1, "x"], [["=", "extra", 5]])
        assert (await connection.select("people", [1]))[0]["extra"] == 5
        assert (await connection.delete("people", [1]))[0]["id"] == 1
        assert (await connection.call("add", [2, 3])).body == [5]
        assert (await connection.call16("add", [2, 3])).body == [[5]]
        with pytest.raises(asynctnt.exceptions.TarantoolDatabaseError) as caught:
            await connection.insert("people", [2, "x"])
        assert caught.value.code == 3
        await connection.ping()
        await connection.disconnect()


async def test_asynctnt_commits_and_rolls_back_in_streams(tmp_path: Path) -> None:
    async with serving(tmp_path, Dialect.V2_11) as server:
        connection = asynctnt.Connection(host=HOST, port=server.port, username="app", password="secret")
        await connection.connect()
        first, second = connection.stream(), connection.stream()
        async with first:
            await first.insert("people", [1, "ann"])
            assert len(await connection.select("people")) == 0
        await second.begin()
        await second.insert("people", [2, "bob"])
        await second.rollback()
        assert [row["id"] for row in await connection.select("people")] == [1]
        await connection.disconnect()


NET_BOX = """
local net, json = require('net.box'), require('json')
local c = net.connect('app:secret@127.0.0.1:PORT')
local function fails(...) local _, e = pcall(...) return {e.code, e.type, e.message} end
local people = c.space.people
local seen = {c.state, people.index.by_name.name, people:insert{1, 'ann'}, people:get{1}}
people:upsert({1, 'x'}, {{'=', 2, 'eve'}})
table.insert(seen, people:update(1, {{'=', 'extra', 5}}))
table.insert(seen, people.index.by_name:select('eve'))
local futures = {}
for i = 1, 500 do futures[i] = people:replace({i, 'n'}, {is_async = true}) end
for i = 1, 500 do assert(futures[i]:wait_result(10)) end
table.insert(seen, people.index.pk:count())
table.insert(seen, c:call('add', {2, 3}))
table.insert(seen, c:call('box.info').status)
table.insert(seen, fails(people.insert, people, {1, 'x'}))
local guest = net.connect('127.0.0.1:PORT')
local _, e = pcall(guest.call, guest, 'add')
table.insert(seen, {e.code, e.type, e.access_type, e.object_type, e.object_name})
print(json.encode(seen))
os.exit(0)
"""


@pytest.mark.real
@pytest.mark.parametrize("dialect", Dialect)
async def test_net_box_of_a_real_server_supports_its_requests(dialect: Dialect, tmp_path: Path, tarantool: Any) -> None:
    async with serving(tmp_path, dialect) as server:
        script = NET_BOX.replace("PORT", str(server.port))
        printed = await asyncio.to_thread(tarantool.run, script, tmp_path / "net_box", seconds=60)
    assert json.loads(printed) == [
        "active",
        "by_name",
        [1, "ann"],
        [1, "ann"],
        [1, "eve", 5],
        [[1, "eve", 5]],
        500,
        5,
        "running",
        [3, "ClientError", "Duplicate key exists in unique index 'pk' in space 'people'"],
        [42, "AccessDeniedError", "Execute", "function", "add"],
    ]
