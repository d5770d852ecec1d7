"""The applier of one upstream: connects, joins or subscribes, and feeds what comes to a `Sink`, for ever.

Runs `replication/applier_protocol.py` on a stream of `Outside`. Decides when to pause, when to try
again and what to log; what rows mean is for the sink, which the node, `follow` and `archive` each have one of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final, NoReturn
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.greeting import Greeting
from flowstone.iproto.uri import Uri
from flowstone.node.ballot_watching import BallotWatching
from flowstone.node.connection import CLOSE_SECONDS, CONNECT_SECONDS, READ_SIZE, reason_of, tls_hint, tls_of
from flowstone.node.sink import Sink
from flowstone.outside import Outside, Stream
from flowstone.replication.applier import (
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
from flowstone.replication.applier_protocol import (
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
from flowstone.replication.membership import Members, Standing
from flowstone.replication.messages import Ballot, FetchSnapshot, Join, Register, Subscribe, SubscribeReply
from flowstone.replication.received_rows import check_name, check_own_rows, goes_on
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import Slab

LOG = logging.getLogger("flowstone.node")

TIMEOUT_INFINITY: Final = 100 * 365 * 86400.0
"""The lag of an applier that has heard nothing yet, as real ones show it."""

SILENCE_MAX: Final = 4
"""Times `replication_timeout` without a word, and the connection counts as lost; both ends agree on it."""

JOIN_SILENCE_SECONDS: Final = 30.0
"""As long a peer may say nothing in a join: it waits for its log and for synchronous transactions before it begins."""

FAILURES_BEFORE_BACKOFF: Final = 10
BACKOFF: Final = 1.5
RETRY_SECONDS_MAX: Final = 5.0
"""How the pauses between attempts grow once these many have failed."""

_LAST_2_6: Final = 2 << 16 | 6 << 8


class Applier:
    """Follows one upstream. Made, `start`ed, resumed state by state or for good, and `stop`ped.

    It pauses in the states it is told to, at first those of `start`, then the one of `resume_to`; from SYNC on it goes
    on by itself. `state` is always that of `box.info`, `error` why it is not what it should be.
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
        """`on_alive` is told of signs of life, as elections count them. `silence_max`: as SILENCE_MAX, in seconds.
        `may_regain` and `members` are those of `Standing`.
        """
        self._outside = outside
        self._sink = sink
        self._on_state = on_state
        self._on_ballot = on_ballot
        self._on_alive = on_alive
        self._task: asyncio.Task[None] | None = None
        self._verdict: FlowstoneError | None = None
        self._pause_at: frozenset[ApplierState] = frozenset()
        self._resumed = asyncio.Event()
        self._waiters: list[_Waiter] = []
        self._protocol: ApplierProtocol | None = None
        self._stream: Stream | None = None
        self._watch: BallotWatching | None = None
        self._is_ack_due = False
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
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
        self.lag, self.peer_time = TIMEOUT_INFINITY, 0.0  # lag; what its clock said last
        self.error: FlowstoneError | None = None
        self.is_disowned = False
        """True if the peer does not know us although it has all rows of others that we have: we were expelled."""
        self.remote_vclock_at_subscribe: VClock | None = None
        self.own_lsn_seen = 0
        """The highest LSN of our own rows that the peer has shown to have; if we have fewer, we lost some."""

    # --- for whoever owns it ---

    def start(self, *, pause_at: Collection[ApplierState] = ()) -> None:
        """Begins, and pauses when it comes to one of `pause_at`."""
        assert self._task is None or self._task.done(), "it runs already"
        self._pause_at = frozenset(pause_at)
        self._resumed.clear()
        self._verdict = self._last_logged = None
        self._failures = self._times_unknown = 0
        self.standing.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def resume(self) -> None:
        """Goes on without pauses: follows for ever, and connects again whenever the connection is lost."""
        self._pause_at = frozenset()
        self._resumed.set()

    async def resume_to(self, state: ApplierState, *, is_patient: bool = True) -> None:
        """Goes on until `state`, and returns with a pause there; raises its error if it fails before.

        While the peer is loading, or a login or a right is missing, it tries again, unless it is not patient.
        """
        if self._task is None or self._task.done():
            raise self._failure()
        if self.state is state and not self._resumed.is_set():
            return
        failures = FAILED - {ApplierState.LOADING} if is_patient else FAILED
        waiter = _Waiter(asyncio.get_running_loop().create_future(), failures | {state})
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
        return self.error or ConnectionLost(f"the applier of {self.uri.address} is {self.state.value}")

    async def stop(self) -> None:
        """Ends it; it may be started again."""
        task = self._task
        if task is not None:
            task.cancel()
            # Who is cancelled meanwhile hears of it, and the task ends all the same.
            await asyncio.gather(asyncio.shield(task), return_exceptions=True)
            self._task = None
        if self.state is not ApplierState.OFF:
            self._set_state(ApplierState.OFF)

    def fail(self, error: FlowstoneError) -> None:
        """Stops it for a reason of ours: what was applied could not be written, and was taken back."""
        if self._task is None or self._task.done() or self._verdict is not None:
            return
        self._verdict = error
        self._task.cancel()

    def info(self) -> dict[str, Any]:
        """`upstream` of `box.info.replication[n]`; it has none while it is off."""
        found: dict[str, Any] = {"status": self.state.value}
        if self._task is not None:
            found["lag"] = self.lag
            found["idle"] = self._outside.clock.monotonic() - self._heard_at
            found["peer"] = str(self.uri)
        if self.error is not None:
            found["message"] = self.error.message
            if self.error.hint and (self.state is ApplierState.STOPPED or isinstance(self.error, DOES_NOT_KNOW_US)):
                found["message"] += f"; {self.error.hint}"  # which row it is about, or what somebody has to do
            cause = self.error.__cause__
            if isinstance(cause, OSError):
                reason = reason_of(cause, self.uri)
                found["system_message"] = reason[:1].upper() + reason[1:]
        return found

    # --- its life ---

    async def _run(self) -> None:
        try:
            while (after := await self._attempt()) not in ENDED:
                self._set_state(after)
                await self._outside.clock.sleep(self._pause_before_retry())
            self._set_state(after)
        except asyncio.CancelledError:
            if self._verdict is None:
                raise
            self._set_state(self._fail(self._verdict))

    async def _attempt(self) -> ApplierState:
        """Connects and follows until that fails; the state to be in then."""
        try:
            await self._follow()
        except (FlowstoneError, OSError) as error:
            return self._fail(error)
        except Exception as error:
            self._say.exception("the applier of %s", self.uri.address)
            return self._fail(FlowstoneError(f"{type(error).__name__}: {error}"))
        finally:
            await self._disconnect()

    def _fail(self, error: FlowstoneError | OSError) -> ApplierState:
        """Takes note of the error, logs it unless it is the last one again, and tells what comes of it."""
        if isinstance(error, OSError):
            reason = reason_of(error, self.uri) or "time-out"
            lost = ConnectionLost(f"connection to {self.uri.address} is lost: {reason}")
            lost.__cause__ = error
            error = lost
        error.message = shortened(error.message)
        after = self._reaction(error)
        if after is ApplierState.OFF:
            self._say.info("%s is this instance itself", self.uri.address)
            return after
        self.error = error
        level = logging.INFO if is_ordinary(error, self._failures) else logging.WARNING
        which = code_of(error) or error.message, error.hint, level
        if which != self._last_logged and self._log(level, error, after):
            self._last_logged = which
        self._failures += 1
        return after

    def _reaction(self, error: FlowstoneError) -> ApplierState:
        other = advice_about_peer(error, self._sink.replicaset_uuid)
        if other is not None:
            error.hint = other
        elif isinstance(error, DOES_NOT_KNOW_US) and self.state is ApplierState.READY and self._sink.replica_id:
            number, ballot = self._sink.replica_id, self.ballot
            if ballot is None or not lacks_rows(ballot.vclock, self._sink.vclock, besides=number):
                self._times_unknown += 1
            self.is_disowned = self._times_unknown > UNKNOWN_MAX
            error.hint = REMOVED if self.is_disowned else ON_ITS_WAY
            if not self.is_disowned:
                return ApplierState.LOADING
        is_2_6, has_data = self._sink.version_id <= _LAST_2_6, self._sink.replicaset_uuid is not None
        return reaction(error, is_2_6=is_2_6, has_data=has_data)

    def _log(self, level: int, error: FlowstoneError, after: ApplierState) -> bool:
        """False: it is raised to somebody instead, who decides whether it is tried again."""
        if after is ApplierState.STOPPED:
            self._say.error("replication from %s is stopped: %s", self.uri.address, error)
        elif any(waiter.wants(after) for waiter in self._waiters):
            return False
        else:
            failed = doing(self.state, has_data=self._sink.replicaset_uuid is not None)
            what = f"{failed} {self.uri.address}: " if isinstance(error, TarantoolError) else ""
            self._say.log(level, "%s%s; trying again every %g s", what, error, self.replication_timeout)
        return True

    def _pause_before_retry(self) -> float:
        """As real appliers at first; who cannot be reached for long is asked less often."""
        interval, patience = self.replication_timeout, max(0, self._failures - FAILURES_BEFORE_BACKOFF)
        return min(interval * BACKOFF**patience, max(interval, RETRY_SECONDS_MAX))

    def _set_state(self, state: ApplierState) -> None:
        assert state in TRANSITIONS[self.state], f"from {self.state.value} to {state.value}"
        self.state = state
        self._on_state(self)
        for waiter in self._waiters:
            waiter.see(state)

    async def _enter(self, state: ApplierState) -> None:
        """As `_set_state`, and waits there if it is to pause in this state."""
        if state in self._pause_at:
            self._resumed.clear()
        self._set_state(state)
        if state in self._pause_at:
            await self._resumed.wait()

    async def _disconnect(self) -> None:
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
                with suppress(TimeoutError):  # a peer that reads no more would hold us for ever
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await stream.close()

    # --- one connection ---

    async def _follow(self) -> NoReturn:
        """Connects and never returns: some error ends it."""
        uuid = self._sink.instance_uuid
        protocol = ApplierProtocol(self.uri.address, instance_uuid=uuid, came_from=self.state)
        while True:
            event = protocol.next_event()
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
            case HeartbeatHeard(heartbeat):
                self._check_member()
                self._on_alive(self)
                self._note_lag(heartbeat.timestamp)
                self._acked = None  # it wants an answer, even if nothing is new
                self._request_ack()
            case RaftHeard(row):
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
                await self._end_watch()
                self._begin_following(protocol)

    async def _act(self, protocol: ApplierProtocol, state: ApplierState) -> None:
        """What is to be done in a state that waits for us."""
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
        """For data, if we have none; for an id, if we need one; else for what is new."""
        sink, uuid = self._sink, self._sink.instance_uuid
        if sink.replicaset_uuid is None:
            if protocol.has_joined:
                raise FlowstoneError(f"what {self.uri.address} sent for a join names no replica set")
            if sink.is_anonymous:
                protocol.fetch_snapshot(FetchSnapshot(sink.version_id, uuid))
            else:
                protocol.join(Join(uuid, sink.version_id))
        elif sink.replica_id == 0 and not sink.is_anonymous and not protocol.has_registered:
            self._has_gap = False
            protocol.register(Register(uuid, sink.vclock))
        else:
            place = (sink.replicaset_uuid, uuid, sink.vclock, sink.version_id)
            protocol.subscribe(Subscribe(*place, sink.is_anonymous, self._id_filter()))

    def _id_filter(self) -> tuple[int, ...]:
        """As the sink wants it; but rows of our own that we have no more we ask for, whoever has them."""
        wanted, number = self._sink.id_filter, self._sink.replica_id
        if self.ballot is not None:
            self._see_own_rows(self.ballot.vclock)
        return tuple(each for each in wanted if each != number) if self._lacks_own_rows() else wanted

    def _see_own_rows(self, theirs: VClock) -> None:
        if self._sink.replica_id:
            self.own_lsn_seen = max(self.own_lsn_seen, theirs.get(self._sink.replica_id))

    def _lacks_own_rows(self) -> bool:
        number = self._sink.replica_id
        return number != 0 and self.own_lsn_seen > self._sink.vclock.get(number)

    async def _final(self, slab: Slab) -> None:
        """Of a registration, rows are taken only if they go on where we are.

        A master of 2.6 sends what it has written since it was asked, however far behind we were: the subscription
        then brings all of it, the row that registers us as well.
        """
        if self.state is ApplierState.REGISTER:
            self._has_gap = self._has_gap or not goes_on(slab, self._sink.vclock)
            if self._has_gap:  # what comes behind rows that were left out is left out as well
                return
        await self._sink.final_rows(slab)

    # --- talking ---

    async def _open(self) -> Stream:
        uri = self.uri
        try:
            return await self._outside.network.connect(uri.host, uri.port, timeout=CONNECT_SECONDS, tls=tls_of(uri))
        except OSError as error:
            reason = reason_of(error, uri) or f"no answer within {CONNECT_SECONDS:g} s"
            raise ConnectionLost(f"cannot connect to {uri.address}: {reason}") from error

    async def _read(self, protocol: ApplierProtocol) -> None:
        """Waits for bytes: not for ever, as a peer that has lost power says nothing. A join may take its time."""
        assert self._stream is not None
        seconds = self._silence_max()
        if protocol.is_joining:
            seconds = max(seconds, JOIN_SILENCE_SECONDS)
        hint = None if protocol.is_greeted else tls_hint(self.uri)
        try:
            async with asyncio.timeout(seconds):
                data = await self._stream.read(READ_SIZE)
        except TimeoutError as error:
            raise ConnectionLost(f"{self.uri.address} said nothing for {seconds:g} s", hint=hint) from error
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
        if self.uuid != greeting.uuid:
            self.own_lsn_seen = 0
        self.uuid, self.version = greeting.uuid, greeting.version

    # --- the ballot of a newer peer ---

    async def _watch_ballot(self) -> Ballot:
        """Begins to watch it on a connection of its own; the first one."""
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
        if self.version < BEATS_ALWAYS:
            self._on_alive(self)
        rest: Slab | None = slab
        while rest is not None:
            self._check_member()
            part, rest = self.standing.split(rest, self._sink.vclock)
            self._check_origin(part)
            await self._sink.apply(part)

    def _check_member(self) -> None:
        if self.standing.check():
            self._on_state(self)
        if (row := self.standing.heard()) is not None:
            self._sink.raft(self.peer_id, row)

    def peer_acknowledged(self, replica_id: int, vclock: VClock) -> None:
        """A member that follows us has written all of `vclock`: rows that it had lost among it, perhaps."""
        self.standing.acknowledged(replica_id, vclock)

    def _check_origin(self, slab: Slab) -> None:
        """Rows of our own come from a peer only where it has shown that it has them, and we have lost them."""
        number = self._sink.replica_id
        if number > 0:
            check_own_rows(slab, number, max(self._sink.vclock.get(number), self.own_lsn_seen))

    def _check_own_rows(self, reply: SubscribeReply) -> None:
        """A peer may show only now that it has rows of ours which we lost: it is asked again, for those as well."""
        did_lack = self._lacks_own_rows()
        self._see_own_rows(reply.vclock)
        number = self._sink.replica_id
        if number in self._sink.id_filter and self._lacks_own_rows() and not did_lack:
            last = self._sink.vclock.get(number)
            raise ConnectionLost(
                f"{self.uri.address} has our own rows {last + 1}…{self.own_lsn_seen}, which we have no more",
                hint="they are asked for",
            )

    def _begin_following(self, protocol: ApplierProtocol) -> None:
        reply = protocol.reply
        assert reply is not None
        assert self.uuid is not None
        check_name(self.uri.address, reply.replica_id, self._sink.replica_id)
        self.standing.subscribed(self.uuid, reply.replica_id, reply.vclock, protocol.subscribed_from)
        self._check_own_rows(reply)
        self._say.info("subscribed to %s: its vclock is %s, ours %s", self.uri.address, reply.vclock, self._sink.vclock)
        self.peer_id = reply.replica_id
        self.remote_vclock_at_subscribe = reply.vclock
        self.lag, self.peer_time = TIMEOUT_INFINITY, 0.0
        self.error = self._last_logged = None
        self._failures = self._times_unknown = 0
        self.is_disowned = False
        self._acked = None
        self._protocol = protocol
        self._sink.on_written.append(self._request_ack)
        self._tick()

    def _tick(self) -> None:
        """While what came before is being applied nobody reads heartbeats, but the master waits for answers."""
        if self._is_busy:
            self._acked = None
            self._request_ack()
        self._timer = asyncio.get_running_loop().call_later(self.replication_timeout, self._tick)

    def _note_lag(self, timestamp: float) -> None:
        if timestamp:  # newer masters leave it out of a heartbeat if rows have told it
            self.lag, self.peer_time = self._outside.clock.wall() - timestamp, timestamp

    def _request_ack(self) -> None:
        """What is written before the loop comes round again shares an ACK."""
        if not self._is_ack_due:
            self._is_ack_due = True
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        self._is_ack_due = False
        protocol = self._protocol
        if protocol is None:
            return
        vclock = self._sink.vclock.without_zero()
        if vclock != self._acked:
            self._acked = vclock
            protocol.acknowledge(vclock, self._sink.term)
            self._send(protocol)
        if protocol.synchronize(vclock, self.lag, self.sync_lag):
            self._set_state(ApplierState.FOLLOW)


class _Waiter:
    """Somebody who waits for one of `states`."""

    def __init__(self, reached: asyncio.Future[ApplierState], states: frozenset[ApplierState]) -> None:
        self.reached = reached
        self._states = states

    def wants(self, state: ApplierState) -> bool:
        return state in self._states

    def see(self, state: ApplierState) -> None:
        if self.wants(state) and not self.reached.done():
            self.reached.set_result(state)
