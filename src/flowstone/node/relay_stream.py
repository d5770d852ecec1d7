"""One relay: the way of our log to one replica, from SUBSCRIBE until the connection ends.

It is either live, and gets what is written as the chunks of the common tail (`tail.py`), or behind, and reads the files
(`log_reader.py`) until the tail covers where it is. A replica that is slow to read falls behind; one that sends nothing
for too long is disconnected. Which rows it gets and what is due is decided in `replication/relay.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import UUID

from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType, type_name
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.packet import split
from flowstone.iproto.replies import encode_error
from flowstone.iproto.row import decode_row
from flowstone.node.gc import Consumer
from flowstone.node.info import replicaset_name
from flowstone.node.instance import Instance
from flowstone.node.log_reader import LogReader, LogsGone
from flowstone.node.relay_join import Link as JoiningLink
from flowstone.node.relay_join import raft_row
from flowstone.node.tail import Tail, packets_of, promoted_term
from flowstone.outside import Receiver
from flowstone.replication.messages import (
    Ack,
    Heartbeat,
    Subscribe,
    SubscribeReply,
    decode_ack,
    encode_heartbeat,
    encode_row_packet,
    encode_subscribe_reply,
)
from flowstone.replication.relay import TRANSITIONS, Acked, Pulse, RelayState, RowFilter, xlog_gap
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

ACK_SIZE_MAX: Final = 64 * 1024
"""An ACK has some hundred bytes."""

UNANSWERED_MAX: Final = 4 * 1024 * 1024
"""Bytes of rows to a replica that has said nothing since. A 2.6 that always finds something to read does nothing else:
it neither writes its log nor sends ACKs, and would be taken for lost. Some tenths of a second of work for it."""

LEAVE_SECONDS: Final = 30.0
"""How long an expelled replica may make no progress towards the row that expels it before it is disconnected. Real
servers never disconnect it."""

LOOK_INTERVAL_MAX: Final = 1.0
"""How long a relay sleeps at most: `replication_timeout` may have become shorter meanwhile."""

FIRST_VERSION_WITH_RAFT: Final = 2 << 16 | 6 << 8
_CLOSED: Final = "Broken pipe"


class Link(JoiningLink, Protocol):
    """The connection of a replica."""

    @property
    def is_busy(self) -> bool:
        """Other requests of it are not answered yet."""
        ...

    def hold(self) -> None:
        """Requests that come from now on wait."""
        ...

    def release(self) -> None:
        """They need not wait any more."""
        ...

    def hand_over(self, receiver: Receiver) -> bytes:
        """It is no client any more: what happens to the connection is told to `receiver`; the bytes not read yet."""
        ...

    def close(self) -> None:
        """Sends what is queued, and closes."""
        ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Downstream:
    """A replica that has asked for something since we started, connected or not."""

    uuid: UUID
    id: int = 0
    """0: anonymous."""
    state: RelayState = RelayState.OFF
    relay: Relay | None = None
    consumer: Consumer | None = None
    vclock_sync: int = 0
    """Heartbeats are numbered, over all its connections."""
    message: str = ""
    system_message: str | None = None
    sent_bytes: int = 0
    """Of rows, over all its connections."""
    sent_rows: int = 0

    def become(self, state: RelayState) -> None:
        assert state in TRANSITIONS[self.state], f"a relay that is {self.state.value} cannot become {state.value}"
        self.state = state


class Following(Protocol):
    """All relays of a node, as one of them sees them."""

    instance: Instance

    @property
    def wal_dir(self) -> str: ...

    @property
    def tail(self) -> Tail: ...

    def forget(self, relay: Relay) -> None:
        """It is over."""
        ...

    def acknowledged(self, replica: Downstream, vclock: VClock) -> None:
        """The replica has written more."""
        ...

    def answered(self, replica: Downstream, vclock_sync: int, vclock: VClock) -> None:
        """The replica has written so much, as it says after the heartbeat with this number."""
        ...


class Relay:
    """The way of our log to one replica."""

    def __init__(self, relays: Following, replica: Downstream, link: Link, subscribe: Subscribe, sync: int) -> None:
        self.replica = replica
        self._relays = relays
        self._instance = instance = relays.instance
        self._link = link
        self._sync = sync
        self._version = subscribe.version
        self._is_2_6 = instance.box.dialect is Dialect.V2_6
        self._gets_raft = not self._is_2_6 and not subscribe.is_anonymous and self._version >= FIRST_VERSION_WITH_RAFT
        self._sent_term = 0
        self._awaited_term = 0
        """Of rows that wait until the replica is told of it."""
        clock = instance.outside.clock
        self.pulse = Pulse(clock.monotonic(), is_2_6=self._is_2_6)
        self.acked = Acked(subscribe.vclock)
        self._own_lsn_at_subscribe = subscribe.vclock.get(instance.id)
        self.is_intact: Final = subscribe.vclock.get(replica.id) >= instance.journal.vclock.get(replica.id)
        """True if the replica subscribed with all its own rows that we had, so it has lost none on this connection."""
        self._rows = RowFilter(
            subscribe.vclock,
            left_out=subscribe.id_filter,
            own_id=replica.id,
            own_lsn_max=instance.vclock.get(replica.id),
        )
        self._number: int | None = None
        self._unread = bytearray()
        self._unanswered = 0
        self._is_congested = False
        self._is_heartbeat_wanted = False
        self._is_over = False
        self._last_row: VClock | None = None
        self._leave_at = 0.0
        self._released: asyncio.Future[None] | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    # --- life ---

    @property
    def number(self) -> int | None:
        """The next chunk of the tail that it gets; None: it is behind the tail."""
        return self._number

    def start(self) -> None:
        """Answers the request, and begins to send."""
        instance = self._instance
        # Members of 3.x that were given a name for their replica set follow nobody who does not know it.
        reply = SubscribeReply(instance.id, instance.vclock, instance.replicaset_uuid, replicaset_name(instance))
        self._link.write(encode_subscribe_reply(reply, self._sync, is_2_6=self._is_2_6))
        self.send_raft()
        self._number = self._relays.tail.find(self._rows.known)
        if self._number is None:
            self._run(self._catch_up(is_first=True))
        else:
            self.push()
            self._heartbeat()
        self._run(self._beat())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._is_over:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, FlowstoneError | OSError):  # a file that cannot be read needs no traceback
                LOG.error("relaying to %s failed", self._link.peer, exc_info=error)
            # The replica is told nothing, so that it comes back: most errors would stop it for good.
            self.stop(str(error))

    def stop(self, message: str, system_message: str | None = None, *, error: TarantoolError | None = None) -> None:
        """Ends it and the connection, with a last word to the replica if there is one. Twice is harmless."""
        if self._is_over:
            return
        self._is_over = True
        replica = self.replica
        # Who follows without being a member comes and goes as it likes.
        level = logging.INFO if system_message == _CLOSED and not replica.id else logging.WARNING
        whom = {"peer": self._link.peer, "replica_id": replica.id, "replica": str(replica.uuid)}
        LOG.log(level, "relay to %s at %s is stopped: %s", replica.uuid, self._link.peer, message, extra=whom)
        replica.message, replica.system_message = message, system_message
        replica.become(RelayState.STOPPED)
        replica.relay = None
        self._relays.forget(self)
        for task in self._tasks:
            task.cancel()
        if error is not None:
            version = self._instance.box.schema_version
            self._link.write(encode_error(self._sync, version, error, not self._is_2_6))
        self._link.close()

    @property
    def is_expelled(self) -> bool:
        """True if the replica was removed from `_cluster`: it gets rows, but its acknowledgements do not count."""
        return self._last_row is not None

    def expel(self) -> None:
        """Keep the connection open until the replica has the row that expels it, and closes it, or a time limit."""
        self._last_row = self._instance.vclock.without_zero()
        self._leave_at = self._instance.outside.clock.monotonic() + LEAVE_SECONDS

    def _expelled_acked(self, vclock: VClock) -> None:
        """Extend the time limit while the replica makes progress; once it has the row, the limit is final."""
        assert self._last_row is not None
        now = self._instance.outside.clock.monotonic()
        if self._last_row <= vclock:
            self._leave_at = min(self._leave_at, now + self._instance.configuration.replication_timeout)
        else:
            self._leave_at = now + LEAVE_SECONDS

    async def ended(self) -> None:
        """Returns when nothing of it runs any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what the network calls ---

    def received(self, data: bytes) -> None:
        self._unread += data
        self._unanswered = 0
        try:
            packets, end = split(self._unread, size_max=ACK_SIZE_MAX)
            del self._unread[:end]
            if packets:
                self._take_acks(packets)
        except errors.Protocol as error:
            self.stop(error.message, error=error)
        except FlowstoneError as error:
            self.stop(error.message, error=errors.InvalidMsgpack("Invalid MsgPack - packet header"))
        self._go_on()

    def congested(self) -> None:
        self._is_congested = True

    def drained(self) -> None:
        self._is_congested = False
        self._send_wanted_heartbeat()
        self._go_on()

    def closed(self) -> None:
        self.stop("unexpected EOF when reading from socket", _CLOSED)

    # --- ACKs ---

    def _take_acks(self, packets: list[bytes]) -> None:
        """Only where the replica is now matters: of several ACKs the last, and the last that tells a time."""
        clock = self._instance.outside.clock
        self.pulse.acked(clock.monotonic())
        row = decode_row(packets[-1])
        if row.type != RequestType.OK:
            raise errors.Protocol(f"it sends {type_name(row.type)} where it follows, and only acknowledges")
        ack = decode_ack(row)
        if (unwritten := self._unwritten(ack.vclock)) is not None:
            # Without a word: an honest one, to which another member gave rows of ours that we have lost, comes back
            # and says where it is; an error would stop it for good.
            self.stop(unwritten)
            return
        for packet in reversed(packets[:-1]):
            if ack.timestamp or self._is_2_6:
                break
            ack = Ack(ack.vclock, ack.term, ack.vclock_sync, decode_row(packet).timestamp)
        if self.is_expelled:
            if self.acked.take(ack, clock.wall()):
                self._rows.follow(self.acked.vclock)
                self._expelled_acked(self.acked.vclock)
            return
        # Before the ACK counts: a replica that lives in a newer term does not make a transaction of ours a fact.
        if not self._is_2_6:  # whose log must not have a row of elections
            self._instance.elections.heard_term(self.replica.id, ack.term)
        if self.acked.take(ack, clock.wall()):
            self._rows.follow(self.acked.vclock)  # what another member was faster to send it needs no second time
            self._relays.acknowledged(self.replica, self.acked.vclock)
        if ack.vclock_sync:
            self._relays.answered(self.replica, ack.vclock_sync, self.acked.vclock)

    def _unwritten(self, vclock: VClock) -> str | None:
        """What it has of our own rows we have sent, unless it had them before. Else transactions to come would have a
        quorum that does not exist.
        """
        number = self._instance.id
        known = max(self._instance.vclock.get(number), self._own_lsn_at_subscribe)
        if not number or vclock.get(number) <= known:
            return None
        what = f"row {vclock.get(number)} of replica {number}, which is this instance"
        return f"it acknowledges {what}; that has written {known}"

    # --- rows ---

    @property
    def _is_held(self) -> bool:
        """It gets no more rows for now."""
        is_late = self._is_congested or self._unanswered > UNANSWERED_MAX
        return is_late or self._awaited_term > self._sent_term or self._is_over

    def _go_on(self) -> None:
        if self._is_held:
            return
        if self._released is not None and not self._released.done():
            self._released.set_result(None)
        elif self._number is not None:
            self.push()

    def push(self) -> None:
        """Sends what the tail has for it, as far as it takes it."""
        tail = self._relays.tail
        while self._number is not None and self._number < tail.end and not self._is_held:
            chunk = tail.chunk(self._number)
            if chunk is None:
                self._number = None
                self._run(self._catch_up())
                return
            packets = chunk.packets_for(self._rows, self._sync)
            if packets and not self._knows_term(chunk.promoted_term):
                return
            self._number += 1
            self._send(packets, chunk.after)

    async def _catch_up(self, *, is_first: bool = False) -> None:
        """Sends what the files have until the tail has the rest."""
        instance, tail = self._instance, self._relays.tail
        reader = LogReader(instance.outside.disk, self._relays.wal_dir, self._rows.known)
        try:
            while True:
                tail.seal()
                self._number = tail.find(self._rows.known)
                if self._number is not None:
                    break
                limit = instance.vclock
                try:
                    found = await instance.outside.blocking(self._read, reader, limit)
                except LogsGone as gap:
                    # The collector deletes logs that the replica has acknowledged: another member was faster.
                    if not gap.need.without_zero() <= self._rows.known:
                        raise
                    reader.close()
                    reader = LogReader(instance.outside.disk, self._relays.wal_dir, self._rows.known)
                    continue
                if found is not None:
                    packets, after, term = found
                    while packets and not self._knows_term(term):
                        await self._release()
                    self._send(packets, after)
                elif instance.vclock == limit and tail.find(self._rows.known) is None:
                    raise LogsGone(self._rows.known, limit)
                if is_first:
                    is_first = False
                    self._heartbeat()
                if self._is_held:
                    await self._release()
        except LogsGone as gap:
            if is_first:
                self._heartbeat()
            error = xlog_gap(gap.have, gap.need, is_2_6=self._is_2_6)
            self.stop(error.message, error=error)
            return
        finally:
            reader.close()
        self.push()

    async def _release(self) -> None:
        self._released = asyncio.get_running_loop().create_future()
        await self._released
        self._released = None

    def _read(self, reader: LogReader, limit: VClock) -> tuple[bytes, VClock, int] | None:
        piece = reader.read(limit)
        if piece is None:
            return None
        term = promoted_term(piece.slab) if self._gets_raft else 0
        return packets_of(piece.slab, self._rows, self._sync), piece.after, term

    def _knows_term(self, term: int) -> bool:
        """Whether the replica was told of this term, in which rows to it give the queue to somebody.

        Else they wait until it is on our own disk: nobody hears of a term before.
        """
        if not self._gets_raft or term <= self._sent_term:
            return True
        elections = self._instance.elections
        elections.heard_term(self._instance.id, term)
        if elections.term >= term:
            self.send_raft()
            return True
        self._awaited_term = term
        return False

    def _send(self, packets: bytes, after: VClock) -> None:
        """Sends the rows up to `after` that are for it."""
        count = self._rows.count(after) if packets else 0
        self._rows.follow(after)
        if not packets:
            return
        self.replica.sent_rows += count
        self.replica.sent_bytes += len(packets)
        self.pulse.sent(self._instance.outside.clock.monotonic())
        self._unanswered += len(packets)
        self._link.write(packets)

    # --- signs of life ---

    def send_raft(self) -> None:
        """Tells the state of elections; those who could not make sense of it get nothing."""
        if not self._gets_raft or self._is_over:
            return
        shown = self._instance.elections.shown
        self._sent_term = shown.term
        self._link.write(encode_row_packet(raft_row(shown, self._version)))

    def elections_changed(self) -> None:
        """Tells the replica, and rows that waited for that go on."""
        self.send_raft()
        self._go_on()

    def synchronize(self) -> None:
        """Sends a heartbeat without waiting for its time. Who else asks before it is sent shares it."""
        if not self._is_heartbeat_wanted:
            self._is_heartbeat_wanted = True
            asyncio.get_running_loop().call_soon(self._send_wanted_heartbeat)

    def _send_wanted_heartbeat(self) -> None:
        if self._is_heartbeat_wanted and not self._is_congested and not self._is_over:
            self._heartbeat()

    def _heartbeat(self) -> None:
        self._is_heartbeat_wanted = False
        clock = self._instance.outside.clock
        shows_time = self.pulse.heartbeat(clock.monotonic())
        if not self._is_2_6:
            self.replica.vclock_sync += 1
        number = 0 if self._is_2_6 else self.replica.vclock_sync
        heartbeat = Heartbeat(self._instance.id, clock.wall() if shows_time else 0.0, number)
        self._link.write(encode_heartbeat(heartbeat, self._sync))

    async def _beat(self) -> None:
        clock, pulse = self._instance.outside.clock, self.pulse
        while True:
            timeout = self._instance.configuration.replication_timeout
            lost_at = pulse.lost_at(self._instance.elections.disconnect_timeout)
            now = clock.monotonic()
            if self.is_expelled and now >= self._leave_at:
                self.stop("the replica is no longer registered")
                return
            if now >= lost_at:
                self.stop("timed out", "Connection timed out")
                self._link.abort()  # it would never take what is still queued for it
                return
            # Who is behind with reading has enough of us to read.
            if now >= pulse.heartbeat_due(timeout) and not self._is_congested:
                self._heartbeat()
            due = lost_at
            if not self._is_congested:
                due = min(due, pulse.heartbeat_due(timeout))
            await clock.sleep(min(due - now, timeout, LOOK_INTERVAL_MAX))
