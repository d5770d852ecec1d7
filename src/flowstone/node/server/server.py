"""The IPROTO server: accepts and greets clients, collects their packets for the next turn, and enforces limits.

`executor.py` executes the packets in batches, and sessions interpret packets that are not plain statements. The server
limits the number of connections, packet sizes, bytes read ahead, pending requests and unread output. A client that
sends an invalid packet gets an error and is disconnected; other clients are not affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from flowstone.box.access import GUEST, PUBLIC, UNIVERSE, Privilege
from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType, type_name
from flowstone.iproto.greeting import Greeting, encode_greeting
from flowstone.iproto.packet import PacketError, frame, span
from flowstone.iproto.replies import encode_error
from flowstone.iproto.requests import Request, decode_request
from flowstone.node.downstream.relays import Relays
from flowstone.node.instance import Instance
from flowstone.node.server.auth_deadline import AuthDeadline
from flowstone.node.server.executor import Executor
from flowstone.node.server.limits import ServerLimits, limits_of
from flowstone.node.server.login_attempts import LoginAttempts
from flowstone.node.server.procedures_box import built_in
from flowstone.node.server.request_batch import Reply
from flowstone.node.server.session import Session, no_replication
from flowstone.node.server.streams import OpenTransactions
from flowstone.node.server.watchers import Watchers, sources_of
from flowstone.outside import Client, Listener, Receiver, Tls

LOG = logging.getLogger("flowstone.node")

SALT_SIZE: Final = 32
SWEEP_SECONDS: Final = 0.25
"""Interval of checks for slow clients and expired transactions."""

READ_AHEAD_MAX: Final = 1024 * 1024
"""Unprocessed bytes above which reading from a connection pauses. A larger packet is still read to its end."""

_NO_REPLY: Final = Reply(b"")
_MAY_TAKE_LONG: Final = (
    RequestType.JOIN,
    RequestType.SUBSCRIBE,
    RequestType.FETCH_SNAPSHOT,
    RequestType.REGISTER,
    RequestType.AUTH,
)
_OF_EVERY_GUEST: Final = int(Privilege.SESSION | Privilege.USAGE)


class ClientConnection:
    """The connection of one client: unread bytes, flow control, and its session."""

    def __init__(self, server: Server, client: Client, session_id: int) -> None:
        instance = server.instance
        self.client = client
        self.unread = bytearray()
        self.packet_size_max = server.limits.packet_size_max_before_auth
        self.in_flight = 0
        self._server = server
        self._counters = instance.counters
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_closed = False
        self._is_paused = False
        self._is_held = False
        """True while requests wait because this client has too many pending requests or unread replies."""
        self._wanted = 1
        """Bytes that must be in `unread` before a turn can make progress."""
        self._unsent = 0
        self._deferred: list[bytes] = []
        self._refusal: bytes | None = None
        self._relay: Receiver | None = None
        self._is_serving_replica = False
        self._drained: asyncio.Future[None] | None = None
        self._opened = instance.outside.clock.monotonic()
        self._congested_since: float | None = None
        salt = instance.outside.random.bytes(SALT_SIZE)
        self.session = Session(
            instance,
            server.watchers,
            server.procedures,
            self._answer,
            id=session_id,
            salt=salt,
            peer=client.peer,
            open_transactions=server.open_transactions,
            logins=server.logins,
            replicate=self._replicate,
        )
        client.write(encode_greeting(Greeting(instance.box.dialect.greeting_version, instance.uuid, salt)))

    # --- called by the network ---

    def received(self, data: bytes) -> None:
        if self._relay is not None:
            self._relay.received(data)
            return
        self._counters.received_bytes += len(data)
        self.unread += data
        size = len(self.unread)
        if size >= self._wanted and not self._is_held:
            self._server.schedule(self)
        if size > self._wanted and size > READ_AHEAD_MAX:
            self._pause()

    def congested(self) -> None:
        if self._relay is not None:
            self._relay.congested()
            return
        self._congested_since = self._server.instance.outside.clock.monotonic()
        self._is_held = True
        self._pause()

    def drained(self) -> None:
        if self._relay is not None:
            self._relay.drained()
            return
        self._congested_since = None
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._continue()

    def closed(self) -> None:
        self._is_closed = True
        self.session.close()
        self._server.forget(self)
        if self._relay is not None:
            self._relay.closed()
        # Cancel later: a task cancelled before its first step would leave the coroutines in it unawaited.
        asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        """Cancel pending requests: no client waits for them. Rows that were submitted to the log are still written."""
        for task in self._tasks:
            task.cancel()

    # --- called by turns ---

    def before_turn(self) -> None:
        """Set the packet size limit, which is smaller for clients that have not authenticated."""
        limits = self._server.limits
        self.packet_size_max = limits.packet_size_max
        size = max(len(self.unread), self._wanted)
        if size > limits.packet_size_max_before_auth and not self._is_known():
            self.packet_size_max = limits.packet_size_max_before_auth

    @property
    def user(self) -> int:
        return self.session.user

    @property
    def is_waiting(self) -> bool:
        return self._is_held or self._is_serving_replica or bool(self._deferred)

    def handle(self, packet: bytes) -> Reply | Coroutine[Any, Any, Reply]:
        if self.is_waiting:
            # Execute them later, in order: if executed now, their replies would accumulate.
            self._deferred.append(packet)
            return _NO_REPLY
        request = decode_request(packet, is_2_6=self._server.is_2_6)
        answer = self.session.handle(request)
        if isinstance(answer, Reply):
            return answer
        if request.type == RequestType.AUTH:
            self.hold()  # further requests wait for the login: they belong to the new user
        return self._timed(request, answer)

    async def _timed(self, request: Request, answer: Coroutine[Any, Any, Reply]) -> Reply:
        """Await the reply, and log a request that takes too long, unless it is a replication request or a login."""
        instance = self._server.instance
        begun = instance.outside.clock.monotonic()
        try:
            return await answer
        finally:
            if request.type == RequestType.AUTH:
                self.release()
            seconds = instance.outside.clock.monotonic() - begun
            if seconds > instance.configuration.too_long_threshold and request.type not in _MAY_TAKE_LONG:
                more = self.session.fields_of(request) | {"seconds": seconds}
                LOG.warning("too long %s: %.3f sec", type_name(request.type), seconds, extra=more)

    @property
    def _fields(self) -> dict[str, Any]:
        """Fields of log records about this client."""
        return {"peer": self.client.peer, "connection": self.session.id}

    def replying(self, size: int) -> None:
        self._unsent += size
        if self._unsent > self._server.limits.output_max:
            self._is_held = True

    def postponed(self, count: int) -> None:
        self.in_flight += count
        self._counters.requests_in_progress += count
        if self.in_flight >= self._server.limits.net_msg_max:
            self._is_held = True

    def send_late(self, packets: Sequence[bytes], count: int) -> None:
        self.in_flight -= count
        self._counters.requests_in_progress -= count
        self._answer(packets[0] if len(packets) == 1 else b"".join(packets))
        if self._is_held:
            self._continue()

    def start(self, reply: Coroutine[Any, Any, Reply]) -> None:
        self.postponed(1)
        task = self._server.start(self._run(reply))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def send(self, packets: Sequence[bytes]) -> None:
        self._unsent = 0
        self._answer(packets[0] if len(packets) == 1 else b"".join(packets))
        if self._is_held:
            self._continue()  # replies may be sent after the turn, when the log is written

    def refuse(self, reason: str) -> None:
        error = errors.InvalidMsgpack(f"Invalid MsgPack - {reason}")
        server = self._server
        self._refusal = encode_error(0, server.instance.box.schema_version, error, not server.is_2_6)
        self.unread.clear()

    # --- called by relays: `node.relay_stream.Link` ---

    def _replicate(self, request: Request) -> Coroutine[Any, Any, None]:
        relays = self._server.relays
        if relays is None:
            return no_replication(request)
        return self._serve_replica(relays.serve(request, self), request.type == RequestType.SUBSCRIBE)

    async def _serve_replica(self, work: Coroutine[Any, Any, None], ends_connection: bool) -> None:
        try:
            await work
        except Exception:
            if ends_connection:  # after the error was sent, as real servers do
                asyncio.get_running_loop().call_soon(self.close)
            raise

    @property
    def peer(self) -> str:
        return self.client.peer

    @property
    def is_busy(self) -> bool:
        return self.in_flight > 0 or self._unsent > 0

    def hold(self) -> None:
        self._is_serving_replica = True

    def release(self) -> None:
        if self._relay is None:
            self._is_serving_replica = False
            self._continue()

    def write(self, data: bytes) -> None:
        if not self._is_closed:
            self.client.write(data)

    async def flushed(self) -> None:
        if self._congested_since is None:
            await self._server.instance.outside.clock.sleep(0)
            return
        self._drained = asyncio.get_running_loop().create_future()
        await self._drained

    def hand_over(self, receiver: Receiver) -> bytes:
        self._relay = receiver
        unread = bytes(self.unread)
        self.unread.clear()
        if self._is_paused:
            self._is_paused = False
            self.client.resume_reading()
        if self._congested_since is not None:
            receiver.congested()
        return unread

    def close(self) -> None:
        if not self._is_closed:
            self.client.close()

    def abort(self) -> None:
        if not self._is_closed:
            self.client.abort()

    # --- flow control and replies ---

    def _is_known(self) -> bool:
        return self.session.is_authenticated or self._server.trusts_guests()

    async def _run(self, reply: Coroutine[Any, Any, Reply]) -> None:
        try:
            self._answer((await reply).packet)
        finally:
            self.in_flight -= 1
            self._counters.requests_in_progress -= 1
            self._server.watchers.check()
            self._continue()

    def _answer(self, data: bytes) -> None:
        if data and not self._is_closed:
            self._counters.sent_bytes += len(data)
            self.client.write(data)

    def after_turn(self) -> None:
        """Disconnect a client that sent an invalid packet; put back deferred packets; resume reading if possible."""
        if self._refusal is not None and not self._is_closed:
            LOG.info("invalid packet: disconnecting %s", self.client.peer, extra=self._fields)
            self.client.write(self._refusal)
            self.client.close()
            self.closed()
            return
        if self._deferred:
            self.unread[:0] = b"".join(map(frame, self._deferred))
            self._deferred = []
        if self.unread or self._is_held or self._is_paused:
            self._continue()
        else:
            self._wanted = 1

    def _continue(self) -> None:
        """Resume unless something still blocks it."""
        if self._is_closed or self._is_serving_replica:
            return
        limits = self._server.limits
        self._is_held = (
            self._congested_since is not None
            or self.in_flight >= limits.net_msg_max
            or self._unsent > limits.output_max
        )
        if self._is_held:
            self._pause()
            return
        self._wanted = _size_wanted(self.unread, limits.packet_size_max)
        is_too_large = self._wanted > limits.packet_size_max_before_auth and not self._is_known()
        if len(self.unread) >= self._wanted or is_too_large:
            self._server.schedule(self)
        elif self._is_paused:
            self._is_paused = False
            self.client.resume_reading()

    def _pause(self) -> None:
        if not self._is_paused and not self._is_closed:
            self._is_paused = True
            self.client.pause_reading()

    def sweep(self, now: float, deadline: AuthDeadline) -> None:
        """Disconnect a client that exceeds a timeout, and abort its expired transactions."""
        limits = self._server.limits
        if self._relay is not None:
            return  # relays have timeouts of their own
        if self._congested_since is not None and now - self._congested_since > limits.slow_reader_seconds:
            LOG.warning("client does not read its replies: disconnecting %s", self.client.peer, extra=self._fields)
            self.client.abort()
        elif deadline.has_passed(self.session, self._opened):
            LOG.info("authentication timeout: disconnecting %s", self.client.peer, extra=self._fields)
            self.client.abort()
        else:
            self.session.expire(now)


def _size_wanted(unread: bytearray, size_max: int) -> int:
    """Return the bytes needed before a turn can make progress: a whole packet, or 0 if the length is invalid."""
    if not unread:
        return 1
    try:
        return span(unread, 0, size_max)[1]
    except PacketError:
        return 0


class Server:
    """Serves the clients of an instance. `listen` opens a listener, `close` closes it and all connections."""

    def __init__(self, instance: Instance, *, limits: ServerLimits | None = None) -> None:
        self.instance = instance
        self.limits = limits or limits_of(instance)
        self.watchers = Watchers(sources_of(instance))
        for changed in (instance.elections.on_change, instance.queue.on_change):
            changed.append(self.watchers.check)  # these changes happen outside of turns
        self.procedures = built_in()
        self.logins = LoginAttempts(instance)
        self.is_2_6 = instance.box.dialect is Dialect.V2_6
        self.relays: Relays | None = None
        """Serves replicas; None until there is data, or without a log."""
        self.open_transactions = OpenTransactions(
            self.limits.transactions_max, self.limits.transactions_max_before_auth, self.trusts_guests
        )
        self._executor = Executor(
            instance.box,
            instance.journal,
            instance.commits,
            instance.outside.clock,
            instance.counters,
            wide=not self.is_2_6,
        )
        self._connections: dict[ClientConnection, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ready: dict[ClientConnection, None] = {}
        self._is_scheduled = False
        self._is_full = False
        self._unwritten = 0
        self._listener: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def port(self) -> int | None:
        """The port of the listener, as chosen by the kernel; None if there is no listener."""
        return self._listener.port if self._listener is not None else None

    async def listen(self, host: str, port: int | None, *, tls: Tls | None = None) -> None:
        """Listen on this address, then close the previous listener. Connections stay open. Raise OSError on failure."""
        listener = await self.instance.outside.network.listen(host, port, self._accept, tls=tls)
        await self.stop_listening()
        self._listener = listener
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def reconfigure(self) -> None:
        """Apply the current options."""
        self.limits = limits_of(self.instance)

    async def stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    async def close(self) -> None:
        """Stop listening, cancel pending requests, and close all connections."""
        await self.stop_listening()
        tasks = [*self._tasks, *([self._sweeper] if self._sweeper is not None else [])]
        self._sweeper = None
        for task in tasks:
            asyncio.get_running_loop().call_soon(task.cancel)  # after its first step, as in `ClientConnection.closed`
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.client.close()
            connection.closed()

    def trusts_guests(self) -> bool:
        """Return True if guest was granted more than its default rights: if so, the limits for unauthenticated clients
        do not apply."""
        granted = self.instance.box.access.granted(GUEST)
        return bool(granted.pop(UNIVERSE, 0) & ~_OF_EVERY_GUEST) or any(key != ("role", PUBLIC) for key in granted)

    # --- connections ---

    def _accept(self, client: Client) -> ClientConnection | _RejectedClient:
        if len(self._connections) >= self.limits.connections_max:
            if not self._is_full:  # logged once until a connection is accepted again
                LOG.warning("connection limit reached (%d); rejecting %s", self.limits.connections_max, client.peer)
            self._is_full = True
            client.abort()
            return _RejectedClient()
        self._is_full = False
        counters = self.instance.counters
        counters.connections_total += 1
        connection = ClientConnection(self, client, counters.connections_total)
        self._connections[connection] = None
        counters.connections = len(self._connections)
        return connection

    def forget(self, connection: ClientConnection) -> None:
        self._connections.pop(connection, None)
        self.instance.counters.connections = len(self._connections)
        self._ready.pop(connection, None)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("request failed", exc_info=task.exception())

    # --- turns ---

    def schedule(self, connection: ClientConnection) -> None:
        """Process the packets of `connection` in the next turn."""
        self._ready[connection] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        journal, limits = self.instance.journal, self.limits
        if self._unwritten > limits.wal_queue_max_size and not journal.is_idle:
            # The log is slower than the clients: they wait until it is written.
            self._is_scheduled = True
            self.start(self._after_log())
            return
        connections, self._ready = list(self._ready), {}
        size, begun = 0, self.instance.outside.clock.monotonic()
        for connection in connections:
            connection.before_turn()
            size += len(connection.unread)
        try:
            self._executor.execute(connections)
        except Exception:
            LOG.exception("turn failed")
            journal.flush()
            for connection in connections:
                connection.client.abort()
            return
        for connection in connections:
            connection.after_turn()
        self.watchers.check()
        self._unwritten = 0 if journal.is_idle else self._unwritten + size
        seconds = self.instance.outside.clock.monotonic() - begun
        if seconds > self.instance.configuration.too_long_threshold:
            LOG.warning("event loop turn took %.3f s (%d connections, %d bytes)", seconds, len(connections), size)

    async def _after_log(self) -> None:
        try:
            await self.instance.journal.drain()
        finally:
            self._unwritten = 0
            asyncio.get_running_loop().call_soon(self._turn)

    async def _sweep(self) -> None:
        clock = self.instance.outside.clock
        while True:
            await clock.sleep(SWEEP_SECONDS)
            now = clock.monotonic()
            deadline = AuthDeadline(self.limits, now, trusts_guests=self.trusts_guests())
            for connection in list(self._connections):
                connection.sweep(now, deadline)
            self.watchers.check(vclock_counts=True)


class _RejectedClient:
    """Discards input from a rejected connection."""

    def received(self, data: bytes) -> None: ...

    def congested(self) -> None: ...

    def drained(self) -> None: ...

    def closed(self) -> None: ...
