"""The live tail of real servers of 2.6 and of nodes: rows, names, and outcomes of transactions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.client.connection import Connection
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.msgpack import pack
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.observation.live_transaction import LiveTransaction, TransactionStatus
from flowstone.observation.query import Asking
from flowstone.observation.report import Report
from flowstone.observation.tail import LiveTail, TailStatus
from flowstone.outside import production
from tests import real_tarantool
from tests.node.upstream_server import Upstream

SECONDS = 30.0

ORDERS = """
local orders = box.schema.space.create('orders', {id = 600, format = {{'id', 'unsigned'}, {'who', 'string'}}})
orders:create_index('pk')
local sure = box.schema.space.create('sure', {id = 601, is_sync = true, format = {{'id', 'unsigned'}}})
sure:create_index('pk')
"""


async def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {SECONDS:g} s"
        await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def tailing(*uris: str, **options: Any) -> AsyncIterator[LiveTail]:
    """Run a tail that follows one of `uris`."""
    members: Sequence[Uri] = [parse_uri(uri) for uri in uris]
    tail = LiveTail(production(), lambda: members, **options)
    tail.start()
    try:
        yield tail
    finally:
        await tail.stop()


async def following(tail: LiveTail) -> None:
    await until("a connection", lambda: tail.status is TailStatus.FOLLOWING)


def lines(tail: LiveTail) -> list[tuple[str, str | None, str]]:
    """Return type, space and data of all recorded rows."""
    return [(row.type, row.space, row.data) for transaction in tail.sink.ring for row in transaction.rows]


def of(tail: LiveTail, data: str) -> LiveTransaction | None:
    """Return the transaction with a row that contains the text."""
    return next((each for each in tail.sink.ring if any(row.data == data for row in each.rows)), None)


async def evaluate(connection: Connection, expression: str) -> None:
    await connection.request(RequestType.EVAL, pack({Key.EXPR.value: expression, Key.TUPLE.value: ()}))


async def heartbeats_are_answered(uri: Uri) -> None:
    """Wait until three further acknowledgements of the only anonymous replica have arrived."""
    asking, acks, idle = Asking(production(), uri, timeout=SECONDS), 0, 0.0
    deadline = time.monotonic() + SECONDS
    while acks < 3:
        assert time.monotonic() < deadline, f"{acks} heartbeats answered within {SECONDS:g} s"
        report = await asking.ask()
        assert isinstance(report, Report)
        for downstream in (peer.downstream for peer in report.anonymous):  # none during the retry interval
            assert downstream is not None
            assert downstream.idle is not None
            acks, idle = acks + (downstream.idle < idle), downstream.idle
    await asking.close()


async def test_tail_of_a_real_server_has_names(tarantool: object, tmp_path: Path) -> None:
    with real_tarantool.serve(tmp_path, setup=ORDERS) as server:
        async with await Connection.open(production(), parse_uri(server.uri)) as client, tailing(server.uri) as tail:
            await following(tail)
            await evaluate(client, "box.space.orders:insert{1, 'Ada'}")
            await evaluate(client, "box.space.orders:update(1, {{'=', 'who', 'Grace'}})")
            await evaluate(
                client, "box.begin() box.space.orders:insert{2, 'x'} box.space.orders:delete(1) box.commit()"
            )
            await until("the last row", lambda: tail.sink.transactions_seen >= 3)
            assert lines(tail) == [
                ("INSERT", "orders", '{id: 1, who: "Ada"}'),
                ("UPDATE", "orders", '{id: 1} [["=", "who", "Grace"]]'),
                ("INSERT", "orders", '{id: 2, who: "x"}'),
                ("DELETE", "orders", "{id: 1}"),
            ]
            assert [len(each.rows) for each in tail.sink.ring] == [1, 1, 2]
            assert all(each.status is TransactionStatus.SETTLED for each in tail.sink.ring)
            assert tail.sink.rows_seen == 4
            assert tail.sink.skipped == 0


async def test_new_space_is_shown_by_name(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", dialect="2.11")
    await upstream.start()
    try:
        async with tailing(upstream.uri) as tail:
            await following(tail)
            herbs = await upstream.node.create_space("herbs", format=[("id", "unsigned")])
            await herbs.create_index("primary")
            await herbs.insert((7,))
            await until("the row", lambda: ("INSERT", "herbs", "{id: 7}") in lines(tail))
    finally:
        await upstream.stop()


async def test_a_password_is_not_shown(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", dialect="2.11")
    await upstream.start()
    try:
        async with tailing(upstream.uri) as tail:
            await following(tail)
            await upstream.node.create_user("eve", "open sesame")
            found = await until("the user", lambda: [line for line in lines(tail) if line[1] == "_user"])
            assert "eve" in found[0][2]
            assert "<hidden>" in found[0][2]
    finally:
        await upstream.stop()


async def test_synchronous_transaction_of_2_6_is_pending_until_its_verdict(tarantool: object, tmp_path: Path) -> None:
    """The tail's own acknowledgements do not make the quorum, although 2.6 counts those of anonymous replicas."""
    quorum = "replication_synchro_quorum = 2, replication_synchro_timeout = 1000, replication_timeout = 0.5"
    with real_tarantool.serve(tmp_path, setup=ORDERS, cfg=quorum) as server:
        async with await Connection.open(production(), parse_uri(server.uri)) as client, tailing(server.uri) as tail:
            await following(tail)
            insert = asyncio.create_task(evaluate(client, "box.space.sure:insert{1}"))
            waiting = await until("the row", tail.sink.waiting)
            assert [(each.rows[0].space, each.rows[0].key) for each in waiting] == [("sure", "{id: 1}")]
            shown = of(tail, "{id: 1}")
            assert shown is not None
            assert shown.status is TransactionStatus.WAITING
            await heartbeats_are_answered(parse_uri(server.uri))
            assert not insert.done()
            async with await Connection.open(production(), parse_uri(server.uri)) as second:
                await evaluate(second, "box.cfg{replication_synchro_quorum = 1}")
            await until("the verdict", lambda: shown.status is TransactionStatus.SETTLED)
            await insert
            assert tail.sink.waiting() == []
            assert [line for line in lines(tail) if line[0] == "CONFIRM"]


