"""One connection of a master to a replica: a control channel, and a connection for each log channel.

Each connection answers its requests in order. The first failure on any of them, whether an ERROR, a closed connection
or an unexpected answer, ends the conversation; `lost` holds the reason. Uses the Network of its Outside. Never decides
what to send, and never reconnects: `replica_link.py` does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from flowstone.errors import FlowstoneError
from flowstone.limestone.errors import BadMessage, LimestoneError
from flowstone.limestone.format import messages
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.messages import (
    CommonAck,
    Error,
    GroupCommit,
    LogChannelCreate,
    Message,
    MessageParser,
    SessionBegin,
    SessionBeginAck,
)
from flowstone.limestone.format.wire_extensions import ControlParser, Frame, WireExtensionError
from flowstone.limestone.master.ended_session import EndedSession
from flowstone.outside import Outside, SocketOptions, Stream, Tls
from flowstone.outside.worker import by_worker

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 20.0
"""Timeout of the answer that opens a conversation or a channel."""

PREPARE_SECONDS: Final = 600.0
"""Timeout of the answer to PREPARE: the replica reads its directory first."""

OPENING_MAX: Final = 64
"""Maximum number of log channels that are opened at the same time. A replica limits the connections that have not
opened a channel yet (`UNOPENED_MAX` in `limestone/replica/replica.py`), and its listen queue is finite, so a thousand
channels must take turns."""

CLOSE_SECONDS: Final = 1.0
READ_SIZE: Final = 1 << 16
ANSWER_SIZE_MAX: Final = 64 << 10

UNACKNOWLEDGED_MAX: Final = 64 << 20
"""Maximum number of unacknowledged bytes of one log channel. Beyond it the connection ends, and the replica gets the
bytes from the log files after it has reconnected."""


class ReplicaLost(LimestoneError):
    """A replica is unreachable or has rejected a request. `is_final`: retrying would not help."""

    def __init__(self, endpoint: Endpoint, reason: str, *, hint: str | None = None, is_final: bool = False) -> None:
        super().__init__(f"replica {endpoint} is lost: {reason}", hint=hint)
        self.reason = reason
        self.is_final = is_final


class AuthenticationFailed(ReplicaLost):
    """Master and replica have different secrets, or only one of them has a secret."""

    def __init__(self, endpoint: Endpoint, reason: str) -> None:
        hint = "configure the same secret on both, or on neither"
        super().__init__(endpoint, reason, hint=hint)


class ReplicaRefused(ReplicaLost):
    """A Flowstone replica cannot execute a request, and has sent the reason."""


@dataclass(frozen=True)
class ReplicaAddress:
    """The address of a replica, and the options of connections to it."""

    endpoint: Endpoint
    tls: Tls | None = None
    options: SocketOptions = SocketOptions()  # noqa: RUF009

    @property
    def encryption(self) -> Tls | None:
        return self.tls or (Tls() if self.endpoint.is_encrypted else None)


Answer = Message | Frame


class _Parser(Protocol):
    def feed(self, data: bytes) -> None: ...

    def next_message(self) -> Answer | None: ...


class Wire:
    """One connection, and the callbacks that wait for its answers."""

    def __init__(self, stream: Stream, parser: _Parser, on_lost: Callable[[str], None]) -> None:
        self.stream = stream
        self.expected: deque[Callable[[Answer], None]] = deque()
        self._parser = parser
        self._on_lost = on_lost
        self._closing: asyncio.Task[None] | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def ask(self, data: bytes, then: Callable[[Answer], None]) -> None:
        """Send `data`, and call `then` with the answer."""
        self.expected.append(then)
        self.stream.write(data)

    async def answer(self, data: bytes, seconds: float) -> Answer:
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.ask(data, lambda answer: None if waiting.done() else waiting.set_result(answer))
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except TimeoutError:
            reason = f"no answer within {seconds:g} s"
            self._on_lost(reason)
            raise

    async def _read(self) -> None:
        try:
            while data := await self.stream.read(READ_SIZE):
                self._received(data)
            self._on_lost("connection closed by the replica")
        except OSError as error:
            self._on_lost(f"connection failed: {error.strerror or error}")
        except BadMessage as error:
            self._on_lost(f"invalid message: {error.message}")

    def _received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (message := self._parser.next_message()) is not None:
            if not self.expected:
                raise BadMessage(f"unexpected {type(message).__name__}: no request is pending")
            self.expected.popleft()(message)

    async def close(self) -> None:
        """Close the connection, even if the caller is cancelled, and drop pending answers. May be called twice."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._reading.cancel()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.stream.close()
        with suppress(asyncio.CancelledError):
            await self._reading


