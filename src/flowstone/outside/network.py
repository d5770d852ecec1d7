"""Byte streams to other processes: TCP, and Unix sockets.

Relies on asyncio's transports. Knows nothing of packets: what a stream carries is for its callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc only from Python 3.12 on


class Stream(Protocol):
    """A connection. One reader and one writer at a time."""

    async def read(self, n: int) -> bytes:
        """Between one and `n` bytes, as soon as there are any; b"" when the peer has closed."""
        ...

    def write(self, data: Buffer) -> None:
        """Queue `data` for sending; never blocks, never fails. `drain` tells whether it went well."""
        ...

    async def drain(self) -> None:
        """Wait until little is queued; raises OSError when the connection is lost."""
        ...

    async def close(self) -> None:
        """Send what is queued and close; a connection that is already lost is not an error."""
        ...


class Network(Protocol):
    """Reaching others."""

    async def connect(self, host: str, port: int | None, *, timeout: float) -> Stream:
        """Connect to `host` and `port`, or, when `port` is None, to the Unix socket at path `host`.

        Raises OSError, of which TimeoutError (after `timeout` seconds) is one."""
        ...


class SystemNetwork:
    """The network of this machine."""

    async def connect(self, host: str, port: int | None, *, timeout: float) -> Stream:
        try:
            async with asyncio.timeout(timeout):
                if port is None:
                    return _AsyncioStream(*await asyncio.open_unix_connection(host))
                reader, writer = await asyncio.open_connection(host, port)
        except TimeoutError as error:
            address = host if port is None else f"{host}:{port}"
            raise TimeoutError(f"no connection to {address} within {timeout:g} s") from error
        # Replies and ACKs are small and waited for: Nagle's delay would be paid on each of them.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _AsyncioStream(reader, writer)


class _AsyncioStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, n: int) -> bytes:
        return await self._reader.read(n)

    def write(self, data: Buffer) -> None:
        self._writer.write(memoryview(data))

    async def drain(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # lost before it was closed: nobody is left to tell
            await self._writer.wait_closed()
