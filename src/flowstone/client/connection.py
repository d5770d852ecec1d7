"""A client connection to an IPROTO server.

Requests are pipelined: each one has a number (sync), and responses are matched by it, in any order. A failure of the
connection (a lost connection, a timeout, an invalid packet) closes it, and all pending requests fail with the same
error. An error response does not affect the connection.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import auth
from flowstone.iproto.constants import Feature, Key, RequestType
from flowstone.iproto.errors import UnknownRequestType
from flowstone.iproto.greeting import GREETING_SIZE, Greeting, GreetingError, decode_greeting
from flowstone.iproto.limits import PACKET_SIZE_MAX
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import EMPTY_BODY, PacketError, Response, decode_response, encode_request, split
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
_NO_ANSWERS = (RequestType.CHUNK, RequestType.EVENT)


class ConnectionFailed(FlowstoneError):
    """The connection could not be opened or is lost. Pending requests may or may not have been executed."""


class Connection:
    """A connection, opened by `Connection.open`. `request` sends one request, `send` pipelines several."""

    def __init__(self, stream: Stream, greeting: Greeting, address: str) -> None:
        self.greeting = greeting
        self.address = address
        self.features: tuple[int, ...] = ()
        self._stream = stream
        self._sync = 0
        self._waiting: dict[int, asyncio.Future[Response]] = {}
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

    def has(self, *features: Feature) -> bool:
        """True if the server supports all of `features`."""
        return all(feature in self.features for feature in features)

    def send(self, type: RequestType, body: bytes = EMPTY_BODY, *, stream_id: int = 0) -> asyncio.Future[Response]:
        """Queue a request without waiting. Return a future of the response, which may be an error response."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            _refuse(answer, self._failure)
            return answer
        self._sync += 1
        self._waiting[self._sync] = answer
        self._stream.write(encode_request(type, self._sync, body, stream_id=stream_id))
        return answer

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
        buffer = bytearray()
        try:
            while data := await self._stream.read(READ_SIZE):
                buffer += data
                packets, end = split(buffer, size_max=PACKET_SIZE_MAX)
                while packets:
                    del buffer[:end]
                    for packet in packets:
                        self._dispatch(decode_response(packet))
                    packets, end = split(buffer, size_max=PACKET_SIZE_MAX)  # raises if the rest is invalid
            self._fail(ConnectionFailed(f"{self.address} closed the connection"))
        except OSError as error:
            self._fail(ConnectionFailed(f"connection to {self.address} is lost: {error}"))
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.address} sent an invalid packet: {error}"))
            await self._stream.close()

    def _dispatch(self, response: Response) -> None:
        if response.type in _NO_ANSWERS:
            return
        answer = self._waiting.pop(response.sync, None)
        if answer is None:
            raise PacketError(f"response to unknown request {response.sync}")
        if not answer.done():
            answer.set_result(response)

    def _fail(self, failure: FlowstoneError) -> None:
        """Record the first failure, and fail all pending requests with it; later requests fail with it, too."""
        if self._failure is not None:
            return
        self._failure = failure
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                _refuse(answer, failure)


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
