"""One IPROTO connection to a server, as its client.

Requests are pipelined: each has a number (sync), answers find their request by it, in any order. Whatever
goes wrong with the connection itself (lost, silent for too long, bytes that are no packet) ends it, and every
request that waits gets that error. Errors that a server answers leave the connection as it is.
"""

from __future__ import annotations

import asyncio
import errno
import re
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
HINT_OF_SILENCE = "its process may hang: see whether it runs, and what its log says"
ID_SINCE = (2, 10, 0)
"""Servers before this one have no ID request and none of the features it announces."""

_OUR_FEATURES = (Feature.STREAMS, Feature.TRANSACTIONS, Feature.ERROR_EXTENSION)
_OUR_PROTOCOL_VERSION = 2  # the one that brought ERROR_EXTENSION
_ERRNO = re.compile(r"\[Errno (\d+)\]")
# A push and an event carry the sync of a request without being its answer.
_NO_ANSWERS = (RequestType.CHUNK, RequestType.EVENT)


class ConnectionFailed(FlowstoneError):
    """The connection could not be made or is gone. What was under way may or may not have happened."""


class Connection:
    """Made by `Connection.open`; then `request` for one answer, `send` for many, `close` at the end."""

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
        cls, outside: Outside, uri: Uri, *, timeout: float = CONNECT_SECONDS, instance: str | None = None
    ) -> Connection:
        """Connects, reads the greeting, learns the server's features and authenticates, within `timeout`.

        Who greets with another UUID than `instance`, where that is given, is sent nothing, and so no login.
        """
        connection: Connection | None = None
        stream: Stream | None = None
        try:
            async with asyncio.timeout(timeout):
                stream = await outside.network.connect(uri.host, uri.port, timeout=timeout, tls=tls_of(uri))
                connection = cls(stream, await _greeting(stream, uri), uri.address)
                there = str(connection.greeting.uuid)
                if instance not in (None, there):
                    raise ConnectionFailed(f"another instance answers there, {there}", hint=f"it should be {instance}")
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
        """It has ended: every further request fails."""
        return self._failure is not None

    def has(self, *features: Feature) -> bool:
        """Whether the server has announced all of `features`."""
        return all(feature in self.features for feature in features)

    def send(self, type: RequestType, body: bytes = EMPTY_BODY, *, stream_id: int = 0) -> asyncio.Future[Response]:
        """Queues a request; the future gives its answer, an error packet too. Nothing is waited for."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            _refuse(answer, self._failure)
            return answer
        self._sync += 1
        self._waiting[self._sync] = answer
        self._stream.write(encode_request(type, self._sync, body, stream_id=stream_id))
        return answer

    async def answer(self, future: asyncio.Future[Response], *, timeout: float = REQUEST_SECONDS) -> Response:
        """The answer to something sent. Silence beyond `timeout` ends the connection."""
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
        """Sends one request and gives the body of its answer; an error packet is raised as its error."""
        response = await self.answer(self.send(type, body, stream_id=stream_id), timeout=timeout)
        return self.values(response)

    def values(self, response: Response) -> dict[int, Any]:
        """The body of `response`, or the error that it is; a broken body ends the connection."""
        try:
            return response.values()
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.address} sent a broken answer: {error}"))
        assert self._failure is not None
        raise self._failure

    async def detach(self) -> Stream:
        """The stream of a connection with nothing under way, for who sends and reads in bulk; the rest is over."""
        assert not self._waiting, "answers are under way"
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._fail(ConnectionFailed(f"connection to {self.address} was given away"))
        return self._stream

    async def close(self) -> None:
        self._fail(ConnectionFailed(f"connection to {self.address} was closed"))
        self._reader.cancel()
        with suppress(TimeoutError):  # a peer that reads no more would hold us for ever
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
            raise RemoteProtocolError(f"{self.address} announces features that are no array")
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
                    packets, end = split(buffer, size_max=PACKET_SIZE_MAX)  # which tells what is wrong with the rest
            self._fail(ConnectionFailed(f"{self.address} closed the connection"))
        except OSError as error:
            self._fail(ConnectionFailed(f"connection to {self.address} is lost: {error}"))
        except RemoteProtocolError as error:
            self._fail(RemoteProtocolError(f"{self.address} sent something that is no packet: {error}"))
            await self._stream.close()

    def _dispatch(self, response: Response) -> None:
        if response.type in _NO_ANSWERS:
            return
        answer = self._waiting.pop(response.sync, None)
        if answer is None:
            raise PacketError(f"an answer to request {response.sync}, which was never sent")
        if not answer.done():
            answer.set_result(response)

    def _fail(self, failure: FlowstoneError) -> None:
        """The first failure counts. Whoever waits, or sends later, gets it."""
        if self._failure is not None:
            return
        self._failure = failure
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                _refuse(answer, failure)


def _refuse(answer: asyncio.Future[Response], failure: FlowstoneError) -> None:
    answer.set_exception(failure)
    answer.exception()  # marks it as seen: of a hundred requests only one may be waited for


def tls_of(uri: Uri) -> Tls | None:
    """Encryption as the parameters of a URI ask for it, by Tarantool's names: `?transport=ssl&ssl_ca_file=…`."""
    given = dict(uri.parameters)
    if given.pop("transport", "plain") == "plain":
        return None
    return Tls(**{name.removeprefix("ssl_"): value for name, value in given.items()})


def tls_hint(uri: Uri) -> str | None:
    """For who is not greeted: servers with TLS wait for a client's first word, and may leave who shows no name."""
    tls = tls_of(uri)
    if tls is None:
        return "the server may want TLS: add ?transport=ssl to the URI"
    return None if tls.cert_file else "the server may want our certificate: add ssl_cert_file and ssl_key_file"


def reason_of(error: OSError, uri: Uri) -> str:
    """In words; a name with several addresses gives one error that holds the texts of all."""
    reason = getattr(error, "reason", None)  # errors of TLS have one
    if reason == "CERTIFICATE_VERIFY_FAILED":
        why = getattr(error, "verify_message", "") or "it is not valid"
        return f"its certificate does not hold against ssl_ca_file {dict(uri.parameters).get('ssl_ca_file')}: {why}"
    if reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS, which transport=ssl asks for"
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
                raise GreetingError("the peer closed the connection without a greeting", hint=hint)
            data += piece
        return decode_greeting(data)
    except BaseException:
        await stream.close()
        raise


async def greeting_of(outside: Outside, uri: Uri, *, timeout: float = GREETING_SECONDS) -> Greeting | None:
    """How the server at `uri` greets; None where nobody does within `timeout`."""
    try:
        async with asyncio.timeout(timeout):
            stream = await outside.network.connect(uri.host, uri.port, timeout=timeout, tls=tls_of(uri))
            greeting = await _greeting(stream, uri)
            await stream.close()
            return greeting
    except (OSError, FlowstoneError):
        return None
