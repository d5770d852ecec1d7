"""A replica: takes what a master sends, has it on disk before it says so, and keeps whole epochs.

Serves one master after another, the original or ours, on the Outside that it is handed. Each connection has a task.
Whatever a peer sends, at worst that connection is closed, with the protocol's ERROR where there is one (reference:
acceptance and failure table): a peer that has not shown the shared secret, where there is one, makes it write nothing.

`compatible`: files and answers are the original's, byte for byte. Otherwise the markers in the log files carry the
epochs of the sessions, so that the directory can be recovered after a crash at any moment, and masters of ours are told
by the session secret that they may say who they are, resume and seed (`extensions.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Self

from flowstone.limestone import extensions
from flowstone.limestone import replica_events as events
from flowstone.limestone.endpoint import Endpoint
from flowstone.limestone.errors import BadMessage, LimestoneError
from flowstone.limestone.extensions import Action, ControlParser, ExtensionError, Frame, Hello, HelloAck, Prepare
from flowstone.limestone.messages import (
    ACK,
    MESSAGE_SIZE_MAX,
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    GroupCommit,
    LogChannelCreate,
    Message,
    RdmaInit,
    SessionBegin,
    SessionBeginAck,
    SessionFlags,
    encode,
)
from flowstone.limestone.names import CHANNELS_MAX
from flowstone.limestone.replica_channel import SPILL
from flowstone.limestone.replica_commits import Commits, Decision
from flowstone.limestone.replica_connection import OPENING_SECONDS, Connection, Refusal
from flowstone.limestone.replica_directory import CannotSetBack, ReplicaDirectory
from flowstone.limestone.transcode import DiskEntries, WireReader
from flowstone.outside import Client, Listener, Outside, Tls

UNOPENED_MAX: Final = 256
"""Connections that have not said what they are; more are not let in."""

ENDS: Final = SessionFlags.END | SessionFlags.FLUSH

OnEvent = Callable[[events.Event], None]


@dataclass(frozen=True)
class ReplicaStatus:
    """Where a replica stands. `master`: who has the control channel, or opened the first log channel."""

    directory: str
    endpoint: str
    instance_uuid: str
    durable_epoch: int
    follows: str | None
    is_seeding: bool
    compatible: bool
    master: str | None
    channels: int


@dataclass
class _Master:
    """The connections of one master, from the first to the last. `instance` and `token` are of those that say HELLO."""

    peer: str
    commits: Commits = field(default_factory=Commits)
    control: Connection | None = None
    had_control: bool = False
    channels: dict[int, Connection] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    """Ids that log channels of it have had, and the numbers of their files."""
    instance: str | None = None
    token: bytes | None = None
    is_preparing: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a session has been synced, or lost."""

    @property
    def is_over(self) -> bool:
        """Nothing that comes from it can become durable any more."""
        return self.control is None and (self.had_control or not self.channels)


