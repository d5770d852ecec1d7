"""Events for many listeners: one that does not read has no effect on others, and bounded memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from flowstone.web import event_stream, server
from flowstone.web.event_stream import BATCHES_MAX, LISTENERS_MAX, EventStream
from flowstone.web.server import WebServer
from tests.web.http_client import SECONDS, connect, listen


async def until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS:g} s"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(stream: EventStream) -> AsyncIterator[WebServer]:
    async with WebServer(stream.handle, "127.0.0.1:0") as web:
        yield web


def batch(number: int, size: int = 10) -> bytes:
    return msgspec.json.encode({"set": "s", "transactions": [number], "skipped": 0, "filler": "x" * size})


async def test_new_listener_gets_the_newest_state_and_then_changes() -> None:
    stream = EventStream()
    stream.put_state(b'{"now":1}')
    stream.put_state(b'{"now":2}')
    async with serving(stream) as web:
        events = await listen(web)
        assert await events.next("state") == {"now": 2}
        stream.put_batch("s", 1, batch(7))
        assert (await events.next("transactions"))["transactions"] == [7]
        stream.put_state(b'{"now":3}')
        assert await events.next("state") == {"now": 3}
        events.close()
        await until("the listener is gone", lambda: stream.listeners == 0)


async def test_only_the_newest_unsent_state_is_sent() -> None:
    stream = EventStream()
    async with serving(stream) as web:
        events = await listen(web)
        await until("somebody listens", lambda: stream.listeners == 1)
        for now in range(100):
            stream.put_state(b'{"now":%d}' % now)
        assert await events.next("state") == {"now": 99}
        events.close()


async def test_slow_listener_gets_its_number_of_missed_events_and_delays_no_other() -> None:
    stream, size, rounds = EventStream(), 1024 * 1024, 60
    async with serving(stream) as web:
        slow, quick = await listen(web), await listen(web)
        await until("both listen", lambda: stream.listeners == 2)
        got: list[int] = []
        for number in range(rounds):
            stream.put_batch("s", 1, batch(number, size))
            while not got or got[-1] != number:
                got += (await quick.next("transactions"))["transactions"]
        assert got == list(range(rounds))
        waiting = max(sum(len(each[2]) for each in one.batches) for one in stream._listeners)
        assert waiting <= BATCHES_MAX * (size + 100)
        missed, last = 0, -1
        while last != rounds - 1:
            event = await slow.next("transactions")
            missed += event["skipped"]
            last = event["transactions"][-1] if event["transactions"] else last
        assert 0 < missed < rounds
        for events in (slow, quick):
            events.close()


async def test_listener_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    stream = EventStream()
    async with serving(stream) as web:
        _, writer = await connect(web, "/api/events")
        await until("somebody listens", lambda: stream.listeners == 1)
        deadline = time.monotonic() + SECONDS
        while stream.listeners:
            assert time.monotonic() < deadline
            stream.put_batch("s", 1, batch(0, 1024 * 1024))
            await asyncio.sleep(0.01)
        # Unsent bytes would hold the connection, one of few, and the memory.
        await until("its connection is gone", lambda: not web._server.server_state.connections)
        writer.close()


async def test_idle_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.05)
    stream = EventStream()
    async with serving(stream) as web:
        events = await listen(web)
        reading = asyncio.create_task(events.next("state"))
        await until("three signs of life", lambda: events.comments >= 3)
        stream.put_state(b'{"now":1}')
        assert await reading == {"now": 1}
        events.close()


async def test_new_listener_replaces_the_oldest_when_the_server_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "LISTENERS_MAX", 2)
    assert LISTENERS_MAX > 2
    stream = EventStream()
    async with serving(stream) as web:
        first, second = await listen(web), await listen(web)
        await until("both listen", lambda: stream.listeners == 2)
        third = await listen(web)
        async with asyncio.timeout(SECONDS):
            while await first.reader.read(1000):
                pass
        assert stream.listeners == 2
        stream.put_state(b'{"now":1}')
        for events in (second, third):
            assert await events.next("state") == {"now": 1}
        for events in (first, second, third):
            events.close()
