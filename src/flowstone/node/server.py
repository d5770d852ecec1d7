"""The IPROTO server: accepts clients, greets them, collects what they send for the next turn, and keeps them in bounds.

What requests mean is the sessions' part, executing them in batches that of `turn.py`. Here nothing grows without end:
connections, bytes of a packet, bytes read ahead, requests that take time, output that nobody reads. Who sends what is
no packet is told so and loses this connection, nothing else.
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
from flowstone.iproto.packet import frame
from flowstone.iproto.replies import encode_error
from flowstone.iproto.requests import Request, decode_request
from flowstone.node.auth_deadline import AuthDeadline
from flowstone.node.instance import Instance
from flowstone.node.limits import Limits, limits_of
from flowstone.node.login_attempts import LoginAttempts
from flowstone.node.procedures_box import built_in
from flowstone.node.relay import Relays
from flowstone.node.session import Session, no_replication
from flowstone.node.streams import OpenTransactions
from flowstone.node.turn import Turns
from flowstone.node.turn_batch import Reply
from flowstone.node.watchers import Watchers, sources_of
from flowstone.outside import Client, Listener, Receiver, Tls

LOG = logging.getLogger("flowstone.node")

SALT_SIZE: Final = 32
SWEEP_SECONDS: Final = 0.25
"""How often slow clients and old transactions are looked for."""

READ_AHEAD_MAX: Final = 1024 * 1024
"""Bytes that wait for a turn before a connection is no longer read; a packet that is larger is read to its end."""

_NO_REPLY: Final = Reply(b"")
_LENGTH_BYTES: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_MAY_TAKE_LONG: Final = (
    RequestType.JOIN,
    RequestType.SUBSCRIBE,
    RequestType.FETCH_SNAPSHOT,
    RequestType.REGISTER,
    RequestType.AUTH,
)
_OF_EVERY_GUEST: Final = int(Privilege.SESSION | Privilege.USAGE)


class Connection:
    """One client: what it sent, what it may still send, and its session."""

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
        """Whether requests have to wait because of this client itself."""
        self._wanted = 1
        """Bytes that must be there before a turn can do something."""
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

    # --- what the network calls ---

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
        # Not at once: what began in this turn has yet to run its first step, and would leave its parts unawaited.
        asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        """Ends what takes time, as nobody waits for it. What is on its way to the log gets there."""
        for task in self._tasks:
            task.cancel()

    # --- what a turn calls ---

    def before_turn(self) -> None:
        """Strangers need no large packets."""
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
            # Executed later, in their order: their replies would pile up now.
            self._deferred.append(packet)
            return _NO_REPLY
        request = decode_request(packet, is_2_6=self._server.is_2_6)
        answer = self.session.handle(request)
        if isinstance(answer, Reply):
            return answer
        if request.type == RequestType.AUTH:
            self.hold()  # further requests belong to the new user: they wait for the login
        return self._timed(request, answer)

    async def _timed(self, request: Request, answer: Coroutine[Any, Any, Reply]) -> Reply:
        """Log a request that takes too long, unless it is a replica's or a delayed login."""
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
        """Whom a line of the log is about."""
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
            self._continue()  # the log may have taken longer than the turn

    def refuse(self, reason: str) -> None:
        error = errors.InvalidMsgpack(f"Invalid MsgPack - {reason}")
        server = self._server
        self._refusal = encode_error(0, server.instance.box.schema_version, error, not server.is_2_6)
        self.unread.clear()

    # --- what those who serve a replica call: `node.relay_stream.Link` ---

    def _replicate(self, request: Request) -> Coroutine[Any, Any, None]:
        relays = self._server.relays
        if relays is None:
            return no_replication(request)
        return self._serve_replica(relays.serve(request, self), request.type == RequestType.SUBSCRIBE)

    async def _serve_replica(self, work: Coroutine[Any, Any, None], ends_connection: bool) -> None:
        try:
            await work
        except Exception:
            if ends_connection:  # as real servers do, when the error is sent
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

    # --- the rest ---

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
        """Puts back what could not be executed, closes who was refused, and goes on reading who may be read."""
        if self._refusal is not None and not self._is_closed:
            what = "%s sent something that is no packet, and is disconnected"
            LOG.info(what, self.client.peer, extra=self._fields)
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
        """Goes on if nothing holds it back any more."""
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
        """Ends what has taken too long."""
        limits = self._server.limits
        if self._relay is not None:
            return  # it has its own idea of what is too long
        if self._congested_since is not None and now - self._congested_since > limits.slow_reader_seconds:
            what = "%s does not read what it asked for, and is disconnected"
            LOG.warning(what, self.client.peer, extra=self._fields)
            self.client.abort()
        elif deadline.has_passed(self.session, self._opened):
            LOG.info("authentication timeout: disconnecting %s", self.client.peer, extra=self._fields)
            self.client.abort()
        else:
            self.session.expire(now)


