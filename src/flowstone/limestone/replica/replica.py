"""A replica: makes the sessions of a master durable before it acknowledges them, and records committed epochs.

`Replica` accepts connections and owns the data directory. The conversations (`conversations.py`) handle the messages of
each connection. The replica serves one master at a time, the original or Flowstone, on the Outside that is passed in.

Theory of operation
-------------------

A master uses one control channel and any number of log channels, each a connection with a task of its own. The first
message says which: SESSION_BEGIN opens the control channel, LOG_CHANNEL_CREATE a log channel.

1. Admission. The first channel makes its sender the master, and leaves only durable sessions in the directory. While
   that master has a connection, a second control channel is rejected, unless the same instance proves itself again.
   With a shared secret, nothing is written for a peer that has not proved the secret.
2. HELLO and PREPARE (Flowstone masters only). The replica reports its durable epoch and the master of its data. The
   master then asks it to resume after an epoch, which removes later sessions, or to be seeded: the old data is put
   aside until the new data is durable, and restored if it never is (`limestone/store/seeding.py`).
3. Sessions. A log channel appends the entries of a session to its file, syncs the file at the end of the session, and
   acknowledges.
4. Epochs. GROUP_COMMIT records an epoch in the epoch file, once all its ended sessions are synced, and acknowledges.

When the last connection of a master has closed, the next one may be another master. An invalid message closes its
connection, with the protocol's ERROR if there is one (`docs/spec/limestone.md#replica-acceptance`).

`compatible`: files and answers are the original's, byte for byte. Otherwise the markers in the log files carry the
epochs of the sessions, so that the directory can be recovered after a crash at any point, and the session secret offers
Flowstone masters to identify themselves, resume and seed (`limestone/format/wire_extensions.py`).

Invariants:

- An acknowledged session is on disk, and an acknowledged epoch is in the epoch file.
- An epoch is recorded only if all its ended sessions are synced; an interrupted session makes the commit fail.
- A master never gets the data of another database replaced, unless `reseed` allows it, once.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Self

from flowstone.errors import CannotListen
from flowstone.limestone.errors import BadMessage, LimestoneError
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.messages import MESSAGE_SIZE_MAX, ErrorCode, LogChannelCreate
from flowstone.limestone.format.names import CHANNELS_MAX
from flowstone.limestone.format.wire_extensions import WireExtensionError
from flowstone.limestone.replica import events as events
from flowstone.limestone.replica.connection import OPENING_SECONDS, READ_AHEAD_MAX, Refusal, ReplicaConnection
from flowstone.limestone.replica.conversations import ControlConversation, LogConversation
from flowstone.limestone.replica.directory import CannotSetBack, ReplicaDirectory
from flowstone.limestone.replica.master import Master
from flowstone.limestone.replica.memory import READ_AHEAD_TOTAL, Memory
from flowstone.limestone.store import descriptors
from flowstone.limestone.store.upkeep import LOOK_SECONDS, START_COMPACTION
from flowstone.outside import Client, Listener, Outside, Tls
from flowstone.outside.network import DEFAULT_OPTIONS, SocketOptions
from flowstone.outside.worker import with_workers

UNOPENED_MAX: Final = 256
"""Maximum number of connections that have not opened a channel or proved the secret; a further connection closes the
connection that has been idle longest."""

_OTHER_ADDRESS: Final = "set --listen to an address or a name of this machine"
_NOT_TO_BE_HAD: Final = {
    errno.EADDRINUSE: (
        "address already in use",
        "choose another port, or stop the process that uses it (see ss -ltnp)",
    ),
    errno.EADDRNOTAVAIL: ("this machine does not have that address", _OTHER_ADDRESS),
    errno.EACCES: ("permission denied", "choose a port above 1023"),
}
"""Reasons and hints for errors of the system."""

OnEvent = Callable[[events.Event], None]


@dataclass(frozen=True)
class ReplicaStatus:
    """The status of a replica. `master`: the peer that has the control channel, or opened the first log channel."""

    directory: str
    endpoint: str
    instance_uuid: str
    durable_epoch: int
    follows: str | None
    is_seeding: bool
    compatible: bool
    master: str | None
    channels: int


class Replica:
    """A Limestone replica: serves masters from `start` until `stop`, or in an `async with` block.

    `endpoint` has the chosen port if port 0 was requested.

    Args:
        outside: The door to disk, network and clock: `flowstone.outside.production()`.
        path: Directory of the data; created if missing.
        endpoint: Address to listen on.
        compatible: Write and answer byte for byte as the original.
        secret: Secret that masters must prove.
        tls: Certificates, for an encrypted endpoint.
        socket_options: Options of the sockets.
        message_size_max: Largest message in bytes that is accepted.
        reseed: Let the next master replace the data of another database, once; otherwise such a master is rejected.
        on_event: Called with each event.

    Example:
        async with Replica(production(), "/var/lib/shop/replica", Endpoint.parse("tcp://0.0.0.0:12346")) as replica:
            print(replica.status())
    """

    def __init__(
        self,
        outside: Outside,
        path: str,
        endpoint: Endpoint,
        *,
        compatible: bool = False,
        secret: str | None = None,
        tls: Tls | None = None,
        socket_options: SocketOptions = DEFAULT_OPTIONS,
        message_size_max: int = MESSAGE_SIZE_MAX,
        reseed: bool = False,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        if compatible and secret is not None:
            raise LimestoneError("compatible mode does not support a secret", hint="unset compatible, or the secret")
        self.endpoint = endpoint
        self.outside, self._workers = with_workers(outside, lambda: LimestoneError(f"replica of {path} is stopped"))
        self.compatible = compatible
        self.secret = secret.encode() if secret is not None else None
        self.message_size_max = message_size_max
        self.may_reseed = reseed
        """True if a master may replace the data of another one: once, and until that is durable."""
        self.tell = on_event
        self.directory: ReplicaDirectory
        self._watching: asyncio.Task[None]
        self._path = path
        self._tls = tls
        self._socket_options = socket_options
        self._master: Master | None = None
        self._gate = asyncio.Lock()
        self._recording = asyncio.Lock()
        self._listener: Listener | None = None
        self._is_open = asyncio.Event()
        self._is_stopping = False
        self._stopping: asyncio.Task[None] | None = None
        self._connections: dict[ReplicaConnection, asyncio.Task[None]] = {}
        self.memory = Memory(lambda: len(self._connections))
        self._unopened: dict[ReplicaConnection, None] = {}
        self._idle: dict[ReplicaConnection, None] = {}
        """Connections that the replica waits for, or has rejected; the oldest first."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        """Listen, lock the directory, recover it after a crash, and accept masters.

        Raises:
            CannotListen: The address is not available; nothing is created on the disk then.
            AlreadyLocked: Another process uses the directory.
            LimestoneError: The directory is damaged, or has an unknown format.
        """
        listener = await self._listen()
        try:
            self.directory = await ReplicaDirectory.open(self.outside, self._path, compatible=self.compatible)
        except BaseException:
            self._is_stopping = True
            await listener.close()
            for task in self._connections.values():
                task.cancel()
            await asyncio.gather(*self._connections.values(), return_exceptions=True)
            raise
        self._is_open.set()
        self._listener = listener
        self.endpoint = Endpoint(self.endpoint.host, listener.port or 0, self._tls is not None)
        directory = self.directory
        if directory.was_restored:
            self.tell(events.ReplicaRestored(directory.durable_epoch))
        where = (self._path, str(self.endpoint), directory.instance_uuid, directory.durable_epoch, self.compatible)
        self.tell(events.Listening(*where))
        self._watching = self._start(self._watch())

    async def _listen(self) -> Listener:
        endpoint, network = self.endpoint, self.outside.network
        try:
            return await network.listen(
                endpoint.host, endpoint.port, self._accept, tls=self._tls, options=self._socket_options
            )
        except OSError as error:
            reason, hint = _NOT_TO_BE_HAD.get(error.errno or 0, (error.strerror or str(error), _OTHER_ADDRESS))
            raise CannotListen(f"cannot listen at {endpoint}: {reason}", hint=hint) from error

    async def stop(self) -> None:
        """Close all connections, wait for running writes, and release the directory.

        Cancelling the call only ends the wait; the next call waits until the shutdown is complete."""
        if self._listener is not None:
            listener, self._listener, self._is_stopping = self._listener, None, True
            self._stopping = asyncio.ensure_future(self._stop(listener))
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    async def _stop(self, listener: Listener) -> None:
        await listener.close()
        self._watching.cancel()
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*self._connections.values(), *self._tasks, return_exceptions=True)
        await self._workers.close()
        await self.directory.close()
        self.tell(events.ReplicaStopped(self.directory.durable_epoch))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def status(self) -> ReplicaStatus:
        directory = self.directory
        master = self._master if self._master is not None and not self._master.is_over else None
        channels = master.channels.values() if master is not None else ()
        return ReplicaStatus(
            directory=self._path,
            endpoint=str(self.endpoint),
            instance_uuid=directory.instance_uuid,
            durable_epoch=directory.durable_epoch,
            follows=directory.state.follows,
            is_seeding=directory.is_seeding,
            compatible=self.compatible,
            master=master.peer if master is not None else None,
            channels=sum(not connection.is_closed for connection in channels),
        )

    # --- connections ---

    def _accept(self, client: Client) -> ReplicaConnection:
        connection = ReplicaConnection(client, lambda: self.memory.share(READ_AHEAD_TOTAL, READ_AHEAD_MAX))
        if self._is_stopping or (len(self._unopened) >= UNOPENED_MAX and not self._drop_idle()):
            connection.abort()
            return connection
        self._unopened[connection] = self._idle[connection] = None
        self._connections[connection] = asyncio.get_running_loop().create_task(self._serve(connection))
        return connection

    def _drop_idle(self) -> bool:
        """Close the connection that has been silent for the longest time, to make room for a new one."""
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        oldest.abort()
        if not self._is_open.is_set():
            self._connections[oldest].cancel()
        del self._idle[oldest], self._unopened[oldest]
        return True

    def heard(self, connection: ReplicaConnection) -> None:
        """Note that a connection cannot send more before it is admitted or rejected."""
        self._idle.pop(connection, None)

    async def _serve(self, connection: ReplicaConnection) -> None:
        try:
            await self._is_open.wait()
            await self._answer_errors(connection, self._converse(connection))
        finally:
            connection.close()
            self._unopened.pop(connection, None)
            self._idle.pop(connection, None)
            self._connections.pop(connection, None)

    async def _answer_errors(self, connection: ReplicaConnection, conversation: Awaitable[None]) -> None:
        try:
            await conversation
        except Refusal as refusal:
            if connection in self._unopened:
                self._idle[connection] = None
            self.tell(events.MasterRefused(connection.peer, refusal.code, refusal.message))
            await connection.refuse(refusal)
        except BadMessage as error:
            self.tell(events.MasterRefused(connection.peer, None, error.message))
        except (OSError, LimestoneError) as error:
            if not isinstance(error, CannotSetBack):
                self.directory.look_again()
            self.tell(events.MasterRefused(connection.peer, WireExtensionError.REFUSED, str(error)))
            await connection.refuse(Refusal(WireExtensionError.REFUSED, str(error)))

    async def _converse(self, connection: ReplicaConnection) -> None:
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                opened = await connection.opener()
        except TimeoutError:
            raise BadMessage(f"no channel opened within {OPENING_SECONDS:g} s") from None
        if opened is None:
            return
        message, rest = opened
        if self.secret is None or isinstance(message, LogChannelCreate):
            self.heard(connection)
        if isinstance(message, LogChannelCreate):
            await LogConversation(self, connection).run(message, rest)
        else:
            await ControlConversation(self, connection).run(message, rest)

    def opened(self, connection: ReplicaConnection) -> None:
        """Note that a connection has opened a channel, and proved the secret if there is one."""
        self._unopened.pop(connection, None)
        self._idle.pop(connection, None)

    # --- masters ---

    async def admit_control(self, connection: ReplicaConnection, instance: str | None = None) -> Master:
        """Return the master of this control channel. `instance`: the identity, if the secret was proved."""
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
            self.tell(events.MasterConnected(connection.peer))
            return master

    async def admit_channel(self, connection: ReplicaConnection, message: LogChannelCreate) -> tuple[Master, int]:
        """Return the master of this log channel, and the number of its file."""
        async with self._gate:
            current = self._master
            if current is not None and current.is_over:
                await self._dismiss(current)
            current = self._master
            token = current.token if current is not None else None
            if token is None and self.secret is not None:
                raise Refusal(WireExtensionError.AUTHENTICATION_FAILED, "this replica requires a shared secret")
            if token is not None and not extensions.is_proven(token, message.secret):
                raise Refusal(WireExtensionError.AUTHENTICATION_FAILED, "token does not belong to the connected master")
            channel_id = message.channel_id
            if channel_id >= CHANNELS_MAX:
                raise Refusal(ErrorCode.TOO_MANY_LOG_CHANNELS, "Too many log channels: cannot assign more")
            if current is not None and channel_id in current.used:
                text = f"Log channel {channel_id} already created"
                raise Refusal(ErrorCode.TOO_MANY_LOG_CHANNELS, text)
            self._check_descriptors(0 if current is None else len(current.used))
            master = current or await self._welcome(connection)
            number = len(master.used) if self.compatible else channel_id
            master.used[channel_id] = number
            master.channels[channel_id] = connection
            self.opened(connection)
            return master, number

    def _check_descriptors(self, open_channels: int) -> None:
        try:
            descriptors.check(self.outside.disk, open_channels + 1, descriptors.PER_REPLICA_CHANNEL)
        except LimestoneError as error:
            raise Refusal(ErrorCode.TOO_MANY_LOG_CHANNELS, str(error)) from error

    async def _welcome(self, connection: ReplicaConnection) -> Master:
        """A new master, and a directory that holds what is durable and nothing else."""
        directory = self.directory
        was_seeding = directory.is_seeding
        withdrawn = await directory.settle()
        if was_seeding and directory.was_restored:
            self.tell(events.ReplicaRestored(directory.durable_epoch))
        elif withdrawn:
            self.tell(events.EpochsWithdrawn(withdrawn, directory.durable_epoch))
        self._master = Master(connection.peer)
        return self._master

    async def _dismiss(self, master: Master) -> None:
        """Its connections are closed, and done with."""
        left = [*master.channels.values(), *([master.control] if master.control is not None else [])]
        for connection in left:
            connection.abort()
        await asyncio.gather(*(self._connections[each] for each in left), return_exceptions=True)
        self._master = None

    # --- epochs and files ---

    async def compact(self) -> int:
        """Compact all durable sessions while masters continue.

        The catalog lists the compacted files as detached; they stay until they are deleted manually.

        Returns:
            The number of compacted files.
        """
        done = await self.directory.compact()
        if done.inputs:
            self.tell(events.ReplicaCompacted(done.catalog.max_epoch_id, len(done.inputs)))
        return len(done.inputs)

    async def _watch(self) -> None:
        """Compact when an operator creates `ctrl/start_compaction`, as the original does."""
        disk, path = self.outside.disk, f"{self._path}/{START_COMPACTION}"
        while True:
            await self.outside.clock.sleep(LOOK_SECONDS)
            if disk.kind(path) == "file":
                await asyncio.shield(self._start(self._fulfil(path)))

    async def _fulfil(self, wish: str) -> None:
        try:
            self.outside.disk.unlink(wish)
            await self.compact()
        except (OSError, LimestoneError) as error:
            self.tell(events.Failed(f"compaction failed: {error}"))

    async def record(self, epoch: int) -> None:
        """Record an epoch; the record is durable on return."""
        directory = self.directory
        directory.promise(epoch)
        async with self._recording:
            if self.compatible or epoch > directory.durable_epoch:
                was_seeding = directory.is_seeding
                await directory.commit(epoch)
                if was_seeding and directory.state.follows is not None:
                    self.may_reseed = False
                    self.tell(events.Seeded(directory.state.follows, epoch))
                    self._start(self._discard())

    async def _discard(self) -> None:
        try:
            await self.directory.discard()
        except OSError as error:
            self.tell(events.Failed(f"cannot delete the old data that was put aside: {error}"))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task
