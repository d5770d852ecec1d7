"""One life of a master's conversation with a replica: a control channel, and a connection for each log channel.

What is asked is answered in order, connection by connection. The first thing that goes wrong on any of them, be it an
ERROR, an end or an answer to nothing, ends all of them: `lost` says what it was. Relies on the Network of its Outside.
Never decides what to ask, and never comes back: that is for `replica_link.py`.
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
from flowstone.limestone import extensions, messages
from flowstone.limestone.ended_session import EndedSession
from flowstone.limestone.endpoint import Endpoint
from flowstone.limestone.errors import BadMessage, LimestoneError
from flowstone.limestone.extensions import ControlParser, ExtensionError, Frame
from flowstone.limestone.messages import (
    Ack,
    Error,
    GroupCommit,
    LogChannelCreate,
    Message,
    MessageParser,
    SessionBegin,
    SessionBeginAck,
)
from flowstone.outside import Outside, SocketOptions, Stream, Tls
from flowstone.outside.worker import by_worker

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 20.0
"""For an answer to what opens a conversation or a channel."""

PREPARE_SECONDS: Final = 600.0
"""A replica reads its directory before it says that it is prepared."""

OPENING_MAX: Final = 64
"""Maximum number of log channels that are opened at the same time. A replica limits the connections that have not
opened a channel yet (`UNOPENED_MAX` in `replica.py`), and its listen queue is finite, so a thousand channels must take
turns."""

CLOSE_SECONDS: Final = 1.0
READ_SIZE: Final = 1 << 16
ANSWER_SIZE_MAX: Final = 64 << 10

UNACKNOWLEDGED_MAX: Final = 64 << 20
"""Bytes of one log channel that wait for a replica which others do not wait for; beyond it, it is sent them from the
log files, when it comes back."""


class ReplicaLost(LimestoneError):
    """A replica is out of reach, or has refused. `is_final`: to try again would not help."""

    def __init__(self, endpoint: Endpoint, reason: str, *, hint: str | None = None, is_final: bool = False) -> None:
        super().__init__(f"replica {endpoint} is lost: {reason}", hint=hint)
        self.reason = reason
        self.is_final = is_final


class AuthenticationFailed(ReplicaLost):
    """Master and replica do not have the same secret, or only one of them has one."""

    def __init__(self, endpoint: Endpoint, reason: str) -> None:
        hint = "give both the same secret, or neither of them one"
        super().__init__(endpoint, reason, hint=hint)


class Refused(ReplicaLost):
    """A replica of ours cannot do what it was asked, and says why."""


@dataclass(frozen=True)
class Peer:
    """Where a replica is, and how it is spoken to."""

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
    """One connection: what is written, and who waits for an answer to it."""

    def __init__(self, stream: Stream, parser: _Parser, on_lost: Callable[[str], None]) -> None:
        self.stream = stream
        self.expected: deque[Callable[[Answer], None]] = deque()
        self._parser = parser
        self._on_lost = on_lost
        self._closing: asyncio.Task[None] | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def ask(self, data: bytes, then: Callable[[Answer], None]) -> None:
        """Send, and do something with the answer, which must come."""
        self.expected.append(then)
        self.stream.write(data)

    async def answer(self, data: bytes, seconds: float) -> Answer:
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.ask(data, lambda answer: None if waiting.done() else waiting.set_result(answer))
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except TimeoutError:
            reason = f"it gave no answer within {seconds:g} s"
            self._on_lost(reason)
            raise

    async def _read(self) -> None:
        try:
            while data := await self.stream.read(READ_SIZE):
                self._received(data)
            self._on_lost("it has closed the connection")
        except OSError as error:
            self._on_lost(f"the connection broke: {error.strerror or error}")
        except BadMessage as error:
            self._on_lost(f"it sent {error.message}")

    def _received(self, data: bytes) -> None:
        self._parser.feed(data)
        while (message := self._parser.next_message()) is not None:
            if not self.expected:
                raise BadMessage(f"{type(message).__name__}, which answers nothing")
            self.expected.popleft()(message)

    async def close(self) -> None:
        """Called by who does not wait for an answer any more; twice is harmless. It is closed even if nobody waits."""
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


class LogChannel:
    """A log channel at the replica: sessions in order, each acknowledged in its turn."""

    def __init__(self, conversation: Conversation, channel_id: int) -> None:
        self.channel_id = channel_id
        self.unacknowledged = 0
        """Bytes of sessions that wait, or are on their way."""
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
            if not isinstance(answer, Ack):
                conversation.refused("LOG_CHANNEL_CREATE", answer)
                return
            self._wire = wire
        except (OSError, FlowstoneError) as error:
            conversation.end(_reason(error))
            return
        if self._waiting:
            self._send_on()

    def send(self, session: EndedSession, then: Callable[[], None]) -> None:
        """Send a session when its turn comes; `then` is called when the replica has it on disk."""
        if self._conversation.lost.done():
            return
        self.unacknowledged += session.held
        if self.unacknowledged > UNACKNOWLEDGED_MAX:
            self._conversation.end(f"it is more than {UNACKNOWLEDGED_MAX >> 20} MiB behind")
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
        """Piece by piece: what a file has is read by a worker, and no more than the replica takes."""
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
        if not isinstance(answer, Ack):
            self._conversation.refused("the end of a session", answer)
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
    """Begins with `begin`, or in the original's order with its log channels; over when `lost` is there."""

    def __init__(self, outside: Outside, peer: Peer) -> None:
        self.outside = outside
        self.peer = peer
        self.token = b""
        """The secret of a log channel's opening."""
        self.lost: asyncio.Future[ReplicaLost] = asyncio.get_running_loop().create_future()
        self.opening = asyncio.Semaphore(OPENING_MAX)
        """Held while a log channel is being opened."""
        self._control: Wire | None = None
        self._parser = ControlParser()
        self._wires: list[Wire] = []
        self._channels: dict[int, LogChannel] = {}

    # --- its end ---

    def end(self, reason: str, *, is_final: bool = False) -> None:
        """It is over; of several reasons the first counts."""
        self.end_by(ReplicaLost(self.peer.endpoint, reason, is_final=is_final))

    def end_by(self, error: ReplicaLost) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    def refused(self, what: str, answer: Answer) -> None:
        """The replica has not acknowledged what it had to."""
        endpoint = self.peer.endpoint
        if isinstance(answer, Error) and answer.code == ExtensionError.AUTHENTICATION_FAILED:
            self.end_by(AuthenticationFailed(endpoint, _said(answer)))
        elif isinstance(answer, Error) and answer.code == ExtensionError.REFUSED:
            self.end_by(Refused(endpoint, f"to {what} it said {_said(answer)}"))
        elif isinstance(answer, Error):
            self.end(f"to {what} it said {_said(answer)}")
        else:
            self.end(f"to {what} it said {type(answer).__name__}")

    async def close(self) -> None:
        """Close the control channel first, then the others, without a word, as the original does."""
        self.end("we have closed the connection")
        for channel in self._channels.values():
            if not channel.opened.done():
                channel.opened.cancel()
        closing: list[Awaitable[None]] = [wire.close() for wire in self._wires if wire is self._control]
        closing += [channel.close() for channel in self._channels.values()]
        closing += [wire.close() for wire in self._wires if wire is not self._control]
        await asyncio.gather(*closing)

    # --- opening ---

    async def connect(self, parser: _Parser) -> Wire:
        """A new connection to the replica."""
        endpoint = self.peer.endpoint
        stream = await self.outside.network.connect(
            endpoint.host, endpoint.port, timeout=CONNECT_SECONDS, tls=self.peer.encryption, options=self.peer.options
        )
        wire = Wire(stream, parser, self.end)
        self._wires.append(wire)
        return wire

    async def begin(self) -> bytes:
        """Open the control channel: the session secret of the replica. ReplicaLost if it does not want us."""
        try:
            self._control = await self.connect(self._parser)
        except FlowstoneError as error:  # TLS that we cannot set up will not be set up by itself
            raise ReplicaLost(self.peer.endpoint, error.message, hint=error.hint, is_final=True) from error
        except OSError as error:
            raise ReplicaLost(self.peer.endpoint, _reason(error)) from error
        answer = await self.asked(self._control, messages.encode(SessionBegin()), ANSWER_SECONDS)
        if not isinstance(answer, SessionBeginAck):
            raise self._refusal("SESSION_BEGIN", answer)
        return answer.session_secret

    async def exchange(self, frame: Frame) -> Answer:
        """Say something that only a replica of ours understands; it must not answer by an ERROR."""
        assert self._control is not None
        self._parser.extended = True
        seconds = PREPARE_SECONDS if isinstance(frame, extensions.Prepare) else ANSWER_SECONDS
        name = type(frame).__name__.upper()
        answer = await self.asked(self._control, extensions.encode(frame), seconds)
        if isinstance(answer, Error):
            raise self._refusal(name, answer)
        return answer

    async def asked(self, wire: Wire, data: bytes, seconds: float) -> Answer:
        """The answer, or ReplicaLost as soon as there will be none."""
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

    def channel(self, channel_id: int) -> LogChannel:
        """The log channel of this id, which begins to be opened when it is first asked for."""
        if channel_id not in self._channels:
            self._channels[channel_id] = LogChannel(self, channel_id)
        return self._channels[channel_id]

    async def close_channel(self, channel_id: int) -> None:
        """A log channel whose sessions are all acknowledged, if it was ever opened."""
        if (channel := self._channels.pop(channel_id, None)) is not None:
            await channel.close()

    def group_commit(self, epoch: int, then: Callable[[], None], refused: Callable[[Answer], None]) -> None:
        """`then` is called when the replica has recorded the epoch, `refused` with any other answer."""
        assert self._control is not None
        data = messages.encode(GroupCommit(epoch))
        self._control.ask(data, lambda answer: then() if isinstance(answer, Ack) else refused(answer))

    async def close_control(self) -> None:
        """As the original after a group commit that was refused: the log channels go on."""
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
