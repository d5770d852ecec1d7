"""Byte streams to other processes: TCP, and Unix sockets, with or without TLS.

Whoever connects gets a `Stream` to await. Whoever listens gets a `Client` per connection and is called when something
happens to it: a server handles many connections per turn of the loop, and a task for each would cost more than its
requests. Relies on asyncio's transports. Knows nothing of packets: what a stream carries is for its callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc only from Python 3.12 on

BACKLOG = 1024
"""Connections that the kernel holds for us before they are accepted; Tarantool takes the system's maximum."""

QUEUE_MAX = 1024 * 1024
"""Bytes waiting to be sent to a client from which on it counts as congested; a quarter of it is drained."""


KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_COUNT = 15, 5, 3
"""When the kernel begins to ask whether a silent peer is still there, how often, and after how many it gives up."""

KEEPALIVE_SECONDS = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_INTERVAL_SECONDS * KEEPALIVE_COUNT
"""After so long a connection is lost to whose other end something has happened that it could not tell us of."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption of one end, by the names of Tarantool's options `ssl_cert_file`, `ssl_key_file`, …

    A listener needs certificate and key. `ca_file`: the other end must show a certificate signed by it; without it
    nobody's identity is checked. `TlsRefused` where a file cannot be used.
    """

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    ciphers: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """What TCP does with what is sent. `no_delay`: it goes at once, however little it is. Buffer sizes are the kernel's
    where they are None."""

    no_delay: bool = True
    send_buffer: int | None = None
    receive_buffer: int | None = None


DEFAULT_OPTIONS = SocketOptions()


class TlsRefused(FlowstoneError):
    """Encryption cannot be set up on our side: a file is missing or is not what it should be. The message names it."""


