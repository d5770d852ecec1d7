"""A scripted replica that records every byte: for the messages of a master, and its reaction to answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from flowstone.limestone.format import messages
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.messages import (
    ACK,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    MessageParser,
    SessionBegin,
    SessionBeginAck,
)
from flowstone.limestone.format.wire_extensions import ControlParser, Frame, Hello, HelloAck, Prepare

UUID = "0e1f2a3b-0000-4000-8000-00000000000b"
NONCE = bytes(range(32))
TOKEN = bytes(range(32, 64))

Answer = bytes | None
"""The answer to a message. None: close the connection. b"": send no answer."""


@dataclass
class Connection:
    """The bytes received on one connection, and the decoded messages."""

    writer: asyncio.StreamWriter
    received: bytearray = field(default_factory=bytearray)
    messages: list[Message | Frame] = field(default_factory=list)

    @property
    def channel_id(self) -> int | None:
        first = self.messages[0] if self.messages else None
        return first.channel_id if isinstance(first, LogChannelCreate) else None


class ScriptedReplica:
    """Acknowledges every message as required, unless a function in `answers` returns another answer.

    The first answer other than b"?" is sent. `is_ours`: the replica offers the extensions, and reports `follows` and
    `durable_epoch`.
    """

    def __init__(self, *, is_ours: bool = False) -> None:
        self.is_ours = is_ours
        self.follows: str | None = None
        self.durable_epoch = 0
        self.proof: Callable[[Hello], bytes | None] = lambda _: None
        self.answers: list[Callable[[Message | Frame], Answer]] = []
        self.connections: list[Connection] = []
        self.port = 0
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)

    @property
    def heard(self) -> list[Message | Frame]:
        """Return the messages of all connections, in order of connection."""
        return [message for connection in self.connections for message in connection.messages]

    def heard_of(self, *kinds: type) -> list[Message | Frame]:
        return [message for message in self.heard if isinstance(message, kinds)]

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def vanish(self) -> None:
        """Close everything, as a kill would."""
        assert self._server is not None
        self._server.close()
        for connection in self.connections:
            connection.writer.close()
        for connection in self.connections:
            with suppress(OSError):
                await connection.writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self.connections.append(connection)
        parser: ControlParser | MessageParser | None = None
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                connection.received += data
                if parser is None:
                    parser = ControlParser(extended=True) if data[0] == 1 else MessageParser()
                parser.feed(data)
                while (message := parser.next_message()) is not None:
                    connection.messages.append(message)
                    answer = self._answer(message)
                    if answer is None:
                        writer.close()
                        return
                    writer.write(answer)
        writer.close()

    def _answer(self, message: Message | Frame) -> Answer:
        for answers in self.answers:
            if (answer := answers(message)) != b"?":
                return answer
        match message:
            case SessionBegin():
                secret = extensions.offer(NONCE) if self.is_ours else messages.PLACEHOLDER_SECRET
                return messages.encode(SessionBeginAck(secret))
            case Hello():
                ack = HelloAck(UUID, self.follows, self.durable_epoch, TOKEN, self.proof(message))
                return extensions.encode(ack)
            case LogEntries(flags=flags):
                return ACK if flags & 6 else b""
            case GroupCommit(epoch):
                self.durable_epoch = epoch
                return ACK
            case LogChannelCreate() | Prepare():
                return ACK
        return None


@asynccontextmanager
async def scripted(*, is_ours: bool = False) -> AsyncIterator[ScriptedReplica]:
    replica = ScriptedReplica(is_ours=is_ours)
    await replica.listen()
    try:
        yield replica
    finally:
        await replica.vanish()


async def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110, of everything that may be waited for
            await asyncio.sleep(0.005)
