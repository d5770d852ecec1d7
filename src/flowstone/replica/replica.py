"""A replica inside a program: anonymous, read-only, in memory only. `flowstone.follow` opens it.

Connects an applier, which talks to the upstream, with a settled box, which has the data. It acknowledges only settled
positions, so rows that are only in memory never complete a quorum. If a member fails, the replica continues with the
next one at its settled position; `node/upstream/members.py` selects it. If no member has the logs that the replica
needs, a new snapshot replaces the data at once. If all members have lost rows that the replica has, that is an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from uuid import UUID
from weakref import WeakSet

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect, from_greeting
from flowstone.box.engine.transaction import BoxTransaction
from flowstone.client import rights
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import Uri
from flowstone.node.changes import SettledChange
from flowstone.node.spaces import Space
from flowstone.node.upstream.applier import Applier
from flowstone.node.upstream.members import MemberLacksRows, UpstreamMembers
from flowstone.node.wal.recovery import FLAGS_SINCE, replicaset_uuid_of
from flowstone.outside import Outside
from flowstone.replica.change_stream import BUFFER_TRANSACTIONS, ChangesMissed, ChangeStream
from flowstone.replica.settled_box import FollowedSpaces, RowsNeeded, SettledBox, SnapshotBox
from flowstone.replication.applier.states import ENDED, FAILED, ApplierState, ConnectionLost, code_of
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import VClock, VClockError

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

OnChange = Callable[[list[SettledChange]], None]
"""Called with the changes of a settled transaction."""

OnResync = Callable[[VClock, VClock], None]
"""Called with the positions before and after a new snapshot replaced the data."""

OnState = Callable[["ReplicaState"], None]
"""Called when the replica begins to follow a member, and when it no longer does."""

_GAP_TEXT: Final = "Missing .xlog file"
"""Text in the error of version 2.6, which has no error code for a gap."""

RESTART_SECONDS_MAX: Final = 60.0
"""Longest pause between two snapshots from an upstream that deletes its logs faster than the replica follows."""


class CannotFollow(FlowstoneError):
    """The upstream is unreachable or rejects the replica; `__cause__` is the original error."""


class UpstreamCut(MemberLacksRows):
    """The upstream has lost rows that the replica has, because the upstream's log was truncated or replaced."""


class LogsDeleted(FlowstoneError):
    """A member no longer has the rows that the replica needs next."""


class NotReached(FlowstoneError):
    """The replica did not reach a position in time."""


class StaleReplica(FlowstoneError):
    """The replica may lack changes that are older than the caller accepts."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The state of a replica, as passed to `on_state`.

    `upstream` is the address of the member. `status` is `follow` while the replica is in sync with the member. Else it
    is `disconnected` or `loading` (the replica tries all members in turn), or `stopped` (no member can be followed).
    `error` says why the replica no longer follows; None if it does.
    """

    upstream: str
    status: str
    error: FlowstoneError | None = None


