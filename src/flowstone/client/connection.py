"""A client connection to an IPROTO server.

Requests are pipelined: each one has a number (sync), and responses are matched by it, in any order. A failure of the
connection (a lost connection, a timeout, an invalid packet) closes it, and all pending requests fail with the same
error. An error response does not affect the connection.

`send` is for single requests. `submit` is for many: it calls a `Submitted` instead of completing a future, and all
requests that are submitted in one turn of the event loop are sent with one write. Only a request on an idle connection
is sent at once: a program that awaits its requests one by one does not wait for the end of a turn.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Any, Protocol, Self

from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import auth
from flowstone.iproto.constants import Feature, Key, RequestType
from flowstone.iproto.errors import UnknownRequestType
from flowstone.iproto.greeting import GREETING_SIZE, Greeting, GreetingError, decode_greeting
from flowstone.iproto.limits import PACKET_SIZE_MAX
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.packet import (
    EMPTY_BODY,
    PacketError,
    Response,
    decode_response,
    encode_request,
    encode_statement,
    split,
)
from flowstone.iproto.uri import Uri
from flowstone.outside import Outside, Stream, Tls

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 60.0
CLOSE_SECONDS = 5.0
GREETING_SECONDS = 2.0
READ_SIZE = 256 * 1024
HINT_OF_SILENCE = "its process may hang: check that it is running, and check its log"
ID_SINCE = (2, 10, 0)
"""The first version with the ID request; older servers have none of the features that it reports."""

_OUR_FEATURES = (Feature.STREAMS, Feature.TRANSACTIONS, Feature.ERROR_EXTENSION)
_OUR_PROTOCOL_VERSION = 2  # the one that brought ERROR_EXTENSION
_ERRNO = re.compile(r"\[Errno (\d+)\]")
# A push and an event have the sync of a request but are not its response.
_NO_ANSWERS = (RequestType.CHUNK.value, RequestType.EVENT.value)

LOG = logging.getLogger("flowstone.client")

Listener = Callable[[Any], None]
"""Called with the value of a watched key; None while it has no value."""


class ConnectionFailed(FlowstoneError):
    """The connection could not be opened or is lost. Submitted requests may or may not have been executed."""


class Submitted(Protocol):
    """Waits for the responses to submitted requests. The connection calls it from the event loop; it must not block."""

    deadline: float
    """The time of the monotonic clock at which `Connection.expire` gives the request up."""

    def answered(self, response: Response) -> None:
        """Take the response to one request. A RemoteProtocolError fails the request, and closes the connection."""
        ...

    def failed(self, sync: int, error: FlowstoneError, *, was_sent: bool) -> None:
        """Take the failure of one request. If it was not sent, the server has certainly not executed it."""
        ...


class _Future:
    """A pending request of `send`: it completes a future."""

    __slots__ = ("future",)
    deadline = inf

    def __init__(self, future: asyncio.Future[Response]) -> None:
        self.future = future

    def answered(self, response: Response) -> None:
        if not self.future.done():
            self.future.set_result(response)

    def failed(self, sync: int, error: FlowstoneError, *, was_sent: bool) -> None:
        if not self.future.done():
            _refuse(self.future, error)


class _GivenUp:
    """Ignores the response to a request that has expired."""

    deadline = inf

    def answered(self, response: Response) -> None:
        pass

    def failed(self, sync: int, error: FlowstoneError, *, was_sent: bool) -> None:
        pass


_GIVEN_UP = _GivenUp()


class Connection:
    """A connection, opened by `Connection.open`. `request` sends one request, `send` pipelines several."""

    def __init__(self, stream: Stream, greeting: Greeting, address: str) -> None:
        self.greeting = greeting
        self.address = address
        self.features: tuple[int, ...] = ()
        self._stream = stream
        self._sync = 0
        self.on_lost: Callable[[], None] | None = None
        """Called once, when the connection has failed or is closed."""
        self._waiting: dict[int, Submitted] = {}
        self._outbox: list[bytes] = []
        """Submitted requests that the next turn of the event loop sends."""
        self._sent = 0
        """The last request that was sent, by its number; later ones are in the outbox."""
        self._watched: dict[str, dict[Listener, None]] = {}
        self._values: dict[str, Any] = {}
        """The last value of each watched key, for later listeners: the server sends it only once."""
        self._stream_id = 0
        self._buffer = bytearray()
        """Received bytes of an incomplete packet."""
        self._is_fast = False
        self._failure: FlowstoneError | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls,
        outside: Outside,
        uri: Uri,
        *,
        timeout: float = CONNECT_SECONDS,
        instance: str | None = None,
        on_greeting: Callable[[Greeting], None] | None = None,
    ) -> Connection:
        """Connect, read the greeting, query the features of the server and log in, within `timeout` seconds.

        If `instance` is given and the greeting has another UUID, nothing is sent, so that the server never receives the
        credentials. `on_greeting` gets the greeting even if the connection fails afterwards, as it does if a loading
        server rejects the login. Raise ConnectionFailed if the connection fails, and the server's error if it
        rejects the login.
        """
        connection: Connection | None = None
        stream: Stream | None = None
        try:
            async with asyncio.timeout(timeout):
                stream = await outside.network.connect(uri.host, uri.port, timeout=timeout, tls=tls_of(uri))
                connection = cls(stream, await _greeting(stream, uri), uri.address)
                if on_greeting is not None:
                    on_greeting(connection.greeting)
                there = str(connection.greeting.uuid)
                if instance not in (None, there):
                    reason = f"another instance answers at this address: {there}"
                    raise ConnectionFailed(reason, hint=f"expected {instance}")
                await connection._introduce()
                if uri.user is not None:
                    await connection._authenticate(uri.user, uri.password or "")
                return connection
        except OSError as error:
            if connection is not None:
                await connection.close()
            reason = reason_of(error, uri) or f"no answer within {timeout:g} s"
            hint = tls_hint(uri) if connection is None and stream is not None else None
            if isinstance(error, TimeoutError) and stream is not None:
                hint = ", or ".join(filter(None, (hint, HINT_OF_SILENCE)))
            raise ConnectionFailed(f"cannot connect to {uri.address}: {reason}", hint=hint) from error
        except BaseException:
            if connection is not None:
                await connection.close()
            raise

    @property
    def is_lost(self) -> bool:
        """True if the connection has failed or is closed: every further request fails."""
        return self._failure is not None

    @property
    def failure(self) -> FlowstoneError | None:
        """The error that all further requests get; None while the connection is usable."""
        return self._failure

    def has(self, *features: Feature) -> bool:
        """True if the server supports all of `features`."""
        return all(feature in self.features for feature in features)

    def send(self, type: RequestType, body: bytes = EMPTY_BODY, *, stream_id: int = 0) -> asyncio.Future[Response]:
        """Queue a request without waiting. Return a future of the response, which may be an error response."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            _refuse(answer, self._failure)
            return answer
        self._flush()
        self._sync += 1
        self._waiting[self._sync] = _Future(answer)
        self._stream.write(encode_request(type, self._sync, body, stream_id=stream_id))
        self._sent = self._sync
        return answer

    def submit(
        self, type: int, body: bytes, pending: Submitted, *, schema_version: int = 0, stream_id: int = 0
    ) -> None:
        """Send a request, at the latest at the end of this turn of the event loop. `pending` gets its outcome.

        A server with another schema version than `schema_version` rejects the request, unless it is 0.
        """
        if self._failure is not None:
            pending.failed(0, self._failure, was_sent=False)
            return
        sync = self._sync + 1
        if stream_id:
            packet = encode_request(type, sync, body, stream_id=stream_id, schema_version=schema_version)
        else:
            packet = encode_statement(type, sync, body, schema_version)
        is_idle = not self._waiting
        self._sync = sync
        self._waiting[sync] = pending
        if is_idle:
            self._stream.write(packet)
            self._sent = sync
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(packet)

    def next_stream_id(self) -> int:
        """Return the id of a stream that was not used on this connection."""
        self._stream_id += 1
        return self._stream_id

    def submit_many(self, type: int, bodies: Sequence[bytes], pending: Submitted, *, schema_version: int = 0) -> int:
        """Queue requests like `submit`. Return the number of the first; the others follow it.

        Raise the failure of the connection if it has failed.
        """
        if self._failure is not None:
            raise self._failure
        first = self._sync + 1
        packets = [encode_statement(type, sync, body, schema_version) for sync, body in enumerate(bodies, first)]
        self._sync += len(packets)
        self._waiting.update(dict.fromkeys(range(first, self._sync + 1), pending))
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox += packets
        return first

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            if self._failure is None:
                self._stream.write(b"".join(outbox))
                self._sent = self._sync

    def hurry(self) -> None:
        """Take responses as they arrive from the next one on, without a turn of the event loop for each.

        For a connection that is never detached.
        """
        self._is_fast = True

    async def drain(self) -> None:
        """Send what was submitted, and wait until the send queue is short. Raise ConnectionFailed if it is lost."""
        self._flush()
        try:
            await self._stream.drain()
        except OSError as error:
            self._fail(ConnectionFailed(f"connection to {self.address} is lost: {error}"))
        if self._failure is not None:
            raise self._failure

    def expire(self, now: float) -> None:
        """Fail the submitted requests whose deadline has passed; late responses to them are ignored."""
        expired = [(sync, pending) for sync, pending in self._waiting.items() if pending.deadline <= now]
        for sync, pending in expired:
            self._waiting[sync] = _GIVEN_UP
            pending.failed(sync, ConnectionFailed(f"{self.address} did not answer in time"), was_sent=True)

    def watch(self, key: str, listener: Listener) -> None:
        """Call `listener` with the value of the key, now and after each change. The server must support watchers."""
        listeners = self._watched.setdefault(key, {})
        listeners[listener] = None
        if key in self._values:
            listener(self._values[key])
        elif len(listeners) == 1:
            self._write_watch(RequestType.WATCH, key)

    def unwatch(self, key: str, listener: Listener) -> None:
        """Stop calling `listener`."""
        listeners = self._watched.get(key, {})
        listeners.pop(listener, None)
        if not listeners and self._watched.pop(key, None) is not None:
            self._values.pop(key, None)
            self._write_watch(RequestType.UNWATCH, key)

    def _write_watch(self, type: RequestType, key: str) -> None:
        if self._failure is None:
            self._stream.write(encode_request(type, 0, pack({Key.EVENT_KEY.value: key})))  # has no response

    async def answer(self, future: asyncio.Future[Response], *, timeout: float = REQUEST_SECONDS) -> Response:
        """Wait for the response to a sent request. A timeout closes the connection and raises ConnectionFailed."""
        try:
            async with asyncio.timeout(timeout):
                await self._stream.drain()
                return await future
        except TimeoutError:
            self._fail(ConnectionFailed(f"{self.address} did not answer within {timeout:g} s"))
        except OSError as error:
            self._fail(ConnectionFailed(f"connection to {self.address} is lost: {error}"))
        assert self._failure is not None
        raise self._failure

    async def request(
        self,
        type: RequestType,
        body: bytes = EMPTY_BODY,
        *,
        stream_id: int = 0,
        timeout: float = REQUEST_SECONDS,
    ) -> dict[int, Any]:
        """Send one request and return the body of its response; raise the error of an error response."""
        response = await self.answer(self.send(type, body, stream_id=stream_id), timeout=timeout)
        return self.values(response)

    def values(self, response: Response) -> dict[int, Any]:
        """Return the body of `response`; raise the error of an error response. An invalid body ends the connection."""
        try:
            return response.values()
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.address} sent an invalid response: {error}"))
        assert self._failure is not None
        raise self._failure

    async def detach(self) -> Stream:
        """Return the stream, for a caller that sends and reads in bulk. No request may be pending, or be sent later."""
        assert not self._waiting, "requests are pending"
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(ConnectionFailed(f"connection to {self.address} was detached"))
        return self._stream

    async def close(self) -> None:
        """Close the connection; pending requests fail."""
        self._fail(ConnectionFailed(f"connection to {self.address} was closed"))
        self._reader.cancel()
        with suppress(TimeoutError):  # a peer that does not read would block forever
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _introduce(self) -> None:
        if self.greeting.version < ID_SINCE:
            return
        known = [feature.value for feature in _OUR_FEATURES]
        body = pack({Key.VERSION.value: _OUR_PROTOCOL_VERSION, Key.FEATURES.value: known})
        try:
            answer = await self.request(RequestType.ID, body)
        except UnknownRequestType:
            return
        features = answer.get(Key.FEATURES, ())
        if not isinstance(features, tuple):
            raise RemoteProtocolError(f"{self.address} sent an invalid response: features are not an array")
        self.features = features

    async def _authenticate(self, user: str, password: str) -> None:
        scramble = auth.scramble(password, self.greeting.salt)
        body = {Key.USER_NAME.value: user, Key.TUPLE.value: (auth.METHOD, scramble)}
        await self.request(RequestType.AUTH, pack(body))

    async def _read(self) -> None:
        try:
            while data := await self._stream.read(READ_SIZE):
                self._take(data)
                if self._is_fast and self._stream.deliver(self._receive, self._note_end):
                    return
            self._note_end()
        except OSError as error:
            self._fail(ConnectionFailed(f"connection to {self.address} is lost: {error}"))
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.address} sent an invalid packet: {error}"))
            await self._stream.close()

    def _receive(self, data: bytes) -> None:
        """Take bytes that the stream delivers."""
        if self._failure is not None:
            return
        try:
            self._take(data)
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.address} sent an invalid packet: {error}"))

    def _note_end(self) -> None:
        self._fail(ConnectionFailed(f"{self.address} closed the connection"))

    def _take(self, data: bytes) -> None:
        """Dispatch the packets in the bytes so far."""
        if not self._buffer and data[0] == 0xCE and int.from_bytes(data[1:5], "big") == len(data) - 5:
            self._dispatch(decode_response(data[5:]))  # one whole packet, as for a single request
            return
        buffer: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        packets, end = split(buffer, size_max=PACKET_SIZE_MAX)
        for packet in packets:
            self._dispatch(decode_response(packet))
        if end == len(buffer):
            self._buffer.clear()
        elif buffer is data:
            self._buffer += data[end:]
        else:
            del self._buffer[:end]
        if self._buffer and packets:
            split(self._buffer, size_max=PACKET_SIZE_MAX)  # raises if an invalid length follows

    def _dispatch(self, response: Response) -> None:
        if response.type in _NO_ANSWERS:
            if response.type == RequestType.EVENT:
                self._tell(response)
            return
        pending = self._waiting.pop(response.sync, None)
        if pending is None:
            raise PacketError(f"response to unknown request {response.sync}")
        try:
            pending.answered(response)
        except RemoteProtocolError as error:
            pending.failed(response.sync, error, was_sent=True)
            raise

    def _tell(self, event: Response) -> None:
        """Pass an event to its listeners, and acknowledge it: the server sends the next one only then."""
        body = unpack_body(event.body)
        key = body.get(Key.EVENT_KEY)
        listeners = self._watched.get(key, {}) if isinstance(key, str) else {}
        if not isinstance(key, str) or not listeners:
            return
        value = self._values[key] = body.get(Key.EVENT_DATA)
        self._write_watch(RequestType.WATCH, key)
        for listener in list(listeners):
            try:
                listener(value)
            except Exception:  # code of the application
                LOG.exception("watcher of %r failed", key)

    def _fail(self, failure: FlowstoneError) -> None:
        """Record the first failure, and fail all pending requests with it; later requests fail with it, too."""
        if self._failure is not None:
            return
        self._failure = failure
        waiting, self._waiting = self._waiting, {}
        for sync, pending in waiting.items():
            pending.failed(sync, failure, was_sent=sync <= self._sent)
        if self.on_lost is not None:
            self.on_lost()


