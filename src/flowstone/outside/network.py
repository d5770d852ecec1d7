"""Byte streams to other processes: TCP and Unix sockets, with or without TLS.

`connect` returns a `Stream` with awaitable reads. `listen` creates a `Client` per connection and calls a `Receiver` on
its events: a server handles many connections per iteration of the loop, and a task for each would cost more than the
requests themselves. Built on asyncio's transports. Does not interpret the content of streams.
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
"""Length of the kernel's queue of connections that are not accepted yet; Tarantool uses the system's maximum."""

QUEUE_MAX = 1024 * 1024
"""Bytes queued for a client above which it is congested; at a quarter of this it counts as drained."""


KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_COUNT = 15, 5, 3
"""TCP keepalive: idle time before the first probe, interval between probes, and probes without answer until failure."""

KEEPALIVE_SECONDS = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_INTERVAL_SECONDS * KEEPALIVE_COUNT
"""Time after which an idle connection fails if its peer has disappeared without closing it."""


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings of one end, named after Tarantool's options `ssl_cert_file`, `ssl_key_file`, …

    A listener needs a certificate and a key. With `ca_file` the peer must present a certificate signed by that
    authority; without it the peer is not verified. Using a file that is invalid raises TlsRefused.
    """

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    ciphers: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """TCP socket options. `no_delay` sends small packets at once (TCP_NODELAY). Buffer sizes of None keep the kernel's
    defaults."""

    no_delay: bool = True
    send_buffer: int | None = None
    receive_buffer: int | None = None


DEFAULT_OPTIONS = SocketOptions()


class TlsRefused(FlowstoneError):
    """TLS cannot be set up on our side because a file or option is missing or invalid. The message names it."""


class Stream(Protocol):
    """An outgoing connection. One reader and one writer at a time.

    If the peer disappears without closing the connection, an idle connection fails within KEEPALIVE_SECONDS.
    """

    async def read(self, n: int) -> bytes:
        """Return between one and `n` bytes as soon as any arrive; b"" if the peer has closed the connection."""
        ...

    def write(self, data: Buffer) -> None:
        """Queue `data` for sending; never blocks, never fails. `drain` reports errors."""
        ...

    async def drain(self) -> None:
        """Wait until the send queue is short; raise OSError if the connection is lost."""
        ...

    def deliver(self, receive: Callable[[bytes], None], ended: Callable[[], None]) -> bool:
        """Pass bytes to `receive` as they arrive, instead of to `read`, and call `ended` once after the last ones.

        This saves a turn of the event loop per message. Call it directly after a `read` that took all bytes.
        Return False, without effect, if the stream cannot do that, or has ended.
        """
        ...

    async def close(self) -> None:
        """Send the queued data and close; a connection that is already lost is not an error."""
        ...


class Receiver(Protocol):
    """Handles the events of one client. The event loop calls each method, which must not block."""

    def received(self, data: bytes) -> None:
        """Handle bytes that have arrived."""
        ...

    def congested(self) -> None:
        """Handle a full send queue (more than QUEUE_MAX bytes); `drained` or `closed` follows."""
        ...

    def drained(self) -> None:
        """Handle a send queue that has become short again."""
        ...

    def closed(self) -> None:
        """Handle the end of the connection, for whatever reason; this is the last call."""
        ...


class Client(Protocol):
    """An incoming connection."""

    @property
    def peer(self) -> str:
        """The address and port of the peer, for logs; "unix/:" for a Unix socket."""
        ...

    @property
    def queued(self) -> int:
        """Bytes in the send queue that the kernel has not accepted yet."""
        ...

    def write(self, data: Buffer) -> None:
        """Queue `data` for sending; never blocks, never fails. Does nothing after the end of the connection."""
        ...

    def pause_reading(self) -> None:
        """Stop calling `received`; the kernel slows the peer down once its buffer is full. Twice is harmless."""
        ...

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""
        ...

    def close(self) -> None:
        """Send the queued data and close; nothing more is received."""
        ...

    def abort(self) -> None:
        """Close at once and discard the queued data."""
        ...


class Listener(Protocol):
    """A listening socket."""

    @property
    def port(self) -> int | None:
        """The port, chosen by the kernel if 0 was requested; None for a Unix socket."""
        ...

    async def close(self) -> None:
        """Stop accepting connections. Existing connections stay open; their owner closes them."""
        ...


class Network(Protocol):
    """Outgoing and incoming connections."""

    async def connect(
        self,
        host: str,
        port: int | None,
        *,
        timeout: float,
        tls: Tls | None = None,
        options: SocketOptions = DEFAULT_OPTIONS,
    ) -> Stream:
        """Connect to `host` and `port`, or, if `port` is None, to the Unix socket at path `host`.

        Raise OSError, including TimeoutError after `timeout` seconds, or TlsRefused."""
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
        """Accept connections at an address, written as for `connect`; `on_client` returns the receiver of a new client.

        Raise OSError if the address is in use or not local, or TlsRefused. Closing the listener removes the file of a
        Unix socket."""
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
            raise TimeoutError(f"connection to {address} timed out after {timeout:g} s") from error
        except OSError:  # must come first: certificate errors are both OSErrors and ValueErrors
            raise
        except ValueError as error:  # for example UnicodeError, if Python cannot encode the host name
            raise OSError(errno.EINVAL, f"invalid host name {host!r}") from error
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
    context.check_hostname = False  # as in Tarantool: the authority's signature is checked, not the host name
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE
    return _with_files(context, tls)


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if tls.ca_file else ssl.CERT_NONE
    return _with_files(context, tls)