async def test_tail_marks_rolled_back_transactions(tarantool: object, tmp_path: Path) -> None:
    quorum = "replication_synchro_quorum = 2, replication_synchro_timeout = 0.2"
    with real_tarantool.serve(tmp_path, setup=ORDERS, cfg=quorum) as server:
        async with await Connection.open(production(), parse_uri(server.uri)) as client, tailing(server.uri) as tail:
            await following(tail)
            with pytest.raises(TarantoolError):
                await evaluate(client, "box.space.sure:insert{1}")
            shown = await until("the row", lambda: of(tail, "{id: 1}"))
            await until("the verdict", lambda: shown.status is TransactionStatus.ROLLED_BACK)
            assert tail.sink.waiting() == []


async def test_error_for_missing_rights_names_the_grant(tarantool: object, tmp_path: Path) -> None:
    with real_tarantool.serve(tmp_path, setup="box.schema.user.create('eve', {password = 'x'})") as server:
        async with tailing(f"eve:x@{server.uri}") as tail:
            await until("the refusal", lambda: tail.status is TailStatus.REFUSED)
            assert tail.message is not None
            assert "box.schema.user.grant('eve', 'replication')" in tail.message
        async with tailing(f"eve:wrong-secret@{server.uri}") as tail:
            await until("the refusal", lambda: tail.status is TailStatus.REFUSED)
            assert tail.message is not None
            assert "wrong-secret" not in tail.message


async def test_tail_switches_to_another_member_when_its_member_is_lost(tmp_path: Path) -> None:
    first = Upstream(tmp_path / "first", dialect="2.11", replication_timeout=0.2)
    await first.start()
    second = flowstone.Node(tmp_path / "second", listen="127.0.0.1:0", replication=[first.uri], replication_timeout=0.2)
    await second.start()
    try:
        other = f"replicator:secret@{second.address}"
        async with tailing(first.uri, other) as tail:
            await following(tail)
            await first.fruit.insert((1, "fig"))
            await until("the row", lambda: of(tail, '{id: 1, name: "fig"}'))
            await until("the row at the second one", lambda: second.info()["vclock"] == first.vclock)
            await first.stop()
            await until("another member", lambda: tail.followed == parse_uri(other))
            await following(tail)
            await second.space("fruit").insert((2, "plum"))
            await until("the row", lambda: of(tail, '{id: 2, name: "plum"}'))
            assert tail.sink.transactions_seen == len(tail.sink.ring)
    finally:
        await second.stop()
        await first.stop()


async def test_tail_without_a_reachable_member_raises_nothing(tmp_path: Path) -> None:
    async with tailing(f"127.0.0.1:{real_tarantool.free_port()}") as tail:
        await until("the end of the attempt", lambda: tail.status is TailStatus.LOST)
        assert tail.message is not None
        assert "connection refused" in tail.message
    assert tail.status is TailStatus.OFF


async def test_tail_shows_transactions_that_were_pending_at_its_start(tmp_path: Path) -> None:
    """Users open a dashboard when something is already stuck."""
    upstream = Upstream(tmp_path / "upstream", dialect="2.11", replication_synchro_timeout=1000.0)
    await upstream.start()
    try:
        sure = await upstream.node.create_space("sure", is_sync=True, format=[("id", "unsigned")])
        await sure.create_index("primary")
        await upstream.node.promote()
        await sure.insert((1,))
        await upstream.node.reconfigure(replication_synchro_quorum=3)
        lsn = upstream.node.info()["lsn"]
        writing = asyncio.create_task(sure.insert((2,)))
        await until("it is written", lambda: upstream.node.info()["lsn"] > lsn)
        assert upstream.node.info()["synchro"]["queue"]["len"] == 1
        async with tailing(upstream.uri) as tail:
            waiting = await until("the row", tail.sink.waiting)
            assert [each.rows[0].key for each in waiting] == ["{id: 2}"]
            before = of(tail, "{id: 1}")
            assert before is not None
            assert before.status is TransactionStatus.SETTLED
            assert tail.sink.rows_seen == 0
            await upstream.node.reconfigure(replication_synchro_quorum=1)
            await writing
            await until("the verdict", lambda: not tail.sink.waiting())
            assert tail.sink.rows_seen == 1
    finally:
        await upstream.stop()


async def test_tail_starts_at_the_current_position_of_a_server_without_older_logs(tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", dialect="2.11")
    await upstream.start()
    try:
        await upstream.lose_logs()
        async with tailing(upstream.uri) as tail:
            await following(tail)
            await upstream.fruit.insert((7, "fig"))
            await until("the row", lambda: of(tail, '{id: 7, name: "fig"}'))
    finally:
        await upstream.stop()
