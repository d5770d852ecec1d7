"""The server side of recorded conversations, replayed byte for byte to any client.

A connection gets the next conversation that begins with the same request. An answer is sent when the client has sent as
much as it had in the recording; acknowledgements may come in fewer packets, so for those it is enough that the client
has acknowledged as much. All connections are greeted with the salt of the next conversation that authenticates, so the
recorded scramble is valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from flowstone.iproto.constants import Key, RequestType
from tests.conversations.recording import Conversation, Packet, framed, split

DEADLINE_SECONDS = 60.0
READ_SIZE = 65536


def is_ack(packet: Packet) -> bool:
    return not packet.from_server and packet.type == RequestType.OK


@dataclass
class Heard:
    """The requests and acknowledgements of a client in one conversation."""

    requests: list[Packet] = field(default_factory=list)
    acks: list[Packet] = field(default_factory=list)

    def has_acknowledged(self, recorded: Packet) -> bool:
        """Return True if the client has acknowledged at least as much as the recorded applier with this ACK."""
        return any(_covers(ack, recorded) for ack in self.acks)


def _covers(ack: Packet, recorded: Packet) -> bool:
    lsns, heartbeats = ack.content(Key.VCLOCK, {}), ack.content(Key.VCLOCK_SYNC, 0)
    if heartbeats < recorded.content(Key.VCLOCK_SYNC, 0):
        return False
    return all(lsns.get(replica_id, 0) >= lsn for replica_id, lsn in recorded.content(Key.VCLOCK, {}).items())


Hold = Callable[[Packet], Awaitable[None]]
"""Awaited before an answer that the recorded client followed with this packet: its precondition."""


async def _no_hold(answer: Packet) -> None:
    pass


class RecordedServer:
    """Replays `conversations`, each once, in order among those that begin alike; then reads silently."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self.hold: Hold = _no_hold
        self._waiting = list(conversations)
        self._changed = asyncio.Condition()
        self.heard = {conversation.name: Heard() for conversation in conversations}
        self.played: set[str] = set()
        self.problems: list[str] = []
        self.port = 0

    async def finished(self, *names: str) -> None:
        """Wait until these conversations are complete on both sides."""
        async with asyncio.timeout(DEADLINE_SECONDS), self._changed:
            await self._changed.wait_for(lambda: bool(self.problems) or self.played.issuperset(names))
        assert not self.problems, self.problems

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            await self._handle(reader, writer)
        writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = next((c.greeting for c in self._waiting if _authenticates(c)), None)
        greeting = greeting or next((c.greeting for c in self._waiting), None)
        if greeting is None:
            await reader.read()
            return
        writer.write(greeting)
        client = _Client(reader)
        first = await client.request()
        if first is None:
            return
        conversation = next((c for c in self._waiting if c.requests[0].type == first.type), None)
        if conversation is None:
            await reader.read()
            return
        self._waiting.remove(conversation)
        client.heard = self.heard[conversation.name]
        client.heard.requests.append(first)
        problem = await self._play(conversation, client, writer)
        async with self._changed:
            self.played.add(conversation.name)
            self.problems += [problem] if problem else []
            self._changed.notify_all()
        await client.listen()

    async def _play(self, conversation: Conversation, client: _Client, writer: asyncio.StreamWriter) -> str | None:
        """Return the deviation from the recording; None if there is none."""
        is_first = True
        for number, packet in enumerate(conversation.packets):
            if packet.from_server:
                answer = next((later for later in conversation.packets[number:] if not later.from_server), None)
                if answer is not None:
                    await self.hold(answer)
                writer.write(framed(packet.payload))
                continue
            try:
                async with asyncio.timeout(DEADLINE_SECONDS / 2):
                    if is_ack(packet):
                        came = await client.acknowledges(packet)
                    else:
                        came = is_first or await client.asks(packet.type)
            except TimeoutError:
                came = False
            if not came:
                return f"{conversation.name}: the client did not send {packet}; it sent {client.shown()}"
            is_first = False
        await writer.drain()
        return None


class _Client:
    """The other end of a connection: its packets are sorted into `heard`."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._buffer = b""
        self._new: list[Packet] = []
        self.heard = Heard()

    async def request(self) -> Packet | None:
        """Take and return the next request; None at the end."""
        while not self._new:
            if not await self._read():
                return None
        return self._new.pop(0)

    async def asks(self, type: int) -> bool:
        packet = await self.request()
        if packet is not None:
            self.heard.requests.append(packet)
        return packet is not None and packet.type == type

    async def acknowledges(self, recorded: Packet) -> bool:
        while not self.heard.has_acknowledged(recorded):
            if not await self._read():
                return False
        return True

    async def listen(self) -> None:
        """Read until the end."""
        while await self._read():
            pass

    def shown(self) -> list[str]:
        return [str(packet) for packet in (*self.heard.requests[-2:], *self.heard.acks[-2:], *self._new)]

    async def _read(self) -> bool:
        data = await self._reader.read(READ_SIZE)
        self._buffer += data
        whole = 0
        for payload, stop in split(self._buffer, 0, len(self._buffer)):
            packet, whole = Packet(False, payload), stop
            (self.heard.acks if is_ack(packet) else self._new).append(packet)
        self._buffer = self._buffer[whole:]
        return bool(data)


def _authenticates(conversation: Conversation) -> bool:
    return any(request.type == RequestType.AUTH for request in conversation.requests)


@asynccontextmanager
async def serving(conversations: Sequence[Conversation]) -> AsyncIterator[RecordedServer]:
    """Run a server on loopback that replays `conversations`; its connections are closed at the end."""
    server = RecordedServer(conversations)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await server.handle(reader, writer)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