def check_tls(tls: Tls) -> None:
    """Raise TlsRefused if a listener cannot use these settings."""
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
            hint = "use OpenSSL cipher names; `openssl ciphers` lists them"
            raise TlsRefused(f"ssl_ciphers {tls.ciphers!r}: {_reason(error)}", hint=hint) from error
    return context


_CERTIFICATE = (b"CERTIFICATE-----", "certificate")
_PRIVATE_KEY = (b"PRIVATE KEY-----", "private key")
"""End of the first line of a PEM block, and the kind of the block."""

_PEM_HINT = "use PEM format, including the lines -----BEGIN … and -----END …"


def _load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str, password: str | None) -> None:
    """Load a certificate and its key. Check both files first, because OpenSSL's errors do not name the file."""
    _check_pem("ssl_cert_file", cert_file, _CERTIFICATE)
    key = _check_pem("ssl_key_file", key_file, _PRIVATE_KEY)
    try:
        # An empty password instead of None: OpenSSL would prompt on the terminal for a missing one.
        context.load_cert_chain(cert_file, key_file, password=password or "")
    except ssl.SSLError as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            message = f"ssl_key_file {key_file} does not match ssl_cert_file {cert_file}"
            raise TlsRefused(message, hint="use the private key that belongs to the certificate") from error
        if b"ENCRYPTED" in key:
            what = "cannot be decrypted with the given password" if password else "is encrypted and needs a password"
            hint = f"set ssl_password in the URI, or remove the password: openssl pkey -in {key_file} -out …"
            raise TlsRefused(f"ssl_key_file {key_file} {what}", hint=hint) from error
        message = f"ssl_cert_file {cert_file} with ssl_key_file {key_file}: {_reason(error)}"
        raise TlsRefused(message, hint="check both files with `openssl x509` and `openssl pkey`") from error


def _check_pem(option: str, path: str, wanted: tuple[bytes, str]) -> bytes:
    """Return the content of the file; raise TlsRefused unless it contains a block of the wanted kind."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        message = f"cannot read {option} {path}: {error.strerror or error}"
        raise TlsRefused(message, hint=f"check the path and its permissions, or use another {option}") from error
    line_end, kind = wanted
    if line_end not in content:
        raise TlsRefused(f"{option} {path} contains no {kind}", hint=_PEM_HINT)
    return content


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words, or its message if there is no reason."""
    reason = getattr(error, "reason", None)
    return reason.replace("_", " ").lower() if reason else str(error.args[-1])


def _prepare(transport: asyncio.BaseTransport, options: SocketOptions) -> None:
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return
    # Responses and ACKs are small and awaited by the peer: Nagle's algorithm would delay each of them.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(options.no_delay))
    for buffer, size in ((socket.SO_SNDBUF, options.send_buffer), (socket.SO_RCVBUF, options.receive_buffer)):
        if size is not None:
            connection.setsockopt(socket.SOL_SOCKET, buffer, size)
    # A machine that loses power closes nothing: without keepalive a reader would wait forever.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_KEEPALIVE_OPTIONS = (
    ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
    ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
    ("TCP_KEEPCNT", KEEPALIVE_COUNT),
)
"""Names instead of constants, because not every system has all of them."""


class _AsyncioStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._transport = writer.transport

    async def read(self, n: int) -> bytes:
        return await self._reader.read(n)

    def write(self, data: Buffer) -> None:
        if not self._transport.is_closing():  # uvloop would raise, where asyncio discards the data
            self._transport.write(data if type(data) is bytes else memoryview(data))

    async def drain(self) -> None:
        await self._writer.drain()

    def deliver(self, receive: Callable[[bytes], None], ended: Callable[[], None]) -> bool:
        if self._reader.at_eof() or self._writer.is_closing():
            return False
        transport = self._writer.transport
        transport.set_protocol(_Delivery(cast(asyncio.Protocol, transport.get_protocol()), receive, ended))
        return True

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # the connection was already lost
            # All callers wait for one future. Without the shield a caller that is cancelled cancels the others, too.
            await asyncio.shield(self._writer.wait_closed())


class _Delivery(asyncio.Protocol):
    """Delivers bytes to a callback as they arrive; forwards all other events to the protocol of the stream."""

    def __init__(self, stream: asyncio.Protocol, receive: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        self._stream = stream
        self._receive = receive
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def pause_writing(self) -> None:
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._stream.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._stream.connection_lost(error)
        self._ended()


class _AsyncioClient(asyncio.Protocol):
    """An asyncio protocol that implements `Client`."""

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
        # Another process may listen at this path by now; then the file is not ours to remove.
        if self._path is not None and self._identity is not None and _identity(self._path) == self._identity:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        # No wait_closed: since Python 3.12 it also waits for the connections.
        self._server.close()


def _identity(path: str | None) -> tuple[int, int] | None:
    """Return device and inode of the file at `path`; None if there is none, as for an abstract Unix socket."""
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
