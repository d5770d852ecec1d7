"""An HTTP client without a library: one request, or a stream of events, byte by byte."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flowstone.web.server import WebServer

SECONDS = 30.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.status == 200, self
        return msgspec.json.decode(self.body)


async def connect(web: WebServer, path: str, **headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = web.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {web.address}\r\nConnection: close\r\n{more}\r\n".encode())
    return reader, writer


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = [line.split(": ", 1) for line in lines[1:] if line]
    return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}


async def get(web: WebServer, path: str, **headers: str) -> Answer:
    async with asyncio.timeout(SECONDS):
        reader, writer = await connect(web, path, **headers)
        status, headers = await head_of(reader)
        body = await reader.read()
        writer.close()
    return Answer(status, headers, body)


@dataclass
class Events:
    """A stream of server-sent events; `next` returns name and data of the next one, without comments."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    comments: int = 0
    _text: bytes = field(default=b"")

    async def next(self, name: str = "") -> Any:
        """Return the data of the next event, or of the next one with this name."""
        async with asyncio.timeout(SECONDS):
            while True:
                fields = await self._fields()
                if "data" in fields and name in ("", fields.get("event", "")):
                    return msgspec.json.decode(fields["data"])

    async def _fields(self) -> dict[str, str]:
        while b"\n\n" not in self._text:
            size = int((await self.reader.readline()).strip() or b"0", 16)
            assert size, "the stream ended"
            self._text += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        block, _, self._text = self._text.partition(b"\n\n")
        lines = block.decode().split("\n")
        self.comments += sum(line.startswith(":") for line in lines)
        return dict(line.split(": ", 1) for line in lines if line and not line.startswith(":"))

    def close(self) -> None:
        self.writer.close()


async def listen(web: WebServer, path: str = "/api/events") -> Events:
    reader, writer = await connect(web, path)
    status, headers = await head_of(reader)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["transfer-encoding"] == "chunked"
    return Events(reader, writer)
