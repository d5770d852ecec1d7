"""A replica inside a program: anonymous, read-only, with nothing on disk. `flowstone.follow` opens one.

Holds together an applier, which talks to the upstream, and a settled box, which has the data. Only settled positions
are acknowledged, so what is kept here in memory alone never completes a quorum. When the upstream has no more the logs
that we need, a new snapshot takes the place of the data in one moment; when it has less than we do, that is an error.
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
from flowstone.box.transaction import Transaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.row import Row
from flowstone.iproto.uri import Uri
from flowstone.node import rights
from flowstone.node.applier import Applier
from flowstone.node.changes import SettledChange
from flowstone.node.recovery import FLAGS_SINCE, replicaset_uuid_of
from flowstone.node.settled_box import Choice, RowsNeeded, SettledBox, Snapshot, warm_up
from flowstone.node.spaces import Space
from flowstone.outside import Outside
from flowstone.replication.applier import ENDED, ApplierState, ConnectionLost, code_of
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import VClock, VClockError
from flowstone.xlog.reader import Slab

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

OnChange = Callable[[list[SettledChange]], None]
OnResync = Callable[[VClock, VClock], None]
"""Told the position before and after, when a new snapshot has taken the place of the data."""

_GAP_TEXT: Final = "Missing .xlog file"
"""How the error of 2.6 begins that has no code of its own."""


RESTART_SECONDS_MAX: Final = 60.0
"""Between two snapshots from an upstream that has the logs behind none of them."""


class CannotFollow(FlowstoneError):
    """The upstream could not be reached, or does not let us in; `__cause__` is what it said."""


class UpstreamCut(FlowstoneError):
    """The upstream has fewer rows than we had from it: its log was cut, or is another's."""


class NotReached(FlowstoneError):
    """A position was waited for, and did not come in time."""


class Follower:
    """The replica as its applier sees it: `node.sink.Sink`."""

    def __init__(self, uri: Uri, uuid: UUID, choice: Choice, guard: AbstractContextManager[Any] | None) -> None:
        self.on_written: list[Callable[[], None]] = []
        self.on_snapshot: Callable[[], None] = lambda: None
        """Called when rows of a snapshot come."""
        self.on_resync: Callable[[VClock, VClock], None] = lambda before, after: None
        self.instance_uuid = uuid
        self.replica_id = 0
        self.is_anonymous = True
        self.id_filter = (0,)
        self.term = 1
        self.settled: SettledBox | None = None
        self.snapshot_reason = "there is no data yet"
        """Why a snapshot is asked for next; empty where rows are."""
        self.refusal: FlowstoneError | None = None
        """Why no row is taken from the present connection."""
        self._uri = uri
        self._choice = choice
        self._guard = guard
        self._snapshot: Snapshot | None = None
        self._is_fresh = False
        self._replicaset_uuid: UUID | None = None
        self._version: tuple[int, int, int] = (0, 0, 0)
        self._dialect = Dialect.V2_11

    # --- where it stands ---

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
        """The upstream has said its age. What rows of another age mean is not known without a snapshot of its."""
        before, self._version, self._dialect = self._version, version, from_greeting(version)
        is_other = self.settled is not None and self._dialect is not self.settled.box.dialect
        if is_other or (before != (0, 0, 0) and (version >= FLAGS_SINCE) is not (before >= FLAGS_SINCE)):
            self.snapshot_reason = f"it was {_text(before)}, and is {_text(version)} now"

    def prepare(self, ballot: Ballot | None) -> None:
        """A subscription, or a snapshot, is about to be asked for."""
        self.refusal = None
        if self.settled is None:
            return
        # 2.6 notices that logs are missing only when it has written another one: better see for ourselves.
        if ballot is not None and not self._is_fresh and not ballot.gc_vclock.without_zero() <= self.vclock:
            self.snapshot_reason = f"it has logs from {ballot.gc_vclock.without_zero()} on only"
        self._is_fresh = False
        self.settled.resume(has_flags=self._version >= FLAGS_SINCE)

    def tail_lost(self, theirs: VClock) -> UpstreamCut | None:
        """An upstream that has less than we had from it would go on with other rows under the same numbers."""
        ours = self.vclock
        lost = [(number, theirs.get(number) + 1, lsn) for number, lsn in ours if lsn > theirs.get(number)]
        if not lost:
            return None
        rows = ", ".join(f"{first}…{last} of replica {number}" for number, first, last in lost)
        return UpstreamCut(
            f"{self._uri.address} has lost rows {rows}: its vclock is {theirs}, ours {ours}",
            hint="find out which of the two is right; following anew takes its data as they are",
        )

    # --- the snapshot ---

    async def begin_snapshot(self, vclock: VClock, greeting_version: tuple[int, int, int]) -> None:
        if (lost := self.tail_lost(vclock)) is not None:
            raise lost
        self._snapshot = Snapshot(self._dialect, vclock, self._choice)

    async def meta(self, row: Row) -> None:
        assert self._snapshot is not None
        self._snapshot.synchro.follow(row, in_snapshot=True)

    async def snapshot_rows(self, slab: Slab) -> None:
        assert self._snapshot is not None
        self._snapshot.push(slab)
        self.on_snapshot()

    async def begin_final(self, stop_vclock: VClock) -> None:
        raise AssertionError("who is anonymous does not join")

    async def final_rows(self, slab: Slab) -> None:
        raise AssertionError("who is anonymous does not join")

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
        LOG.info("received a snapshot of %s, %d rows", snapshot.vclock, snapshot.row_count)
        if self.settled is None:
            self.settled = SettledBox(snapshot, self._choice, guard=self._guard)
            return
        before = self.vclock
        self.settled.replace(snapshot)
        LOG.warning(
            "%s: %s; its snapshot of %s takes the place of the data of %s",
            self._uri.address,
            reason,
            self.vclock,
            before,
        )
        self.on_resync(before, self.vclock)
        self._tell()

    # --- the log ---

    async def apply(self, slab: Slab) -> None:
        assert self.settled is not None, "there is data before there is a subscription"
        if self.refusal is not None:
            raise self.refusal
        before = self.vclock
        try:
            self.settled.push(slab)
        except RowsNeeded as error:
            self.snapshot_reason = error.message
            raise ConnectionLost(error.message, hint="a new snapshot will have it") from error
        finally:
            if self.vclock is not before:
                self._tell()

    def raft(self, source_id: int, row: Row) -> None:
        """Who is anonymous has no part in elections."""

    def _tell(self) -> None:
        for tell in tuple(self.on_written):
            tell()