class ReplicaSink:
    """The `Sink` (node/upstream/sink.py) of the replica's applier."""

    def __init__(self, uri: Uri, uuid: UUID, choice: FollowedSpaces, guard: AbstractContextManager[Any] | None) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.on_snapshot: Callable[[], None] = lambda: None
        """Called when rows of a snapshot arrive."""
        self.on_resync: Callable[[VClock, VClock], None] = lambda before, after: None
        self.wait_for_room: Callable[[], Awaitable[None]] | None = None
        """Called before rows are applied; returns when the readers of changes have room."""
        self.uri = uri
        self.instance_uuid = uuid
        self.replica_id = 0
        self.is_anonymous = True
        self.id_filter = (0,)
        self.term = 1
        self.settled: SettledBox | None = None
        self.snapshot_reason = "no data yet"
        """Why the next request is for a snapshot; empty if it is a subscription."""
        self.refusal: FlowstoneError | None = None
        """Error that rejects all rows of the current connection."""
        self._choice = choice
        self._guard = guard
        self._snapshot: SnapshotBox | None = None
        self._is_fresh = False
        self._replicaset_uuid: UUID | None = None
        self._version: tuple[int, int, int] = (0, 0, 0)
        self._dialect = Dialect.V2_11

    # --- state ---

    @property
    def replicaset_uuid(self) -> UUID | None:
        return None if self.snapshot_reason else self._replicaset_uuid

    @property
    def version_id(self) -> int:
        return self._dialect.version_id

    @property
    def vclock(self) -> VClock:
        return self.settled.vclock if self.settled is not None else VClock()

    def meet(self, version: tuple[int, int, int]) -> None:
        """Record the version of the upstream. If the meaning of rows differs from before, request a snapshot."""
        before, self._version, self._dialect = self._version, version, from_greeting(version)
        is_other = self.settled is not None and self._dialect is not self.settled.box.dialect
        if is_other or (before != (0, 0, 0) and (version >= FLAGS_SINCE) is not (before >= FLAGS_SINCE)):
            self.snapshot_reason = f"version changed from {_text(before)} to {_text(version)}"

    def prepare(self, ballot: Ballot | None) -> LogsDeleted | None:
        """Prepare for the next request, which is a subscription or a snapshot.

        Return the error if the upstream no longer has the rows that a subscription would need.
        """
        self.refusal = None
        if self.settled is None:
            return None
        deleted = None
        # Version 2.6 reports missing logs only after it has started another one, so check the ballot.
        if ballot is not None and not self._is_fresh and not ballot.gc_vclock.without_zero() <= self.vclock:
            deleted = LogsDeleted(f"its oldest log starts at {ballot.gc_vclock.without_zero()}")
        self._is_fresh = False
        self.settled.resume(has_flags=self._version >= FLAGS_SINCE)
        return deleted

    def tail_lost(self, theirs: VClock) -> UpstreamCut | None:
        """Return the error if the upstream has lost rows that we have: it would assign their LSNs to other rows."""
        ours = self.vclock
        lost = [(number, theirs.get(number) + 1, lsn) for number, lsn in ours if lsn > theirs.get(number)]
        if not lost:
            return None
        rows = ", ".join(f"{first}…{last} of replica {number}" for number, first, last in lost)
        error = UpstreamCut(
            f"{self.uri.address} has lost rows {rows}: its vclock is {theirs}, ours {ours}",
            hint="check whether the replica or the server has the right data; "
            "to use the server's data, call follow again",
        )
        error.missing = tuple(lost)
        return error

    # --- the snapshot ---

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        if (lost := self.tail_lost(vclock)) is not None:
            raise lost
        self._snapshot = SnapshotBox(self._dialect, vclock, self._choice)

    async def meta(self, row: Row) -> None:
        assert self._snapshot is not None
        self._snapshot.synchro.follow(row, in_snapshot=True)

    async def snapshot_rows(self, slab: Slab) -> None:
        assert self._snapshot is not None
        self._snapshot.push(slab)
        self.on_snapshot()

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise AssertionError("unexpected join: the replica is anonymous")

    async def final_rows(self, slab: Slab) -> None:
        raise AssertionError("unexpected join: the replica is anonymous")

    async def end_join(self, vclock: VClock) -> None:
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        snapshot.complete()
        ours, theirs = self._replicaset_uuid, replicaset_uuid_of(snapshot.box)
        if ours not in (None, theirs):
            raise errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {ours}, got {theirs}")
        self._replicaset_uuid = theirs
        self._is_fresh = True
        self.term = max(self.term, snapshot.synchro.raft.term)
        reason, self.snapshot_reason = self.snapshot_reason, ""
        LOG.info("received snapshot at %s: %d rows", snapshot.vclock, snapshot.row_count)
        if self.settled is None:
            self.settled = SettledBox(snapshot, self._choice, guard=self._guard)
            return
        before = self.vclock
        self.settled.replace(snapshot)
        LOG.warning(
            "resynchronized with %s: %s; snapshot at %s replaces the data at %s",
            self.uri.address,
            reason,
            self.vclock,
            before,
        )
        self.on_resync(before, self.vclock)
        self._tell()

    # --- the log ---

    async def apply(self, slab: Slab) -> None:
        assert self.settled is not None, "subscribed before the snapshot is complete"
        if self.refusal is not None:
            raise self.refusal
        if self.wait_for_room is not None:
            # The applier acknowledges heartbeats meanwhile, so the upstream does not give us up.
            await self.wait_for_room()
        before = self.vclock
        try:
            self.settled.push(slab)
        except RowsNeeded as error:
            self.snapshot_reason = error.message
            raise ConnectionLost(error.message, hint="a new snapshot is requested") from error
        finally:
            if self.vclock is not before:
                self._tell()

    def raft(self, source_id: int, row: Row) -> None:
        """Ignore the message: an anonymous replica takes no part in elections."""

    def _tell(self) -> None:
        for tell in tuple(self.on_written):
            tell()


