"""A replica inside a program: anonymous, read-only, in memory only. `flowstone.follow` opens it.

Connects an applier, which talks to the upstream, with a settled box, which has the data. It acknowledges only settled
positions, so rows that are only in memory never complete a quorum. If the upstream no longer has the logs that the
replica needs, a new snapshot replaces the data at once. If the upstream has lost rows that the replica has, that is an
error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar
from uuid import UUID

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
from flowstone.node.wal.recovery import FLAGS_SINCE, replicaset_uuid_of
from flowstone.outside import Outside
from flowstone.replica.settled_box import FollowedSpaces, RowsNeeded, SettledBox, SnapshotBox, warm_up
from flowstone.replication.applier.states import ENDED, ApplierState, ConnectionLost, code_of
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import VClock, VClockError

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

OnChange = Callable[[list[SettledChange]], None]
"""Called with the changes of a settled transaction."""

OnResync = Callable[[VClock, VClock], None]
"""Called with the positions before and after a new snapshot replaced the data."""

_GAP_TEXT: Final = "Missing .xlog file"
"""Text in the error of version 2.6, which has no error code for a gap."""

RESTART_SECONDS_MAX: Final = 60.0
"""Longest pause between two snapshots from an upstream that deletes its logs faster than the replica follows."""


class CannotFollow(FlowstoneError):
    """The upstream is unreachable or rejects the replica; `__cause__` is the original error."""


class UpstreamCut(FlowstoneError):
    """The upstream has lost rows that the replica has: its log was truncated or replaced."""


class NotReached(FlowstoneError):
    """The replica did not reach a position in time."""


class ReplicaSink:
    """The sink of the replica's applier; see `node.sink.Sink`."""

    def __init__(self, uri: Uri, uuid: UUID, choice: FollowedSpaces, guard: AbstractContextManager[Any] | None) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.on_snapshot: Callable[[], None] = lambda: None
        """Called when rows of a snapshot arrive."""
        self.on_resync: Callable[[VClock, VClock], None] = lambda before, after: None
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
        self._uri = uri
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

    def prepare(self, ballot: Ballot | None) -> None:
        """Prepare for the next request, which is a subscription or a snapshot."""
        self.refusal = None
        if self.settled is None:
            return
        # Version 2.6 reports missing logs only after it has started another one, so check the ballot.
        if ballot is not None and not self._is_fresh and not ballot.gc_vclock.without_zero() <= self.vclock:
            self.snapshot_reason = f"its oldest log starts at {ballot.gc_vclock.without_zero()}"
        self._is_fresh = False
        self.settled.resume(has_flags=self._version >= FLAGS_SINCE)

    def tail_lost(self, theirs: VClock) -> UpstreamCut | None:
        """Return the error if the upstream has lost rows that we have: it would assign their LSNs to other rows."""
        ours = self.vclock
        lost = [(number, theirs.get(number) + 1, lsn) for number, lsn in ours if lsn > theirs.get(number)]
        if not lost:
            return None
        rows = ", ".join(f"{first}…{last} of replica {number}" for number, first, last in lost)
        return UpstreamCut(
            f"{self._uri.address} has lost rows {rows}: its vclock is {theirs}, ours {ours}",
            hint="find out which of the two is right; to take over the data of the server, call follow again",
        )

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
            self._uri.address,
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
    """A read-only copy of a server's data, which `async with flowstone.follow(…)` returns.

    Reads are plain calls on memory, and see only settled transactions; between two `await`s nothing changes. The
    position only moves forward. Triggers are called in the event loop, once per transaction, after its changes are
    visible. Exceptions of triggers are logged. Triggers should be fast: no rows are received while one runs.

    Example:
        async with flowstone.follow("replicator:secret@db1:3301") as replica:
            orders = replica.space("orders")
            print(orders.get(42), len(orders), replica.vclock)
    """

    def __init__(
        self,
        outside: Outside,
        uri: Uri,
        *,
        spaces: Collection[str | int] | None = None,
        on_change: Collection[OnChange] = (),
        on_resync: Collection[OnResync] = (),
        connect_timeout: float = 10.0,
        replication_timeout: float = 1.0,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._outside = outside
        self._uri = uri
        self._connect_timeout = connect_timeout
        self._on_change = list(on_change)
        self._on_resync = list(on_resync)
        self._wanted = tuple(spaces or ())
        self._follower = ReplicaSink(
            uri, outside.random.uuid(), FollowedSpaces(spaces if spaces is None else self._wanted), guard
        )
        self._follower.on_resync = self._resynced
        self._applier = Applier(
            outside, uri, self._follower, replication_timeout=replication_timeout, on_state=self._state_changed
        )
        self._waiters: list[tuple[VClock, asyncio.Future[None]]] = []
        self._restart: asyncio.Task[None] | None = None
        self._is_restarting = False
        self._restart_seconds = replication_timeout

    # --- life cycle ---

    async def start(self) -> None:
        """Connect, fetch a snapshot and subscribe. `async with` does this.

        Raises:
            CannotFollow: The server is unreachable or rejects the replica.
        """
        await self._outside.blocking(warm_up)
        try:
            await self._begin()
        except BaseException:
            await self.stop()
            raise
        self._warn_of_missing()
        if self._on_change:
            self._settled.on_transaction.append(self._changed)
        self._follower.on_written.append(self._moved)
        self._applier.resume()

    def _warn_of_missing(self) -> None:
        there = {name for space in self.box.spaces.values() for name in (space.name, space.id)}
        missing = [space for space in self._wanted if space not in there]
        if missing:
            names = ", ".join(map(repr, missing))
            LOG.warning("%s has no space %s; will follow it once created", self._uri.address, names)

    async def _begin(self) -> None:
        address = self._uri.address
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
                is_guest = rights.is_guest(self._uri.user)
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
        self._is_restarting = False
        await self._applier.stop()
        self._wake()

    # --- reading ---

    @property
    def box(self) -> Box:
        """The spaces in memory, for access beyond the methods of this class."""
        return self._settled.box

    @property
    def _settled(self) -> SettledBox:
        settled = self._follower.settled
        if settled is None:
            raise CannotFollow(f"no data from {self._uri.address} yet", hint="use the replica inside `async with`")
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
        raise read_only(self._uri)

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
            raise NotReached(message, hint=f"upstream {self._uri.address} is in state {status}") from None
        finally:
            self._waiters.remove(waiter)

    # --- triggers ---

    def on_change(self, trigger: OnChange) -> OnChange:
        """Call `trigger` with the list of changes of each transaction that is settled from now on.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """
        if not self._on_change and self._follower.settled is not None:
            self._follower.settled.on_transaction.append(self._changed)
        self._on_change.append(trigger)
        return trigger

    def on_resync(self, trigger: OnResync) -> OnResync:
        """Call `trigger` with the positions before and after, each time a snapshot replaces the data.

        `on_change` does not report the changes between the two positions, so derived data must be rebuilt.

        Returns:
            `trigger`, so that the method can be used as a decorator.
        """
        self._on_resync.append(trigger)
        return trigger

    def _changed(self, changes: list[SettledChange]) -> None:
        for trigger in tuple(self._on_change):
            try:
                trigger(changes)
            except Exception:
                LOG.exception("on_change trigger %s failed", _name(trigger))

    def _resynced(self, before: VClock, after: VClock) -> None:
        for trigger in tuple(self._on_resync):
            try:
                trigger(before, after)
            except Exception:
                LOG.exception("on_resync trigger %s failed", _name(trigger))

    # --- the applier ---

    def _state_changed(self, applier: Applier) -> None:
        follower = self._follower
        match applier.state:
            case ApplierState.CONNECT:
                self._is_restarting = False
            case ApplierState.CONNECTED:
                follower.meet(applier.version)
            case ApplierState.READY:
                follower.prepare(applier.ballot)
            case ApplierState.SYNC:
                self._check_tail(applier)
            case ApplierState.FOLLOW:
                self._restart_seconds = applier.replication_timeout
            case ApplierState.LOADING | ApplierState.STOPPED if applier.error is not None and _is_gap(applier.error):
                follower.snapshot_reason = applier.error.message
                self._is_restarting = True
                self._restart = asyncio.get_running_loop().create_task(self._start_again())
            case ApplierState.STOPPED:
                self._wake()

    def _check_tail(self, applier: Applier) -> None:
        self._follower.refusal = error = self._follower.tail_lost(applier.remote_vclock_at_subscribe or VClock())
        if error is not None:
            applier.fail(error)

    async def _start_again(self) -> None:
        """Restart the applier after a pause that grows each time, because a snapshot is expensive for the upstream."""
        await self._applier.stop()
        await self._outside.clock.sleep(self._restart_seconds)
        self._restart_seconds = min(2 * self._restart_seconds, RESTART_SECONDS_MAX)
        self._applier.start()

    def _moved(self) -> None:
        vclock = self.vclock
        for wanted, reached in self._waiters:
            if wanted <= vclock and not reached.done():
                reached.set_result(None)

    def _check_alive(self) -> None:
        applier = self._applier
        if applier.state in ENDED and not self._is_restarting:
            why = applier.error.message if applier.error is not None else "the replica was stopped"
            hint = applier.error.hint if applier.error is not None else None
            raise CannotFollow(f"{self._uri.address} is no longer followed: {why}", hint=hint) from applier.error

    def _wake(self) -> None:
        """Fail all waiters if the applier has ended, since no more rows will arrive."""
        try:
            self._check_alive()
        except CannotFollow as error:
            for _, reached in self._waiters:
                if not reached.done():
                    reached.set_exception(error)


def read_only(uri: Uri) -> errors.TarantoolError:
    """Return the error for an attempt to change data in a replica."""
    return errors.Readonly("Can't modify data because this is a read-only replica.", hint=f"write to {uri.address}")


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
    return code_of(error) == errors.XlogGap.code or _GAP_TEXT in error.message
