"""A replica without an event loop: plain calls from any thread while another one applies rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowstone
from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.outside.loop_thread import LoopThread
from flowstone.replica.replica import NotReached
from flowstone.replication.vclock import VClock
from tests.node.upstream_server import Upstream

SECONDS = 20.0


class Server:
    """An upstream in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.upstream = Upstream(directory)
        self._thread = LoopThread("upstream")
        self._thread.run(self.upstream.start())

    def write(self, statement: Callable[[flowstone.Space], Any]) -> dict[int, int]:
        """Return the position after the write."""

        async def write() -> dict[int, int]:
            await statement(self.upstream.fruit)
            return self.upstream.vclock

        return self._thread.run(write())

    def close(self) -> None:
        self._thread.run(self.upstream.stop())
        self._thread.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "upstream")
    yield made
    made.close()


def test_reads_are_plain_calls(server: Server) -> None:
    server.write(lambda fruit: fruit.insert((1, "fig")))
    with flowstone.follow(server.upstream.uri) as replica:
        fruit = replica.space("fruit")
        assert fruit.get(1) == (1, "fig")
        position = server.write(lambda fruit: fruit.insert((2, "date")))
        replica.wait_for(position, timeout=SECONDS)
        assert replica.vclock >= VClock(position)
        assert (len(fruit), fruit.count(), 2 in fruit, 3 in fruit) == (2, 2, True, False)
        assert [each.values for each in fruit] == [(1, "fig"), (2, "date")]
        assert fruit.min() == (1, "fig")
        assert fruit.max() == fruit.random(1) == (2, "date")
        assert fruit.select(iterator="LE", key=1, limit=1) == [(1, "fig")]
        assert fruit.index("by_name").select("date") == [(2, "date")]
        assert sorted(fruit.indexes) == ["by_name", "primary"]
        assert (fruit.id, fruit.name, fruit.format[1]["name"]) == (512, "fruit", "name")
        assert (fruit.index("by_name").name, repr(fruit)) == ("by_name", "<Space 'fruit'>")
        assert replica.info()["upstream"]["status"] in ("sync", "follow")


def test_replica_rejects_writes(server: Server) -> None:
    with flowstone.follow(server.upstream.uri) as replica:
        fruit = replica.space("fruit")
        for attempt in (fruit.insert, fruit.replace, fruit.delete, fruit.drop, fruit.index("by_name").update):
            with pytest.raises(errors.Readonly, match="read-only replica"):
                attempt((1, "fig"))


def test_triggers_are_called_in_a_thread_of_the_replica_and_may_read(server: Server) -> None:
    told: list[tuple[Any, str, Any]] = []
    arrived = threading.Event()
    with flowstone.follow(server.upstream.uri, spaces=["fruit"]) as replica:
        fruit = replica.space("fruit")
        replica.on_resync(lambda before, after: None)

        @replica.on_change
        def changed(changes: list[flowstone.SettledChange]) -> None:
            found = fruit.get(changes[0].key)
            told.append((found, threading.current_thread().name, changes[0].new))
            with pytest.raises(LocalProtocolError):
                replica.wait_for({1: 999})
            arrived.set()

        server.write(lambda fruit: fruit.insert((1, "fig")))
        assert arrived.wait(SECONDS)
    assert told == [((1, "fig"), "flowstone-follow", (1, "fig"))]


def test_wait_for_an_unreached_position_times_out(server: Server) -> None:
    with flowstone.follow(server.upstream.uri) as replica, pytest.raises(NotReached):
        replica.wait_for({1: 999}, timeout=0.05)


def test_reads_see_whole_transactions_while_others_are_applied(server: Server) -> None:
    """Each transaction moves both tuples: an atomic read never sees only one of them moved."""
    count = 200
    server.write(lambda fruit: fruit.insert((1, "0")))
    server.write(lambda fruit: fruit.insert((2, "0")))

    async def move(number: int) -> None:
        async with server.upstream.node.transaction() as transaction:
            for key in (1, 2):
                transaction.space("fruit").replace((key, str(number)))

    with flowstone.follow(server.upstream.uri) as replica:
        fruit, torn, done = replica.space("fruit"), [], threading.Event()

        def read() -> None:
            while not done.is_set():
                first, second = fruit.select()
                if first["name"] != second["name"]:
                    torn.append((first, second))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for number in range(1, count):
                position = server.write(lambda fruit, number=number: move(number))  # type: ignore[misc]
            replica.wait_for(position, timeout=SECONDS)
        finally:
            done.set()
            reader.join()
        assert torn == []
        assert fruit.get(2) == (2, str(count - 1))
