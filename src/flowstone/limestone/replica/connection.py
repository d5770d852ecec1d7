"""One connection to a replica: the message that opens it, and the bytes that follow.

Uses the Client that is passed in, which calls it on events; the task that serves the connection awaits `read`. A peer
that has not opened a channel gets little memory and little time. Never interprets other messages: `replica.py` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from flowstone.limestone.errors import BadMessage, LimestoneError
from flowstone.limestone.format.messages import (
    Error,
    ErrorCode,
    LogChannelCreate,
    MessageParser,
    MessageType,
    SessionBegin,
    encode,
)
from flowstone.outside import Client

OPENER_SIZE_MAX: Final = 64 << 10
"""Size limit of the message that opens a channel. Messages of the original have at most 22 bytes; Flowstone's also
contain a secret."""

OPENING_SECONDS: Final = 10.0
"""Time limit for the message that opens a channel and, if a secret is required, for its proof."""

READ_AHEAD_MAX: Final = 4 << 20
"""Pending bytes of one connection beyond which reading from it is paused; less if there are many connections."""

LINGER_SECONDS: Final = 0.25
LINGER_SIZE_MAX: Final = 64 << 20
"""Seconds and bytes that a rejected peer may still send. If we closed the socket with unread bytes, the kernel would
discard the answer that the peer has not read yet."""

_STRING_AT: Final = 14
"""Offset of the string in both opening messages, after its length."""


class Refusal(LimestoneError):
    """A rejection: an ERROR of this code is sent to the peer, and the connection is closed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ReplicaConnection:
    """A Receiver of a Client, with the bytes that were received and not read yet."""

    def __init__(self, client: Client, read_ahead: Callable[[], int] = lambda: READ_AHEAD_MAX) -> None:
        """`read_ahead` returns how many received bytes may be pending before reading from the peer is paused."""
        self.peer = client.peer
        self._read_ahead = read_ahead
        self.is_closed = False
        self._client = client
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._arrival = asyncio.Event()

    # --- called by the loop ---

    def received(self, data: bytes) -> None:
        self._chunks.append(data)
        self._size += len(data)
        if not self._is_paused and self._size > self._read_ahead():
            self._is_paused = True
            self._client.pause_reading()
        self._arrival.set()

    def congested(self) -> None:
        """Stop reading from a peer that does not read its answers."""
        self._client.pause_reading()

    def drained(self) -> None:
        if not self._is_paused:
            self._client.resume_reading()

    def closed(self) -> None:
        self.is_closed = True
        self._arrival.set()

    # --- for the server ---

    async def read(self) -> bytes:
        """Return all bytes that have arrived; b"" if the connection has ended."""
        while not self._chunks:
            if self.is_closed:
                return b""
            self._arrival.clear()
            await self._arrival.wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks, self._size = [], 0
        if self._is_paused:
            self._is_paused = False
            self._client.resume_reading()
        return data

    async def opener(self) -> tuple[SessionBegin | LogChannelCreate, bytes] | None:
        """Return the first message, and the bytes after it; None if the peer disconnected.

        Raise Refusal for a message that opens no channel, as soon as its type is known; BadMessage for an unknown type.
        """
        data = b""
        while piece := await self.read():
            data += piece
            kind = data[0]
            if kind not in (MessageType.SESSION_BEGIN, MessageType.LOG_CHANNEL_CREATE):
                if kind in tuple(MessageType):
                    raise Refusal(ErrorCode.UNEXPECTED_TYPE, "Unexpected message type")
                raise BadMessage(f"unknown message type {kind:#04x}")
            if len(data) >= _STRING_AT:
                behind = 8 if kind == MessageType.SESSION_BEGIN else 0
                size = _STRING_AT + int.from_bytes(data[_STRING_AT - 4 : _STRING_AT]) + behind
                if size > OPENER_SIZE_MAX:
                    raise BadMessage(f"opening message of {size} bytes exceeds the limit of {OPENER_SIZE_MAX}")
                if len(data) >= size:
                    return _opener(data[:size]), data[size:]
        return None

    def write(self, data: bytes) -> None:
        self._client.write(data)

    def close(self) -> None:
        """Send what is queued and close."""
        self._client.close()

    def abort(self) -> None:
        """Close at once; unread bytes are dropped."""
        self._chunks, self._size = [], 0
        self._client.abort()

    async def refuse(self, refusal: Refusal) -> None:
        """Send the reason, and wait until the peer has had time to read it or has disconnected. Close the connection
        afterwards."""
        self.write(encode(Error(refusal.code, refusal.message)))
        size = 0
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while size < LINGER_SIZE_MAX and (data := await self.read()):
                    size += len(data)
        except TimeoutError:
            pass


def _opener(data: bytes) -> SessionBegin | LogChannelCreate:
    parser = MessageParser(size_max=OPENER_SIZE_MAX)
    parser.feed(data)
    message = parser.next_message()
    assert isinstance(message, SessionBegin | LogChannelCreate)
    return message
