"""Byte streams to other processes: TCP, and Unix sockets, with or without TLS.

Whoever connects gets a `Stream` to await. Whoever listens gets a `Client` per connection and is called when something
happens to it: a server handles many connections per turn of the loop, and a task for each would cost more than its
requests. Relies on asyncio's transports. Knows nothing of packets: what a stream carries is for its callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc only from Python 3.12 on

BACKLOG = 1024
"""Connections that the kernel holds for us before they are accepted; Tarantool takes the system's maximum."""

QUEUE_MAX = 1024 * 1024
"""Bytes waiting to be sent to a client from which on it counts as congested; a quarter of it is drained."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption of one end, by the names of Tarantool's options `ssl_cert_file`, `ssl_key_file`, …

    A listener needs certificate and key. `ca_file`: the other end must show a certificate signed by it; without it
    nobody's identity is checked. OSError or ssl.SSLError (one, too) where a file cannot be read.
    """

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    ciphers: str | None = None
    password: str | None = field(default=None, repr=False)


class Stream(Protocol):
    """A connection that we made. One reader and one writer at a time."""

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


class Receiver(Protocol):
    """What a server does with one client. Each method is called by the loop and must not block."""

    def received(self, data: bytes) -> None:
        """Some bytes have arrived."""
        ...

    def congested(self) -> None:
        """More than QUEUE_MAX bytes wait to be sent; `drained` will follow, or `closed`."""
        ...

    def drained(self) -> None:
        """Little is left of what was too much."""
        ...

    def closed(self) -> None:
        """The connection is gone, for whatever reason; the last call."""
        ...


class Client(Protocol):
    """A connection that somebody made to us."""

    @property
    def peer(self) -> str:
        """Who it is, for logs: address and port; "unix/:" for a Unix socket."""
        ...

    @property
    def queued(self) -> int:
        """Bytes written and not yet taken by the kernel."""
        ...

    def write(self, data: Buffer) -> None:
        """Queue `data` for sending; never blocks, never fails. After the end of the connection it does nothing."""
        ...

    def pause_reading(self) -> None:
        """No more `received` after this; the peer is held back when the kernel's buffer is full. Twice is harmless."""
        ...

    def resume_reading(self) -> None:
        """Undoes `pause_reading`."""
        ...

    def close(self) -> None:
        """Send what is queued and close; nothing is received any more."""
        ...

    def abort(self) -> None:
        """Close at once, whatever is queued."""
        ...


class Listener(Protocol):
    """An open port."""

    @property
    def port(self) -> int | None:
        """The port, chosen by the kernel where 0 was asked for; None for a Unix socket."""
        ...

    async def close(self) -> None:
        """Accept nobody any more. Connections stay: closing them is for who accepted them."""
        ...


class Network(Protocol):
    """Reaching others, and being reached."""

    async def connect(self, host: str, port: int | None, *, timeout: float, tls: Tls | None = None) -> Stream:
        """Connect to `host` and `port`, or, when `port` is None, to the Unix socket at path `host`.

        Raises OSError, of which TimeoutError (after `timeout` seconds) is one."""
        ...

    async def listen(
        self,
        host: str,
        port: int | None,
        on_client: Callable[[Client], Receiver],
        *,
        tls: Tls | None = None,
        backlog: int = BACKLOG,
    ) -> Listener:
        """Accept connections, as with `connect`; `on_client` says who receives what a new one sends.

        Raises OSError where the address is taken or not ours."""
        ...


class SystemNetwork:
    """The network of this machine."""

    async def connect(self, host: str, port: int | None, *, timeout: float, tls: Tls | None = None) -> Stream:
        context = _client_context(tls) if tls is not None else None
        options: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": ""}
        try:
            async with asyncio.timeout(timeout):
                if port is None:
                    return _AsyncioStream(*await asyncio.open_unix_connection(host, **options))
                reader, writer = await asyncio.open_connection(host, port, **options)
        except TimeoutError as error:
            address = host if port is None else f"{host}:{port}"
            raise TimeoutError(f"no connection to {address} within {timeout:g} s") from error
        _send_at_once(writer.transport)
        return _AsyncioStream(reader, writer)

    async def listen(
        self,
        host: str,
        port: int | None,
        on_client: Callable[[Client], Receiver],
        *,
        tls: Tls | None = None,
        backlog: int = BACKLOG,
    ) -> Listener:
        context = _server_context(tls) if tls is not None else None
        loop = asyncio.get_running_loop()
        accept = lambda: _AsyncioClient(on_client)  # noqa: E731
        if port is None:
            server = await loop.create_unix_server(accept, host, backlog=backlog, ssl=context)
        else:
            server = await loop.create_server(accept, host, port, backlog=backlog, ssl=context, reuse_address=True)
        return _AsyncioListener(server, port)


def _client_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # as Tarantool: the authority's signature counts, not the name
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE
    return _with_files(context, tls)


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE
    return _with_files(context, tls)


def _with_files(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file:
        # An empty password instead of None: OpenSSL would ask at the terminal for one that is missing.
        context.load_cert_chain(tls.cert_file, tls.key_file, password=tls.password or "")
    if tls.ca_file:
        context.load_verify_locations(tls.ca_file)
    if tls.ciphers:
        context.set_ciphers(tls.ciphers)
    return context


def _send_at_once(transport: asyncio.BaseTransport) -> None:
    """Replies and ACKs are small and waited for: Nagle's delay would be paid on each of them."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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


class _AsyncioClient(asyncio.Protocol):
    """A client to who accepted it, a protocol to the loop."""

    def __init__(self, on_client: Callable[[Client], Receiver]) -> None:
        self._on_client = on_client
        self._transport: asyncio.Transport
        self._receiver: Receiver
        self.peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(QUEUE_MAX, QUEUE_MAX // 4)
        _send_at_once(transport)
        self.peer = _peer(transport)
        self._receiver = self._on_client(self)

    def data_received(self, data: bytes) -> None:
        self._receiver.received(data)

    def pause_writing(self) -> None:
        self._receiver.congested()

    def resume_writing(self) -> None:
        self._receiver.drained()

    def connection_lost(self, error: Exception | None) -> None:
        self._receiver.closed()

    @property
    def queued(self) -> int:
        return self._transport.get_write_buffer_size()

    def write(self, data: Buffer) -> None:
        if not self._transport.is_closing():
            self._transport.write(memoryview(data))

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()


class _AsyncioListener:
    def __init__(self, server: asyncio.Server, port: int | None) -> None:
        self._server = server
        self.port = None if port is None else cast(int, server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        # Not wait_closed: from Python 3.12 on it waits for the connections, too.
        self._server.close()


def _peer(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unix/:"
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