class Replica:
    """A read-only copy of the data of a replica set, which `async with flowstone.follow(…)` returns.

    Reads are plain calls on memory, and see only settled transactions; between two `await`s nothing changes. The
    position only moves forward, also from one member to another. Triggers are called in the event loop, once per
    transaction, after its changes are visible. Exceptions of triggers are logged. Triggers should be fast: no rows are
    received while one runs.

    Example:
        async with flowstone.follow("replicator:secret@db1:3301") as replica:
            orders = replica.space("orders")
            print(orders.get(42), len(orders), replica.vclock)
    """

    def __init__(
        self,
        outside: Outside,
        *members: Uri,
        spaces: Collection[str | int] | None = None,
        on_change: Collection[OnChange] = (),
        on_resync: Collection[OnResync] = (),
        on_state: Collection[OnState] = (),
        connect_timeout: float = 10.0,
        replication_timeout: float = 1.0,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._outside = outside
        self._members = UpstreamMembers(members)
        uri = members[0]
        self._connect_timeout = connect_timeout
        self._on_change = list(on_change)
        self._on_resync = list(on_resync)
        self._on_state = list(on_state)
        self._wanted = tuple(spaces or ())
        self._follower = ReplicaSink(
            uri, outside.random.uuid(), FollowedSpaces(spaces if spaces is None else self._wanted), guard
        )
        self._follower.on_resync = self._resynced
        self._follower.wait_for_room = self._wait_for_room
        self._applier = Applier(
            outside, uri, self._follower, replication_timeout=replication_timeout, on_state=self._state_changed
        )
        self._waiters: list[tuple[VClock, asyncio.Future[None]]] = []
        self._restart: asyncio.Task[None] | None = None
        self._is_restarting = False
        self._restart_seconds = replication_timeout
        self._is_started = self._is_given_up = self._is_following = False
        self._subscribed_at = 0.0
        self._streams: WeakSet[ChangeStream] = WeakSet()
        self._room = asyncio.Event()

    # --- life cycle ---

    async def start(self) -> None:
        """Connect, fetch a snapshot and subscribe. `async with` does this.

        Raises:
            CannotFollow: The server is unreachable or rejects the replica.
        """
        try:
            await self._begin()
        except BaseException:
            await self.stop()
            raise
        self._warn_of_missing()
        if self._on_change:
            self._listen()
        self._follower.on_written.append(self._moved)
        self._is_started = True
        self._applier.resume()

    def _warn_of_missing(self) -> None:
        there = {name for space in self.box.spaces.values() for name in (space.name, space.id)}
        missing = [space for space in self._wanted if space not in there]
        if missing:
            names = ", ".join(map(repr, missing))
            LOG.warning("%s has no space %s; will follow it once created", self.upstream, names)

    async def _begin(self) -> None:
        """Subscribe at the first member that accepts the replica."""
        while True:
            try:
                await self._begin_at_member()
            except CannotFollow as error:
                await self._applier.stop()
                self._members.failed(error, self._outside.clock.monotonic(), is_final=False)
                self._use_member()
                if len(self._members) == 1:
                    raise
                if self._members.is_round_complete:
                    all_of_them = "; ".join(error.message for error in self._members.errors)
                    raise CannotFollow(f"cannot follow any member: {all_of_them}", hint=error.hint) from error
                LOG.warning("%s; trying %s", error.message, self.upstream)
            else:
                self._members.accepted()
                return

    async def _begin_at_member(self) -> None:
        address = self.upstream
        self._applier.start()
        try:
            async with asyncio.timeout(self._connect_timeout) as limit:
                # A large snapshot may take long: once its rows arrive, only the timeout of the applier applies.
                self._follower.on_snapshot = lambda: limit.reschedule(None)
                await self._reach_subscription()
        except TimeoutError:
            said = f": {self._applier.error.message}" if self._applier.error is not None else ""
            raise CannotFollow(
                f"cannot follow {address}: no data within {self._connect_timeout:g} s{said}",
                hint="check that the server is running, or increase connect_timeout",
            ) from self._applier.error
        except FlowstoneError as error:
            hint = error.hint
            if code_of(error) == errors.AccessDenied.code:
                is_guest = rights.is_guest(self._applier.uri.user)
                hint = rights.NO_USER if is_guest else "grant the user the role 'replication'"
            raise CannotFollow(f"cannot follow {address}: {error.message}", hint=hint) from error
        finally:
            self._follower.on_snapshot = lambda: None

    async def _reach_subscription(self) -> None:
        """Run the applier until it is subscribed. It pauses there: no row is applied before the triggers are set."""
        while True:
            try:
                await self._applier.resume_to(ApplierState.SYNC, is_patient=False)
            except errors.Loading:
                continue  # the server is starting
            return

    async def stop(self) -> None:
        """Close the connection. The data in memory remain readable. `async with` does this."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        self._is_restarting = self._is_started = False
        await self._applier.stop()
        self._wake()
        for stream in tuple(self._streams):
            stream.end()

    # --- reading ---

    @property
    def box(self) -> Box:
        """The spaces in memory, for access beyond the methods of this class."""
        return self._settled.box

    @property
    def _settled(self) -> SettledBox:
        settled = self._follower.settled
        if settled is None:
            raise CannotFollow(f"no data from {self.upstream} yet", hint="use the replica inside `async with`")
        return settled

    def space(self, space: str | int) -> Space:
        """Return the space with this name or id, for reading.

        Its methods that change data raise error 7 (ER_READONLY).

        Raises:
            TarantoolError: The space does not exist or is not followed (error 36, ER_NO_SUCH_SPACE).
        """
        found = self.box.space(space)
        if not self._settled.follows(found):
            raise errors.NoSuchSpace(f"Space '{space}' is not followed", hint="add it to spaces=[…]")
        return Space(self, found.id)

    async def write(self, statement: Callable[[BoxTransaction], T]) -> T:
        """Raise error 7 (ER_READONLY): only the upstream can be written to."""
        raise read_only(*self._members)

    @property
    def upstream(self) -> str:
        """The address of the member that the replica follows or, while it follows none, tries next."""
        return self._applier.uri.address

    @property
    def lag(self) -> float:
        """Seconds since the last moment up to which the replica certainly has all settled changes of the upstream.

        That moment is the time of the last row or heartbeat received in sync, as stamped by the upstream. An upstream
        without writes sends a heartbeat each `replication_timeout`, so the lag of a replica in sync stays below about
        that time; while no member answers, it grows. Infinite until the replica is in sync for the first time. A
        difference between the clocks of the two machines adds to the lag if the upstream's is slow, and hides as much
        lag if it is fast. A member that is itself cut off from its leader is not detected.
        """
        at = self._applier.fresh_at
        return math.inf if at is None else max(0.0, self._outside.clock.monotonic() - at)

    def check_fresh(self, max_lag: float) -> None:
        """Raise an error if `lag` is greater than `max_lag`.

        Args:
            max_lag: Seconds; should be at least twice the `replication_timeout` of the server.

        Raises:
            StaleReplica: The replica may lack changes that are older than `max_lag`.

        Example:
            replica.check_fresh(5.0)
            order = replica.space("orders").get(42)  # at most 5 s old
        """
        lag = self.lag
        if lag > max_lag:
            since = "was never in sync" if math.isinf(lag) else f"was in sync {lag:.3g} s ago"
            error = self._applier.error
            why = f": {error.message}" if error is not None else ""
            state = f"upstream {self.upstream} is in state {self._applier.state.value}"
            raise StaleReplica(f"replica {since}, more than {max_lag:g} s{why}", hint=state)

    @property
    def vclock(self) -> VClock:
        """The settled position: rows up to it are visible and can no longer be rolled back."""
        return self._follower.vclock

    def info(self) -> dict[str, Any]:
        """Return `uuid` and `vclock` of the replica, and the state of its connection.

        Returns:
            A map. `held` is the number of transactions that are pending or wait for one that is. `upstream` has `uuid`,
            `version`, and status, lag and idle time as in `box.info.replication`.
        """
        settled, applier = self._follower.settled, self._applier
        return {
            "uuid": str(self._follower.instance_uuid),
            "vclock": self.vclock.to_mapping(),
            "held": settled.held_count if settled is not None else 0,
            "upstream": {
                "uuid": str(applier.uuid) if applier.uuid is not None else None,
                "version": _text(applier.version),
                **applier.info(),
            },
        }

    async def wait_for(self, vclock: VClock | Mapping[int, int], *, timeout: float | None = None) -> None:
        """Wait until the replica is at `vclock` or later.

        Args:
            vclock: The position, such as the `box.info.vclock` of the server after a write.
            timeout: Seconds to wait; None: no limit.

        Raises:
            NotReached: The replica is not there after `timeout` seconds.
            CannotFollow: The replica is stopped.
            VClockError: `vclock` is not a vclock.
        """
        wanted = _vclock(vclock).without_zero()
        if wanted <= self.vclock:
            return
        self._check_alive()
        waiter = (wanted, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter[1]
        except TimeoutError:
            status = self._applier.state.value
            message = f"position {wanted} not reached within {timeout:g} s: replica is at {self.vclock}"
            raise NotReached(message, hint=f"upstream {self.upstream} is in state {status}") from None
        finally:
            self._waiters.remove(waiter)

    # --- triggers ---

    def on_change(self, trigger: OnChange) -> OnChange:
        """Call `trigger` with the list of changes of each transaction that is settled from now on.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """
        self._on_change.append(trigger)
        self._listen()
        return trigger

    def on_resync(self, trigger: OnResync) -> OnResync:
        """Call `trigger` with the positions before and after, each time a snapshot replaces the data.

        `on_change` does not report the changes between the two positions, so derived data must be rebuilt.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """
        self._on_resync.append(trigger)
        return trigger

    def on_state(self, trigger: OnState) -> OnState:
        """Call `trigger` with a `ReplicaState` when the replica is in sync with a member, and when it loses it.

        Retries are not reported: after `disconnected`, the next call is for `follow` or `stopped`.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """
        self._on_state.append(trigger)
        return trigger

    def changes(self, *, buffer: int = BUFFER_TRANSACTIONS) -> ChangeStream:
        """Return an async iterator over the transactions that are settled from now on, each as a list of changes.

        While `buffer` transactions wait for a slow reader, the replica receives nothing from its upstream, and its
        `lag` grows. A single read from the network may exceed the buffer. The iteration ends when the replica is
        stopped, or by `close()`.

        Args:
            buffer: The number of transactions to keep for the reader.

        Returns:
            The iterator. Its `__anext__` raises ChangesMissed if a snapshot has replaced the data: read the data again,
            and call `changes` again. It raises CannotFollow if no member can be followed any more.

        Example:
            async for changes in replica.changes():
                for change in changes:
                    print(change.type, change.space, change.key, change.old, change.new)
        """
        loop, room = asyncio.get_running_loop(), self._room

        def discarded() -> None:  # must not refer to `self`, which would keep the replica alive
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(room.set)

        stream = ChangeStream(max(1, buffer), room.set, discarded)
        self._streams.add(stream)
        self._listen()
        if not self._is_started:
            stream.end()
        elif self._is_given_up:
            stream.end(self._no_longer_followed())
        return stream

    async def _wait_for_room(self) -> None:
        while any(stream.is_full for stream in tuple(self._streams)):
            self._room.clear()
            await self._room.wait()

    def _listen(self) -> None:
        """Let the settled box report changes. Without a listener it does not decode them."""
        settled = self._follower.settled
        if settled is not None and self._changed not in settled.on_transaction:
            settled.on_transaction.append(self._changed)

    def _changed(self, changes: list[SettledChange]) -> None:
        for stream in tuple(self._streams):
            stream.put(changes)
        for trigger in tuple(self._on_change):
            try:
                trigger(changes)
            except Exception:
                LOG.exception("on_change trigger %s failed", _name(trigger))

    def _resynced(self, before: VClock, after: VClock) -> None:
        for stream in tuple(self._streams):
            message = f"changes between {before} and {after} are missing: a snapshot has replaced the data"
            stream.end(ChangesMissed(message, hint="read the data again, and call changes() again"))
        for trigger in tuple(self._on_resync):
            try:
                trigger(before, after)
            except Exception:
                LOG.exception("on_resync trigger %s failed", _name(trigger))

    # --- the applier ---

    def _state_changed(self, applier: Applier) -> None:
        follower, now = self._follower, self._outside.clock.monotonic()
        match applier.state:
            case ApplierState.CONNECT:
                self._is_restarting = False
            case ApplierState.CONNECTED:
                follower.meet(applier.version)
            case ApplierState.READY:
                if (deleted := follower.prepare(applier.ballot)) is not None:
                    self._logs_deleted(applier, deleted)
            case ApplierState.SYNC:
                self._subscribed_at = now
                self._check_tail(applier)
            case ApplierState.FOLLOW:
                # We have all rows that the upstream had when we subscribed.
                applier.fresh_at = max(applier.fresh_at or 0.0, self._subscribed_at)
                self._restart_seconds = applier.replication_timeout
                self._members.accepted()
                self._tell_state(ReplicaState(self.upstream, applier.state.value))
            case state if state in FAILED and state is not ApplierState.OFF and applier.error is not None:
                if self._is_started:
                    self._failed(applier, applier.error)

    def _check_tail(self, applier: Applier) -> None:
        self._follower.refusal = error = self._follower.tail_lost(applier.remote_vclock_at_subscribe or VClock())
        if error is not None:
            applier.fail(error)

    def _logs_deleted(self, applier: Applier, error: LogsDeleted) -> None:
        """Request a snapshot, unless another member may have the logs."""
        if len(self._members) == 1:
            self._follower.snapshot_reason = error.message
        elif not self._follower.snapshot_reason:
            applier.fail(error)

    def _failed(self, applier: Applier, error: FlowstoneError) -> None:
        """Go on to the next member, or give up if all members have refused."""
        if self._is_given_up:
            return
        status, has_stopped = applier.state.value, applier.state is ApplierState.STOPPED
        now, address = self._outside.clock.monotonic(), self.upstream
        self._members.failed(error, now, is_final=has_stopped or _is_gap(error))
        verdict, are_all = self._members.verdict(now), self._members.have_all_refused
        is_resync = verdict is not None and _is_gap(verdict)
        self._is_given_up = verdict is not None and are_all and not is_resync
        if self._is_given_up:
            self._give_up(applier, address, verdict or error)
            return
        if is_resync:
            assert verdict is not None
            self._follower.snapshot_reason = verdict.message
        pauses = self._members.is_round_complete
        self._use_member()
        if has_stopped or is_resync:
            self._is_restarting = True
            self._restart = asyncio.get_running_loop().create_task(self._start_again(is_resync, pauses))
            status = ApplierState.DISCONNECTED.value
        self._tell_state(ReplicaState(address, status, error))

    def _use_member(self) -> None:
        """Let the next attempt connect to the current member: the connection to the former one has ended."""
        self._applier.uri = self._follower.uri = self._members.current

    def _give_up(self, applier: Applier, address: str, error: FlowstoneError) -> None:
        applier.fail(error)  # no effect if it has stopped
        applier.error = error
        self._tell_state(ReplicaState(address, ApplierState.STOPPED.value, error))
        self._wake()
        for stream in tuple(self._streams):
            stream.end(self._no_longer_followed())

    def _tell_state(self, state: ReplicaState) -> None:
        is_following = state.status == ApplierState.FOLLOW.value
        has_changed = is_following is not self._is_following or state.status == ApplierState.STOPPED.value
        self._is_following = is_following
        if not has_changed or not self._is_started:
            return
        for trigger in tuple(self._on_state):
            try:
                trigger(state)
            except Exception:
                LOG.exception("on_state trigger %s failed", _name(trigger))

    async def _start_again(self, is_resync: bool, pauses: bool) -> None:
        """Restart the applier: after a pause that grows each time if a snapshot is next, because it is expensive."""
        await self._applier.stop()
        if is_resync:
            await self._outside.clock.sleep(self._restart_seconds)
            self._restart_seconds = min(2 * self._restart_seconds, RESTART_SECONDS_MAX)
        elif pauses:
            await self._outside.clock.sleep(self._applier.replication_timeout)
        self._applier.start()

    def _moved(self) -> None:
        vclock = self.vclock
        for wanted, reached in self._waiters:
            if wanted <= vclock and not reached.done():
                reached.set_result(None)

    def _check_alive(self) -> None:
        if (self._applier.state in ENDED or self._is_given_up) and not self._is_restarting:
            raise self._no_longer_followed() from self._applier.error

    def _no_longer_followed(self) -> CannotFollow:
        error = self._applier.error
        why = error.message if error is not None else "the replica was stopped"
        return CannotFollow(f"{self.upstream} is no longer followed: {why}", hint=error.hint if error else None)

    def _wake(self) -> None:
        """Fail all waiters if the applier has ended, since no more rows will arrive."""
        try:
            self._check_alive()
        except CannotFollow as error:
            for _, reached in self._waiters:
                if not reached.done():
                    reached.set_exception(error)


def read_only(*members: Uri) -> errors.TarantoolError:
    """Return the error for an attempt to change data in a replica."""
    places = " or ".join(uri.address for uri in members)
    return errors.Readonly("Can't modify data because this is a read-only replica.", hint=f"write to {places}")


def _vclock(given: object) -> VClock:
    if isinstance(given, VClock):
        return given
    if not isinstance(given, Mapping) or not all(isinstance(number, int) for pair in given.items() for number in pair):
        raise VClockError(f"{given!r} is not a vclock", hint="write it as {replica id: LSN}, such as {1: 1000}")
    return VClock(given)


def _name(trigger: Callable[..., None]) -> str:
    return getattr(trigger, "__qualname__", None) or repr(trigger)


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _is_gap(error: FlowstoneError) -> bool:
    """True if the upstream reported that it no longer has the logs we need."""
    return isinstance(error, LogsDeleted) or code_of(error) == errors.XlogGap.code or _GAP_TEXT in error.message
