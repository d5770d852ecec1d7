"""Server-sent events for many listeners: each event is encoded once, and a slow listener does not delay the others.

A listener queues the newest state and a few batches of transactions. Batches that do not fit are dropped and counted in
a `skipped` event. Memory is therefore bounded by the number of listeners, which is limited, too: a new listener above
the limit replaces the oldest listener of the address that has the most. A listener that reads nothing for SEND_SECONDS
is disconnected. Plain ASGI; knows nothing about the content of events.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope, Send

LISTENERS_MAX: Final = 64
BATCHES_MAX: Final = 8
"""Batches of transactions queued for one listener: two seconds' worth."""

KEEP_ALIVE_SECONDS: Final = 15.0
"""Idle time after which a comment is sent to keep the connection alive."""

SEND_SECONDS: Final = 30.0
"""Timeout for a listener to read what was sent. A browser that is suspended longer reconnects when it resumes."""

RETRY_MILLISECONDS: Final = 2000
"""Delay before a browser reconnects, sent as the stream's `retry` field."""

_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class _Listener:
    """The events queued for one listener."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.state: bytes | None = None
        self.batches: deque[tuple[str, int, bytes]] = deque()
        self.left_out: dict[str, int] = {}
        self.is_due = asyncio.Event()
        self.is_replaced = asyncio.Event()
        """Set when a new listener replaces this one."""

    def put_state(self, event: bytes) -> None:
        self.state = event
        self.is_due.set()

    def put_batch(self, source: str, count: int, event: bytes) -> None:
        if len(self.batches) >= BATCHES_MAX:
            oldest, lost, _ = self.batches.popleft()
            self.left_out[oldest] = self.left_out.get(oldest, 0) + lost
        self.batches.append((source, count, event))
        self.is_due.set()

    def take(self) -> bytes:
        """Remove and return all queued events; the state first, because it names the sets of the transactions."""
        self.is_due.clear()
        parts = [self.state] if self.state is not None else []
        parts += [left_out_event(source, count) for source, count in self.left_out.items()]
        parts += [event for _, _, event in self.batches]
        self.state, self.left_out = None, {}
        self.batches.clear()
        return b"".join(parts)


class EventStream:
    """Sends each event to all listeners; `handle` is the ASGI application that serves one listener."""

    def __init__(self) -> None:
        self._listeners: list[_Listener] = []
        self._newest_state: bytes | None = None

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def put_state(self, data: bytes) -> None:
        """Queue a state, encoded as JSON; it replaces an earlier state that has not been sent yet."""
        self._newest_state = event(b"state", data)
        for listener in self._listeners:
            listener.put_state(self._newest_state)

    def put_batch(self, source: str, count: int, data: bytes) -> None:
        """Queue a batch of `count` transactions of the set `source`, encoded as JSON."""
        encoded = event(b"transactions", data)
        for listener in self._listeners:
            listener.put_batch(source, count, encoded)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        client = scope.get("client")
        listener = _Listener(client[0] if client else "")
        if self._newest_state is not None:
            listener.put_state(self._newest_state)
        self._listeners.append(listener)
        if len(self._listeners) > LISTENERS_MAX:
            self._replace_one()
        tasks = [
            asyncio.create_task(_until_gone(receive)),
            asyncio.create_task(_tell(listener, send)),
            asyncio.create_task(listener.is_replaced.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if listener in self._listeners:
                self._listeners.remove(listener)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _replace_one(self) -> None:
        """Disconnect the oldest listener of the address that has most: early listeners must not lock others out."""
        counts = Counter(each.host for each in self._listeners)
        most = max(counts.values())
        oldest = next(each for each in self._listeners if counts[each.host] == most)
        self._listeners.remove(oldest)
        oldest.is_replaced.set()


def event(name: bytes, data: bytes) -> bytes:
    """Return the event as it is sent. `data` must not contain line breaks; JSON has none."""
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


def left_out_event(source: str, count: int) -> bytes:
    """Return the event that tells a listener that `count` transactions of the set `source` were dropped."""
    return event(b"transactions", b'{"set":"%s","transactions":[],"skipped":%d}' % (source.encode(), count))


async def _tell(listener: _Listener, send: Send) -> None:
    await _send(send, b"retry: %d\n\n" % RETRY_MILLISECONDS)
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                await listener.is_due.wait()
        await _send(send, listener.take() or b": here\n\n")


async def _send(send: Send, data: bytes) -> None:
    """Send `data`; raise TimeoutError if the listener does not read it within SEND_SECONDS."""
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
