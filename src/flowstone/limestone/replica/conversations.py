"""The messages of a replica's channels, and the answers to them.

A conversation serves one connection that has opened a channel, on behalf of the Replica, which admits it and is
notified of everything that concerns other connections (`docs/spec/limestone.md#replica-acceptance`). Never accepts
connections, and never makes one master wait for another except while the directory changes for both.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from flowstone.limestone.errors import BadMessage, LimestoneError
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.messages import (
    ACK,
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
from flowstone.limestone.format.transcode import BlobPart, DiskEntries, WireReader
from flowstone.limestone.format.wire_extensions import (
    Action,
    ControlParser,
    Frame,
    Hello,
    HelloAck,
    Prepare,
    WireExtensionError,
)
from flowstone.limestone.replica import events as events
from flowstone.limestone.replica.connection import OPENING_SECONDS, Refusal, ReplicaConnection
from flowstone.limestone.replica.log_file_channel import SPILL
from flowstone.limestone.replica.master import Master
from flowstone.limestone.replica.memory import BUFFERED_TOTAL, HUGE_MESSAGE, LARGE_MESSAGE
from flowstone.limestone.replica.received_blob import ReceivedBlob

if TYPE_CHECKING:
    from flowstone.limestone.replica.replica import Replica

ENDS: Final = SessionFlags.END | SessionFlags.FLUSH


class ControlConversation:
    """Serves the control channel."""

    def __init__(self, replica: Replica, connection: ReplicaConnection) -> None:
        self._replica = replica
        self._connection = connection
        self._parser = ControlParser(extended=not replica.compatible)
        self._nonce = replica.outside.random.bytes(extensions.NONCE_SIZE)
        self._master: Master | None = None

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
        """No request of this peer is executed before the peer has proved that it has the secret."""
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                message = await self._next()
        except TimeoutError:
            message = None
        if not isinstance(message, Hello):
            raise Refusal(WireExtensionError.AUTHENTICATION_FAILED, "this replica requires a shared secret")
        await self._hello(message)

    async def _handle(self, message: Message | Frame) -> None:
        match message:
            case GroupCommit(epoch):
                await self._group_commit(epoch)
            case SessionBegin():
                pass
            case RdmaInit():
                code = ErrorCode.RDMA_NOT_AVAILABLE
                self._connection.write(encode(Error(code, "Failed to initialize RDMA receiver")))
            case Hello():
                await self._hello(message)
            case Prepare():
                await self._prepare(message)
            case _:
                raise BadMessage(f"unexpected {type(message).__name__} on the control channel")

    async def _group_commit(self, epoch: int) -> None:
        replica, master = self._replica, self._master
        assert master is not None
        if replica.compatible:
            await replica.record(epoch)
        else:
            if master.instance is None:
                # The original may have sent sessions before this over other connections: read those first.
                await replica.outside.clock.sleep(0)
                await replica.outside.clock.sleep(0)
            await self._record(master, epoch)
        self._connection.write(ACK)

    async def _record(self, master: Master, epoch: int) -> None:
        """Record an epoch with all of its sessions that have ended; open sessions count from their end on.

        The master may wait for the answer before it ends open sessions, and then reports the epoch to its clients."""
        directory, commits = self._replica.directory, master.commits
        if not commits.has_lost(epoch):
            directory.promise(epoch)
            await directory.hide_unfinished(epoch)
        while commits.is_syncing(epoch) and not commits.has_lost(epoch):
            master.changed.clear()
            await master.changed.wait()
        if commits.has_lost(epoch):
            text = f"epoch {epoch} is incomplete: a session of epoch {commits.lost} was interrupted"
            raise Refusal(WireExtensionError.REFUSED, text)
        await self._replica.record(epoch)

    async def _hello(self, hello: Hello) -> None:
        replica, secret, proof = self._replica, self._replica.secret, None
        if secret is not None:
            if not extensions.is_proven(extensions.master_proof(secret, hello.nonce, self._nonce), hello.proof):
                raise Refusal(WireExtensionError.AUTHENTICATION_FAILED, "shared secrets differ")
            proof = extensions.replica_proof(secret, hello.nonce, self._nonce)
            replica.heard(self._connection)
            if self._master is None:
                self._master = await replica.admit_control(self._connection, hello.instance)
        master = self._master
        assert master is not None
        if master.instance is not None or master.used:
            raise Refusal(WireExtensionError.REFUSED, "HELLO must be the first message, and sent once")
        token = replica.outside.random.bytes(extensions.TOKEN_SIZE)
        master.instance, master.token = hello.instance, token
        master.claims = frozenset((hello.instance, *hello.formerly))
        directory = replica.directory
        ack = HelloAck(directory.instance_uuid, directory.state.follows, directory.durable_epoch, token, proof)
        self._connection.write(extensions.encode(ack))
        replica.tell(events.Identified(self._connection.peer, hello.instance, hello.durable_epoch))

    async def _prepare(self, prepare: Prepare) -> None:
        replica, master = self._replica, self._master
        assert master is not None
        if master.instance is None or not master.commits.is_idle:
            raise Refusal(WireExtensionError.REFUSED, "PREPARE must follow HELLO and precede any session")
        directory = replica.directory
        master.is_preparing = True
        try:
            await directory.settle()
            if prepare.action is Action.SEED:
                self._refuse_strangers(master)
                await directory.put_aside(master.instance)
                replica.tell(events.Seeding(master.instance, prepare.epoch))
            else:
                await directory.set_back(prepare.epoch)
                await directory.follow(master.instance)
                replica.tell(events.Resumed(master.instance, directory.durable_epoch))
        finally:
            master.is_preparing = False
        self._connection.write(ACK)

    def _refuse_strangers(self, master: Master) -> None:
        """A wrong endpoint must not cost anybody the replica of another database."""
        directory = self._replica.directory
        if self._replica.may_reseed or not directory.is_of_none(master.claims):
            return
        whose = directory.state.follows
        holder = f"instance {whose}" if whose is not None else "a master without an identity, or its own"
        raise Refusal(
            WireExtensionError.REFUSED,
            f"this replica holds epochs up to {directory.durable_epoch} of another database ({holder}), not of "
            f"{master.instance}; check the endpoint, or start the replica with --reseed to replace its data",
        )

    def _leave(self) -> None:
        if self._master is not None:
            self._master.control = None
            peer, epoch = self._connection.peer, self._replica.directory.durable_epoch
            self._replica.tell(events.MasterDisconnected(peer, epoch))


class LogConversation:
    """Serves a log channel."""

    def __init__(self, replica: Replica, connection: ReplicaConnection) -> None:
        self._replica = replica
        self._connection = connection
        self._has_lock = False
        self._places: set[asyncio.Semaphore] = set()
        self._received: list[ReceivedBlob] = []
        """Blobs of the current message that arrive piece by piece; the last one may be incomplete."""
        self._is_receiving = False

    async def run(self, opener: LogChannelCreate, rest: bytes) -> None:
        if opener.connection_type != 1:
            raise BadMessage(f"log channel with connection_type {opener.connection_type}")
        self._master, number = await self._replica.admit_channel(self._connection, opener)
        self._id = opener.channel_id
        self._channel = self._replica.directory.channel(number)
        try:
            self._connection.write(ACK)
            reader, data = WireReader(self._replica.message_size_max, self._replica.memory.scratch), rest
            while data or (data := await self._connection.read()):
                await self._take(reader, data)
                await self._take_places(reader.held)
                data = b""
        finally:
            await self._take_places(0)
            await self._leave()

    async def _take_places(self, held: int) -> None:
        """Acquire the places that an unfinished message of `held` bytes needs, and release the others."""
        memory = self._replica.memory
        for place, size in ((memory.large_messages, LARGE_MESSAGE), (memory.huge_messages, HUGE_MESSAGE)):
            if held > size and place not in self._places:
                await place.acquire()
                self._places.add(place)
            elif held <= size and place in self._places:
                place.release()
                self._places.remove(place)

    async def _take(self, reader: WireReader, data: bytes) -> None:
        """Handle all messages that these bytes complete. Sessions that end in the same call are synced together."""
        problem: LimestoneError | OSError | None = None
        try:
            for message in reader.feed(data):
                await self._handle(message)
        except BadMessage as error:
            # A Flowstone master reports the reason to its operator and retries; the original knows no such message.
            ours = self._master.instance is not None
            problem = Refusal(WireExtensionError.REFUSED, f"invalid message: {error.message}") if ours else error
        except (Refusal, OSError) as error:
            problem = error
        await self._sync()
        if problem is not None:
            raise problem

    async def _handle(self, message: DiskEntries | BlobPart | Message) -> None:
        if isinstance(message, DiskEntries):
            await self._entries(message)
        elif isinstance(message, BlobPart):
            await self._receive(message)
        elif isinstance(message, RdmaInit):
            code = ErrorCode.RDMA_WRONG_CHANNEL
            self._connection.write(encode(Error(code, "Invalid handler resources for RDMA_INIT")))
        elif not isinstance(message, SessionBegin):
            raise BadMessage(f"unexpected {type(message).__name__} on a log channel")

    async def _entries(self, message: DiskEntries) -> None:
        channel = self._channel
        if message.flags & SessionFlags.BEGIN:
            await self._begin(message.epoch)
        elif channel.session is None:
            if message.disk or message.blobs or message.flags & ENDS:
                raise Refusal(ErrorCode.LOG_CHANNEL_CONFUSED, f"log channel {self._id}: no session is open")
            return
        if message.blobs:
            are_gone = self._master.instance is not None and bool(message.flags & SessionFlags.GONE)
            await self._replica.directory.store(message.blobs, self._received, are_gone=are_gone)
            self._received = []
        channel.add(message.disk)
        if message.flags & ENDS:
            channel.end()
            self._master.commits.ended(self._id)
        if channel.buffered > self._replica.memory.share(BUFFERED_TOTAL, SPILL):
            async with channel.writing:
                await self._replica.outside.blocking(channel.flush, False)

    async def _receive(self, part: BlobPart) -> None:
        """Write a piece of a blob to a temporary file: the flags, which may begin a session, come after the blobs."""
        if self._master.is_preparing:
            raise Refusal(WireExtensionError.REFUSED, "session began before the answer to PREPARE")
        if not self._is_receiving:
            self._received.append(await self._replica.directory.receive(part.blob_id))
        append = partial(self._received[-1].append, is_last=part.is_last)
        self._is_receiving = not part.is_last
        await self._replica.outside.blocking(append, part.data)

    def _discard(self) -> None:
        for received in self._received:
            received.discard()

    async def _begin(self, epoch: int) -> None:
        master, directory = self._master, self._replica.directory
        if self._channel.session is not None:
            text = f"log channel {self._id}: a session of epoch {self._channel.session.epoch} is already open"
            raise Refusal(ErrorCode.LOG_CHANNEL_CONFUSED, text)
        if master.is_preparing:
            raise Refusal(WireExtensionError.REFUSED, "session began before the answer to PREPARE")
        master.commits.begun(self._id, epoch)  # first: if anything fails from here on, the epoch is not whole
        if directory.state.follows != master.instance and not directory.is_seeding:
            await directory.follow(master.instance)
        await self._hold()
        self._channel.begin(epoch, directory.promised_epoch)

    async def _hold(self) -> None:
        if not self._has_lock:
            await self._channel.lock.acquire()
            self._has_lock = True

    def _let_go(self) -> None:
        if self._has_lock:
            self._channel.lock.release()
            self._has_lock = False

    async def _sync(self) -> None:
        channel, replica = self._channel, self._replica
        count = len(channel.ended)
        if not count:
            return
        async with channel.writing:
            replica.directory.written(channel, await replica.outside.blocking(channel.flush, True))
        self._master.commits.synced(self._id)
        self._master.changed.set()
        if channel.session is None:
            self._let_go()
        self._connection.write(ACK * count)

    async def _leave(self) -> None:
        """Nothing stays of a session that has not ended. Until then, the master keeps this connection."""
        self._master.commits.dropped(self._id)
        self._master.changed.set()
        try:
            if self._has_lock:
                async with self._channel.writing:
                    await self._replica.outside.blocking(self._channel.abandon)
            if self._received:
                await self._replica.outside.blocking(self._discard)
        finally:
            self._let_go()
            del self._master.channels[self._id]