class Stream(Protocol):
    """A connection that we made. One reader and one writer at a time.

    A peer that is gone without a word is noticed after KEEPALIVE_SECONDS at the latest, if nothing is on its way to it.
    """

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

    async def connect(
        self,
        host: str,
        port: int | None,
        *,
        timeout: float,
        tls: Tls | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        """Connect to `host` and `port`, or, when `port` is None, to the Unix socket at path `host`.

        Raises OSError, of which TimeoutError (after `timeout` seconds) is one, and TlsRefused."""
        ...

    async def listen(
        self,
        host: str,
        port: int | None,
        on_client: Callable[[Client], Receiver],
        *,
        tls: Tls | None = None,
        backlog: int = BACKLOG,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Listener:
        """Accept connections, as with `connect`; `on_client` says who receives what a new one sends.

        Raises OSError where the address is taken or not ours, and TlsRefused. The file of a Unix socket is removed
        when the listener is closed."""
        ...


class SystemNetwork:
    """The network of this machine."""

    async def connect(
        self,
        host: str,
        port: int | None,
        *,
        timeout: float,
        tls: Tls | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        context = _client_context(tls) if tls is not None else None
        encryption: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": ""}
        try:
            async with asyncio.timeout(timeout):
                if port is None:
                    return _AsyncioStream(*await asyncio.open_unix_connection(host, **encryption))
                reader, writer = await asyncio.open_connection(host, port, **encryption)
        except TimeoutError as error:
            address = host if port is None else f"{host}:{port}"
            raise TimeoutError(f"no connection to {address} within {timeout:g} s") from error
        except OSError:  # errors of certificates are ValueErrors, too
            raise
        except ValueError as error:  # of which UnicodeError is one: Python's own look at the name
            raise OSError(errno.EINVAL, f"{host!r} can be no address") from error
        _prepare(writer.transport, options)
        return _AsyncioStream(reader, writer)

    async def listen(
        self,
        host: str,
        port: int | None,
        on_client: Callable[[Client], Receiver],
        *,
        tls: Tls | None = None,
        backlog: int = BACKLOG,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Listener:
        context = _server_context(tls) if tls is not None else None
        loop = asyncio.get_running_loop()
        accept = lambda: _AsyncioClient(on_client, options)  # noqa: E731
        if port is None:
            server = await loop.create_unix_server(accept, host, backlog=backlog, ssl=context)
        else:
            server = await loop.create_server(accept, host, port, backlog=backlog, ssl=context, reuse_address=True)
        return _AsyncioListener(server, host, port)


def _client_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # as Tarantool: the authority's signature counts, not the name
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE
    return _with_files(context, tls)


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE
    return _with_files(context, tls)


def check_tls(tls: Tls) -> None:
    """TlsRefused where a listener could not use it."""
    _server_context(tls)


def _with_files(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file:
        _load_certificate(context, tls.cert_file, tls.key_file or tls.cert_file, tls.password)
    if tls.ca_file:
        _check_pem("ssl_ca_file", tls.ca_file, _CERTIFICATE)
        try:
            context.load_verify_locations(tls.ca_file)
        except ssl.SSLError as error:
            raise TlsRefused(f"ssl_ca_file {tls.ca_file}: {_reason(error)}", hint=_PEM_HINT) from error
    if tls.ciphers:
        try:
            context.set_ciphers(tls.ciphers)
        except ssl.SSLError as error:
            hint = "write them as OpenSSL does: `openssl ciphers` lists the names"
            raise TlsRefused(f"ssl_ciphers {tls.ciphers!r}: {_reason(error)}", hint=hint) from error
    return context


_CERTIFICATE = (b"CERTIFICATE-----", "certificate")
_PRIVATE_KEY = (b"PRIVATE KEY-----", "private key")
"""How the first line of a PEM block ends, and what the block is."""

_PEM_HINT = "give it in PEM form, the lines -----BEGIN … and -----END … included"


def _load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str, password: str | None) -> None:
    """OpenSSL does not say which file it stumbled over, so they are looked at before."""
    _check_pem("ssl_cert_file", cert_file, _CERTIFICATE)
    key = _check_pem("ssl_key_file", key_file, _PRIVATE_KEY)
    try:
        # An empty password instead of None: OpenSSL would ask at the terminal for one that is missing.
        context.load_cert_chain(cert_file, key_file, password=password or "")
    except ssl.SSLError as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            message = f"ssl_key_file {key_file} is not the key of ssl_cert_file {cert_file}"
            raise TlsRefused(message, hint="give the key that the certificate was made for") from error
        if b"ENCRYPTED" in key:
            what = "is not opened by the password" if password else "is under a password"
            hint = f"give the right one (ssl_password in a URI), or take it off: openssl pkey -in {key_file} -out …"
            raise TlsRefused(f"ssl_key_file {key_file} {what}", hint=hint) from error
        message = f"ssl_cert_file {cert_file} with ssl_key_file {key_file}: {_reason(error)}"
        raise TlsRefused(message, hint="see what `openssl x509` and `openssl pkey` say of them") from error


def _check_pem(option: str, path: str, wanted: tuple[bytes, str]) -> bytes:
    """What the file holds, among it a block of the kind that is wanted."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        message = f"{option} {path} cannot be read: {error.strerror or error}"
        raise TlsRefused(message, hint=f"check the path and its permissions, or give another {option}") from error
    line_end, kind = wanted
    if line_end not in content:
        raise TlsRefused(f"{option} {path} holds no {kind}", hint=_PEM_HINT)
    return content


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason in words; without one, its own text."""
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if reason else str(error.args[-1])


def _prepare(transport: asyncio.BaseTransport, options: SocketOptions) -> None:
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return
    # Replies and ACKs are small and waited for: Nagle's delay would be paid on each of them.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(options.no_delay))
    for buffer, size in ((socket.SO_SNDBUF, options.send_buffer), (socket.SO_RCVBUF, options.receive_buffer)):
        if size is not None:
            connection.setsockopt(socket.SOL_SOCKET, buffer, size)
    # A machine that loses power says nothing: whoever only waits would wait for ever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_KEEPALIVE_OPTIONS = (
    ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
    ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
    ("TCP_KEEPCNT", KEEPALIVE_COUNT),
)
"""By name, as not every system has all of them."""


class _AsyncioStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, n: int) -> bytes:
        return await self._reader.read(n)

    def write(self, data: Buffer) -> None:
        if not self._writer.is_closing():  # uvloop would raise, asyncio drops it
            self._writer.write(memoryview(data))

    async def drain(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # lost before it was closed: nobody is left to tell
            await self._writer.wait_closed()


class _AsyncioClient(asyncio.Protocol):
    """A client to who accepted it, a protocol to the loop."""

    def __init__(self, on_client: Callable[[Client], Receiver], options: SocketOptions) -> None:
        self._on_client = on_client
        self._options = options
        self._transport: asyncio.Transport
        self._receiver: Receiver
        self.peer = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(QUEUE_MAX, QUEUE_MAX // 4)
        _prepare(transport, self._options)
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
    def __init__(self, server: asyncio.Server, host: str, port: int | None) -> None:
        self._server = server
        self.port = None if port is None else cast(int, server.sockets[0].getsockname()[1])
        self._path = host if port is None else None
        self._identity = _identity(self._path)

    async def close(self) -> None:
        # Somebody else may listen at this path by now; then the file is theirs.
        if self._path is not None and self._identity is not None and _identity(self._path) == self._identity:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        # Not wait_closed: from Python 3.12 on it waits for the connections, too.
        self._server.close()


def _identity(path: str | None) -> tuple[int, int] | None:
    """Which file is at `path`; None where there is none, as for a socket in Linux's abstract namespace."""
    if path is None or path.startswith("\0"):
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _peer(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unix/:"
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