def _size_wanted(unread: bytearray, size_max: int) -> int:
    """Bytes that must be there before a turn can do something: a whole packet, or proof that it is none."""
    if not unread:
        return 1
    head = unread[0]
    width = 0 if head < 0x80 else _LENGTH_BYTES.get(head)
    if width is None:
        return 0
    if len(unread) <= width:
        return width + 1
    size = head if width == 0 else int.from_bytes(unread[1 : 1 + width], "big")
    return 1 + width + size if 0 < size <= size_max else 0


class Server:
    """Serves an instance. `listen` opens it, `close` ends it with all its connections."""

    def __init__(self, instance: Instance, *, limits: Limits | None = None) -> None:
        self.instance = instance
        self.limits = limits or limits_of(instance)
        self.watchers = Watchers(sources_of(instance))
        for changed in (instance.elections.on_change, instance.queue.on_change):
            changed.append(self.watchers.check)  # such news come without a turn
        self.procedures = built_in()
        self.logins = LoginAttempts(instance)
        self.is_2_6 = instance.box.dialect is Dialect.V2_6
        self.relays: Relays | None = None
        """Whoever serves replicas; there is nobody before there is data, and where there is no log."""
        self.open_transactions = OpenTransactions(
            self.limits.transactions_max, self.limits.transactions_max_before_auth, self.trusts_guests
        )
        self._turns = Turns(
            instance.box,
            instance.journal,
            instance.commits,
            instance.outside.clock,
            instance.counters,
            wide=not self.is_2_6,
        )
        self._connections: dict[Connection, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ready: dict[Connection, None] = {}
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
        """The port that it listens on, as the kernel chose it."""
        return self._listener.port if self._listener is not None else None

    async def listen(self, host: str, port: int | None, *, tls: Tls | None = None) -> None:
        """Accepts clients there, and no longer where it did before; connections stay. OSError if it cannot."""
        listener = await self.instance.outside.network.listen(host, port, self._accept, tls=tls)
        await self.stop_listening()
        self._listener = listener
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def reconfigure(self) -> None:
        """Takes the options as they are now."""
        self.limits = limits_of(self.instance)

    async def stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()

    async def close(self) -> None:
        """Ends everything: no client is answered any more."""
        await self.stop_listening()
        tasks = [*self._tasks, *([self._sweeper] if self._sweeper is not None else [])]
        self._sweeper = None
        for task in tasks:
            asyncio.get_running_loop().call_soon(task.cancel)  # behind its first step, as in `Connection.closed`
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.client.close()
            connection.closed()

    def trusts_guests(self) -> bool:
        """Whether somebody has given guests more than every guest has: then they are clients like others."""
        granted = self.instance.box.access.granted(GUEST)
        return bool(granted.pop(UNIVERSE, 0) & ~_OF_EVERY_GUEST) or any(key != ("role", PUBLIC) for key in granted)

    # --- connections ---

    def _accept(self, client: Client) -> Connection | _Turned:
        if len(self._connections) >= self.limits.connections_max:
            if not self._is_full:  # said once, however many come
                LOG.warning("%s and whoever follows is turned away: connections_max are open", client.peer)
            self._is_full = True
            client.abort()
            return _Turned()
        self._is_full = False
        counters = self.instance.counters
        counters.connections_total += 1
        connection = Connection(self, client, counters.connections_total)
        self._connections[connection] = None
        counters.connections = len(self._connections)
        return connection

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self.instance.counters.connections = len(self._connections)
        self._ready.pop(connection, None)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something that takes time."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("a request failed", exc_info=task.exception())

    # --- turns ---

    def schedule(self, connection: Connection) -> None:
        """Has whole packets for the next turn."""
        self._ready[connection] = None
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        journal, limits = self.instance.journal, self.limits
        if self._unwritten > limits.wal_queue_max_size and not journal.is_idle:
            # A disk that is slower than the clients holds them back.
            self._is_scheduled = True
            self.start(self._after_log())
            return
        connections, self._ready = list(self._ready), {}
        size, begun = 0, self.instance.outside.clock.monotonic()
        for connection in connections:
            connection.before_turn()
            size += len(connection.unread)
        try:
            self._turns.run(connections)
        except Exception:
            LOG.exception("a turn failed")
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
            LOG.warning("too long turn: %d connections, %d bytes: %.3f sec", len(connections), size, seconds)

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


class _Turned:
    """Who was turned away says nothing that anybody hears."""

    def received(self, data: bytes) -> None: ...

    def congested(self) -> None: ...

    def drained(self) -> None: ...

    def closed(self) -> None: ...
