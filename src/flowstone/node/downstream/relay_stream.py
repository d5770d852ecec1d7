"""A relay: sends our log to one replica, from SUBSCRIBE until the connection ends.

A relay is either live, and sends the chunks of the shared tail (`node/wal/log_tail.py`), or lagging, and reads the log
files (`node/wal/log_reader.py`) until the tail includes its position. A replica that reads slowly starts to lag; a
silent replica is disconnected after a timeout. `replication/relay/relay_logic.py` decides which rows a replica gets,
and when heartbeats are due.
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
from flowstone.node.downstream.join_server import JoinLink as JoiningLink
from flowstone.node.downstream.join_server import raft_row
from flowstone.node.info import replicaset_name
from flowstone.node.instance import Instance
from flowstone.node.wal.gc import Consumer
from flowstone.node.wal.log_reader import LogReader, LogsGone
from flowstone.node.wal.log_tail import LogTail, packets_of, promoted_term
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
from flowstone.replication.relay.relay_logic import TRANSITIONS, Acked, Pulse, RelayState, RowFilter, xlog_gap
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

ACK_SIZE_MAX: Final = 64 * 1024
"""Maximum size of a packet from a replica, in bytes. An ACK has some hundred bytes."""

UNANSWERED_MAX: Final = 4 * 1024 * 1024
"""Maximum size, in bytes, of rows sent since the last packet from the replica. A 2.6 replica with constant input only
reads. It would neither write its log nor send ACKs, and the connection would time out. It processes this much in tenths
of a second."""

LEAVE_SECONDS: Final = 30.0
"""Time after which an expelled replica is disconnected if it makes no progress towards the row that expels it. Real
servers never disconnect it."""

LOOK_INTERVAL_MAX: Final = 1.0
"""Maximum sleep of a relay, because `replication_timeout` may be lowered during the sleep."""

FIRST_VERSION_WITH_RAFT: Final = 2 << 16 | 6 << 8
_CLOSED: Final = "Broken pipe"


class RelayLink(JoiningLink, Protocol):
    """The connection of a replica, as a relay uses it."""

    @property
    def is_busy(self) -> bool:
        """True if other requests on this connection are pending."""
        ...

    def hold(self) -> None:
        """Do not process further requests until `release`."""
        ...

    def release(self) -> None:
        """Process requests again."""
        ...

    def hand_over(self, receiver: Receiver) -> bytes:
        """Make `receiver` the owner of the connection, which ends the client session; return the unread bytes."""
        ...

    def close(self) -> None:
        """Send the queued bytes, then close the connection."""
        ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Downstream:
    """A replica that has joined or subscribed since the start, connected or not."""

    uuid: UUID
    id: int = 0
    """The replica id; 0 if anonymous."""
    state: RelayState = RelayState.OFF
    relay: Relay | None = None
    consumer: Consumer | None = None
    vclock_sync: int = 0
    """The number of the last heartbeat, counted across connections."""
    message: str = ""
    system_message: str | None = None
    sent_bytes: int = 0
    """Bytes of rows sent, across connections."""
    sent_rows: int = 0

    def become(self, state: RelayState) -> None:
        assert state in TRANSITIONS[self.state], f"invalid relay transition: {self.state.value} to {state.value}"
        self.state = state


class RelayOwner(Protocol):
    """The relays of a node, as a single relay uses them; implemented by `Relays`."""

    instance: Instance

    @property
    def wal_dir(self) -> str: ...

    @property
    def tail(self) -> LogTail: ...

    def forget(self, relay: Relay) -> None:
        """Remove a relay that has ended."""
        ...

    def acknowledged(self, replica: Downstream, vclock: VClock) -> None:
        """Record that an ACK has advanced the vclock of the replica."""
        ...

    def answered(self, replica: Downstream, vclock_sync: int, vclock: VClock) -> None:
        """Pass on the vclock of the replica, from its answer to the heartbeat with number `vclock_sync`."""
        ...


class Relay:
    """Sends our log to one replica."""

    def __init__(
        self, relays: RelayOwner, replica: Downstream, link: RelayLink, subscribe: Subscribe, sync: int
    ) -> None:
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
        """The term of a PROMOTE or DEMOTE that must not be sent before a RAFT row with that term."""
        clock = instance.outside.clock
        self.pulse = Pulse(clock.monotonic(), is_2_6=self._is_2_6)
        self.acked = Acked(subscribe.vclock)
        self._own_lsn_at_subscribe = subscribe.vclock.get(instance.id)
        self.is_intact: Final = subscribe.vclock.get(replica.id) >= instance.journal.vclock.get(replica.id)
        """True if the replica subscribed with all its own rows that we had, so it has lost none of them."""
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

    # --- lifecycle ---

    @property
    def number(self) -> int | None:
        """The number of the next chunk of the tail to send; None while the relay lags and reads files."""
        return self._number

    def start(self) -> None:
        """Answer the SUBSCRIBE, and start to send rows."""
        instance = self._instance
        # The name is required: 3.x replicas configured with a replica set name do not follow a master without it.
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
                LOG.error("relay to %s failed", self._link.peer, exc_info=error)
            # No error is sent, so that the replica reconnects: most errors would stop its applier permanently.
            self.stop(str(error))

    def stop(self, message: str, system_message: str | None = None, *, error: TarantoolError | None = None) -> None:
        """Stop the relay and close the connection, after sending `error`, if any. Calling it again has no effect.

        `message` and `system_message` are shown in `box.info`.
        """
        if self._is_over:
            return
        self._is_over = True
        replica = self.replica
        # Anonymous replicas may disconnect at any time.
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
        """True if the replica was deleted from `_cluster`: it still gets rows, but its ACKs do not count."""
        return self._last_row is not None

    def expel(self) -> None:
        """Keep the connection open until the replica has the row that expels it, or until a time limit."""
        self._last_row = self._instance.vclock.without_zero()
        self._leave_at = self._instance.outside.clock.monotonic() + LEAVE_SECONDS

    def _expelled_acked(self, vclock: VClock) -> None:
        """Extend the time limit while the replica makes progress; once it has the row, the limit becomes final."""
        assert self._last_row is not None
        now = self._instance.outside.clock.monotonic()
        if self._last_row <= vclock:
            self._leave_at = min(self._leave_at, now + self._instance.configuration.replication_timeout)
        else:
            self._leave_at = now + LEAVE_SECONDS

    async def ended(self) -> None:
        """Wait until all tasks of the relay have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- `Receiver` ---

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
        """Process ACKs. Only the vclock of the last one matters, and the last timestamp among them."""
        clock = self._instance.outside.clock
        self.pulse.acked(clock.monotonic())
        row = decode_row(packets[-1])
        if row.type != RequestType.OK:
            raise errors.Protocol(f"unexpected {type_name(row.type)} from subscribed replica: only ACKs are allowed")
        ack = decode_ack(row)
        if (unwritten := self._unwritten(ack.vclock)) is not None:
            # No error is sent, because it would stop the applier permanently. The replica may be right: if another
            # member sent it rows of ours that we have lost, it reconnects, and its SUBSCRIBE shows that.
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
        # Before the ACK is counted: a replica in a newer term must not complete a quorum for our transactions.
        if not self._is_2_6:  # a 2.6 log must not contain RAFT rows
            self._instance.elections.heard_term(self.replica.id, ack.term)
        if self.acked.take(ack, clock.wall()):
            self._rows.follow(self.acked.vclock)  # skip rows that another member has sent
            self._relays.acknowledged(self.replica, self.acked.vclock)
        if ack.vclock_sync:
            self._relays.answered(self.replica, ack.vclock_sync, self.acked.vclock)

    def _unwritten(self, vclock: VClock) -> str | None:
        """Return an error text if the replica acknowledges rows of this instance that do not exist; else None.

        Such an ACK would count towards the quorum of later transactions. Rows that the replica had when it subscribed
        are accepted.
        """
        number = self._instance.id
        known = max(self._instance.vclock.get(number), self._own_lsn_at_subscribe)
        if not number or vclock.get(number) <= known:
            return None
        what = f"row {vclock.get(number)} of this instance (replica {number})"
        return f"replica acknowledges {what}, but the last row written is {known}"

    # --- rows ---

    @property
    def _is_held(self) -> bool:
        """True while no rows may be sent: the replica reads too slowly, or does not know a term yet."""
        is_late = self._is_congested or self._unanswered > UNANSWERED_MAX
        return is_late or self._awaited_term > self._sent_term or self._is_over

    def _go_on(self) -> None:
        """Resume sending unless something still blocks it."""
        if self._is_held:
            return
        if self._released is not None and not self._released.done():
            self._released.set_result(None)
        elif self._number is not None:
            self.push()

    def push(self) -> None:
        """Send chunks of the tail, as long as the replica can take them; read files if the next chunk is gone."""
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
        """Send rows from the log files until the tail includes the position of the replica."""
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
                    # The replica got these rows from another member and acknowledged them, so their logs were deleted.
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
        """Wait until `_go_on` finds that rows may be sent again."""
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
        """Return True if the replica knows `term`, the term of a PROMOTE or DEMOTE in the next rows, or if this call
        sends it.

        If False, the rows must wait until the term is on our own disk; before that, no peer may receive the term.
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
        """Send rows, and record that the log has been sent up to `after`."""
        count = self._rows.count(after) if packets else 0
        self._rows.follow(after)
        if not packets:
            return
        self.replica.sent_rows += count
        self.replica.sent_bytes += len(packets)
        self.pulse.sent(self._instance.outside.clock.monotonic())
        self._unanswered += len(packets)
        self._link.write(packets)

    # --- election state and heartbeats ---

    def send_raft(self) -> None:
        """Send the election state, unless the replica is anonymous or too old to understand it."""
        if not self._gets_raft or self._is_over:
            return
        shown = self._instance.elections.shown
        self._sent_term = shown.term
        self._link.write(encode_row_packet(raft_row(shown, self._version)))

    def elections_changed(self) -> None:
        """Send the election state, and the rows that waited for it."""
        self.send_raft()
        self._go_on()

    def synchronize(self) -> None:
        """Send a heartbeat now. Calls in one iteration of the event loop share it."""
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
        """Send heartbeats, and disconnect a replica that is silent or expelled."""
        clock, pulse = self._instance.outside.clock, self.pulse
        while True:
            timeout = self._instance.configuration.replication_timeout
            lost_at = pulse.lost_at(self._instance.elections.disconnect_timeout)
            now = clock.monotonic()
            if self.is_expelled and now >= self._leave_at:
                self.stop("replica is no longer registered")
                return
            if now >= lost_at:
                self.stop("timed out", "Connection timed out")
                self._link.abort()  # queued bytes would never be sent
                return
            # A replica that reads slowly still has input.
            if now >= pulse.heartbeat_due(timeout) and not self._is_congested:
                self._heartbeat()
            due = lost_at
            if not self._is_congested:
                due = min(due, pulse.heartbeat_due(timeout))
            await clock.sleep(min(due - now, timeout, LOOK_INTERVAL_MAX))
