"""Byte streams against a real server on this machine, over TCP and a Unix socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flowstone.outside.network import SystemNetwork


async def shout_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each chunk in upper case, and closes when its peer stops sending or says "bye"."""
    while (data := await reader.read(1 << 16)) and data != b"bye":
        writer.write(data.upper())
    writer.close()
    await writer.wait_closed()


@asynccontextmanager
async def tcp_server() -> AsyncIterator[int]:
    async with await asyncio.start_server(shout_back, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_bytes_go_out_and_come_back_over_tcp() -> None:
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        stream.write(b"ping")
        await stream.drain()
        assert await stream.read(2) == b"PI"
        assert await stream.read(100) == b"NG"
        await stream.close()


async def test_bytes_go_out_and_come_back_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(shout_back, path):
        stream = await SystemNetwork().connect(path, None, timeout=10)
        stream.write(memoryview(b"ping"))
        assert await stream.read(100) == b"PING"
        await stream.close()


async def test_small_writes_are_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    open_connection = asyncio.open_connection

    async def remember(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_connection(host, port)
        opened.append(writer.get_extra_info("socket"))
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", remember)
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        assert opened[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        await stream.close()


async def test_a_closed_peer_reads_as_nothing_more() -> None:
    async with tcp_server() as port:
        stream = await SystemNetwork().connect("127.0.0.1", port, timeout=10)
        stream.write(b"bye")
        assert await stream.read(100) == b""
        await stream.close()
        await stream.close()


async def test_a_refused_connection_is_an_os_error() -> None:
    async with tcp_server() as port:
        pass
    with pytest.raises(ConnectionRefusedError):
        await SystemNetwork().connect("127.0.0.1", port, timeout=10)


async def test_a_missing_unix_socket_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await SystemNetwork().connect(str(tmp_path / "missing"), None, timeout=10)


async def test_a_connection_that_takes_too_long_says_to_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(host: str, port: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    with pytest.raises(TimeoutError, match=r"no connection to db1:3301 within 0\.01 s"):
        await SystemNetwork().connect("db1", 3301, timeout=0.01)
