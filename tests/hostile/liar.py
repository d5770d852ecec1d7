"""A master on loopback that follows the protocol except for a lie.

`Liar` listens; each connection is a `Talk`, whose methods are the valid steps before a lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.dialect import Dialect
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.constants import TYPE_ERROR, Flag, Key, RequestType
from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import frame, split
from flowstone.iproto.row import Row, decode_row, encode_header
from flowstone.replication.messages import (
    Ballot,
    Heartbeat,
    SubscribeReply,
    encode_ballot_body,
    encode_heartbeat,
    encode_subscribe_reply,
    encode_vclock_reply,
)
from flowstone.replication.vclock import VClock

LIAR: Final = UUID("66666666-6666-4666-8666-666666666666")
LIAR_ID: Final = 3
NOBODY: Final = UUID("99999999-9999-4999-8999-999999999999")
MARK: Final = "a lie"
"""Contained in every row that must not be stored."""

SPACE_ID, SYNCHRONOUS_ID = 600, 601

Tell = Callable[["Talk"], Awaitable[None]]


@dataclass(frozen=True)
class Role:
    """The identity and the position that a liar claims."""

    dialect: Dialect
    replicaset_uuid: UUID
    vclock: VClock
    uuid: UUID = LIAR

    @property
    def is_2_6(self) -> bool:
        return self.dialect is Dialect.V2_6


class Talk:
    """One connection of a victim to the liar."""

    def __init__(self, role: Role, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.role = role
        self.writer = writer
        self._reader = reader
        self._unread = b""
        self._packets: list[bytes] = []

    # --- bytes ---

    async def say(self, *packets: bytes) -> None:
        self.writer.write(b"".join(packets))
        await self.writer.drain()

    async def hear(self) -> Row:
        """Return the next request of the victim; raise ConnectionError if it disconnects."""
        while not self._packets:
            data = await self._reader.read(1 << 16)
            if not data:
                raise ConnectionResetError("the victim hung up")
            self._packets, end = split(self._unread + data)
            self._unread = (self._unread + data)[end:]
        return decode_row(self._packets.pop(0))

    async def be_left(self) -> None:
        """Stop answering, and return when the victim has disconnected."""
        with suppress(ConnectionError):
            while True:
                await self.hear()

    # --- valid steps ---

    def greeting(self, **other: Any) -> bytes:
        fields: dict[str, Any] = {
            "version": self.role.dialect.greeting_version,
            "uuid": self.role.uuid,
            "salt": bytes(32),
        } | other
        return encode_greeting(Greeting(**fields))

    def ballot(self, **other: Any) -> bytes:
        fields: dict[str, Any] = {"vclock": self.role.vclock, "is_booted": True}
        ballot = Ballot(**fields | other)
        return frame(
            pack({Key.REQUEST_TYPE.value: 0, Key.SYNC.value: 0}) + encode_ballot_body(ballot, is_2_6=self.role.is_2_6)
        )

    async def polite_until(self, wanted: RequestType) -> Row:
        """Greet and answer until the victim sends the wanted request, which is not answered."""
        await self.say(self.greeting())
        while (request := await self.hear()).type != wanted:
            await self.say(self.polite_answer(request.type))
        return request

    def polite_answer(self, type: int) -> bytes:
        match type:
            case RequestType.VOTE:
                return self.ballot()
            case RequestType.FETCH_SNAPSHOT:
                position = encode_vclock_reply(self.role.vclock)
                return position + self.snapshot(NOBODY) + position
            case RequestType.ID:
                return ok({Key.VERSION.value: 3, Key.FEATURES.value: [0, 1, 2]})
            case _:
                return ok({})

    async def subscribed(self, **other: Any) -> None:
        """Answer SUBSCRIBE, and send a heartbeat."""
        await self.polite_until(RequestType.SUBSCRIBE)
        await self.say(self.subscription(**other), encode_heartbeat(Heartbeat(LIAR_ID, 1.5)))

    def subscription(self, **other: Any) -> bytes:
        role = self.role
        fields: dict[str, Any] = {
            "replica_id": LIAR_ID,
            "vclock": role.vclock,
            "replicaset_uuid": role.replicaset_uuid,
        } | other
        return encode_subscribe_reply(SubscribeReply(**fields), is_2_6=role.is_2_6)

    async def joining(self, wanted: RequestType) -> None:
        """Accept a request for data."""
        await self.polite_until(wanted)
        await self.say(encode_vclock_reply(self.role.vclock))

    def snapshot(self, victim: UUID) -> bytes:
        """Send the data of a new replica set, in which the victim has id 2."""
        members = [(2, str(victim))]
        rows = [*bootstrap_rows(self.role.dialect, self.role.uuid, self.role.replicaset_uuid, None)]
        rows += [(CLUSTER_ID, pack(member)) for member in members]
        return b"".join(snapshot_row(space_id, raw) for space_id, raw in rows)


def ok(body: dict[int, Any]) -> bytes:
    return frame(pack({Key.REQUEST_TYPE.value: 0, Key.SYNC.value: 0}) + pack(body))


def error_packet(code: int, body: bytes) -> bytes:
    return frame(pack({Key.REQUEST_TYPE.value: TYPE_ERROR + code, Key.SYNC.value: 0}) + body)


def snapshot_row(space_id: int, raw: bytes) -> bytes:
    head = encode_header(Row(RequestType.INSERT.value, flags=Flag.COMMIT.value))
    return frame(head + b"\x82\x10" + pack(space_id) + b"\x21" + raw)


def tuple_body(key: int, text: str = MARK, *, space_id: int = SPACE_ID) -> bytes:
    return pack({Key.SPACE_ID.value: space_id, Key.TUPLE.value: (key, text)})


def row(
    lsn: int, *, tsn: int = 0, is_last: bool = True, flags: int = 0, body: bytes | None = None, **other: Any
) -> bytes:
    """Return a log row as a packet: REPLACE of a tuple with the mark, by default as a transaction of its own."""
    fields: dict[str, Any] = {"type": RequestType.REPLACE.value, "replica_id": LIAR_ID, "timestamp": 1.5} | other
    flags |= Flag.COMMIT.value if is_last else 0
    content = tuple_body(1000 + lsn % 1000) if body is None else body
    return frame(Row(lsn=lsn, tsn=tsn or lsn, flags=flags, body=content, **fields).encode())


class Liar:
    """A server on loopback that runs `tell` on each connection."""

    def __init__(self, role: Role, tell: Tell) -> None:
        self._role = role
        self._tell = tell
        self._talks: dict[asyncio.Task[None], None] = {}
        self.is_done = False
        """Set when a lie has been sent completely."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._talk(Talk(self._role, reader, writer)))
        self._talks[task] = None
        task.add_done_callback(self._talks.pop)

    async def _talk(self, talk: Talk) -> None:
        try:
            with suppress(ConnectionError):
                await self._tell(talk)
                self.is_done = True
                await talk.be_left()
        finally:
            talk.writer.transport.abort()