def _refuse(answer: asyncio.Future[Response], failure: FlowstoneError) -> None:
    answer.set_exception(failure)
    answer.exception()  # mark it as retrieved: not every request is awaited


def tls_of(uri: Uri) -> Tls | None:
    """Return the TLS settings in the parameters of a URI, such as `?transport=ssl&ssl_ca_file=…`; None for plain."""
    given = dict(uri.parameters)
    if given.pop("transport", "plain") == "plain":
        return None
    return Tls(**{name.removeprefix("ssl_"): value for name, value in given.items()})


def tls_hint(uri: Uri) -> str | None:
    """Return advice for a missing greeting: a TLS server waits for the client, or rejects one without certificate."""
    tls = tls_of(uri)
    if tls is None:
        return "the server may require TLS: add ?transport=ssl to the URI"
    return None if tls.cert_file else "the server may require a client certificate: add ssl_cert_file and ssl_key_file"


def reason_of(error: OSError, uri: Uri) -> str:
    """Return the reason of a connection error; for a name with several addresses, `error` has the texts of all."""
    reason = getattr(error, "reason", None)  # TLS errors have a reason
    if reason == "CERTIFICATE_VERIFY_FAILED":
        why = getattr(error, "verify_message", "") or "not valid"
        return f"certificate not accepted with ssl_ca_file {dict(uri.parameters).get('ssl_ca_file')}: {why}"
    if reason == "WRONG_VERSION_NUMBER":
        return "server does not use TLS, but the URI has transport=ssl"
    numbers = {int(number) for number in _ERRNO.findall(str(error))}
    if isinstance(error, ConnectionRefusedError) or numbers == {errno.ECONNREFUSED}:
        return "connection refused"
    return error.strerror or str(error)


async def _greeting(stream: Stream, uri: Uri) -> Greeting:
    data = b""
    try:
        while len(data) < GREETING_SIZE:
            piece = await stream.read(GREETING_SIZE - len(data))
            if not piece:
                hint = "; ".join(filter(None, ("check host and port", tls_hint(uri))))
                raise GreetingError("peer closed the connection without a greeting", hint=hint)
            data += piece
        return decode_greeting(data)
    except BaseException:
        await stream.close()
        raise


async def greeting_of(outside: Outside, uri: Uri, *, timeout: float = GREETING_SECONDS) -> Greeting | None:
    """Return the greeting of the server at `uri`; None if there is none within `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            stream = await outside.network.connect(uri.host, uri.port, timeout=timeout, tls=tls_of(uri))
            greeting = await _greeting(stream, uri)
            await stream.close()
            return greeting
    except (OSError, FlowstoneError):
        return None
