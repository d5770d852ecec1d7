"""`flowstone.connect` without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.outside.loop_thread import LoopThread
from tests.node.upstream_server import Upstream
from tests.real_tarantool import Server


@dataclass
class Fruit:
    id: int
    name: str


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    """The address of a node that runs in a thread of its own."""
    thread = LoopThread("node")
    upstream = Upstream(tmp_path / "node", dialect="2.11")
    thread.run(upstream.start())
    try:
        yield upstream.uri
    finally:
        thread.run(upstream.stop())
        thread.close()


def exercise(client: flowstone.BlockingClient) -> None:
    fruit = client.space("fruit")
    assert fruit.insert((1, "fig")) == (1, "fig")
    assert fruit.replace((1, "kiwi")).name == "kiwi"
    assert fruit.update(1, {"name": "pear"}) == (1, "pear")
    fruit.upsert((1, "none"), {"name": "plum"})
    assert fruit.get(1) == (1, "plum")
    assert fruit.as_(Fruit).get(1) == Fruit(1, "plum")
    assert fruit.insert_many([(2, "fig"), (3, "fig")]) == fruit.replace_many([(2, "fig"), (3, "fig")]) == 2
    assert fruit.index("by_name").select("fig", limit=1) == [(2, "fig")]
    assert fruit.delete(1) == (1, "plum")
    assert repr(fruit) == "<ClientSpace 'fruit'>"


def test_statements_are_plain_calls(uri: str) -> None:
    with flowstone.connect(uri) as client:
        exercise(client)
        assert client.call("box.info")[0]["ro"] is False
        assert client.members[0].is_leader


@pytest.mark.real
def test_statements_are_plain_calls_of_a_real_server(fruit_server: Server) -> None:
    with flowstone.connect(fruit_server.uri) as client:
        exercise(client)
        assert client.eval("return ...", 7, read_from="any") == (7,)


def test_transaction_is_a_plain_block(uri: str) -> None:
    with flowstone.connect(uri) as client:
        with client.transaction() as transaction:
            transaction.space("fruit").insert((1, "fig"))
            assert client.space("fruit").get(1) is None
        with pytest.raises(ZeroDivisionError), client.transaction() as transaction:  # noqa: PT012
            transaction.space("fruit").insert((2, "fig"))
            1 / 0
        assert client.space("fruit").select() == [(1, "fig")]


def test_threads_share_the_client(uri: str) -> None:
    with flowstone.connect(uri) as client, ThreadPoolExecutor(4) as threads:
        fruit = client.space("fruit")
        rows = list(threads.map(lambda number: fruit.insert((number, "fig")), range(100)))
        assert fruit.select() == rows


def test_watcher_is_called_until_it_is_removed(uri: str) -> None:
    told = threading.Event()
    values: list[Any] = []

    def watcher(value: Any) -> None:
        values.append(value)
        told.set()

    with flowstone.connect(uri) as client:
        unwatch = client.watch("box.status", watcher)
        assert told.wait(20)
        unwatch()
        assert values[0]["is_ro"] is False


def test_call_after_the_end_is_an_error(uri: str) -> None:
    with flowstone.connect(uri) as client:
        pass
    with pytest.raises(flowstone.FlowstoneError, match="closed"):
        client.space("fruit").get(1)
