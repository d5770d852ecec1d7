"""A blocking IPROTO client for members of a replica set: single or pipelined requests; tuples stay raw."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Self

from flowstone.box.engine.field_types import elements_of, end_of
from flowstone.iproto import auth
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import GREETING_SIZE, decode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, encode_request, split

ANSWER_SECONDS = 60.0
IN_FLIGHT = 200
ALL, LIMIT_MAX = 2, 0xFFFFFFFF


class Request(NamedTuple):
    """A request: type, body as a map of keys, and stream."""

    type: RequestType
    body: dict[Key, Any]
    stream_id: int = 0

    def encode(self, sync: int) -> bytes:
        body = pack({key.value: value for key, value in self.body.items()})
        return encode_request(self.type, sync, body, stream_id=self.stream_id)


class Disconnected(ConnectionError):
    """The server closed the connection, or did not answer in time."""


class Client:
    """One connection; as guest unless a user is given."""

    def __init__(
        self, port: int, user: str | None = None, password: str = "", *, seconds: float = ANSWER_SECONDS
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=seconds)
        self._buffer = bytearray()
        self._sync = 0
        try:
            while len(self._buffer) < GREETING_SIZE:
                self._receive()
            self.greeting = decode_greeting(bytes(self._buffer[:GREETING_SIZE]))
            del self._buffer[:GREETING_SIZE]
            if user is not None:
                scramble = auth.scramble(password, self.greeting.salt)
                self.request(RequestType.AUTH, {Key.USER_NAME: user, Key.TUPLE: (auth.METHOD, scramble)})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def detach(self) -> socket.socket:
        """Return the connection itself for other uses; the client is then unusable."""
        return self._socket

    def close(self) -> None:
        self._socket.close()

    def request(self, type: RequestType, body: dict[Key, Any], *, stream_id: int = 0) -> dict[int, Any]:
        """Return the body of the answer; raise an error packet as its error."""
        return self._answer(Request(type, body, stream_id)).values()

    def call(self, function: str, *arguments: Any) -> Any:
        """Return the result of a function: one value as it is, none as None, several as a tuple."""
        return _results(self.request(RequestType.CALL, {Key.FUNCTION_NAME: function, Key.TUPLE: arguments}))

    def eval(self, expression: str, *arguments: Any) -> Any:
        return _results(self.request(RequestType.EVAL, {Key.EXPR: expression, Key.TUPLE: arguments}))

    def insert(self, space: int, *fields: Any) -> None:
        self.request(RequestType.INSERT, {Key.SPACE_ID: space, Key.TUPLE: fields})

    def replace(self, space: int, *fields: Any) -> None:
        self.request(RequestType.REPLACE, {Key.SPACE_ID: space, Key.TUPLE: fields})

    def delete(self, space: int, *key: Any) -> None:
        self.request(RequestType.DELETE, {Key.SPACE_ID: space, Key.KEY: key})

    def tuples(self, space: int, index: int = 0) -> list[bytes]:
        """Return all tuples in index order, as MessagePack."""
        body = {Key.SPACE_ID: space, Key.INDEX_ID: index, Key.LIMIT: LIMIT_MAX, Key.ITERATOR: ALL, Key.KEY: ()}
        response = self._answer(Request(RequestType.SELECT, body))
        if response.is_error:
            raise response.error()
        data = response.body
        assert data[:2] == bytes((0x81, Key.DATA)), data[:16].hex()
        return elements_of(data[2 : end_of(data, 2)])

    def pipeline(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Return the answers in request order; up to IN_FLIGHT requests are in flight."""
        queue = iter(requests)
        answers: dict[int, Response] = {}
        wanted = self._sync + 1
        while True:
            room = IN_FLIGHT - (self._sync + 1 - wanted)
            if room > IN_FLIGHT // 2:
                self._send(islice(queue, room))
            if wanted > self._sync:
                return
            while wanted not in answers:
                for answer in self._answers():
                    answers[answer.sync] = answer
            while wanted in answers:
                yield answers.pop(wanted)
                wanted += 1

    def _send(self, requests: Iterable[Request]) -> None:
        packets = []
        for request in requests:
            self._sync += 1
            packets.append(request.encode(self._sync))
        try:
            self._socket.sendall(b"".join(packets))
        except OSError as error:
            raise Disconnected(str(error)) from error

    def _answer(self, request: Request) -> Response:
        self._send((request,))
        while True:
            for answer in self._answers():
                if answer.sync == self._sync:
                    return answer

    def _answers(self) -> list[Response]:
        self._receive()
        packets, end = split(self._buffer)
        del self._buffer[:end]
        return [decode_response(packet) for packet in packets]

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise Disconnected(str(error)) from error
        if not data:
            raise Disconnected("connection closed by the server")
        self._buffer += data


def _results(body: dict[int, Any]) -> Any:
    results = body.get(Key.DATA, ())
    return results[0] if len(results) == 1 else (results or None)
