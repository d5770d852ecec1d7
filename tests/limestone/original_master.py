"""A model of the original's master: its messages and their order, and its rules for recording epochs.

The model follows the specification (datastore and log channel contract) and the source that it cites, including
defects: a channel that has finished a session of an epoch is not waited for when it has another one open. Threads are
tasks here, and every pause lets another task run. The model keeps no files; the answers that it received are in the
`Ledger`, which outlives it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Final

from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import WriteVersion, put
from flowstone.limestone.format.messages import (
    Blob,
    GroupCommit,
    LogChannelCreate,
    LogEntries,
    SessionBegin,
    wire_entry,
)
from flowstone.outside import Outside
from tests.limestone.peer import Peer

BEGIN, END = 1, 6
STORAGE: Final = 3


class Aborted(Exception):
    """The original aborts its process because the replica rejected a message, or was lost."""


@dataclass
class Life:
    """One life of a master.

    `committed`: the largest epoch whose group commit the replica acknowledged; `asked`: the largest one sent to the
    replica.
    """

    committed: int = 0
    asked: int = 0


@dataclass
class Session:
    """A session that the master sent.

    `is_ended`: the end was sent. `is_acknowledged`: the replica answered it.
    """

    life: Life
    epoch: int
    rows: dict[bytes, bytes] = field(default_factory=dict)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    is_ended: bool = False
    is_acknowledged: bool = False

    @property
    def must_be_there(self) -> bool:
        """True if the replica acknowledged the session's end, and later its epoch to the same master.

        Sessions that a master did not commit before it died are withdrawn when the next master connects.
        """
        return self.is_acknowledged and self.epoch <= self.life.committed


@dataclass
class Ledger:
    """All sessions that the masters of a replica wrote, and all answers.

    `committed`: the largest acknowledged epoch.
    """

    sessions: list[Session] = field(default_factory=list)
    committed: int = 0
    commit_count: int = 0
    last_epoch: int = 0
    blob_count: int = 0


@dataclass(frozen=True)
class Orders:
    """The original's variables: REPLICATION_ASYNC_SESSION_CLOSE and REPLICATION_ASYNC_GROUP_COMMIT."""

    async_close: bool = False
    async_commit: bool = False


@dataclass
class _Channel:
    peer: Peer
    number: int
    working: int | None = None
    finished: int = 0
    session: Session | None = None


class OriginalMaster:
    """One life of the master.

    `pause`: maximum seconds of a step of a thread.
    """

    def __init__(self, outside: Outside, ledger: Ledger, orders: Orders, rng: Random, pause: float) -> None:
        self.channels: list[_Channel] = []
        self.switched = ledger.last_epoch
        self._outside = outside
        self._ledger = ledger
        self._life = Life()
        self._orders = orders
        self._random = rng
        self._pause = pause
        self._to_record = ledger.last_epoch
        self._recording = asyncio.Lock()
        self._control: Peer

    async def connect(self, endpoint: Endpoint, channels: int) -> None:
        """Open the log channels in order, then the control channel."""
        try:
            for number in range(channels):
                peer = await Peer.connect(self._outside.network, endpoint)
                await self._acknowledged(peer, LogChannelCreate(number))
                self.channels.append(_Channel(peer, number))
            self._control = await Peer.connect(self._outside.network, endpoint)
            if await self._control.ask(SessionBegin()) is None:
                raise Aborted("SESSION_BEGIN")
        except (OSError, TimeoutError) as error:
            raise Aborted(str(error)) from error

    async def stop(self) -> None:
        await self._control.close()
        for channel in self.channels:
            await channel.peer.close()

    # --- interface for the tests ---

    async def switch_epoch(self, epoch: int) -> None:
        self.switched = self._ledger.last_epoch = epoch
        await self._update()

    async def session(self, channel: _Channel, name: str, entries: int) -> None:
        """Send a whole session and wait for the acknowledgement of its end."""
        await self._begin(channel)
        for number in range(entries):
            await self._add(channel, f"{name}-{number}".encode())
        await self._end(channel)

    async def _begin(self, channel: _Channel) -> None:
        channel.working = self.switched
        channel.session = Session(self._life, self.switched)
        self._ledger.sessions.append(channel.session)
        await self._rest()
        self._send(channel, LogEntries(channel.working, (), BEGIN))

    async def _add(self, channel: _Channel, key: bytes) -> None:
        session, rng = channel.session, self._random
        assert session is not None
        value = rng.randbytes(rng.choice((0, 5, 300)))
        blobs: tuple[Blob, ...] = ()
        if rng.random() < 0.2:
            blobs = (self._blob(value),)
            session.blobs[key] = value
        session.rows[key] = value
        version = WriteVersion(session.epoch, len(session.rows))
        entry = put(STORAGE, key, value, version, tuple(blob.blob_id for blob in blobs))
        await self._rest()
        self._send(channel, LogEntries(session.epoch, (wire_entry(entry, blobs),), 0))

    def _blob(self, content: bytes) -> Blob:
        self._ledger.blob_count += 1
        return Blob(self._ledger.blob_count, content)

    async def _end(self, channel: _Channel) -> None:
        if self._orders.async_close:
            self._send_end(channel, channel.finished)
            await self._finish(channel)
        else:
            await self._finish(channel)
            self._send_end(channel, channel.finished)
        await self._acknowledged(channel.peer)
        assert channel.session is not None
        channel.session.is_acknowledged = True

    async def _finish(self, channel: _Channel) -> None:
        assert channel.working is not None
        await self._rest()  # the end of the session was synced
        channel.finished = channel.working
        await self._update()
        channel.working = None

    def _send_end(self, channel: _Channel, epoch: int) -> None:
        assert channel.session is not None
        channel.session.is_ended = True
        self._send(channel, LogEntries(epoch, (), END))

    # --- epochs ---

    async def _update(self) -> None:
        limit, finished = self.switched - 1, 0
        for channel in self.channels:
            if channel.working is not None and channel.working > channel.finished:
                limit = min(limit, channel.working - 1)
            if channel.finished <= limit:
                finished = max(finished, channel.finished)
        epoch = min(limit, finished)
        if epoch <= self._to_record:
            return
        self._to_record = epoch
        async with self._recording:
            if epoch >= self._to_record:
                await self._write_epoch(epoch)

    async def _write_epoch(self, epoch: int) -> None:
        if not self._orders.async_commit:
            await self._rest()
        self._life.asked = max(self._life.asked, epoch)
        self._control.send(GroupCommit(epoch))
        if self._orders.async_commit:
            await self._rest()
        await self._acknowledged(self._control)
        self._life.committed = max(self._life.committed, epoch)
        self._ledger.committed = max(self._ledger.committed, epoch)
        self._ledger.commit_count += 1

    # --- messages ---

    async def _rest(self) -> None:
        await self._outside.clock.sleep(self._random.uniform(0, self._pause))

    def _send(self, channel: _Channel, message: LogEntries) -> None:
        channel.peer.send(message)

    async def _acknowledged(self, peer: Peer, *messages: LogChannelCreate) -> None:
        try:
            answer = await (peer.ask(*messages) if messages else peer.receive())
        except (OSError, TimeoutError) as error:
            raise Aborted(str(error)) from error
        if answer != ():
            raise Aborted(f"{answer}")
