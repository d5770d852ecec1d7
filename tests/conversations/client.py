"""The client side of a recorded conversation, replayed to a server: the same requests, in the recorded order.

A request is sent when the server has sent as much as it had when the request was recorded. Authentication is recomputed
for the salt of this server. Heartbeats depend on a timer, so they are kept apart: only the first is waited for.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgpack

from flowstone.iproto.constants import Key, RequestType
from tests.conversations.recording import GREETING_SIZE, Conversation, Packet, framed, salt_of, split

DEADLINE_SECONDS = 10.0
READ_SIZE = 65536
LAST_SYNC = 4242
"""Sync of the PING that shows at the end that a connection is alive and silent."""

PASSWORDS = ("secret", "nopw", "wrong", "x")
"""All passwords used in the recordings; `ghost` and `wrong` are invalid."""

Before = Callable[[Packet], Awaitable[None]]
"""Awaited before the answer that was recorded here is waited for: the cause of that answer."""


@dataclass
class Played:
    """The answers of this run; `transcript` has everything sent and read, by direction."""

    greeting: bytes
    transcript: list[tuple[str, bytes]]
    answers: list[Packet] = field(default_factory=list)
    heartbeats: list[Packet] = field(default_factory=list)
    server_closed: bool = False


class Connection:
    """A connection to the server; `played` grows with its answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: bytes) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self.patience = DEADLINE_SECONDS
        self.played = Played(greeting, transcript=[("s2c", greeting)])

    def send(self, payload: bytes) -> None:
        data = framed(payload)
        self.played.transcript.append(("c2s", data))
        self._writer.write(data)

    async def answers(self, count: int) -> None:
        """Wait for `count` answers besides heartbeats, or for the end of the connection."""
        await self.until(lambda: len(self.played.answers) >= count)

    async def heartbeat(self) -> None:
        await self.until(lambda: bool(self.played.heartbeats))

    async def end(self) -> None:
        await self.until(lambda: False)

    async def until(self, is_enough: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.patience):
                while not is_enough() and not self.played.server_closed:
                    await self._read()

    async def _read(self) -> None:
        data = await self._reader.read(READ_SIZE)
        if not data:
            self.played.server_closed = True
            return
        self.played.transcript.append(("s2c", data))
        self._buffer += data
        whole = 0
        for payload, stop in split(self._buffer, 0, len(self._buffer)):
            packet, whole = Packet(True, payload), stop
            (self.played.heartbeats if packet.is_heartbeat else self.played.answers).append(packet)
        self._buffer = self._buffer[whole:]


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer, await reader.readexactly(GREETING_SIZE))
    finally:
        writer.close()


async def play(
    conversation: Conversation, port: int, *, before: Before | None = None, patience: float = DEADLINE_SECONDS
) -> Played:
    """Return all answers to the requests of `conversation`, and whether the server closed the connection as recorded.

    If the recorded server did not close the connection, the server must answer a final PING, with nothing before it;
    the stream of a subscription only ends with the connection. An answer that does not arrive within `patience` is
    skipped.
    """
    async with connect(port) as connection:
        connection.patience = patience
        await play_on(connection, conversation, before)
        if conversation.was_refused:
            await connection.end()
        elif not _is_subscribed(conversation.packets):
            await _ping(connection)
        return connection.played


async def play_on(connection: Connection, conversation: Conversation, before: Before | None = None) -> None:
    """Replay a conversation without its end."""
    expected = 0
    for packet in conversation.packets:
        if not packet.from_server:
            await connection.answers(expected)
            connection.send(again(packet, conversation.salt, salt_of(connection.played.greeting)))
        elif packet.is_heartbeat:
            await connection.heartbeat()
        else:
            expected += 1
            if before is not None:
                await before(packet)
    await connection.answers(expected)


async def _ping(connection: Connection) -> None:
    """Send a PING that is not part of the played conversation."""
    answers, transcript = connection.played.answers, connection.played.transcript
    connection.send(msgpack.packb({Key.REQUEST_TYPE.value: RequestType.PING.value, Key.SYNC.value: LAST_SYNC}))
    request = len(transcript) - 1
    await connection.until(lambda: bool(answers) and answers[-1].field(Key.SYNC) == LAST_SYNC)
    if answers and answers[-1].field(Key.SYNC) == LAST_SYNC:
        side, data = transcript.pop()
        rest = data.removesuffix(framed(answers.pop().payload))
        transcript += [(side, rest)] if rest else []
        del transcript[request]


def _is_subscribed(packets: Sequence[Packet]) -> bool:
    return any(packet.type == RequestType.SUBSCRIBE for packet in packets if not packet.from_server)


def again(request: Packet, recorded_salt: bytes, salt: bytes) -> bytes:
    """Return the request for another greeting: the scramble of AUTH is that of the same password and the new salt."""
    if request.type != RequestType.AUTH:
        return request.payload
    method, scrambled = request.content(Key.TUPLE)
    recorded = scrambled if isinstance(scrambled, bytes) else scrambled.encode(errors="surrogateescape")
    for password in PASSWORDS:
        if scramble(password, recorded_salt) == recorded:
            return request.payload.replace(recorded, scramble(password, salt))
    raise ValueError(f"no known password gives the recorded {method} of {request.content(Key.USER_NAME)}")


def scramble(password: str, salt: bytes) -> bytes:
    """Compute the scramble of chap-sha1, like clients."""
    once = hashlib.sha1(password.encode()).digest()
    proof = hashlib.sha1(salt + hashlib.sha1(once).digest()).digest()
    return bytes(a ^ b for a, b in zip(once, proof, strict=True))
