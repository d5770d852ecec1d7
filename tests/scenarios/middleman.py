"""A proxy between two members of a simulated replica set, which may change, delay or drop each packet.

async with Middleman(sim, "a") as middle:
    middle.on_answer = lambda packet: None if … else packet
    await sim.start("b", replication=[middle.uri])
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from flowstone.iproto.greeting import GREETING_SIZE
from flowstone.iproto.packet import frame, split
from flowstone.outside import Client, Stream
from tests.simulation.simulation import PASSWORD, PORT, USER, Simulation

HERE = "scenario"
CONNECT_SECONDS = 10.0

Change = Callable[[bytes], bytes | None]
"""Maps a received packet to the forwarded one; None drops it."""


class Cut(Exception):
    """Raised by a callback: the connection breaks immediately."""


def unchanged(said: bytes) -> bytes | None:
    return said


class Middleman:
    """Relays connections to `uri` to the node `name`, and back; callbacks get packets without their length."""

    def __init__(self, sim: Simulation, name: str, *, user: str = f"{USER}:{PASSWORD}") -> None:
        self.on_greeting: Change = unchanged
        self.on_request: Change = unchanged
        self.on_answer: Change = unchanged
        self.answer_instead: Callable[[bytes], bytes | None] = lambda request: None
        """A request answered here does not reach the node."""
        self.is_open = asyncio.Event()
        """While it is not set, answers are delayed."""
        self.is_open.set()
        self.connections = 0
        self._sim = sim
        self._name = name
        self._user = user
        self._ways: list[_Way] = []

    async def __aenter__(self) -> Self:
        self._listener = await self._sim.outside.network.listen(HERE, 0, self._accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._listener.close()
        for way in self._ways:
            await way.end()

    @property
    def uri(self) -> str:
        return f"{self._user}@{HERE}:{self._listener.port}"

    @property
    def address(self) -> str:
        return f"{HERE}:{self._listener.port}"

    def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for way in self._ways:
            way.break_off()

    def _accept(self, client: Client) -> _Way:
        self.connections += 1
        way = _Way(self, client, self._sim, self._name)
        self._ways.append(way)
        return way


class _Way:
    """One connection and its continuation; the `Receiver` of its client."""

    def __init__(self, middle: Middleman, client: Client, sim: Simulation, name: str) -> None:
        self._middle = middle
        self._client = client
        self._network = sim.outside.network
        self._name = name
        self._said = bytearray()
        self._stream: Stream | None = None
        self._task = sim.loop.create_task(self._run())

    def received(self, data: bytes) -> None:
        self._said += data
        self._forward()

    def congested(self) -> None:
        pass

    def drained(self) -> None:
        pass

    def closed(self) -> None:
        self._task.cancel()

    def break_off(self) -> None:
        self._client.abort()
        self._task.cancel()

    async def end(self) -> None:
        self.break_off()
        with suppress(asyncio.CancelledError):
            await self._task

    def _forward(self) -> None:
        if self._stream is None:
            return
        packets, end = split(self._said)
        del self._said[:end]
        for packet in packets:
            answer = self._middle.answer_instead(packet)
            if answer is not None:
                self._client.write(frame(answer))
                continue
            passed = self._middle.on_request(packet)
            if passed is not None:
                self._stream.write(frame(passed))

    async def _run(self) -> None:
        try:
            self._stream = await self._network.connect(self._name, PORT, timeout=CONNECT_SECONDS)
        except OSError:
            self._client.abort()
            return
        try:
            await self._listen(self._stream)
        except (OSError, Cut):
            pass
        finally:
            self._client.abort()
            await self._stream.close()

    async def _listen(self, stream: Stream) -> None:
        heard = b""
        while len(heard) < GREETING_SIZE:
            data = await stream.read(GREETING_SIZE - len(heard))
            if not data:
                return
            heard += data
        greeting = self._middle.on_greeting(heard)
        if greeting is not None:
            self._client.write(greeting)
        self._forward()
        heard = b""
        while data := await stream.read(1 << 16):
            await self._middle.is_open.wait()
            packets, end = split(heard + data)
            heard = (heard + data)[end:]
            for packet in packets:
                passed = self._middle.on_answer(packet)
                if passed is not None:
                    self._client.write(frame(passed))
