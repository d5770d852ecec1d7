"""A scripted master made of a few sockets, and directories as dictionaries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Self

from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import Entry, WriteVersion, put
from flowstone.limestone.format.messages import (
    Blob,
    Error,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    Message,
    MessageParser,
    SessionBegin,
    SessionBeginAck,
    encode,
    wire_entry,
)
from flowstone.limestone.format.wire_extensions import Action, Hello, HelloAck, Prepare
from flowstone.outside import Network, Stream, Tls
from tests.limestone import recorded

SECONDS = 10.0
MASTER = "11111111-1111-4111-8111-111111111111"


class Peer:
    """One connection to a replica."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parser = MessageParser()
        self._frames = extensions.ControlParser(extended=True)

    @classmethod
    async def connect(cls, network: Network | Connector, endpoint: Endpoint) -> Peer:
        return cls(await network.connect(endpoint.host, endpoint.port, timeout=SECONDS))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def send(self, *messages: Message | bytes) -> None:
        self._stream.write(b"".join(each if isinstance(each, bytes) else encode(each) for each in messages))

    async def receive(self) -> Message | None:
        """Return the next answer, or None if the connection is closed."""
        async with asyncio.timeout(SECONDS):
            while (message := self._parser.next_message()) is None:
                try:
                    data = await self._stream.read(65536)
                except OSError:
                    return None
                if not data:
                    return None
                self._parser.feed(data)
            return message

    async def receive_bytes(self, size: int) -> bytes:
        data = b""
        async with asyncio.timeout(SECONDS):
            while len(data) < size and (piece := await self._stream.read(size - len(data))):
                data += piece
        return data

    async def ask(self, *messages: Message | bytes) -> Message | None:
        self.send(*messages)
        return await self.receive()

    async def acknowledged(self, *messages: Message | bytes) -> None:
        answer = await self.ask(*messages)
        assert answer == (), answer

    async def refused(self, *messages: Message | bytes) -> int | None:
        """Return the code of the ERROR after which the replica closes the connection; None if there is none."""
        answer = await self.ask(*messages)
        if answer is None:
            return None
        assert isinstance(answer, Error), answer
        assert await self.receive() is None
        return answer.code

    async def hello(self, hello: Hello) -> HelloAck | Error:
        self.send(extensions.encode(hello))
        async with asyncio.timeout(SECONDS):
            while (frame := self._frames.next_message()) is None:
                data = await self._stream.read(65536)
                if not data:
                    raise ConnectionResetError("closed instead of an answer to HELLO")
                self._frames.feed(data)
        assert isinstance(frame, HelloAck | Error), frame
        return frame

    async def close(self) -> None:
        await self._stream.close()


class Connector:
    """A part of Network that connects, and finally closes the connections that a test left open."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._streams: list[Stream] = []

    async def connect(self, host: str, port: int | None, *, timeout: float, tls: Tls | None = None) -> Stream:
        stream = await self._network.connect(host, port, timeout=timeout, tls=tls)
        self._streams.append(stream)
        return stream

    async def close(self) -> None:
        for stream in self._streams:
            await stream.close()


class Master:
    """Control and log channels of a master, ours or the original's."""

    def __init__(self, network: Network | Connector, endpoint: Endpoint) -> None:
        self._network = network
        self._endpoint = endpoint
        self.control: Peer
        self.nonce: bytes | None = None
        self.token = b""
        self.channels: dict[int, Peer] = {}

    async def connect(self) -> Peer:
        return await Peer.connect(self._network, self._endpoint)

    async def begin(self) -> SessionBeginAck:
        self.control = await self.connect()
        answer = await self.control.ask(SessionBegin())
        assert isinstance(answer, SessionBeginAck), answer
        self.nonce = extensions.offered_nonce(answer.session_secret)
        return answer

    async def hello(
        self,
        *,
        secret: str | None = None,
        durable_epoch: int = 0,
        instance: str = MASTER,
        formerly: tuple[str, ...] = (),
    ) -> HelloAck:
        nonce = bytes(extensions.NONCE_SIZE)
        assert self.nonce is not None
        proof = extensions.master_proof(secret.encode(), nonce, self.nonce) if secret is not None else None
        answer = await self.control.hello(Hello(instance, durable_epoch, 0, nonce, proof, formerly))
        assert isinstance(answer, HelloAck), answer
        self.token = answer.token
        return answer

    async def prepare(self, action: Action, epoch: int) -> None:
        await self.control.acknowledged(extensions.encode(Prepare(action, epoch)))

    async def open(self, channel_id: int) -> Peer:
        peer = self.channels[channel_id] = await self.connect()
        await peer.acknowledged(LogChannelCreate(channel_id, self.token))
        return peer

    async def commit(self, epoch: int) -> None:
        await self.control.acknowledged(GroupCommit(epoch))

    async def close(self) -> None:
        await self.control.close()
        for peer in self.channels.values():
            await peer.close()


def session(epoch: int, *entries: Entry, flags: int = 7) -> LogEntries:
    return LogEntries(epoch, tuple(wire_entry(entry) for entry in entries), flags)


def row(key: str, value: str, epoch: int, minor: int = 0) -> Entry:
    return put(1, key.encode(), value.encode(), WriteVersion(epoch, minor))


def blob_session(epoch: int, key: str, *blobs: Blob) -> LogEntries:
    entry = put(1, key.encode(), b"", WriteVersion(epoch, 0), tuple(blob.blob_id for blob in blobs))
    return LogEntries(epoch, (wire_entry(entry, blobs),), 7)


def content(root: Path) -> dict[str, bytes]:
    """Return all files of a directory, except those that identify an instance."""
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
    found.pop("limestone-manifest.json", None)
    return found


async def replay(network: Network | Connector, endpoint: Endpoint, name: str) -> None:
    """Replay a real master's messages in their recorded order; every answer must match the recording."""
    wire = recorded.HERE / name / "wire"
    peers: dict[int, Peer] = {}
    for line in (wire / "chunks.jsonl").read_text().splitlines():
        event = json.loads(line)
        number = event["conn"]
        if event.get("open"):
            peers[number] = await Peer.connect(network, endpoint)
        elif "off" in event:
            data = (wire / f"conn{number}.{event['dir']}.bin").read_bytes()[event["off"] : event["off"] + event["len"]]
            if event["dir"] == "m2r":
                peers[number].send(data)
            else:
                assert await peers[number].receive_bytes(len(data)) == data, (number, event)
    for number in sorted(peers, reverse=True):
        await peers[number].close()
