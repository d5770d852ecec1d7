"""An archive: a durable receiver of the log of a live server, what `pg_receivewal` is to PostgreSQL.

`Archive` follows one member of a replica set, anonymously unless it is told to register, and keeps what it gets in
files that a real server recovers from. It decides when to take snapshots, what to do about rows that are gone, and
which errors are the end; files are `archive_store.py`'s part, the protocol is the applier's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node import archive_events as events
from flowstone.node.applier import SILENCE_MAX, Applier
from flowstone.node.archive_events import Event
from flowstone.node.archive_log import WAL_MAX_SIZE, version_of
from flowstone.node.archive_manifest import FIRST, GAP, INTERVAL, Gap, Upstream
from flowstone.node.archive_patience import Patience
from flowstone.node.archive_refusals import (
    FOR_OPERATORS,
    LogsCollected,
    UpstreamLostTail,
    explained,
    is_gap,
)
from flowstone.node.archive_rows import warm_up
from flowstone.node.archive_sink import Intake, LogSink, SnapshotSink
from flowstone.node.archive_snapshot import IncomingSnapshot
from flowstone.node.archive_store import Store
from flowstone.outside import Outside, production
from flowstone.outside.worker import by_worker
from flowstone.replication.applier import ApplierState, ConnectionLost, code_of, is_ordinary
from flowstone.replication.vclock import VClock

SNAPSHOT_INTERVAL: Final = 24 * 3600.0
"""Seconds between snapshots. Each is a copy of all data, for the upstream to send and the archive to keep."""

SAVE_INTERVAL: Final = 1.0
"""Seconds after which manifest and index are brought up to the log."""

KNOWN_INTERVAL: Final = 10.0
"""Seconds after which the manifest says that nothing was written, while nothing is."""

HOLD_SECONDS: Final = 2.0
"""How long rows may wait until the upstream says where a snapshot stands; half of what it waits for our ACKs."""

STALL_SECONDS: Final = 60.0
"""After so long a silence in a snapshot nobody is there any more; before it a server may wait for a quorum."""

SEARCH_SECONDS: Final = 120.0
"""So long a server may be silent after SUBSCRIBE."""

RETRY_SECONDS: Final = 1.0

_FOLLOWING: Final = frozenset({ApplierState.SYNC, ApplierState.FOLLOW})


class HasPath(Protocol):
    """`pathlib.Path`, and what is like it."""

    def __fspath__(self) -> str: ...


class Archive:
    """The archive in `directory` of the server at `uri`. Made, `run`, and told to `stop`.

    `register` makes it a member of the replica set, for which the upstream keeps its logs; `images` adds to each row
    the tuples that it changed; `on_event` is told what happens, `archive_events.py` has what.
    """

    _store_type: type[Store] = Store

    def __init__(
        self,
        uri: str | Uri,
        directory: str | HasPath,
        *,
        register: bool = False,
        images: bool = False,
        snapshot_interval: float = SNAPSHOT_INTERVAL,
        wal_max_size: int = WAL_MAX_SIZE,
        replication_timeout: float = 1.0,
        on_event: Callable[[Event], None] = lambda event: None,
        outside: Outside | None = None,
    ) -> None:
        self._uri = parse_uri(uri) if isinstance(uri, str) else uri
        self._directory = directory if isinstance(directory, str) else directory.__fspath__()
        self._wants_registration = register
        self._wants_images = images
        self._snapshot_interval = snapshot_interval
        self._wal_max_size = wal_max_size
        self._replication_timeout = replication_timeout
        self._on_event = on_event
        self._outside = outside or production()
        self._patience = Patience(self._outside)
        self._store: Store | None = None
        self._intake: Intake | None = None
        self._applier: Applier | None = None
        self._sink: LogSink | None = None
        self._fetching: Applier | None = None
        self._beside: asyncio.Task[None] | None = None
        self._is_once = False
        self._has_opened = False
        self._has_followed = False
        self._is_searching = False
        self._failures = 0
        self._target: VClock | None = None
        self._asked_at = 0.0
        self._ended: asyncio.Future[FlowstoneError | None] | None = None
        self._work: asyncio.Task[None] | None = None
        self._snapshotting: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._told = ""

    # --- for whoever owns it ---

    @property
    def position(self) -> VClock:
        """What is durable here."""
        return self._intake.vclock if self._intake is not None else VClock()

    @property
    def settled(self) -> VClock:
        """What of that can no longer be withdrawn."""
        return self._store.settled if self._store is not None else VClock()

    @property
    def state(self) -> ApplierState:
        """That of the connection to the upstream."""
        return self._applier.state if self._applier is not None else ApplierState.OFF

    async def run(self, *, once: bool = False) -> None:
        """Follows until `stop`, or, with `once`, until it has what the upstream had when it was asked first.

        A server that cannot be reached is waited for, unless `once`. Raises what somebody has to put right.
        """
        self._is_once = once
        await self._open()
        self._work = asyncio.get_running_loop().create_task(self._run())
        if self._is_stopping:
            self._work.cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            self._work.cancel()
            if not self._is_stopping:
                await self._close(is_sound=True)
                raise
        except BaseException:
            await self._close(is_sound=self._intake is not None and self._intake.failure is None)
            raise
        store, _ = self._open_store()
        await self._close(is_sound=True)
        rows = store.log.row_count if store.log is not None else 0
        self._tell(events.Stopped(store.vclock.to_mapping(), store.settled.to_mapping(), rows))

    def stop(self) -> None:
        """Ends `run` in good order: what has come is written first."""
        self._is_stopping = True
        if self._work is not None:
            self._work.cancel()

    async def __aenter__(self) -> Self:
        """Runs beside the block; errors come from `__aexit__`."""
        self._beside = asyncio.get_running_loop().create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._beside is not None:
            await self._beside

    # --- life ---

    async def _open(self) -> None:
        outside = self._outside
        new_uuid = outside.random.uuid()

        def open_store() -> Store:
            return self._store_type.open(
                outside.disk, self._directory, new_uuid, outside.clock.wall, wal_max_size=self._wal_max_size
            )

        await by_worker(outside, warm_up)
        self._store = await by_worker(outside, open_store)
        self._intake = Intake(outside, self._store)
        self._intake.on_written.append(self._note_written)
        self._intake.on_snapshot = self._tell_opened
        if self._store.is_begun:
            self._tell_opened()

    def _tell_opened(self) -> None:
        """Once; of a new archive when the upstream has let us in: before that there is none."""
        if not self._has_opened:
            self._has_opened = True
            store, _ = self._open_store()
            self._tell(events.Opened(self._directory, store.vclock.to_mapping(), store.settled.to_mapping()))

    async def _run(self) -> None:
        store, intake = self._open_store()
        is_anonymous = not self._wants_registration and not store.manifest.replica_id
        self._sink = LogSink(intake, is_anonymous=is_anonymous, on_registered=self._note_registration)
        self._sink.on_joined = self._note_joined
        self._applier = Applier(
            self._outside,
            self._uri,
            self._sink,
            replication_timeout=self._replication_timeout,
            on_state=self._state_changed,
            on_alive=self._note_alive,
            silence_max=self._silence_max,
        )
        saving: asyncio.Task[None] | None = None
        try:
            await self._begin(is_anonymous=is_anonymous)
            if store.log is not None:
                await self._load_images()
            saving = asyncio.create_task(self._keep_saving())
            await self._follow()
        finally:
            for task in (saving, self._snapshotting):
                await _end_task(task)
            await self._applier.stop()
            await self._sink.abandon()

    async def _begin(self, *, is_anonymous: bool) -> None:
        """There is a log to go on with, or, for who registers, will be when it has joined."""
        store, _ = self._open_store()
        if store.log is None and is_anonymous:
            await self._begin_from_snapshot(FIRST, "")

    async def _follow(self) -> None:
        """Until the target is reached, or an error is the end; over gaps it goes on."""
        assert self._applier is not None
        _, intake = self._open_store()
        while True:
            self._ended = asyncio.get_running_loop().create_future()
            self._applier.start()
            if self._snapshot_interval > 0:
                self._snapshotting = asyncio.create_task(self._keep_taking_snapshots())
            try:
                error = await self._ended
            finally:
                await self._applier.stop()
                await _end_task(self._snapshotting)
            if error is None:
                return
            if intake.failure is not None:
                raise self._explained(intake.failure) from intake.failure
            if not self._is_registration_known(error):
                await self._overcome(error)

    async def _overcome(self, error: FlowstoneError) -> None:
        """Prepare to follow again after `error` ended the connection for good; raise it if a retry is useless."""
        assert self._sink is not None
        await self._drain()
        if is_gap(error):
            await self._begin_from_snapshot(GAP, error.message)
        else:
            await self._wait_before_retry(error)
            self._sink.refusal = None

    async def _drain(self) -> None:
        """Wait until everything received is written."""
        try:
            await self._open_store()[1].drain()
        except FlowstoneError as failure:
            raise self._explained(failure) from failure

    async def _close(self, *, is_sound: bool) -> None:
        store, intake = self._store, self._intake
        if store is None or intake is None:
            return
        self._store = None
        if not is_sound:
            await by_worker(self._outside, store.abandon)
            return
        try:
            try:
                await intake.drain()
            finally:
                await intake.alone(store.close)
        except FlowstoneError as error:
            raise self._explained(error) from error

    def _open_store(self) -> tuple[Store, Intake]:
        assert self._store is not None
        assert self._intake is not None
        return self._store, self._intake

    def _tell(self, event: Event) -> None:
        self._on_event(event)

    # --- the connection ---

    def _state_changed(self, applier: Applier) -> None:
        match applier.state:
            case ApplierState.CONNECTED:
                self._check_logs(applier)
            case ApplierState.READY if self._target is None:
                self._asked_at = self._outside.clock.wall()
            case ApplierState.SYNC:
                self._subscribed(applier)
            case ApplierState.STOPPED:
                self._end(applier.error or FlowstoneError(f"{self._uri.address} cannot be followed"))
            case ApplierState.LOADING | ApplierState.DISCONNECTED if applier.error is not None:
                self._failed(applier.error)

    def _check_logs(self, applier: Applier) -> None:
        """The ballot says where the oldest log of the upstream begins: 2.6 does not refuse who is behind that."""
        store, intake = self._open_store()
        if store.log is None or applier.ballot is None:
            return
        oldest = applier.ballot.gc_vclock.without_zero()
        if not oldest <= intake.submitted:
            applier.fail(LogsCollected(f"{self._uri.address} has logs from {oldest} on only"))

    def _subscribed(self, applier: Applier) -> None:
        store, intake = self._open_store()
        theirs = (applier.remote_vclock_at_subscribe or VClock()).without_zero()
        if not intake.submitted <= theirs:
            assert self._sink is not None
            self._sink.refusal = UpstreamLostTail(self._uri.address, theirs, intake.submitted)
            applier.fail(self._sink.refusal)
            return
        version = ".".join(map(str, applier.version))
        store.follow(Upstream(str(applier.uuid), self._uri.address, version))
        self._has_followed = self._is_searching = True
        self._failures = 0
        self._patience.reset()
        self._told = ""
        if self._target is None:
            self._target = theirs
        address, uuid, position = self._uri.address, str(applier.uuid), intake.vclock.to_mapping()
        self._tell(events.Connected(address, uuid, version, position, theirs.to_mapping()))
        self._check_target()

    def _note_alive(self, applier: Applier) -> None:
        self._is_searching = False

    def _silence_max(self) -> float:
        """A server of 2.6 that looks for our place in a large log sends no heartbeats meanwhile."""
        return SEARCH_SECONDS if self._is_searching else SILENCE_MAX * self._replication_timeout

    def _failed(self, error: FlowstoneError) -> None:
        """The applier would try again: that is no use where only somebody can help."""
        self._is_searching = False
        is_refused = code_of(error) in FOR_OPERATORS and not is_ordinary(error, self._failures)
        is_final = is_gap(error) or (is_refused and not self._has_followed)
        self._failures += 1
        # A connection that breaks is made again; who cannot be reached is away.
        is_away = self._failures > 1 or not self._has_followed
        if is_final or (self._is_once and is_away and self.state is ApplierState.DISCONNECTED):
            self._end(error)
        elif str(error) != self._told:
            self._told = str(error)
            self._tell(events.Disconnected(self._uri.address, str(error)))

    def _end(self, error: FlowstoneError | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    def _note_written(self) -> None:
        if self._intake is not None and self._intake.failure is not None:
            self._end(self._intake.failure)
        self._check_target()

    def _check_target(self) -> None:
        if not self._is_once or self._target is None or not self._target <= self.position:
            return
        # Who goes at once hears no heartbeat, which would have told the time there.
        self._open_store()[0].know_until(self._asked_at)
        self._tell(events.CaughtUp(self.position.to_mapping(), self.settled.to_mapping()))
        self._is_once = False
        self._end(None)

    def _note_time(self) -> None:
        """What the upstream wrote up to the time that it told last is here, if none of it is on its way."""
        store, intake = self._open_store()
        theirs = self._applier.remote_vclock_at_subscribe if self._applier is not None else None
        if theirs is not None and theirs.without_zero() <= intake.vclock and intake.vclock == intake.submitted:
            assert self._applier is not None
            store.know_until(self._applier.peer_time)

    def _is_registration_known(self, error: FlowstoneError) -> bool:
        """The process ended after the upstream had registered us and before its row came."""
        if code_of(error) != errors.ReplicaNotAnon.code or self._sink is None or self._sink.replica_id:
            return False
        self._sink.register_known()
        return True

    def _note_registration(self) -> None:
        store, _ = self._open_store()
        self._tell(events.Registered(store.manifest.replica_id))

    async def _note_joined(self, snapshot: IncomingSnapshot) -> None:
        await self._load_images()
        self._tell_snapshot(snapshot, FIRST)

    async def _load_images(self) -> None:
        """Brings the state up to the log, from which rows get their images; without them the manifest says so."""
        store, _ = self._open_store()
        assert store.log is not None
        if not self._wants_images:
            store.manifest.images_since = None
            return
        from flowstone.node.archive_images import Images  # only who wants images pays for loading a whole engine

        store.on_rows = (await Images.load(self._outside, self._directory, version_of(store.log.version))).add
        if store.manifest.images_since is None:
            store.manifest.images_since = store.vclock.to_mapping()

    def _tell_snapshot(self, snapshot: IncomingSnapshot, reason: str) -> None:
        name = snapshot.path.rpartition("/")[2]
        self._tell(events.Snapshotted(name, snapshot.vclock.to_mapping(), snapshot.row_count, reason))

    def _explained(self, error: FlowstoneError) -> FlowstoneError:
        ours = self._store.manifest.replicaset_uuid if self._store is not None else None
        return explained(error, str(self._uri), ours)

    # --- snapshots ---

    async def _begin_from_snapshot(self, reason: str, why: str) -> None:
        """Takes a snapshot and begins the log there, trying again as long as that can help."""
        store, intake = self._open_store()
        gap: Gap | None = None
        snapshot: IncomingSnapshot | None = None
        while snapshot is None:
            # As the one who will subscribe: servers since 3.3 keep their logs for it from here on.
            sink = SnapshotSink(intake, UUID(store.manifest.replica_uuid), self._files_uuid)
            try:
                await self._fetch(sink, reason)
                assert sink.snapshot is not None
                if not store.vclock <= sink.snapshot.vclock:
                    raise UpstreamLostTail(self._uri.address, sink.snapshot.vclock, store.vclock)
                gap = await intake.alone(store.begin_from, sink.snapshot, why)
                snapshot = sink.snapshot
            except FlowstoneError as error:
                await sink.abandon()
                await self._wait_before_retry(error)
            finally:
                await sink.abandon()  # which is harmless where it has become a file
        self._patience.reset()
        intake.begin_anew()
        if reason == GAP:
            await self._load_images()
        if gap is not None:
            self._tell(events.GapFound(gap.missing, gap.after, gap.until, why))
        self._tell_snapshot(snapshot, reason)

    def _files_uuid(self) -> UUID:
        """A new archive's files are those of the instance that it follows: a server started from them is that one."""
        assert self._fetching is not None
        assert self._fetching.uuid is not None
        return self._fetching.uuid

    async def _fetch(self, sink: SnapshotSink, reason: str) -> None:
        """Returns when `sink` has a whole snapshot."""
        store, intake = self._open_store()
        fetching = self._fetching = Applier(
            self._outside, self._uri, sink, replication_timeout=self._replication_timeout
        )
        holding: asyncio.Task[None] | None = None
        try:
            fetching.start(pause_at=(ApplierState.READY,))
            await fetching.resume_to(ApplierState.READY, is_patient=False)
            if reason == INTERVAL:
                # Until it is known where the snapshot stands, no row may pass that place.
                intake.is_free.clear()
                holding = asyncio.get_running_loop().create_task(self._let_go())
                await intake.drain()
            await self._receive(fetching, sink)
        finally:
            intake.is_free.set()
            if holding is not None:
                holding.cancel()
            await fetching.stop()
            self._fetching = None
        found = sink.snapshot.replicaset_uuid if sink.snapshot is not None else None
        known = store.manifest.replicaset_uuid
        if known is not None and str(found) != known:
            raise errors.ReplicasetUuidMismatch(f"Replica set UUID mismatch: expected {known}, got {found}")

    async def _receive(self, fetching: Applier, sink: SnapshotSink) -> None:
        """Until the snapshot is whole, as long as more of it comes."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(STALL_SECONDS) as limit:
                sink.on_rows = lambda: limit.reschedule(loop.time() + STALL_SECONDS)
                await fetching.resume_to(ApplierState.FETCHED_SNAPSHOT, is_patient=False)
        except TimeoutError as error:
            what = f"{self._uri.address} said nothing for {STALL_SECONDS:g} s in the middle of a snapshot"
            raise ConnectionLost(what) from error

    async def _let_go(self) -> None:
        await self._outside.clock.sleep(HOLD_SECONDS * self._replication_timeout)
        assert self._intake is not None
        self._intake.is_free.set()

    async def _wait_before_retry(self, error: FlowstoneError) -> None:
        has_begun = self._open_store()[0].log is not None
        if not await self._patience.outlasts(error, self._uri, has_begun=has_begun, is_once=self._is_once):
            raise self._explained(error) from error
        if str(error) != self._told:
            self._told = str(error)
            self._tell(events.Disconnected(self._uri.address, str(error)))
        intervals = self._patience.intervals(error)
        await self._outside.clock.sleep(intervals * RETRY_SECONDS * self._replication_timeout)

    async def _keep_taking_snapshots(self) -> None:
        clock = self._outside.clock
        retry_at = 0.0
        while True:
            wait = max(self._seconds_until_snapshot(), retry_at - clock.monotonic())
            if self.state not in _FOLLOWING or wait > 0:
                await clock.sleep(min(max(wait, SAVE_INTERVAL), self._snapshot_interval))
                continue
            try:
                await self._take_snapshot()
            except FlowstoneError as error:
                self._tell(events.SnapshotFailed(str(self._explained(error))))
                retry_at = clock.monotonic() + self._snapshot_interval

    def _seconds_until_snapshot(self) -> float:
        """Until the next is due. A newest one from the future is of a clock that was wrong, and so of any age."""
        store, _ = self._open_store()
        age = self._outside.clock.wall() - store.newest_snapshot_at
        return self._snapshot_interval - age if age >= 0 else 0.0

    async def _take_snapshot(self) -> None:
        """One more, while the log goes on; it counts from the moment when the log has come to where it stands."""
        store, intake = self._open_store()

        async def cut(vclock: VClock) -> None:
            await intake.alone(store.cut, vclock)
            intake.is_free.set()

        # As nobody: of one instance there may be one connection, and no logs need to be kept for this one.
        sink = SnapshotSink(intake, UUID(int=0), self._files_uuid, cut)
        try:
            await self._fetch(sink, INTERVAL)
            assert store.log is not None
            while store.log.cut_at is not None:
                intake.has_moved.clear()
                await intake.has_moved.wait()
            snapshot = sink.snapshot
            assert snapshot is not None
            if await intake.alone(store.publish, snapshot) is None:
                raise FlowstoneError("the log had passed the place where the snapshot stands")
            self._tell_snapshot(snapshot, INTERVAL)
        finally:
            if store.log is not None and store.log.cut_at is not None:
                store.log.cut_at = None
            await sink.abandon()

    # --- beside it ---

    async def _keep_saving(self) -> None:
        """Brings manifest and index up to the log, and tells how it goes."""
        store, intake = self._open_store()
        clock = self._outside.clock
        saved = None
        at, rows = clock.monotonic(), 0
        while True:
            await clock.sleep(SAVE_INTERVAL)
            self._note_time()
            known = store.manifest.known_until // KNOWN_INTERVAL
            now = store.vclock, store.settled, store.manifest.upstream, store.manifest.replica_id, known
            if now != saved:
                try:
                    await intake.alone(store.save)
                    saved = now
                except FlowstoneError as error:
                    # No effect while nothing is followed because a snapshot is taken anew: the next round tries again.
                    self._end(error)
            total = store.log.row_count if store.log is not None else 0
            before, at = at, clock.monotonic()
            rate = (total - rows) / max(at - before, 1e-9)
            rows = total
            lag = self._applier.lag if self._applier is not None and self.state in _FOLLOWING else None
            lag = None if lag is not None and lag > 1e9 else lag
            position, settled = store.vclock.to_mapping(), store.settled.to_mapping()
            size = store.log.byte_count if store.log is not None else 0
            self._tell(events.Progress(position, settled, total, rate, lag, self.state.value, size))


async def _end_task(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
