"""A server on loopback that sends only bytes chosen by the test."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.msgpack import pack, unpack, unpack_body
from flowstone.iproto.packet import encode_request, split
from flowstone.iproto.row import Row, decode_row

Reply = tuple[int, bytes]
OK: Reply = (0, b"\x80")


def greeting(version: tuple[int, int, int] = (2, 6, 0)) -> bytes:
    return encode_greeting(Greeting(version, uuid.UUID(int=1), b"\0" * 32))


def refusal(code: int, message: str) -> Reply:
    return 0x8000 + code, pack({Key.ERROR_24.value: message})


@asynccontextmanager
async def peer(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Run a server that passes each connection to `talk`; yield its URI."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def answering(
    answer: Callable[[Row], Reply],
    version: tuple[int, int, int],
    before: Callable[[Row], Awaitable[None]] | None = None,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Return a conversation that answers each request by `answer`; requests are rows, as on the wire.

    `before` is awaited with each request before it is answered.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(version))
        buffer = b""
        while data := await reader.read(65536):
            packets, end = split(buffer + data)
            buffer = (buffer + data)[end:]
            for packet in packets:
                row = decode_row(packet)
                if before is not None:
                    await before(row)
                type, body = answer(row)
                writer.write(encode_request(type, row.sync, body))
            await writer.drain()

    return talk


class Streaming:
    """A store with interactive transactions, as in servers from 2.10 on: a set of keys, INSERT only.

    `log` has the requests, `keys` the committed keys, `names` the content of `_vspace`. With `yields` it behaves like
    memtx without MVCC.
    """

    def __init__(self, *, yields: bool = False, names: Mapping[int, str] | None = None) -> None:
        self.names = names or {}
        self.keys: list[int] = []
        self.log: list[str] = []
        self.yields = yields
        self._open: list[int] | None = None

    def __call__(self, row: Row) -> Reply:
        self.log.append(RequestType(row.type).name)
        match row.type:
            case RequestType.ID:
                return 0, pack({Key.VERSION.value: 4, Key.FEATURES.value: [0, 1, 2, 3, 4]})
            case RequestType.SELECT:
                (space_id,) = unpack_body(row.body)[Key.KEY]
                name = self.names.get(space_id)
                return 0, pack({Key.DATA.value: [] if name is None else [(space_id, 1, name, "memtx", 0)]})
            case RequestType.BEGIN:
                self._open = []
            case RequestType.INSERT:
                return self._insert(unpack_body(row.body)[Key.TUPLE][0])
            case RequestType.COMMIT:
                if self.yields:
                    self._open = None
                    return refusal(154, "aborted by a fiber yield")
                self.keys += self._open or []
                self._open = None
            case RequestType.ROLLBACK:
                self._open = None
            case RequestType.EVAL:
                for one in unpack_body(row.body)[Key.TUPLE][0]:
                    self.keys.append(unpack(one[3].encode("utf-8", "surrogateescape"))[0])
                return 0, pack({Key.DATA.value: []})
        return OK

    def _insert(self, key: int) -> Reply:
        if key in self.keys or key in (self._open or ()):
            return refusal(3, "Duplicate key")
        (self.keys if self._open is None else self._open).append(key)
        return OK
