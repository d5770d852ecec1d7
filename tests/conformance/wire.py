"""A blocking IPROTO client that sends any bytes, valid or not, and keeps replies as received.

Values are encoded by `encode`; `Raw` has bytes of MessagePack that no encoder would write.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from flowstone.iproto import auth
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import GREETING_SIZE, Greeting, decode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import decode_response, frame, split

ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Raw:
    """MessagePack bytes that are sent unchanged."""

    data: bytes


def raw(hexadecimal: str) -> Raw:
    """Return `Raw` bytes from hex digits: `raw("ca 3fc00000")` is a float32."""
    return Raw(bytes.fromhex(hexadecimal))


def encode(value: Any) -> bytes:
    """Return the MessagePack of `value`, which may contain `Raw` at any depth."""
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, list | tuple):
        return _head(0x90, 0xDC, len(value)) + b"".join(map(encode, value))
    if isinstance(value, dict):
        items = value.items()
        return _head(0x80, 0xDE, len(value)) + b"".join(encode(key) + encode(item) for key, item in items)
    return pack(value)


def _head(small: int, large: int, count: int) -> bytes:
    return bytes((small | count,)) if count < 16 else bytes((large,)) + count.to_bytes(2, "big")


class ConnectionClosed(Exception):
    """The server closed the connection instead of answering."""


class Client:
    """One connection. Requests are sent one at a time, each with the next sync."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS)
        self._buffer = b""
        self._packets: list[bytes] = []
        self.sync = 0
        self.greeting: Greeting = decode_greeting(self._read_exactly(GREETING_SIZE))

    def authenticate(self, user: str, password: str) -> bytes:
        scramble = auth.scramble(password, self.greeting.salt)
        return self.request(RequestType.AUTH, {Key.USER_NAME: user, Key.TUPLE: ["chap-sha1", scramble]})

    def request(self, type: int, body: Any, **header: int) -> bytes:
        """Return the reply to a request with this body; further header fields are given by the names of their keys."""
        self.sync += 1
        more = {Key[key.upper()]: value for key, value in header.items()}
        head = {Key.REQUEST_TYPE: type, Key.SYNC: self.sync} | more
        return self.exchange(encode(head) + encode(body))

    def batch(self, type: int, body: Any, count: int) -> list[bytes]:
        """Return the replies to equal requests sent with one write, in the order of the requests."""
        encoded = encode(body)
        syncs = range(self.sync + 1, self.sync + count + 1)
        self.sync += count
        heads = (encode({Key.REQUEST_TYPE: type, Key.SYNC: sync}) for sync in syncs)
        try:
            self._socket.sendall(b"".join(frame(head + encoded) for head in heads))
            packets = [self._packet() for _ in syncs]
        except (ConnectionError, EOFError) as error:
            raise ConnectionClosed from error
        # A server may answer requests that need no log before earlier ones.
        return sorted(packets, key=lambda packet: decode_response(packet).sync)

    def exchange(self, payload: bytes) -> bytes:
        """Return the reply to any header and body."""
        return self.exchange_bytes(frame(payload))

    def exchange_bytes(self, data: bytes) -> bytes:
        """Return the reply to any bytes, including their length."""
        try:
            self._socket.sendall(data)
            return self._packet()
        except (ConnectionError, EOFError) as error:
            raise ConnectionClosed from error

    def close(self) -> None:
        self._socket.close()

    def _packet(self) -> bytes:
        while not self._packets:
            self._packets, end = split(self._buffer)
            self._buffer = self._buffer[end:]
            if not self._packets:
                self._receive()
        return self._packets.pop(0)

    def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _receive(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise EOFError
        self._buffer += data
