"""`flowstone.connect` with an event loop: statements, the leader, watchers, and what is sent again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import flowstone
from flowstone.iproto.errors import (
    FieldType,
    NoSuchFieldName,
    NoSuchProc,
    ProcLua,
    TupleFound,
    Unsupported,
)
from tests.node.upstream_server import USER, Upstream
from tests.real_tarantool import Server, free_port

SECONDS = 20.0


async def exercise(client: flowstone.Client) -> None:
    fruit = client.space("fruit")
    assert await fruit.insert((1, "fig")) == (1, "fig")
    assert (await fruit.insert({"name": "kiwi", "id": 2})).name == "kiwi"
    with pytest.raises(TupleFound, match="Duplicate key"):
        await fruit.insert((1, "apple"))
    with pytest.raises(FieldType):
        await fruit.insert((3, 4))
    with pytest.raises(NoSuchFieldName, match="'colour'"):
        await fruit.insert({"id": 3, "colour": "red"})
    assert await fruit.replace((1, "apple")) == (1, "apple")
    assert await fruit.update(1, {"name": "pear"}) == (1, "pear")
    assert await fruit.update(7, [("=", "name", "none")]) is None
    await fruit.upsert((1, "none"), {"name": "plum"})
    await fruit.upsert((3, "kiwi"), {"name": "none"})
    assert await fruit.get(1) == (1, "plum")
    assert await fruit.get(7) is None
    by_name = fruit.index("by_name")
    assert await by_name.select("kiwi") == [(2, "kiwi"), (3, "kiwi")]
    assert await fruit.select(iterator="LE", limit=2, offset=1) == [(2, "kiwi"), (1, "plum")]
    assert await fruit.delete(1) == (1, "plum")
    assert await fruit.delete(1) is None
    assert await fruit.insert_many((number, "berry") for number in range(100, 3100)) == 3000
    assert await fruit.replace_many([]) == 0
    assert len(await fruit.select()) == 3002
    with pytest.raises(flowstone.UnknownSpace, match="unknown space 'stones'"):
        await client.space("stones").get(1)


async def test_statements_are_executed_by_a_node(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        await exercise(client)
        assert [(one.is_leader, one.version) for one in client.members] == [(True, "2.11.9")]


@pytest.mark.real
async def test_statements_are_executed_by_a_real_server(fruit_server: Server) -> None:
    async with flowstone.connect(fruit_server.uri) as client:
        await exercise(client)
        assert await client.eval("return 1, ...", "a") == (1, "a")
        with pytest.raises(ProcLua, match="on purpose"):
            await client.eval("error('on purpose')")
        with pytest.raises(Unsupported, match="does not support watchers"):
            client.watch("box.status", print)


async def test_requests_of_one_turn_are_sent_together(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        rows = await asyncio.gather(*[fruit.replace((number, "fig")) for number in range(500)])
        assert [row.id for row in rows] == list(range(500))
        assert await asyncio.gather(*[fruit.get(number) for number in range(500)]) == rows


async def test_functions_are_called_with_their_arguments(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        (info,) = await client.call("box.info", read_from="any")
        assert info["ro"] is False
        with pytest.raises(NoSuchProc, match="nothing"):
            await client.call("nothing")


async def test_changed_definition_is_read_before_fields_are_written_by_name(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await fruit.insert({"id": 1, "name": "fig"})
        await node.fruit.set_format(
            [("id", "unsigned"), ("name", "string"), {"name": "colour", "type": "string", "is_nullable": True}]
        )
        await fruit.replace({"id": 1, "name": "fig", "colour": "green"})
        vegetables = await node.node.create_space("vegetables", format=[("id", "unsigned")])
        await vegetables.create_index("primary")
        await asyncio.gather(*[client.space("vegetables").insert({"id": number}) for number in range(10)])
        assert len(vegetables) == 10
    assert node.fruit.get(1) == (1, "fig", "green")


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_writes_go_to_the_member_that_is_writable(pair: tuple[Upstream, Upstream]) -> None:
    one, two = pair
    async with flowstone.connect([two.uri, one.uri]) as client:
        fruit = client.space("fruit")
        await fruit.insert((1, "fig"))
        assert (len(one.fruit), len(two.fruit)) == (1, 0)
        await one.node.reconfigure(read_only=True)
        writing = [fruit.insert((number, "kiwi")) for number in range(2, 20)]
        await two.node.reconfigure(read_only=False)
        await asyncio.gather(*writing)
        assert (len(one.fruit), len(two.fruit)) == (1, 18)
        await until(lambda: [each.is_leader for each in client.members] == [True, False])
        assert await fruit.get(2) == (2, "kiwi")


async def test_write_waits_for_a_leader_until_its_timeout(node: Upstream) -> None:
    async with flowstone.connect(node.uri, request_timeout=0.2) as client:
        await node.node.reconfigure(read_only=True)
        with pytest.raises(flowstone.NoMember, match=r"no member accepts writes: 127\.0\.0\.1:\d+: .*read.only"):
            await client.space("fruit").insert((1, "fig"))
        assert await client.space("fruit", read_from="any").get(1) is None


async def test_requests_go_on_when_a_member_is_back(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await fruit.insert((1, "fig"))
        await node.stop()
        await until(lambda: not client.members[0].is_connected)
        late = fruit.insert((2, "kiwi"))
        await node.start()
        assert await late == (2, "kiwi")


async def test_reads_may_go_to_any_member(pair: tuple[Upstream, Upstream]) -> None:
    one, two = pair
    await one.fruit.insert((1, "one"))
    await two.node.reconfigure(read_only=False)
    await two.fruit.insert((1, "two"))
    await two.node.reconfigure(read_only=True)
    async with flowstone.connect([one.uri, two.uri], read_from="any") as client:
        await until(lambda: all(each.is_connected for each in client.members))
        found = await asyncio.gather(*[client.space("fruit").get(1) for _ in range(4)])
        assert {each.name for each in found if each is not None} == {"one", "two"}
        assert await client.space("fruit", read_from="leader").get(1) == (1, "one")


async def test_value_of_a_key_is_watched_at_the_leader(pair: tuple[Upstream, Upstream]) -> None:
    one, two = pair
    told: list[Any] = []
    async with flowstone.connect([one.uri, two.uri]) as client:
        unwatch = client.watch("box.status", lambda value: told.append(value["is_ro"]))
        again: list[Any] = []
        client.watch("box.status", again.append)
        await until(lambda: told == [False] and again)
        await two.node.reconfigure(read_only=False)
        await one.stop()
        await until(lambda: told[-1] is False and len(told) > 1)
        unwatch()
        await one.start()
        count = len(told)
        await two.node.reconfigure(read_only=True)
        await until(lambda: len(again) > count)
        assert len(told) == count


async def test_watcher_that_fails_is_logged_and_disturbs_nothing(
    node: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(value: Any) -> None:
        raise ZeroDivisionError

    async with flowstone.connect(node.uri) as client:
        client.watch("box.status", fails)
        await until(lambda: "watcher of 'box.status' failed" in caplog.text)
        assert await client.space("fruit").get(1) is None


async def test_lost_answer_of_a_write_is_an_unknown_outcome(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await fruit.get(1)
        leader = client._pool.members[0].connection
        assert leader is not None
        read, write = fruit.get(1), fruit.insert((1, "fig"))
        leader._flush()
        leader._fail(flowstone.ConnectionFailed("cut"))
        with pytest.raises(flowstone.OutcomeUnknown, match=r"outcome of INSERT at .* is unknown: cut; read"):
            await write
        assert await read in (None, (1, "fig"))


async def test_write_that_was_not_sent_is_sent_again(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await fruit.get(1)
        leader = client._pool.members[0].connection
        assert leader is not None
        ping = fruit.get(1)  # the connection is not idle: the write waits for the end of the turn
        write = fruit.insert((1, "fig"))
        leader._fail(flowstone.ConnectionFailed("cut"))
        assert await write == (1, "fig")
        await ping


async def test_requests_fail_when_the_client_is_closed(node: Upstream) -> None:
    async with flowstone.connect(node.uri) as client:
        fruit = client.space("fruit")
        await node.node.reconfigure(read_only=True)
        waiting = fruit.insert((1, "fig"))
        await until(lambda: client.members[0].is_read_only)
    with pytest.raises(flowstone.FlowstoneError, match="closed"):
        await waiting
    with pytest.raises(flowstone.FlowstoneError, match="closed"):
        await fruit.get(1)


async def test_unreachable_members_are_named() -> None:
    one, two = free_port(), free_port()
    with pytest.raises(flowstone.ConnectionFailed, match=f"cannot connect to 127.0.0.1:{one}: connection refused"):
        async with flowstone.connect(f"127.0.0.1:{one}"):
            pass
    with pytest.raises(flowstone.NoMember, match=f"127.0.0.1:{one}: .*refused.*; 127.0.0.1:{two}: .*refused"):
        async with flowstone.connect([f"127.0.0.1:{one}", f"127.0.0.1:{two}"]):
            pass


async def test_wrong_password_is_the_error_of_the_server(node: Upstream) -> None:
    with pytest.raises(flowstone.TarantoolError, match=r"[Ii]ncorrect|User not found"):
        async with flowstone.connect(node.address, user=USER.partition(":")[0], password="wrong"):
            pass