class ChannelConversation:
    """A log channel at the replica. Sessions are sent and acknowledged in order."""

    def __init__(self, conversation: Conversation, channel_id: int) -> None:
        self.channel_id = channel_id
        self.unacknowledged = 0
        """Bytes of sessions that are queued or sent."""
        self._conversation = conversation
        self._waiting: deque[tuple[EndedSession, Callable[[], None]]] = deque()
        self._wire: Wire | None = None
        self._sending: asyncio.Task[None] | None = None
        self.opened: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        conversation = self._conversation
        try:
            async with conversation.opening:
                wire = await conversation.connect(MessageParser(size_max=ANSWER_SIZE_MAX))
                data = messages.encode(LogChannelCreate(self.channel_id, conversation.token))
                answer = await conversation.asked(wire, data, ANSWER_SECONDS)
            if not isinstance(answer, CommonAck):
                conversation.refused("LOG_CHANNEL_CREATE", answer)
                return
            self._wire = wire
        except (OSError, FlowstoneError) as error:
            conversation.end(_reason(error))
            return
        if self._waiting:
            self._send_on()

    def send(self, session: EndedSession, then: Callable[[], None]) -> None:
        """Queue a session; `then` is called when the replica has acknowledged it as durable."""
        if self._conversation.lost.done():
            return
        self.unacknowledged += session.held
        if self.unacknowledged > UNACKNOWLEDGED_MAX:
            self._conversation.end(f"more than {UNACKNOWLEDGED_MAX >> 20} MiB unacknowledged")
        elif self._wire is not None and self._sending is None and session.kept is not None:
            self._wire.ask(session.kept, partial(self._answered, session, then))
        else:
            self._waiting.append((session, then))
            if self._wire is not None:
                self._send_on()

    def _send_on(self) -> None:
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send_waiting())

    async def _send_waiting(self) -> None:
        """Send queued sessions piece by piece. A worker reads pieces from files, no faster than the replica accepts
        them."""
        wire, outside = self._wire, self._conversation.outside
        assert wire is not None
        try:
            while self._waiting:
                session, then = self._waiting.popleft()
                wire.expected.append(partial(self._answered, session, then))
                pieces = session.pieces()
                if session.kept is not None:
                    wire.stream.write(session.kept)
                    await wire.stream.drain()
                    continue
                while (piece := await by_worker(outside, next, pieces, None)) is not None:
                    wire.stream.write(piece)
                    await wire.stream.drain()
        except (OSError, FlowstoneError) as error:
            self._conversation.end(_reason(error))
        finally:
            self._sending = None

    def _answered(self, session: EndedSession, then: Callable[[], None], answer: Answer) -> None:
        if not isinstance(answer, CommonAck):
            self._conversation.refused("session end", answer)
            return
        self.unacknowledged -= session.held
        session.acknowledged.append(self._conversation)
        then()

    async def close(self) -> None:
        for task in (self.opened, self._sending):
            if task is not None and not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._wire is not None:
            await self._wire.close()


