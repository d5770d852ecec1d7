"""A client of the real server that sends raw MessagePack requests and returns raw replies."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from threading import Thread
from typing import NamedTuple, Self

from flowstone.box.engine.field_types import children_of, elements_of, end_of
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack

Request = tuple[int, dict[int, bytes]]


class Answer(NamedTuple):
    """Error code, or 0; error message; the raw tuples of a successful reply."""

    code: int
    message: str
    tuples: list[bytes]


class RawClient:
    """Send many requests at once while reading; the server executes them in order if it has no WAL to wait for."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.stream = self.socket.makefile("rb")
        self.stream.read(128)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()
        self.socket.close()

    def ask(self, requests: Sequence[Request]) -> list[Answer]:
        packets = b"".join(_packet(kind, body) for kind, body in requests)
        sender = Thread(target=self.socket.sendall, args=(packets,))
        sender.start()
        answers = [self._answer() for _ in requests]
        sender.join()
        return answers

    def _answer(self) -> Answer:
        packet = self.stream.read(struct.unpack(">I", self.stream.read(5)[1:])[0])
        body_at = end_of(packet, 0)
        code = unpack(packet[:body_at])[0] & 0x7FFF
        if code:
            return Answer(code, unpack(packet[body_at:])[Key.ERROR_24], [])
        pairs, at = children_of(packet, body_at)
        return Answer(0, "", elements_of(packet[end_of(packet, at) :]) if pairs else [])


def _packet(kind: int, body: dict[int, bytes]) -> bytes:
    content = pack({Key.REQUEST_TYPE: kind, Key.SYNC: 1}) + bytes((0x80 | len(body),))
    content += b"".join(pack(key) + value for key, value in body.items())
    return b"\xce" + struct.pack(">I", len(content)) + content


def insert(space: int, tuple_: bytes) -> Request:
    return RequestType.INSERT, {Key.SPACE_ID: pack(space), Key.TUPLE: tuple_}


def replace(space: int, tuple_: bytes) -> Request:
    return RequestType.REPLACE, {Key.SPACE_ID: pack(space), Key.TUPLE: tuple_}


def select(space: int, index: int, key: bytes = b"\x90", iterator: int = 0) -> Request:
    return RequestType.SELECT, {
        Key.SPACE_ID: pack(space),
        Key.INDEX_ID: pack(index),
        Key.LIMIT: pack(2**32 - 1),
        Key.OFFSET: b"\x00",
        Key.ITERATOR: pack(iterator),
        Key.KEY: key,
    }


def update(space: int, key: bytes, operations: bytes) -> Request:
    return RequestType.UPDATE, {
        Key.SPACE_ID: pack(space),
        Key.INDEX_ID: b"\x00",
        Key.KEY: key,
        Key.TUPLE: operations,
    }


def upsert(space: int, tuple_: bytes, operations: bytes) -> Request:
    return RequestType.UPSERT, {Key.SPACE_ID: pack(space), Key.TUPLE: tuple_, Key.OPS: operations}


def delete(space: int, index: int, key: bytes) -> Request:
    return RequestType.DELETE, {Key.SPACE_ID: pack(space), Key.INDEX_ID: pack(index), Key.KEY: key}
