"""The applier of one upstream: connects, joins or subscribes, and passes the received rows to a `Sink`.

It runs `replication/applier/protocol.py` on a stream of `Outside`, and decides when to pause, when to retry and what to
log. It never interprets rows: it passes them to a sink. The node, `follow` and `archive` have different sinks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final, NoReturn
from uuid import UUID

from flowstone.client.connection import CLOSE_SECONDS, CONNECT_SECONDS, READ_SIZE, reason_of, tls_hint, tls_of
from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.greeting import Greeting
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import Uri
from flowstone.node.upstream.ballot_watcher import BallotWatching
from flowstone.node.upstream.sink import Sink
from flowstone.outside import Outside, Stream
from flowstone.replication.applier.protocol import (
    BEATS_ALWAYS,
    ApplierProtocol,
    BallotIsEvent,
    Entered,
    Event,
    FinalBegun,
    FinalRows,
    Greeted,
    HeartbeatHeard,
    JoinEnded,
    MetaRow,
    RaftHeard,
    Rows,
    SnapshotBegun,
    SnapshotRows,
    Subscribed,
)
from flowstone.replication.applier.received_rows import check_name, goes_on
from flowstone.replication.applier.states import (
    DOES_NOT_KNOW_US,
    ENDED,
    FAILED,
    ON_ITS_WAY,
    REMOVED,
    TRANSITIONS,
    UNKNOWN_MAX,
    ApplierState,
    ConnectionLost,
    advice_about_peer,
    code_of,
    doing,
    is_ordinary,
    lacks_rows,
    reaction,
    shortened,
)
from flowstone.replication.membership.membership import Members, Standing
from flowstone.replication.messages import Ballot, FetchSnapshot, Join, Register, Subscribe, SubscribeReply
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

TIMEOUT_INFINITY: Final = 100 * 365 * 86400.0
"""The lag of an applier that has received nothing yet; real servers show the same value."""

SILENCE_MAX: Final = 4
"""Multiple of `replication_timeout` after which a silent connection counts as lost, at both ends."""

JOIN_SILENCE_SECONDS: Final = 30.0
"""Timeout of a read during a join: the peer waits for its log and for pending synchronous transactions before it sends
the snapshot."""

FAILURES_BEFORE_BACKOFF: Final = 10
BACKOFF: Final = 1.5
RETRY_SECONDS_MAX: Final = 5.0
"""Retries back off after FAILURES_BEFORE_BACKOFF failures: each pause is BACKOFF times the last, up to
RETRY_SECONDS_MAX."""

RETURN_SHARE: Final = 0.05
"""Fraction of `replication_timeout` after which an attempt follows the return of the peer. It bounds the attempts of
two peers each of which subscribes, fails, and so announces its return to the other."""

_LAST_2_6: Final = 2 << 16 | 6 << 8


class Applier:
    """Follows one upstream, from `start` to `stop`.

    The applier pauses in the states passed to `start`, later in the state passed to `resume_to`, and no longer after
    `resume`. From SYNC on it continues by itself. `state` is the status in `box.info`; `error` is the last error, if
    any.
    """

    def __init__(
        self,
        outside: Outside,
        uri: Uri,
        sink: Sink,
        *,
        replication_timeout: float = 1.0,
        sync_lag: float = 10.0,
        on_state: Callable[[Applier], None] = lambda applier: None,
        on_ballot: Callable[[Applier], None] = lambda applier: None,
        on_alive: Callable[[Applier], None] = lambda applier: None,
        may_regain: Callable[[UUID], bool] | None = None,
        members: Members | None = None,
        silence_max: Callable[[], float] | None = None,
    ) -> None:
        """`on_alive` is called for each message that elections count as a heartbeat.

        `silence_max` returns the seconds after which a silent connection counts as lost; by default, SILENCE_MAX times
        `replication_timeout`. `may_regain` and `members` are passed to `Standing`.
        """
        self._outside = outside
        self._sink = sink
        self._on_state = on_state
        self._on_ballot = on_ballot
        self._on_alive = on_alive
        self._task: asyncio.Task[None] | None = None
        # The local error that `fail` stops the task with; it distinguishes this cancellation from that of `stop`.
        self._verdict: FlowstoneError | None = None
        self._pause_at: frozenset[ApplierState] = frozenset()
        self._resumed = asyncio.Event()
        self._returned = asyncio.Event()
        self._waiters: list[_Waiter] = []
        self._protocol: ApplierProtocol | None = None
        self._stream: Stream | None = None
        self._watch: BallotWatching | None = None
        self._is_ack_due = False
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        # The vclock of the last ACK; None forces the next one, even if the vclock is unchanged.
        self._acked: VClock | None = None
        self._heard_at = outside.clock.monotonic()
        self._last_logged: object = None
        self._failures = self._times_unknown = 0
        self.standing = Standing(uri.address, members=members, may_regain=may_regain)
        self._has_gap = False
        self.replication_timeout = replication_timeout
        self._silence_max = silence_max or (lambda: SILENCE_MAX * self.replication_timeout)
        self.sync_lag = sync_lag
        self.uri, self._say = uri, logging.LoggerAdapter(LOG, {"peer": uri.address})
        self.state = ApplierState.OFF
        self.uuid: UUID | None = None
        self.version: tuple[int, int, int] = (0, 0, 0)
        self.ballot: Ballot | None = None
        self.peer_id = 0
        self.lag, self.peer_time = TIMEOUT_INFINITY, 0.0  # peer_time: the last timestamp of the peer
        self.fresh_at: float | None = None
        """The last moment, in monotonic time, up to which we certainly have all rows of the peer; None if never. Taken
        from the last timestamp of the peer, converted to our clock; kept when the connection is lost."""
        self.error: FlowstoneError | None = None
        self.is_disowned = False
        """True if the peer has all rows of other members that we have, but does not know us: we were expelled."""
        self.remote_vclock_at_subscribe: VClock | None = None

    # --- control ---

    def start(self, *, pause_at: Collection[ApplierState] = ()) -> None:
        """Start the applier; it pauses in the first state of `pause_at` that it enters."""
        assert self._task is None or self._task.done(), "the applier is already running"
        self._pause_at = frozenset(pause_at)
        self._resumed.clear()
        self._verdict = self._last_logged = None
        self._failures = self._times_unknown = 0
        self.standing.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def resume(self) -> None:
        """Continue without pauses: follow until `stop`, and reconnect whenever the connection is lost."""
        self._pause_at = frozenset()
        self._resumed.set()

    async def resume_to(self, state: ApplierState, *, is_patient: bool = True) -> None:
        """Continue until `state`, and pause there; raise the error of the applier if it fails before.

        If `is_patient`, LOADING is not a failure: the applier retries while the peer is loading, or while a login or a
        right is missing.
        """
        if self._task is None or self._task.done():
            raise self._failure()
        # Paused there already. While `_resumed` is set, the applier is about to leave the state.
        if self.state is state and not self._resumed.is_set():
            return
        failures = FAILED - {ApplierState.LOADING} if is_patient else FAILED
        waiter = _Waiter(asyncio.get_running_loop().create_future(), failures | {state})
        # Register before the applier is resumed: it may reach the state, or fail, before this coroutine runs again.
        self._waiters.append(waiter)
        self._pause_at = frozenset({state})
        self._resumed.set()
        try:
            reached = await waiter.reached
        finally:
            self._waiters.remove(waiter)
        if reached is not state:
            raise self._failure()

    def _failure(self) -> FlowstoneError:
        return self.error or ConnectionLost(f"applier of {self.uri.address} is {self.state.value}")

    async def stop(self) -> None:
        """Stop the applier and close the connection. It can be started again."""
        task = self._task
        if task is not None:
            task.cancel()
            # Shielded, so that a cancellation of the caller is not mistaken for that of the task.
            await asyncio.gather(asyncio.shield(task), return_exceptions=True)
            self._task = None
        if self.state is not ApplierState.OFF:
            self._set_state(ApplierState.OFF)

    def fail(self, error: FlowstoneError) -> None:
        """Stop the applier with a local `error`, such as a failed write that rolled back applied rows."""
        if self._task is None or self._task.done() or self._verdict is not None:
            return
        self._verdict = error
        self._task.cancel()

    def peer_subscribed(self) -> None:
        """Retry soon if the connection is lost: the peer follows us, so it is there again."""
        self._returned.set()

    def info(self) -> dict[str, Any]:
        """Return `upstream` of `box.info.replication[n]`, which is shown unless the applier is off."""
        found: dict[str, Any] = {"status": self.state.value}
        if self._task is not None:
            found["lag"] = self.lag
            found["idle"] = self._outside.clock.monotonic() - self._heard_at
            found["peer"] = str(self.uri)
        if self.error is not None:
            found["message"] = self.error.message
            if self.error.hint and (self.state is ApplierState.STOPPED or isinstance(self.error, DOES_NOT_KNOW_US)):
                found["message"] += f"; {self.error.hint}"  # names the row that failed, or what the operator has to do
            cause = self.error.__cause__
            if isinstance(cause, OSError):
                reason = reason_of(cause, self.uri)
                found["system_message"] = reason[:1].upper() + reason[1:]
        return found

    # --- attempts and retries ---

    async def _run(self) -> None:
        try:
            while (after := await self._attempt()) not in ENDED:
                self._set_state(after)
                await self._pause()
            self._set_state(after)
        except asyncio.CancelledError:
            if self._verdict is None:
                raise
            self._set_state(self._fail(self._verdict))

    async def _pause(self) -> None:
        """Wait before the next attempt, for a shorter time if the peer returns meanwhile."""
        self._returned.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_before_retry()):
                await self._returned.wait()
                await self._outside.clock.sleep(RETURN_SHARE * self.replication_timeout)

    async def _attempt(self) -> ApplierState:
        """Connect and follow until an error occurs; return the state that follows from the error."""
        try:
            await self._follow()
        except (FlowstoneError, OSError) as error:
            return self._fail(error)
        except Exception as error:
            self._say.exception("applier of %s failed", self.uri.address)
            return self._fail(FlowstoneError(f"{type(error).__name__}: {error}"))
        finally:
            await self._disconnect()

    def _fail(self, error: FlowstoneError | OSError) -> ApplierState:
        """Record the error, log it unless it repeats the last one, and return the state that follows from it."""
        if isinstance(error, OSError):
            reason = reason_of(error, self.uri) or "timed out"
            lost = ConnectionLost(f"connection to {self.uri.address} is lost: {reason}")
            lost.__cause__ = error
            error = lost
        error.message = shortened(error.message)
        after = self._reaction(error)
        if after is ApplierState.OFF:
            self._say.info("ignoring upstream %s: it is this instance", self.uri.address)
            return after
        self.error = error
        level = logging.INFO if is_ordinary(error, self._failures) else logging.WARNING
        which = code_of(error) or error.message, error.hint, level
        # Retries would log the same line every second. The code is compared, not the message, which may contain vclocks
        # or ports.
        if which != self._last_logged and self._log(level, error, after):
            self._last_logged = which
        self._failures += 1
        return after

    def _reaction(self, error: FlowstoneError) -> ApplierState:
        """Return the state that follows from the error, and set the hint of errors about membership."""
        other = advice_about_peer(error, self._sink.replicaset_uuid)
        if other is not None:
            error.hint = other
        # Only if we have an id: a joining instance is unknown to all members.
        elif isinstance(error, DOES_NOT_KNOW_US) and self.state is ApplierState.READY and self._sink.replica_id:
            number, ballot = self._sink.replica_id, self.ballot
            # A peer that lacks rows may learn of us from those rows, however often it has rejected us so far.
            if ballot is None or not lacks_rows(ballot.vclock, self._sink.vclock, besides=number):
                self._times_unknown += 1
            self.is_disowned = self._times_unknown > UNKNOWN_MAX
            error.hint = REMOVED if self.is_disowned else ON_ITS_WAY
            if not self.is_disowned:
                return ApplierState.LOADING
        is_2_6, has_data = self._sink.version_id <= _LAST_2_6, self._sink.replicaset_uuid is not None
        return reaction(error, is_2_6=is_2_6, has_data=has_data)

    def _log(self, level: int, error: FlowstoneError, after: ApplierState) -> bool:
        """Log the error; return False if a waiter gets it instead, which decides whether to retry."""
        if after is ApplierState.STOPPED:
            self._say.error("replication from %s is stopped: %s", self.uri.address, error)
        elif any(waiter.wants(after) for waiter in self._waiters):
            return False
        else:
            failed = doing(self.state, has_data=self._sink.replicaset_uuid is not None)
            what = f"{failed} {self.uri.address}: " if isinstance(error, TarantoolError) else ""
            self._say.log(level, "%s%s; retrying every %g s", what, error, self.replication_timeout)
        return True

    def _pause_before_retry(self) -> float:
        """Return the pause before the next attempt: as long as in real servers at first, longer after many failures."""
        interval, patience = self.replication_timeout, max(0, self._failures - FAILURES_BEFORE_BACKOFF)
        return min(interval * BACKOFF**patience, max(interval, RETRY_SECONDS_MAX))

    def _set_state(self, state: ApplierState) -> None:
        assert state in TRANSITIONS[self.state], f"invalid applier transition: {self.state.value} to {state.value}"
        self.state = state
        self._on_state(self)
        for waiter in self._waiters:
            waiter.see(state)

    async def _enter(self, state: ApplierState) -> None:
        """Set the state, and wait until resumed if the applier has to pause in it."""
        if state in self._pause_at:
            # Must precede `_set_state`: a waiter that it wakes may call `resume` at once.
            self._resumed.clear()
        self._set_state(state)
        if state in self._pause_at:
            await self._resumed.wait()

    async def _disconnect(self) -> None:
        # Clear it first: a scheduled ACK then finds no protocol and does nothing.
        self._protocol = None
        if self._timer is not None:
            self._timer.cancel()
        if self._request_ack in self._sink.on_written:
            self._sink.on_written.remove(self._request_ack)
        stream, self._stream = self._stream, None
        try:
            await self._end_watch()
        finally:
            if stream is not None:
                with suppress(TimeoutError):  # closing flushes, which never ends if the peer has stopped reading
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await stream.close()

    # --- one connection ---

    async def _follow(self) -> NoReturn:
        """Run one connection until it fails."""
        uuid = self._sink.instance_uuid
        protocol = ApplierProtocol(self.uri.address, instance_uuid=uuid, came_from=self.state)
        while True:
            event = protocol.next_event()
            # Send before waiting for bytes: handling the last event may have produced a request.
            self._send(protocol)
            self._is_busy = event is not None
            if event is None:
                await self._read(protocol)
            else:
                await self._handle(protocol, event)

    async def _handle(self, protocol: ApplierProtocol, event: Event) -> None:
        sink = self._sink
        match event:
            case Rows(slab, timestamp):
                await self._apply(slab)
                self._note_lag(timestamp)
                self._note_fresh(timestamp)
            case HeartbeatHeard(heartbeat):
                self._check_member()
                self._on_alive(self)
                self._note_lag(heartbeat.timestamp)
                if self.state is ApplierState.FOLLOW:  # before that, rows written earlier are still to come
                    self._note_fresh(heartbeat.timestamp)
                self._acked = None  # a heartbeat requires an ACK, even if the vclock is unchanged
                self._request_ack()
            case RaftHeard(row):
                # The row takes effect only when the peer is known to be a member
                # (docs/spec/replication.md#unregistered-originators).
                self.standing.hear(row)
                self._check_member()
            case SnapshotRows(slab):
                await sink.snapshot_rows(slab)
            case FinalRows(slab):
                await self._final(slab)
            case Entered(state):
                self.ballot = protocol.ballot or self.ballot
                await self._enter(state)
                await self._act(protocol, state)
            case Greeted(greeting):
                self._greeted(greeting)
            case BallotIsEvent():
                protocol.ballot_known(await self._watch_ballot())
            case SnapshotBegun(vclock):
                await sink.begin_snapshot(vclock, protocol.greeting.version)
            case MetaRow(row):
                await sink.meta(row)
            case FinalBegun(stop_vclock):
                await sink.begin_final(stop_vclock)
            case JoinEnded(vclock):
                await sink.end_join(vclock)
            case Subscribed():
                # Ballots are not needed while rows arrive.
                await self._end_watch()
                self._begin_following(protocol)

    async def _act(self, protocol: ApplierProtocol, state: ApplierState) -> None:
        """Give the command that the protocol waits for in `state`."""
        if state is ApplierState.CONNECT:
            self._stream = await self._open()
        elif state is ApplierState.CONNECTED:
            if self.uri.user is None:
                protocol.go_on()
            else:
                protocol.log_in(self.uri.user, self.uri.password or "")
        elif state is ApplierState.READY:
            self._ask(protocol)

    def _ask(self, protocol: ApplierProtocol) -> None:
        """Send the next request: for a snapshot if there is no data, for an id if we need one, else SUBSCRIBE."""
        sink, uuid = self._sink, self._sink.instance_uuid
        if sink.replicaset_uuid is None:
            # Joining again would yield the same data.
            if protocol.has_joined:
                raise FlowstoneError(f"snapshot from {self.uri.address} has no replica set UUID")
            if sink.is_anonymous:
                protocol.fetch_snapshot(FetchSnapshot(sink.version_id, uuid))
            else:
                protocol.join(Join(uuid, sink.version_id))
        # After a registration the id may arrive with the subscription only, so this must not repeat REGISTER.
        elif sink.replica_id == 0 and not sink.is_anonymous and not protocol.has_registered:
            self._has_gap = False
            protocol.register(Register(uuid, sink.vclock))
        else:
            place = (sink.replicaset_uuid, uuid, sink.vclock, sink.version_id)
            protocol.subscribe(Subscribe(*place, sink.is_anonymous, self._id_filter()))

    def _id_filter(self) -> tuple[int, ...]:
        """Return the id filter of the sink, without our own id if the peer has rows of ours that we lost."""
        wanted, number = self._sink.id_filter, self._sink.replica_id
        if self.ballot is not None:
            self._see_own_rows(self.ballot.vclock)
        return tuple(each for each in wanted if each != number) if self._lacks_own_rows() else wanted

    def _see_own_rows(self, theirs: VClock) -> None:
        if self._sink.replica_id:
            # Kept across reconnects: even if the peer loses these rows, we know that they existed.
            self.standing.own_lsn_seen = max(self.standing.own_lsn_seen, theirs.get(self._sink.replica_id))

    def _lacks_own_rows(self) -> bool:
        number = self._sink.replica_id
        return number != 0 and self.standing.own_lsn_seen > self._sink.vclock.get(number)

    async def _final(self, slab: Slab) -> None:
        """Pass on final rows. Rows of a registration are passed on only if they continue our log without a gap.

        A 2.6 master sends the rows that it has written since REGISTER, even if our log ends long before them. The
        subscription then brings all rows, including the one that registers us.
        """
        if self.state is ApplierState.REGISTER:
            self._has_gap = self._has_gap or not goes_on(slab, self._sink.vclock)
            if self._has_gap:  # rows after the gap are skipped, too
                return
        await self._sink.final_rows(slab)

    # --- input and output ---

    async def _open(self) -> Stream:
        uri = self.uri
        try:
            return await self._outside.network.connect(uri.host, uri.port, timeout=CONNECT_SECONDS, tls=tls_of(uri))
        except OSError as error:
            reason = reason_of(error, uri) or f"no answer within {CONNECT_SECONDS:g} s"
            raise ConnectionLost(f"cannot connect to {uri.address}: {reason}") from error

    async def _read(self, protocol: ApplierProtocol) -> None:
        """Read bytes with a timeout: a peer that lost power never closes the connection. A join may take longer."""
        assert self._stream is not None
        seconds = self._silence_max()
        if protocol.is_joining:
            seconds = max(seconds, JOIN_SILENCE_SECONDS)
        hint = None if protocol.is_greeted else tls_hint(self.uri)
        try:
            async with asyncio.timeout(seconds):
                data = await self._stream.read(READ_SIZE)
        except TimeoutError as error:
            raise ConnectionLost(f"{self.uri.address} sent nothing for {seconds:g} s", hint=hint) from error
        if not data:
            raise ConnectionLost(f"{self.uri.address} closed the connection", hint=hint)
        self._heard_at = self._outside.clock.monotonic()
        protocol.receive(data)

    def _send(self, protocol: ApplierProtocol) -> None:
        if (data := protocol.data_to_send()) and self._stream is not None:
            self._stream.write(data)

    def _greeted(self, greeting: Greeting) -> None:
        if (self.uuid, self.version) != (greeting.uuid, greeting.version):
            text = greeting.version_text
            self._say.info("remote master %s at %s running Tarantool %s", greeting.uuid, self.uri.address, text)
        # Another instance answers at this address; the vclock of the former one does not count.
        if self.uuid != greeting.uuid:
            self.standing.own_lsn_seen = 0
        self.uuid, self.version = greeting.uuid, greeting.version

    # --- the ballot of a newer peer ---

    async def _watch_ballot(self) -> Ballot:
        """Start to watch the ballot on a connection of its own; return the first one."""
        self._watch = BallotWatching(self.uri.address, self._open, self._new_ballot)
        self.ballot = await self._watch.first(CONNECT_SECONDS + self._silence_max())
        return self.ballot

    def _new_ballot(self, ballot: Ballot) -> None:
        self.ballot = ballot
        self._on_ballot(self)

    async def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.end()

    # --- following ---

    async def _apply(self, slab: Slab) -> None:
        # Older masters send no heartbeats between rows, so for elections their rows are signs of life
        # (docs/spec/replication.md#heartbeats).
        if self.version < BEATS_ALWAYS:
            self._on_alive(self)
        self._note_member()
        await self._sink.apply(slab)

    def _check_member(self) -> None:
        self.standing.check()
        self._note_member()

    def _note_member(self) -> None:
        """Report that the peer has become a member, and what it has said before."""
        if self.standing.is_new:
            self.standing.is_new = False
            self._on_state(self)
        if (row := self.standing.heard()) is not None:
            self._sink.raft(self.peer_id, row)

    def peer_acknowledged(self, replica_id: int, vclock: VClock) -> None:
        """Record that a member that follows us has written all rows up to `vclock`, perhaps also rows it had lost."""
        self.standing.acknowledged(replica_id, vclock)

    def _check_own_rows(self, reply: SubscribeReply) -> None:
        """Raise ConnectionLost if the reply is the first sign that we lost rows: the retry subscribes for them, too."""
        did_lack = self._lacks_own_rows()
        self._see_own_rows(reply.vclock)
        number = self._sink.replica_id
        if number in self._sink.id_filter and self._lacks_own_rows() and not did_lack:
            first, last = self._sink.vclock.get(number) + 1, self.standing.own_lsn_seen
            raise ConnectionLost(
                f"{self.uri.address} has rows {first}…{last} of this instance, which are missing here",
                hint="requesting them",
            )

    def _begin_following(self, protocol: ApplierProtocol) -> None:
        reply = protocol.reply
        assert reply is not None
        assert self.uuid is not None
        # All checks come before any change of state: a peer that fails one must not count as followed.
        check_name(self.uri.address, reply.replica_id, self._sink.replica_id)
        self.standing.subscribed(self.uuid, reply.replica_id, reply.vclock, protocol.subscribed_from)
        self._check_own_rows(reply)
        text = "subscribed to %s: remote vclock %s, local vclock %s"
        self._say.info(text, self.uri.address, reply.vclock, self._sink.vclock)
        self.peer_id = reply.replica_id
        self.remote_vclock_at_subscribe = reply.vclock
        self.lag, self.peer_time = TIMEOUT_INFINITY, 0.0
        self.error = self._last_logged = None
        self._failures = self._times_unknown = 0
        self.is_disowned = False
        self._acked = None
        protocol.admit(self.standing, self._sink)
        # From here on `_acknowledge` may send: ACKs are valid only after the reply to SUBSCRIBE.
        self._protocol = protocol
        self._sink.on_written.append(self._request_ack)
        self._tick()

    def _tick(self) -> None:
        """Send an ACK while rows are being applied: heartbeats are not read then, but the master expects ACKs."""
        if self._is_busy:
            self._acked = None
            self._request_ack()
        self._timer = asyncio.get_running_loop().call_later(self.replication_timeout, self._tick)

    def _note_lag(self, timestamp: float) -> None:
        if timestamp:  # newer masters omit it from a heartbeat that follows rows
            self.lag, self.peer_time = self._outside.clock.wall() - timestamp, timestamp

    def _note_fresh(self, timestamp: float) -> None:
        if timestamp:
            at = self._outside.clock.monotonic() - max(0.0, self._outside.clock.wall() - timestamp)
            self.fresh_at = at if self.fresh_at is None else max(self.fresh_at, at)

    def _request_ack(self) -> None:
        """Schedule an ACK. All writes of one iteration of the event loop share it."""
        if not self._is_ack_due:
            self._is_ack_due = True
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        self._is_ack_due = False
        protocol = self._protocol
        if protocol is None:
            return
        # Send the written vclock: a row counts for the quorum of the owner only when it is in our log.
        vclock = self._sink.vclock.without_zero()
        if vclock != self._acked:
            self._acked = vclock
            protocol.acknowledge(vclock, self._sink.term)
            self._send(protocol)
        if protocol.synchronize(vclock, self.lag, self.sync_lag):
            self._set_state(ApplierState.FOLLOW)


class _Waiter:
    """A caller that waits for one of `states`."""

    def __init__(self, reached: asyncio.Future[ApplierState], states: frozenset[ApplierState]) -> None:
        self.reached = reached
        self._states = states

    def wants(self, state: ApplierState) -> bool:
        return state in self._states

    def see(self, state: ApplierState) -> None:
        if self.wants(state) and not self.reached.done():
            self.reached.set_result(state)