class Conversation:
    """One connection to a replica. It starts with `begin`, or with the log channels first, as in the original. It ends
    when `lost` is set."""

    def __init__(self, outside: Outside, peer: ReplicaAddress) -> None:
        self.outside = outside
        self.peer = peer
        self.token = b""
        """The secret that opens a log channel."""
        self.lost: asyncio.Future[ReplicaLost] = asyncio.get_running_loop().create_future()
        self.opening = asyncio.Semaphore(OPENING_MAX)
        """Held while a log channel is being opened."""
        self._control: Wire | None = None
        self._parser = ControlParser()
        self._wires: list[Wire] = []
        self._channels: dict[int, ChannelConversation] = {}

    # --- end ---

    def end(self, reason: str, *, is_final: bool = False) -> None:
        """End the conversation. If there are several reasons, the first counts."""
        self.end_by(ReplicaLost(self.peer.endpoint, reason, is_final=is_final))

    def end_by(self, error: ReplicaLost) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    def refused(self, what: str, answer: Answer) -> None:
        """End the conversation because of an answer other than the expected acknowledgement."""
        endpoint = self.peer.endpoint
        if isinstance(answer, Error) and answer.code == WireExtensionError.AUTHENTICATION_FAILED:
            self.end_by(AuthenticationFailed(endpoint, _said(answer)))
        elif isinstance(answer, Error) and answer.code == WireExtensionError.REFUSED:
            self.end_by(ReplicaRefused(endpoint, f"{what} rejected: {_said(answer)}"))
        elif isinstance(answer, Error):
            self.end(f"{what} rejected: {_said(answer)}")
        else:
            self.end(f"unexpected answer to {what}: {type(answer).__name__}")

    async def close(self) -> None:
        """Close the control channel first, then the others, without a message, as the original does."""
        self.end("connection closed by the master")
        for channel in self._channels.values():
            if not channel.opened.done():
                channel.opened.cancel()
        closing: list[Awaitable[None]] = [wire.close() for wire in self._wires if wire is self._control]
        closing += [channel.close() for channel in self._channels.values()]
        closing += [wire.close() for wire in self._wires if wire is not self._control]
        await asyncio.gather(*closing)

    # --- opening ---

    async def connect(self, parser: _Parser) -> Wire:
        """Open a new connection to the replica."""
        endpoint = self.peer.endpoint
        stream = await self.outside.network.connect(
            endpoint.host, endpoint.port, timeout=CONNECT_SECONDS, tls=self.peer.encryption, options=self.peer.options
        )
        wire = Wire(stream, parser, self.end)
        self._wires.append(wire)
        return wire

    async def begin(self) -> bytes:
        """Open the control channel, and return the session secret of the replica. Raise ReplicaLost on rejection."""
        try:
            self._control = await self.connect(self._parser)
        except FlowstoneError as error:  # a broken TLS configuration does not repair itself
            raise ReplicaLost(self.peer.endpoint, error.message, hint=error.hint, is_final=True) from error
        except OSError as error:
            raise ReplicaLost(self.peer.endpoint, _reason(error)) from error
        answer = await self.asked(self._control, messages.encode(SessionBegin()), ANSWER_SECONDS)
        if not isinstance(answer, SessionBeginAck):
            raise self._refusal("SESSION_BEGIN", answer)
        return answer.session_secret

    async def exchange(self, frame: Frame) -> Answer:
        """Send an extension frame, and return the answer. Raise ReplicaLost if it is an ERROR."""
        assert self._control is not None
        self._parser.extended = True
        seconds = PREPARE_SECONDS if isinstance(frame, extensions.Prepare) else ANSWER_SECONDS
        name = type(frame).__name__.upper()
        answer = await self.asked(self._control, extensions.encode(frame), seconds)
        if isinstance(answer, Error):
            raise self._refusal(name, answer)
        return answer

    async def asked(self, wire: Wire, data: bytes, seconds: float) -> Answer:
        """Send `data`, and return the answer. Raise ReplicaLost as soon as the conversation ends."""
        asking = asyncio.get_running_loop().create_task(wire.answer(data, seconds))
        self.lost.add_done_callback(lambda _: asking.cancel())
        try:
            return await asking
        except (asyncio.CancelledError, TimeoutError):
            if not self.lost.done():
                asking.cancel()
                raise
            raise self.lost.result() from None

    def _refusal(self, what: str, answer: Answer) -> ReplicaLost:
        self.refused(what, answer)
        return self.lost.result()

    # --- running ---

    def channel(self, channel_id: int) -> ChannelConversation:
        """Return the log channel with this id; the first call starts to open it."""
        if channel_id not in self._channels:
            self._channels[channel_id] = ChannelConversation(self, channel_id)
        return self._channels[channel_id]

    async def close_channel(self, channel_id: int) -> None:
        """Close a log channel whose sessions are all acknowledged, if it was ever opened."""
        if (channel := self._channels.pop(channel_id, None)) is not None:
            await channel.close()

    def group_commit(self, epoch: int, then: Callable[[], None], refused: Callable[[Answer], None]) -> None:
        """Send GROUP_COMMIT. Call `then` when the replica has recorded the epoch, `refused` on any other answer."""
        assert self._control is not None
        data = messages.encode(GroupCommit(epoch))
        self._control.ask(data, lambda answer: then() if isinstance(answer, CommonAck) else refused(answer))

    async def close_control(self) -> None:
        """Close the control channel only, as the original does after a rejected group commit; log channels stay
        open."""
        if self._control is not None:
            control, self._control = self._control, None
            self._wires.remove(control)
            await control.close()


def _said(error: Error) -> str:
    return f"error {error.code}, {error.message[:200]!r}"


def _reason(error: Exception) -> str:
    if isinstance(error, FlowstoneError):
        return error.message
    return f"{getattr(error, 'strerror', None) or error}" or type(error).__name__
