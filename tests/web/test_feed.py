"""The feed of live replica sets: transactions, leaders, pending transactions and findings, in real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import flowstone
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import parse_uri
from flowstone.observation.live_transaction import (
    DATA_LENGTH_MAX,
    ROWS_MAX,
    LiveRow,
    LiveTransaction,
    TransactionStatus,
)
from flowstone.observation.survey import Survey
from flowstone.observation.tail_sink import KEPT_MAX
from flowstone.outside import production
from flowstone.web.dashboard import dashboard
from flowstone.web.feed import SEARCHED_AT_ONCE, Feed, TransactionFilter
from flowstone.web.feed_state import SetState
from flowstone.web.server import WebServer
from tests import real_tarantool
from tests.node.upstream_server import Upstream
from tests.real_tarantool import free_port
from tests.web.http_client import Events, get, listen

SECONDS = 30.0
SHOWN_WITHIN_SECONDS = 2.0
WRITES = 5

ORDERS = """
local orders = box.schema.space.create('orders', {format = {{'id', 'unsigned'}, {'who', 'string'}}})
orders:create_index('pk')
box.schema.space.create('sure', {is_sync = true}):create_index('pk')
"""


async def until(what: str, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        await asyncio.sleep(0.01)
    return found


async def until_found(feed: Feed, count: int, **wanted: Any) -> None:
    """Wait until `wanted` transactions are recorded."""
    deadline = time.monotonic() + SECONDS
    while await kept(feed, **wanted) < count:
        assert time.monotonic() < deadline, f"{count} of {wanted} did not come within {SECONDS:g} s"
        await asyncio.sleep(0.01)


async def kept(feed: Feed, **wanted: Any) -> int:
    """Return the recorded and the wanted number."""
    return len((await feed.transactions(TransactionFilter(**wanted))).transactions)


@asynccontextmanager
async def feeding(*uris: str) -> AsyncIterator[Feed]:
    outside = production()
    feed = Feed(outside, Survey(outside, [parse_uri(uri) for uri in uris]), look_seconds=0.2)
    await feed.start()
    try:
        yield feed
    finally:
        await feed.stop()


def tails_follow(feed: Feed) -> bool:
    return all(one.tail.status == "following" for one in feed.state().sets)


def labels(one: SetState) -> dict[str, str]:
    return {member.uuid: member.label for member in one.members}


@asynccontextmanager
async def pair(directory: Path) -> AsyncIterator[tuple[Upstream, flowstone.Node]]:
    """Yield a node and its follower."""
    first = Upstream(directory / "first", dialect="2.11")
    await first.start()
    second = flowstone.Node(directory / "second", listen="127.0.0.1:0", replication=[first.uri])
    await second.start()
    try:
        yield first, second
    finally:
        await second.stop()
        await first.stop()


def ways(one: SetState) -> list[tuple[str, int | None]]:
    return [(link.status, link.lag_lsn) for link in one.links]


async def told_of(events: Events, *wanted: str) -> dict[str, Any]:
    """Return, by set, the transactions that contain `wanted`, once all have been reported, and so all earlier ones."""
    told: dict[str, Any] = {}
    while len(told) < len(wanted):
        batch = await events.next("transactions")
        told |= {each["set"]: each for each in batch["transactions"] if each["rows"][0]["data"] in wanted}
    return told


async def test_writes_in_two_sets_are_reported_in_time(tarantool: object, tmp_path: Path) -> None:
    with real_tarantool.serve(tmp_path / "real", setup=ORDERS) as server:
        async with pair(tmp_path) as (first, _), feeding(first.uri, server.uri) as feed:
            await until("both logs", lambda: tails_follow(feed))
            await until("the word that the second node has all", lambda: ways(feed.state().sets[0]) == [("follow", 0)])
            nodes, real = feed.state().sets
            # The second node was not named: the first one has no upstreams, and knows it only as its replica.
            assert len(nodes.members) == 2
            assert [member.address for member in real.members] == [server.uri]
            async with WebServer(dashboard(feed), "127.0.0.1:0") as web:
                events = await listen(web)
                await events.next("state")  # from here on the listener receives events
                waits = []
                for number in range(1, WRITES + 1):
                    begun = time.monotonic()
                    await first.fruit.insert((number, "fig"))
                    async with await Connection.open(production(), parse_uri(server.uri)) as client:
                        expression = f"return box.space.orders:insert{{{number}, 'Ada'}}"
                        await client.request(RequestType.EVAL, pack({Key.EXPR.value: expression, Key.TUPLE.value: ()}))
                    told = await told_of(events, f'{{id: {number}, name: "fig"}}', f'{{id: {number}, who: "Ada"}}')
                    waits.append(time.monotonic() - begun)
                assert max(waits) < SHOWN_WITHIN_SECONDS
                events.close()
                assert nodes.uuid is not None
                assert real.uuid is not None
                assert told[nodes.uuid]["rows"][0]["data"] == f'{{id: {WRITES}, name: "fig"}}'
                assert told[real.uuid]["rows"][0]["space"] == "orders"
                assert {each["status"] for each in told.values()} == {"settled"}
                found = (await get(web, "/api/transactions?text=FIG")).json()
                assert [each["set"] for each in found["transactions"]] == [nodes.uuid] * WRITES
                assert found["seen"] >= found["kept"] >= 2 * WRITES


async def test_recorded_transactions_are_found_by_filters(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, _), feeding(first.uri) as feed:
        await until("the log", lambda: tails_follow(feed))
        for number in range(1, 11):
            await first.fruit.insert((number, "fig" if number % 2 else "plum"))
        await first.fruit.delete(1)
        await until_found(feed, 11, space="fruit")
        everything, uuid = await kept(feed), feed.state().sets[0].uuid
        assert await kept(feed, text="plum") == 5
        assert await kept(feed, type="DELETE", space="fruit") == 1
        assert await kept(feed, space="fruit", type="INSERT") == 10
        assert await kept(feed, space="512") == 11
        assert await kept(feed, space="vegetables") == 0
        assert await kept(feed, replica=1) == everything
        assert await kept(feed, replica=2) == 0
        assert await kept(feed, set=uuid) == everything
        assert await kept(feed, set="another") == 0
        newest = await feed.transactions(TransactionFilter(limit=2))
        assert [each.lsn for each in newest.transactions] == sorted(
            (each.lsn for each in (await feed.transactions(TransactionFilter())).transactions), reverse=True
        )[:2]


async def test_concurrent_searches_do_not_block_the_event_loop(tmp_path: Path) -> None:
    row = LiveRow(type="INSERT", space="load", space_id=512, lsn=1, data="x" * DATA_LENGTH_MAX)
    large = LiveTransaction(
        replicaset_uuid="x",
        replica_id=1,
        lsn=1,
        tsn=1,
        at=0.0,
        status=TransactionStatus.SETTLED,
        rows=(row,) * ROWS_MAX,
    )
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with pair(tmp_path) as (first, _), feeding(first.uri) as feed:
        await until("the log", lambda: tails_follow(feed))
        tail = feed._watched[feed.state().sets[0].uuid].tail
        assert tail is not None
        tail.sink.ring.extend([large] * KEPT_MAX)
        others = asyncio.create_task(take_turns())
        assert sum(await asyncio.gather(kept(feed, text="plum"), kept(feed, text="fig"))) == 0
        others.cancel()
    assert turns >= 2 * KEPT_MAX / SEARCHED_AT_ONCE


async def test_stalled_member_is_replaced_by_another_source(tmp_path: Path) -> None:
    """An isolated leader that still answers is such a member."""
    async with pair(tmp_path) as (first, second):
        other = f"replicator:secret@{second.address}"
        async with feeding(first.uri, other) as feed:
            await until("the log", lambda: tails_follow(feed))
            assert feed.state().sets[0].tail.address == first.address
            # The first one has no upstreams: it never receives rows of the second one.
            await second.space("fruit").insert((1, "plum"))
            await until_found(feed, 1, text="plum")
            assert feed.state().sets[0].tail.address == second.address


async def test_rows_flow_along_the_links_and_lag_is_remembered(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, _), feeding(first.uri) as feed:
        await until("the log", lambda: tails_follow(feed))

        def flows() -> bool:
            one = feed.state().sets[0]
            rates = [link.rows_per_second for link in one.links]
            return bool(rates and rates[0]) and all(one.rows_per_second.values()) and one.tail.rows_per_second > 0

        deadline = time.monotonic() + SECONDS
        while not flows():
            assert time.monotonic() < deadline
            await first.fruit.replace((1, "fig"))
        one = feed.state().sets[0]
        points = feed.history(one.uuid).points
        assert len(points) >= 2
        assert b'"lag_lsn":' in bytes(points[-1])


async def test_transaction_pending_for_a_quorum_is_listed(tmp_path: Path) -> None:
    options = {"replication_synchro_quorum": 3, "replication_synchro_timeout": 1000.0}
    upstream = Upstream(tmp_path / "node", dialect="2.11", **options)
    await upstream.start()
    try:
        sure = await upstream.node.create_space("sure", is_sync=True, format=[("id", "unsigned")])
        await sure.create_index("primary")
        await upstream.node.reconfigure(replication_synchro_quorum=1)
        await upstream.node.promote()
        await upstream.node.reconfigure(replication_synchro_quorum=3)
        async with feeding(upstream.uri) as feed:
            await until("the log", lambda: tails_follow(feed))
            writing = asyncio.create_task(sure.insert((42,)))
            waiting = await until("the transaction", lambda: feed.state().sets[0].waiting)
            assert [(row.type, row.space, row.key) for row in waiting[0].rows] == [("INSERT", "sure", "{id: 42}")]
            assert 0 <= waiting[0].age < SECONDS
            queue = await until("the queue", lambda: feed.state().sets[0].queue)
            assert queue.owner == 1
            await upstream.node.reconfigure(replication_synchro_quorum=1)
            await writing
            await until("the verdict", lambda: not feed.state().sets[0].waiting)
    finally:
        await upstream.stop()


@asynccontextmanager
async def electorate(directory: Path) -> AsyncIterator[tuple[list[flowstone.Node], list[str]]]:
    """Yield three nodes with elections, and their URIs."""
    uris = [f"admin:secret@127.0.0.1:{free_port()}" for _ in range(3)]
    nodes = [
        flowstone.Node(
            directory / str(number),
            listen=uri.rpartition("@")[2],
            user=("admin", "secret"),
            replication=uris,
            election_mode="candidate",
            election_timeout=2.0,
            replication_synchro_quorum=2,
            replication_timeout=0.5,
        )
        for number, uri in enumerate(uris)
    ]
    await asyncio.gather(*(node.start() for node in nodes))
    try:
        yield nodes, uris
    finally:
        for node in nodes:
            await node.stop()


def leader_of(feed: Feed) -> str | None:
    one: Sequence[SetState] = feed.state().sets
    return next((member.address for member in one[0].members if member.is_leader), None)


def elections_in(feed: Feed) -> list[tuple[str, str | None]]:
    """Return the timeline: events, and the leader since each."""
    return [(event.kind, event.leader_label) for event in feed.state().sets[0].elections]


async def test_timeline_shows_a_lost_leader_and_its_successor(tmp_path: Path) -> None:
    async with electorate(tmp_path) as (nodes, uris), feeding(*uris) as feed:
        await until("a leader and its log", lambda: leader_of(feed) and tails_follow(feed))
        before = leader_of(feed)
        leader = next(node for node in nodes if node.address == before)
        nodes.remove(leader)
        await leader.stop()
        await until("its successor", lambda: leader_of(feed) not in (None, before))
        await until("its election", lambda: elections_in(feed)[-1] == ("leader", leader_of(feed)))
        one, events = feed.state().sets[0], elections_in(feed)
        assert ("leader", before) in events
        assert events[-1] == ("leader", leader_of(feed))
        assert [event.at for event in one.elections] == sorted(event.at for event in one.elections)
        assert any(finding.member == member.uuid for member in one.members for finding in feed.state().findings)
        await until("another log", lambda: tails_follow(feed))
        await until("its successor", lambda: leader_of(feed) not in (None, before))
        successor = next(node for node in nodes if node.address == leader_of(feed))
        await successor.wait_rw(SECONDS)
        space = await successor.create_space("late", format=[("id", "unsigned")])
        await space.create_index("primary")
        await until_found(feed, 1, text="late")


async def test_watching_dashboard_is_not_listed_as_a_member(tmp_path: Path) -> None:
    async with pair(tmp_path) as (first, _), feeding(first.uri) as feed:
        await until("the log", lambda: tails_follow(feed))
        await until("the server's word of it", lambda: first.node.info()["replication_anon"]["count"] == 1)
        looks = len(feed.history(None).points)
        await until("two looks more", lambda: len(feed.history(None).points) >= looks + 2)
        assert [member.id for member in feed.state().sets[0].members] == [1, 2]


async def test_unreachable_servers_are_part_of_the_topology() -> None:
    async with feeding(f"127.0.0.1:{free_port()}") as feed:
        state = feed.state()
        assert state.sets[0].uuid is None
        assert state.sets[0].members[0].unreachable is not None
        assert state.sets[0].tail.status == "off"
        assert state.findings