class Replica:
    """What `async with flowstone.follow(…)` gives: spaces to read, at a position that only moves forward.

    Reads are plain calls that see memory; between two `await`s nothing changes. All that is seen is settled. Triggers
    are called in the event loop, transaction by transaction, when its changes can be read here; whatever they raise is
    logged. They must not take long: nothing is received meanwhile.
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
        self._follower = Follower(uri, outside.random.uuid(), Choice(spaces if spaces is None else self._wanted), guard)
        self._follower.on_resync = self._resynced
        self._applier = Applier(
            outside, uri, self._follower, replication_timeout=replication_timeout, on_state=self._state_changed
        )
        self._waiters: list[tuple[VClock, asyncio.Future[None]]] = []
        self._restart: asyncio.Task[None] | None = None
        self._is_restarting = False
        self._restart_seconds = replication_timeout

    # --- life ---

    async def start(self) -> None:
        """Returns when there is data, and its changes are followed. CannotFollow says what keeps it from that."""
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
            LOG.warning("%s has no space %s: followed if it gets one", self._uri.address, names)

    async def _begin(self) -> None:
        address = self._uri.address
        self._applier.start()
        try:
            async with asyncio.timeout(self._connect_timeout) as limit:
                # Large data may take its time, once it comes: then only silence is too much for the applier.
                self._follower.on_snapshot = lambda: limit.reschedule(None)
                await self._reach_subscription()
        except TimeoutError:
            said = f": {self._applier.error.message}" if self._applier.error is not None else ""
            raise CannotFollow(
                f"cannot follow {address}: no data within {self._connect_timeout:g} s{said}",
                hint="see whether it is up, or allow more with connect_timeout",
            ) from self._applier.error
        except FlowstoneError as error:
            hint = error.hint
            if code_of(error) == errors.AccessDenied.code:
                is_guest = rights.is_guest(self._uri.user)
                hint = rights.NO_USER if is_guest else "grant it the role 'replication' there"
            raise CannotFollow(f"cannot follow {address}: {error.message}", hint=hint) from error
        finally:
            self._follower.on_snapshot = lambda: None

    async def _reach_subscription(self) -> None:
        """It pauses there: no row is taken before everybody who wants to be told is known."""
        while True:
            try:
                await self._applier.resume_to(ApplierState.SYNC, is_patient=False)
            except errors.Loading:
                continue  # it has just been started
            return

    async def stop(self) -> None:
        """Ends the connection. What is in memory can be read as before."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        self._is_restarting = False
        await self._applier.stop()
        self._wake()

    # --- reading ---

    @property
    def box(self) -> Box:
        """The spaces in memory, for who needs more than this class offers."""
        return self._settled.box

    @property
    def _settled(self) -> SettledBox:
        settled = self._follower.settled
        if settled is None:
            raise CannotFollow(f"nothing of {self._uri.address} is here yet", hint="use it inside `async with`")
        return settled

    def space(self, space: str | int) -> Space:
        """The space with this name or id, to be read; a change is refused with error 7."""
        found = self.box.space(space)
        if not self._settled.follows(found):
            raise errors.NoSuchSpace(f"Space '{space}' is not followed", hint="name it in spaces=[…]")
        return Space(self, found.id)

    async def write(self, statement: Callable[[Transaction], T]) -> T:
        """Refuses: what is written belongs to the upstream."""
        raise read_only(self._uri)

    @property
    def vclock(self) -> VClock:
        """The settled position: everything up to here can be read, and will not be taken back."""
        return self._follower.vclock

    def info(self) -> dict[str, Any]:
        """Who and where we are; `upstream` has its status, lag and idle time as `box.info.replication` shows them."""
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
        """Returns when everything up to `vclock` is here, say to `box.info.vclock` of whoever wrote.

        NotReached when `timeout` seconds have passed, and what stopped us if nothing more will come.
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
            message = f"{wanted} was not reached within {timeout:g} s: we are at {self.vclock}"
            raise NotReached(message, hint=f"the upstream {self._uri.address} is in state {status}") from None
        finally:
            self._waiters.remove(waiter)

    # --- triggers ---

    def on_change(self, trigger: OnChange) -> OnChange:
        """From now on calls `trigger` with the changes of every transaction that is settled. A decorator, too."""
        if not self._on_change and self._follower.settled is not None:
            self._follower.settled.on_transaction.append(self._changed)
        self._on_change.append(trigger)
        return trigger

    def on_resync(self, trigger: OnResync) -> OnResync:
        """From now on calls `trigger` with the positions before and after, when a snapshot replaced the data.

        What happened between them is told to nobody: who has derived something from the data looks at all of it anew.
        """
        self._on_resync.append(trigger)
        return trigger

    def _changed(self, changes: list[SettledChange]) -> None:
        for trigger in tuple(self._on_change):
            try:
                trigger(changes)
            except Exception:
                LOG.exception("in the on_change trigger %s", _name(trigger))

    def _resynced(self, before: VClock, after: VClock) -> None:
        for trigger in tuple(self._on_resync):
            try:
                trigger(before, after)
            except Exception:
                LOG.exception("in the on_resync trigger %s", _name(trigger))

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
        """After a pause, longer each time: a snapshot costs the upstream much, and the last one was of no use."""
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
            why = applier.error.message if applier.error is not None else "it was stopped"
            hint = applier.error.hint if applier.error is not None else None
            raise CannotFollow(f"{self._uri.address} is followed no more: {why}", hint=hint) from applier.error

    def _wake(self) -> None:
        """Nothing more will come."""
        try:
            self._check_alive()
        except CannotFollow as error:
            for _, reached in self._waiters:
                if not reached.done():
                    reached.set_exception(error)


def read_only(uri: Uri) -> errors.TarantoolError:
    """The error of who tries to change something in a replica."""
    return errors.Readonly("Can't modify data because this is a read-only replica.", hint=f"write to {uri.address}")


def _vclock(given: object) -> VClock:
    if isinstance(given, VClock):
        return given
    if not isinstance(given, Mapping) or not all(isinstance(number, int) for pair in given.items() for number in pair):
        raise VClockError(f"{given!r} is no vclock", hint="write it as {replica id: LSN}, say {1: 1000}")
    return VClock(given)


def _name(trigger: Callable[..., None]) -> str:
    return getattr(trigger, "__qualname__", None) or repr(trigger)


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _is_gap(error: FlowstoneError) -> bool:
    """Whether the upstream said that it has no more the logs that we need."""
    return code_of(error) == errors.XlogGap.code or _GAP_TEXT in error.message
