"""An archive: a durable receiver of the log of a live server, as `pg_receivewal` is for PostgreSQL.

`Archive` follows one member of a replica set, anonymously unless it registers, and stores the log in files that a real
server recovers from. This module decides when to take snapshots, how to continue after missing rows, and which errors
end the archive. `store.py` handles the files, `node/upstream/applier.py` the protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Protocol, Self
from uuid import UUID

from flowstone.archive import events as events
from flowstone.archive.archive_log import WAL_MAX_SIZE, version_of
from flowstone.archive.archive_sink import Intake, LogSink, SnapshotSink
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.manifest import FIRST, GAP, INTERVAL, ArchivedUpstream, Gap
from flowstone.archive.received_snapshot import IncomingSnapshot
from flowstone.archive.refusals import FOR_OPERATORS, LogsCollected, UpstreamLostTail, explained, is_gap
from flowstone.archive.retries import Patience
from flowstone.archive.store import ArchiveStore
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri, parse_uri
from flowstone.node.upstream.applier import SILENCE_MAX, Applier
from flowstone.outside import Outside, production
from flowstone.outside.worker import by_worker
from flowstone.replication.applier.states import ApplierState, ConnectionLost, code_of, is_ordinary
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed

SNAPSHOT_INTERVAL: Final = 24 * 3600.0
"""Seconds between snapshots. Each one is a full copy of the data, which the upstream sends and the archive keeps."""

SAVE_INTERVAL: Final = 1.0
"""Seconds between saves of the manifest and the index."""

KNOWN_INTERVAL: Final = 10.0
"""Seconds after which the manifest is saved although no rows arrived, to record the new `known_until`."""

HOLD_SECONDS: Final = 2.0
"""Maximum time that rows wait for the position of a snapshot, in replication timeouts: half of the ACK timeout."""

STALL_SECONDS: Final = 60.0
"""Silence after which a snapshot transfer counts as lost. Long, because a server may first wait for a quorum."""

SEARCH_SECONDS: Final = 120.0
"""Timeout for a silent server after SUBSCRIBE: the server may have to search a large log for our position."""

RETRY_SECONDS: Final = 1.0  # in replication timeouts

_FOLLOWING: Final = frozenset({ApplierState.SYNC, ApplierState.FOLLOW})


class HasPath(Protocol):
    """An object that has a path, such as `pathlib.Path`."""

    def __fspath__(self) -> str: ...


class Archive:
    """Archives the log of a server into a directory.

    `async with` runs the archive in the background until the block ends; `run` runs it in the foreground.

    Args:
        uri: Address of the upstream. Its user needs the role `replication`.
        directory: Directory of the archive; created if missing.
        register: Make the archive a member of the replica set, so that the upstream keeps its logs until the archive
            has received them.
        images: Add the old and the new tuple to each row.
        snapshot_interval: Seconds between snapshots; 0 takes only the first one.
        wal_max_size: Size in bytes at which a new log file begins.
        replication_timeout: The `replication_timeout` of the upstream.
        on_event: Called with each event (`flowstone.archive.events`).
        outside: The door to disk, network and clock; for tests.

    Raises:
        UriError: `uri` is not a valid address.

    Example:
        async with flowstone.Archive("replicator:secret@db1:3301", "/backup/db1") as archive:
            print(archive.position, archive.settled)
    """

    _store_type: type[ArchiveStore] = ArchiveStore

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
        on_event: Callable[[ArchiveEvent], None] = lambda event: None,
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
        self._store: ArchiveStore | None = None
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

    # --- public ---

    @property
    def position(self) -> VClock:
        """The position up to which rows are durable in the archive."""
        return self._intake.vclock if self._intake is not None else VClock()

    @property
    def settled(self) -> VClock:
        """The position up to which rows are settled: they can no longer be rolled back."""
        return self._store.settled if self._store is not None else VClock()

    @property
    def state(self) -> ApplierState:
        """The state of the connection to the upstream."""
        return self._applier.state if self._applier is not None else ApplierState.OFF

    async def run(self, *, once: bool = False) -> None:
        """Follow the upstream until `stop` is called.

        An unreachable upstream is contacted again until it answers.

        Args:
            once: Return when the archive has everything that the upstream had at the first subscription. In that case,
            an unreachable upstream is an error.

        Raises:
            AlreadyLocked: Another process writes to the directory.
            NotAnArchive: The directory is not an archive and cannot become one.
            ArchiveRefused: The upstream rejects the archive, or must not be followed.
            FlowstoneError: Another error that needs an operator.
        """
        self._is_once = once
        await self._open()
        self._work = asyncio.get_running_loop().create_task(self._run())
        # `stop` was called while the directory was being opened, when there was no task to cancel.
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
            # After a failed write, the end of the files is unknown: no end marker may be written after it.
            await self._close(is_sound=self._intake is not None and self._intake.failure is None)
            raise
        store, _ = self._open_store()
        await self._close(is_sound=True)
        rows = store.log.row_count if store.log is not None else 0
        self._tell(events.Stopped(store.vclock.to_mapping(), store.settled.to_mapping(), rows))

    def stop(self) -> None:
        """End `run` cleanly: rows already received are written first. Return at once."""
        self._is_stopping = True
        if self._work is not None:
            self._work.cancel()

    async def __aenter__(self) -> Self:
        """Start `run` in the background; `__aexit__` raises its errors."""
        self._beside = asyncio.get_running_loop().create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._beside is not None:
            await self._beside

    # --- life cycle ---

    async def _open(self) -> None:
        outside = self._outside
        new_uuid = outside.random.uuid()

        def open_store() -> ArchiveStore:
            return self._store_type.open(
                outside.disk, self._directory, new_uuid, outside.clock.wall, wal_max_size=self._wal_max_size
            )

        try:
            self._store = await by_worker(outside, open_store)
        except WriteFailed as error:
            raise self._explained(error) from error
        self._intake = Intake(outside, self._store)
        self._intake.on_written.append(self._note_written)
        self._intake.on_snapshot = self._tell_opened
        if self._store.is_begun:
            self._tell_opened()

    def _tell_opened(self) -> None:
        """Report `Opened`, once; for a new archive not before the upstream has granted a snapshot."""
        if not self._has_opened:
            self._has_opened = True
            store, _ = self._open_store()
            self._tell(events.Opened(self._directory, store.vclock.to_mapping(), store.settled.to_mapping()))

    async def _run(self) -> None:
        store, intake = self._open_store()
        # An archive that was registered once stays a member: the server keeps logs for its id.
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
        except WriteFailed as error:
            raise self._explained(error) from error
        finally:
            for task in (saving, self._snapshotting):
                await _end_task(task)
            await self._applier.stop()
            await self._sink.abandon()

    async def _begin(self, *, is_anonymous: bool) -> None:
        """Make sure that there is a log to continue. An archive that registers gets its log by joining instead."""
        store, _ = self._open_store()
        if store.log is None and is_anonymous:
            await self._begin_from_snapshot(FIRST, "")

    async def _follow(self) -> None:
        """Follow the upstream, even across gaps, until the target is reached or an error ends the archive."""
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
            # The failure of the disk comes first: the connection may have ended because of it.
            if intake.failure is not None:
                raise self._explained(intake.failure) from intake.failure
            if not self._is_registration_known(error):
                await self._overcome(error)

    async def _overcome(self, error: FlowstoneError) -> None:
        """Prepare to follow again after `error` ended the connection permanently; raise it if a retry is useless."""
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

    def _open_store(self) -> tuple[ArchiveStore, Intake]:
        assert self._store is not None
        assert self._intake is not None
        return self._store, self._intake

    def _tell(self, event: ArchiveEvent) -> None:
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
                self._end(applier.error or FlowstoneError(f"cannot follow {self._uri.address}"))
            case ApplierState.LOADING | ApplierState.DISCONNECTED if applier.error is not None:
                self._failed(applier.error)

    def _check_logs(self, applier: Applier) -> None:
        """Fail if the oldest log of the upstream starts after our position: version 2.6 does not report this error."""
        store, intake = self._open_store()
        if store.log is None or applier.ballot is None:
            return
        oldest = applier.ballot.gc_vclock.without_zero()
        # 2.6 would send heartbeats until its next log exists, and the gap would be noticed only then
        # (docs/spec/replication.md#missing-logs).
        if not oldest <= intake.submitted:
            applier.fail(LogsCollected(f"the oldest log of {self._uri.address} starts at {oldest}"))

    def _subscribed(self, applier: Applier) -> None:
        store, intake = self._open_store()
        theirs = (applier.remote_vclock_at_subscribe or VClock()).without_zero()
        # The server lags or has lost rows. Following it would skip the rows that it writes under the same LSNs.
        if not intake.submitted <= theirs:
            assert self._sink is not None
            # `fail` takes effect with a delay; rows that arrive until then are rejected by the sink.
            self._sink.refusal = UpstreamLostTail(self._uri.address, theirs, intake.submitted)
            applier.fail(self._sink.refusal)
            return
        version = ".".join(map(str, applier.version))
        store.follow(ArchivedUpstream(str(applier.uuid), self._uri.address, version))
        self._has_followed = self._is_searching = True
        self._failures = 0
        self._patience.reset()
        self._told = ""
        # Only the first subscription sets the target of `--once`: a busy server would move it with each reconnect.
        if self._target is None:
            self._target = theirs
        address, uuid, position = self._uri.address, str(applier.uuid), intake.vclock.to_mapping()
        self._tell(events.Connected(address, uuid, version, position, theirs.to_mapping()))
        self._check_target()

    def _note_alive(self, applier: Applier) -> None:
        self._is_searching = False

    def _silence_max(self) -> float:
        """Return the allowed silence: version 2.6 sends no heartbeats while it searches its log for our position."""
        return SEARCH_SECONDS if self._is_searching else SILENCE_MAX * self._replication_timeout

    def _failed(self, error: FlowstoneError) -> None:
        """End the archive if a retry by the applier is useless, such as when an operator has to act."""
        self._is_searching = False
        is_refused = code_of(error) in FOR_OPERATORS and not is_ordinary(error, self._failures)
        is_final = is_gap(error) or (is_refused and not self._has_followed)
        self._failures += 1
        # The first failure after a subscription is a lost connection; further ones mean an unreachable upstream.
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
        # The archive stops before a heartbeat brings the upstream's time, so use the local time of the request.
        self._open_store()[0].know_until(self._asked_at)
        self._tell(events.CaughtUp(self.position.to_mapping(), self.settled.to_mapping()))
        # The end is reported once, even if rows arrive while the archive stops.
        self._is_once = False
        self._end(None)

    def _note_time(self) -> None:
        """Record that the archive is complete up to the time received from the upstream, unless rows are pending."""
        store, intake = self._open_store()
        theirs = self._applier.remote_vclock_at_subscribe if self._applier is not None else None
        # Only if all received rows are written: the time of a heartbeat is later than that of rows in the queue.
        if theirs is not None and theirs.without_zero() <= intake.vclock and intake.vclock == intake.submitted:
            assert self._applier is not None
            store.know_until(self._applier.peer_time)

    def _is_registration_known(self, error: FlowstoneError) -> bool:
        """Return True, and record it, if we are registered although a crash prevented us from receiving our row of
        `_cluster`."""
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
        """Load the state at the end of the log, which images are made from; without images, clear `images_since`."""
        store, _ = self._open_store()
        assert store.log is not None
        if not self._wants_images:
            store.manifest.images_since = None
            return
        from flowstone.archive.images import Images  # loads the engine, which only images need

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
        """Take a snapshot and start the log at its position; retry as long as a retry can help."""
        store, intake = self._open_store()
        gap: Gap | None = None
        snapshot: IncomingSnapshot | None = None
        while snapshot is None:
            # Use the UUID that will subscribe: servers since 3.3 keep their logs for this UUID from now on.
            sink = SnapshotSink(intake, UUID(store.manifest.replica_uuid), self._files_uuid)
            try:
                await self._fetch(sink, reason)
                assert sink.snapshot is not None
                # Check before the log is replaced: the snapshot of a lagging member lacks rows that the archive has.
                if not store.vclock <= sink.snapshot.vclock:
                    raise UpstreamLostTail(self._uri.address, sink.snapshot.vclock, store.vclock)
                gap = await intake.alone(store.begin_from, sink.snapshot, why)
                snapshot = sink.snapshot
            except FlowstoneError as error:
                await sink.abandon()
                await self._wait_before_retry(error)
            finally:
                await sink.abandon()  # no effect on a finished snapshot
        self._patience.reset()
        # Must follow `begin_from`, whose log starts at the snapshot: rows before the snapshot are known from now on.
        intake.begin_anew()
        if reason == GAP:
            await self._load_images()
        if gap is not None:
            self._tell(events.GapFound(gap.missing, gap.after, gap.until, why))
        self._tell_snapshot(snapshot, reason)

    def _files_uuid(self) -> UUID:
        """Return the instance UUID for the files of a new archive: a server started from them replaces the upstream."""
        assert self._fetching is not None
        assert self._fetching.uuid is not None
        return self._fetching.uuid

    async def _fetch(self, sink: SnapshotSink, reason: str) -> None:
        """Receive a complete snapshot into `sink`."""
        store, intake = self._open_store()
        fetching = self._fetching = Applier(
            self._outside, self._uri, sink, replication_timeout=self._replication_timeout
        )
        holding: asyncio.Task[None] | None = None
        try:
            fetching.start(pause_at=(ApplierState.READY,))
            # Log in first: rows are held below, and must not be held longer than the request itself takes.
            await fetching.resume_to(ApplierState.READY, is_patient=False)
            if reason == INTERVAL:
                # The log must not pass the snapshot's position, which is not known yet.
                intake.is_free.clear()
                holding = asyncio.get_running_loop().create_task(self._let_go())
                await intake.drain()
            await self._receive(fetching, sink)
        finally:
            # Release rows even after a failed snapshot.
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
        """Wait until the snapshot is complete; fail if no rows arrive for STALL_SECONDS."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(STALL_SECONDS) as limit:
                sink.on_rows = lambda: limit.reschedule(loop.time() + STALL_SECONDS)
                await fetching.resume_to(ApplierState.FETCHED_SNAPSHOT, is_patient=False)
        except TimeoutError as error:
            what = f"{self._uri.address} sent nothing for {STALL_SECONDS:g} s during a snapshot"
            raise ConnectionLost(what) from error

    async def _let_go(self) -> None:
        # Keep writing the log: a server disconnects an archive that sends no ACKs for too long.
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
        """Return the seconds until the next snapshot is due; 0 if a wrong clock dated the newest one in the future."""
        store, _ = self._open_store()
        age = self._outside.clock.wall() - store.newest_snapshot_at
        return self._snapshot_interval - age if age >= 0 else 0.0

    async def _take_snapshot(self) -> None:
        """Take a snapshot while the log continues, and publish it when the log has reached its position."""
        store, intake = self._open_store()

        async def cut(vclock: VClock) -> None:
            await intake.alone(store.cut, vclock)
            intake.is_free.set()

        # Connect without a UUID: a server accepts one connection per instance, and need not keep logs for this one.
        sink = SnapshotSink(intake, UUID(int=0), self._files_uuid, cut)
        try:
            await self._fetch(sink, INTERVAL)
            assert store.log is not None
            # A snapshot may be published only if a log file starts at its position: servers start from such a pair of
            # files.
            while store.log.cut_at is not None:
                intake.has_moved.clear()
                await intake.has_moved.wait()
            snapshot = sink.snapshot
            assert snapshot is not None
            if await intake.alone(store.publish, snapshot) is None:
                raise FlowstoneError("the log is already past the position of the snapshot")
            self._tell_snapshot(snapshot, INTERVAL)
        finally:
            # The snapshot failed: the file need not end at its position any more.
            if store.log is not None and store.log.cut_at is not None:
                store.log.cut_at = None
            await sink.abandon()

    # --- background ---

    async def _keep_saving(self) -> None:
        """Save the manifest and the index at intervals, and report the progress."""
        store, intake = self._open_store()
        clock = self._outside.clock
        saved = None
        at, rows = clock.monotonic(), 0
        while True:
            await clock.sleep(SAVE_INTERVAL)
            self._note_time()
            known = store.manifest.known_until // KNOWN_INTERVAL
            now = store.vclock, store.settled, store.manifest.upstream, store.manifest.replica_id, known
            # An idle archive writes nothing.
            if now != saved:
                try:
                    await intake.alone(store.save)
                    saved = now
                except FlowstoneError as error:
                    # No effect while a new snapshot replaces the log: the next round retries.
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
