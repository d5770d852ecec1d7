"""Server-sent events for many listeners: each event encoded once, and nobody waits for a slow one.

A listener has room for the newest state and for a few batches of transactions; what does not fit is left out, and told
as a number. So memory is bounded by the number of listeners, which is bounded, too: one more replaces the oldest
listener of the address that has most. A listener that takes nothing for long is disconnected.
ASGI, without knowledge of what the events mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope, Send

LISTENERS_MAX: Final = 64
BATCHES_MAX: Final = 8
"""Batches of transactions that wait for one listener: two seconds of them."""

KEEP_ALIVE_SECONDS: Final = 15.0
SEND_SECONDS: Final = 30.0
"""What a listener may take to read what it was sent; a browser that sleeps takes longer, and comes back."""

RETRY_MILLISECONDS: Final = 2000

_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class _Listener:
    """What waits to be sent to one."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.state: bytes | None = None
        self.batches: deque[tuple[str, int, bytes]] = deque()
        self.left_out: dict[str, int] = {}
        self.is_due = asyncio.Event()
        self.is_replaced = asyncio.Event()
        """Set when another listener has taken the place of this one."""

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
        """All that waits, the state first: it names what transactions are of."""
        self.is_due.clear()
        parts = [self.state] if self.state is not None else []
        parts += [left_out_event(source, count) for source, count in self.left_out.items()]
        parts += [event for _, _, event in self.batches]
        self.state, self.left_out = None, {}
        self.batches.clear()
        return b"".join(parts)


class EventStream:
    """Sends what it is given to all who listen; `handle` is the ASGI application that serves one of them."""

    def __init__(self) -> None:
        self._listeners: list[_Listener] = []
        self._newest_state: bytes | None = None

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def put_state(self, data: bytes) -> None:
        """JSON of a state, which takes the place of the one before where that was not sent yet."""
        self._newest_state = event(b"state", data)
        for listener in self._listeners:
            listener.put_state(self._newest_state)

    def put_batch(self, source: str, count: int, data: bytes) -> None:
        """JSON of a batch of `count` transactions of `source`."""
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
    """As it is sent. JSON has no line breaks, which would end the data."""
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


def left_out_event(source: str, count: int) -> bytes:
    """To who could not be told of `count` transactions."""
    return event(b"transactions", b'{"set":"%s","transactions":[],"skipped":%d}' % (source.encode(), count))


async def _tell(listener: _Listener, send: Send) -> None:
    await _send(send, b"retry: %d\n\n" % RETRY_MILLISECONDS)
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                await listener.is_due.wait()
        await _send(send, listener.take() or b": here\n\n")


async def _send(send: Send, data: bytes) -> None:
    """TimeoutError where the listener takes nothing for too long."""
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