class Replica:
    """`start`, then it serves until `stop`. `endpoint` has the port that was chosen where 0 was asked for."""

    def __init__(
        self,
        outside: Outside,
        path: str,
        endpoint: Endpoint,
        *,
        compatible: bool = False,
        secret: str | None = None,
        tls: Tls | None = None,
        message_size_max: int = MESSAGE_SIZE_MAX,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        if compatible and secret is not None:
            raise LimestoneError("the original knows no secret", hint="leave out compatible, or the secret")
        self.endpoint = endpoint
        self.outside = outside
        self.compatible = compatible
        self.secret = secret.encode() if secret is not None else None
        self.message_size_max = message_size_max
        self.tell = on_event
        self.directory: ReplicaDirectory
        self._path = path
        self._tls = tls
        self._master: _Master | None = None
        self._gate = asyncio.Lock()
        self._recording = asyncio.Lock()
        self._listener: Listener | None = None
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._unopened: dict[Connection, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        """Take the directory, put right what a crash left in it, and listen."""
        self.directory = await ReplicaDirectory.open(self.outside, self._path, compatible=self.compatible)
        try:
            listener = await self.outside.network.listen(
                self.endpoint.host, self.endpoint.port, self._accept, tls=self._tls
            )
        except BaseException:
            self.directory.release()
            raise
        self._listener = listener
        self.endpoint = Endpoint(self.endpoint.host, listener.port or 0, self._tls is not None)
        directory = self.directory
        if directory.was_restored:
            self.tell(events.Restored(directory.durable_epoch))
        where = (self._path, str(self.endpoint), directory.instance_uuid, directory.durable_epoch, self.compatible)
        self.tell(events.Listening(*where))

    async def stop(self) -> None:
        """Close all connections, let what is being written come to its end, and give the directory back."""
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        await listener.close()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*self._connections.values(), *self._tasks, return_exceptions=True)
        self.directory.release()
        self.tell(events.Stopped(self.directory.durable_epoch))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def status(self) -> ReplicaStatus:
        directory, master = self.directory, self._master
        is_there = master is not None and not master.is_over
        return ReplicaStatus(
            directory=self._path,
            endpoint=str(self.endpoint),
            instance_uuid=directory.instance_uuid,
            durable_epoch=directory.durable_epoch,
            follows=directory.state.follows,
            is_seeding=directory.is_seeding,
            compatible=self.compatible,
            master=master.peer if master is not None and is_there else None,
            channels=len(master.channels) if master is not None and is_there else 0,
        )

    # --- connections ---

    def _accept(self, client: Client) -> Connection:
        connection = Connection(client)
        if self._listener is None or len(self._unopened) >= UNOPENED_MAX:
            connection.abort()
            return connection
        self._unopened[connection] = None
        self._connections[connection] = asyncio.get_running_loop().create_task(self._serve(connection))
        return connection

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._answer_errors(connection, self._converse(connection))
        finally:
            self._unopened.pop(connection, None)
            self._connections.pop(connection, None)

    async def _answer_errors(self, connection: Connection, conversation: Awaitable[None]) -> None:
        try:
            await conversation
            connection.close()
        except Refusal as refusal:
            self.tell(events.Refused(connection.peer, refusal.code, refusal.message))
            await connection.refuse(refusal)
        except BadMessage as error:
            self.tell(events.Refused(connection.peer, None, error.message))
            connection.close()
        except (OSError, LimestoneError) as error:
            if not isinstance(error, CannotSetBack):
                self.directory.look_again()
            self.tell(events.Refused(connection.peer, ExtensionError.REFUSED, str(error)))
            await connection.refuse(Refusal(ExtensionError.REFUSED, str(error)))

    async def _converse(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                opened = await connection.opener()
        except TimeoutError:
            raise BadMessage(f"no channel was opened within {OPENING_SECONDS:g} s") from None
        if opened is None:
            return
        message, rest = opened
        if isinstance(message, LogChannelCreate):
            await _LogConversation(self, connection).run(message, rest)
        else:
            await _ControlConversation(self, connection).run(message, rest)

    def opened(self, connection: Connection) -> None:
        """It has said what it is, and shown the secret where there is one."""
        self._unopened.pop(connection, None)

    # --- masters ---

    async def admit_control(self, connection: Connection, instance: str | None = None) -> _Master:
        """The master that this is the control channel of. `instance`: it has proved to have the secret."""
        async with self._gate:
            current = self._master
            is_same = current is not None and instance is not None and current.instance == instance
            if current is not None and (current.is_over or is_same):
                await self._dismiss(current)
            elif current is not None and current.had_control:
                raise Refusal(ErrorCode.CONTROL_CHANNEL_EXISTS, "Control channel already created")
            master = self._master or await self._welcome(connection)
            master.control, master.had_control, master.peer = connection, True, connection.peer
            self.opened(connection)
            self.tell(events.Connected(connection.peer))
            return master

    async def admit_channel(self, connection: Connection, message: LogChannelCreate) -> tuple[_Master, int]:
        """The master that this is a log channel of, and the number of its file."""
        async with self._gate:
            current = self._master
            if current is not None and current.is_over:
                await self._dismiss(current)
            current = self._master
            token = current.token if current is not None else None
            if token is None and self.secret is not None:
                raise Refusal(ExtensionError.AUTHENTICATION_FAILED, "this replica asks for a shared secret")
            if token is not None and not extensions.is_proven(token, message.secret):
                raise Refusal(ExtensionError.AUTHENTICATION_FAILED, "not the token of the master that is connected")
            channel_id = message.channel_id
            if channel_id >= CHANNELS_MAX:
                raise Refusal(ErrorCode.TOO_MANY_LOG_CHANNELS, "Too many log channels: cannot assign more")
            if current is not None and channel_id in current.used:
                text = f"Log channel {channel_id} already created"
                raise Refusal(ErrorCode.TOO_MANY_LOG_CHANNELS, text)
            master = current or await self._welcome(connection)
            number = len(master.used) if self.compatible else channel_id
            master.used[channel_id] = number
            master.channels[channel_id] = connection
            self.opened(connection)
            return master, number

    async def _welcome(self, connection: Connection) -> _Master:
        """A new master, and a directory that holds what is durable and nothing else."""
        directory = self.directory
        was_seeding = directory.is_seeding
        withdrawn = await directory.settle()
        if was_seeding and directory.was_restored:
            self.tell(events.Restored(directory.durable_epoch))
        elif withdrawn:
            self.tell(events.Withdrawn(withdrawn, directory.durable_epoch))
        self._master = _Master(connection.peer)
        return self._master

    async def _dismiss(self, master: _Master) -> None:
        """Its connections are closed, and done with."""
        left = [*master.channels.values(), *([master.control] if master.control is not None else [])]
        for connection in left:
            connection.abort()
        await asyncio.gather(*(self._connections[each] for each in left), return_exceptions=True)
        self._master = None

    # --- epochs ---

    async def record(self, epoch: int) -> None:
        """The record of an epoch is on disk on return."""
        directory = self.directory
        directory.promise(epoch)
        async with self._recording:
            if self.compatible or epoch > directory.durable_epoch:
                await directory.commit(epoch)
                if directory.has_discarded and directory.state.follows is not None:
                    self.tell(events.Seeded(directory.state.follows, epoch))
                    self._start(directory.discard())

    def _start(self, work: Awaitable[None]) -> None:
        async def attempt() -> None:
            try:
                await work
            except OSError:
                self.directory.look_again()

        task = asyncio.get_running_loop().create_task(attempt())
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


class _ControlConversation:
    """What comes over the control channel, message by message."""

    def __init__(self, replica: Replica, connection: Connection) -> None:
        self._replica = replica
        self._connection = connection
        self._parser = ControlParser(extended=not replica.compatible)
        self._nonce = replica.outside.random.bytes(extensions.NONCE_SIZE)
        self._master: _Master | None = None

    async def run(self, opener: SessionBegin, rest: bytes) -> None:
        replica = self._replica
        if opener.protocol_version != PROTOCOL_VERSION:
            text = f"Unsupported protocol version: {opener.protocol_version}, expected: {PROTOCOL_VERSION}"
            raise Refusal(ErrorCode.UNSUPPORTED_VERSION, text)
        if replica.secret is None:
            self._master = await replica.admit_control(self._connection)
        try:
            ack = SessionBeginAck() if replica.compatible else SessionBeginAck(extensions.offer(self._nonce))
            self._connection.write(encode(ack))
            self._parser.feed(rest)
            if replica.secret is not None:
                await self._authenticate()
            while (message := await self._next()) is not None:
                await self._handle(message)
        finally:
            self._leave()

    async def _next(self) -> Message | Frame | None:
        while (message := self._parser.next_message()) is None:
            data = await self._connection.read()
            if not data:
                return None
            self._parser.feed(data)
        return message

    async def _authenticate(self) -> None:
        """Nothing is done for this peer before it has shown that it has the secret."""
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                message = await self._next()
        except TimeoutError:
            message = None
        if not isinstance(message, Hello):
            raise Refusal(ExtensionError.AUTHENTICATION_FAILED, "this replica asks for a shared secret")
        await self._hello(message)

    async def _handle(self, message: Message | Frame) -> None:
        match message:
            case GroupCommit(epoch):
                await self._group_commit(epoch)
            case SessionBegin():
                pass
            case RdmaInit():
                code = ErrorCode.RDMA_NOT_AVAILABLE
                self._connection.write(encode(Error(code, "RDMA is not available")))
            case Hello():
                await self._hello(message)
            case Prepare():
                await self._prepare(message)
            case _:
                raise BadMessage(f"{type(message).__name__} on the control channel")

    async def _group_commit(self, epoch: int) -> None:
        replica, master = self._replica, self._master
        assert master is not None
        if replica.compatible:
            await replica.record(epoch)
        else:
            if master.instance is None:
                # The original begins a session before it sends this, but on another connection: let that be read.
                await replica.outside.clock.sleep(0)
                await replica.outside.clock.sleep(0)
            await self._record_whole(master, epoch)
        self._connection.write(ACK)

    async def _record_whole(self, master: _Master, epoch: int) -> None:
        while (decision := master.commits.decide(epoch)) is Decision.WAIT:
            master.changed.clear()
            await master.changed.wait()
        if decision is Decision.REFUSE:
            text = f"epoch {epoch} is not whole here: a session of epoch {master.commits.lost} was cut short"
            raise Refusal(ExtensionError.REFUSED, text)
        if decision is Decision.DEFER:
            master.commits.defer(epoch)
        else:
            await self._replica.record(epoch)

    async def _hello(self, hello: Hello) -> None:
        replica, secret, proof = self._replica, self._replica.secret, None
        if secret is not None:
            if not extensions.is_proven(extensions.master_proof(secret, hello.nonce, self._nonce), hello.proof):
                raise Refusal(ExtensionError.AUTHENTICATION_FAILED, "the shared secret is another one")
            proof = extensions.replica_proof(secret, hello.nonce, self._nonce)
            if self._master is None:
                self._master = await replica.admit_control(self._connection, hello.instance)
        master = self._master
        assert master is not None
        if master.instance is not None or master.used:
            raise Refusal(ExtensionError.REFUSED, "HELLO comes first, and once")
        token = replica.outside.random.bytes(extensions.TOKEN_SIZE)
        master.instance, master.token = hello.instance, token
        directory = replica.directory
        ack = HelloAck(directory.instance_uuid, directory.state.follows, directory.durable_epoch, token, proof)
        self._connection.write(extensions.encode(ack))
        replica.tell(events.Identified(self._connection.peer, hello.instance, hello.durable_epoch))

    async def _prepare(self, prepare: Prepare) -> None:
        replica, master = self._replica, self._master
        assert master is not None
        if master.instance is None or not master.commits.is_idle:
            raise Refusal(ExtensionError.REFUSED, "PREPARE comes after HELLO, and before any session")
        directory = replica.directory
        master.is_preparing = True
        try:
            await directory.settle()
            if prepare.action is Action.SEED:
                await directory.put_aside(master.instance)
                replica.tell(events.Seeding(master.instance, prepare.epoch))
            else:
                await directory.set_back(prepare.epoch)
                await directory.follow(master.instance)
                replica.tell(events.Resumed(master.instance, directory.durable_epoch))
        finally:
            master.is_preparing = False
        self._connection.write(ACK)

    def _leave(self) -> None:
        if self._master is not None:
            self._master.control = None
            peer, epoch = self._connection.peer, self._replica.directory.durable_epoch
            self._replica.tell(events.Disconnected(peer, epoch))


class _LogConversation:
    """What comes over a log channel, message by message."""

    def __init__(self, replica: Replica, connection: Connection) -> None:
        self._replica = replica
        self._connection = connection

    async def run(self, opener: LogChannelCreate, rest: bytes) -> None:
        if opener.connection_type != 1:
            raise BadMessage(f"a log channel of connection_type {opener.connection_type}")
        self._master, number = await self._replica.admit_channel(self._connection, opener)
        self._id = opener.channel_id
        self._channel = self._replica.directory.channel(number)
        try:
            self._connection.write(ACK)
            reader, data = WireReader(self._replica.message_size_max), rest
            while data or (data := await self._connection.read()):
                await self._take(reader, data)
                data = b""
        finally:
            await self._leave()

    async def _take(self, reader: WireReader, data: bytes) -> None:
        """All messages that these bytes complete; sessions that end among them are synced together."""
        problem: LimestoneError | OSError | None = None
        try:
            for message in reader.feed(data):
                await self._handle(message)
        except (BadMessage, Refusal, OSError) as error:
            problem = error
        await self._sync()
        if problem is not None:
            raise problem

    async def _handle(self, message: DiskEntries | Message) -> None:
        if isinstance(message, DiskEntries):
            await self._entries(message)
        elif isinstance(message, RdmaInit):
            code = ErrorCode.RDMA_WRONG_CHANNEL
            self._connection.write(encode(Error(code, "RDMA is asked for on the control channel")))
        elif not isinstance(message, SessionBegin):
            raise BadMessage(f"{type(message).__name__} on a log channel")

    async def _entries(self, message: DiskEntries) -> None:
        channel = self._channel
        if message.flags & SessionFlags.BEGIN:
            await self._begin(message.epoch)
        elif channel.session is None:
            if message.disk or message.blobs or message.flags & ENDS:
                raise Refusal(ErrorCode.LOG_CHANNEL_CONFUSED, f"log channel {self._id}: outside of a session")
            return
        if message.blobs:
            await self._replica.directory.store(message.blobs)
        channel.add(message.disk)
        if message.flags & ENDS:
            channel.end()
            self._master.commits.ended(self._id)
        if channel.buffered > SPILL:
            await self._replica.outside.blocking(channel.flush, False)

    async def _begin(self, epoch: int) -> None:
        master, directory = self._master, self._replica.directory
        if self._channel.session is not None:
            text = f"log channel {self._id}: a session begins in another of epoch {self._channel.session.epoch}"
            raise Refusal(ErrorCode.LOG_CHANNEL_CONFUSED, text)
        if master.is_preparing:
            raise Refusal(ExtensionError.REFUSED, "a session begins before the answer to PREPARE")
        if directory.state.follows != master.instance and not directory.is_seeding:
            await directory.follow(master.instance)
        self._channel.begin(epoch, directory.promised_epoch)
        master.commits.begun(self._id, epoch)

    async def _sync(self) -> None:
        channel, replica = self._channel, self._replica
        count = len(channel.ended)
        if not count:
            return
        replica.directory.written(channel, await replica.outside.blocking(channel.flush, True))
        self._master.commits.synced(self._id)
        self._master.changed.set()
        due = self._master.commits.due()
        if due is not None:
            await replica.record(due)
        self._connection.write(ACK * count)

    async def _leave(self) -> None:
        """Nothing stays of a session that has not ended."""
        self._master.channels.pop(self._id, None)
        self._master.commits.dropped(self._id)
        self._master.changed.set()
        await self._replica.outside.blocking(self._channel.abandon)
