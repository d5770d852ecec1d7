"""The datastore: a directory, its log channels, and the epochs that make their sessions durable.

Asynchronous, on the Outside that is passed in; `blocking.py` is the same for threads. The rules are in `epochs.py`,
files in `directory.py` and `channel.py`, replicas in `limestone/master/propagation.py`. An error of the disk, or the
loss of replicas that are required, stops the store: nothing more is written or reported durable, and every call except
`shutdown` raises the reason.

Theory of operation: a NEW store has a directory, which it locks when the first channel is created, and takes channels
and callbacks. `ready` recovers the directory, connects to the replicas and makes the store READY; from then on sessions
are written, and `switch_epoch` makes the sessions of earlier epochs durable. The first error makes the store FAILED, in
any thread, under `guard`. `shutdown` makes it CLOSED before anything is released, so that no call begins meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from flowstone.limestone.errors import DatastoreFailed, LimestoneError, WrongTime
from flowstone.limestone.format import manifest, names
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.master.propagation import Propagation, PropagationStatus
from flowstone.limestone.settings import Settings
from flowstone.limestone.store import backup, blobs, descriptors
from flowstone.limestone.store.backup import Backup, BackupEntry
from flowstone.limestone.store.blobs import BlobPool, Blobs
from flowstone.limestone.store.channel import AsyncLogChannel, Parts, both
from flowstone.limestone.store.compaction import Compacted
from flowstone.limestone.store.cursor import StoreSnapshot
from flowstone.limestone.store.directory import DataDirectory
from flowstone.limestone.store.epochs import Due, EpochRules
from flowstone.limestone.store.recovery import FinishedSizes, RecoveredDirectory, recover_live
from flowstone.limestone.store.rotation import Rotated, Rotation
from flowstone.limestone.store.upkeep import CONTROL, Upkeep
from flowstone.limestone.store.writers import Writers
from flowstone.outside import Disk, Outside
from flowstone.outside.worker import with_workers

Callback = Callable[[int], object]


class State(Enum):
    """The state of a store."""

    NEW = "new"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    State.NEW: frozenset({State.READY, State.FAILED, State.CLOSED}),
    State.READY: frozenset({State.FAILED, State.CLOSED}),
    State.FAILED: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}
"""Maps each state to the states that may follow it."""


@dataclass(frozen=True)
class Status:
    """The status of a store. `informed_epoch` is the last epoch that callbacks were called with."""

    state: State
    instance_uuid: str | None
    channels: int
    current_epoch: int
    durable_epoch: int
    informed_epoch: int
    failure: str | None
    replication: PropagationStatus | None


class AsyncDatastore:
    """A Limestone datastore for an event loop: create channels, call `ready`, use the channels, then call `shutdown`.

    `async with` calls `shutdown` at the end of the block. All calls are made in one event loop. A call at the wrong
    time raises WrongTime and changes nothing.

    Args:
        outside: The door to disk, network and clock: `flowstone.outside.production()`.
        settings: The directory, the replicas and the options.
        guard: Lock for calls from other threads; internal.

    Example:
        async with AsyncDatastore(production(), Settings("/var/lib/shop/log")) as store:
            channel = await store.create_channel()
            await store.ready()
            await store.switch_epoch(store.last_epoch + 1)
            await channel.begin_session()
            channel.add_entry(1, b"key", b"value", (1, 0))
            await channel.end_session()
    """

    def __init__(
        self, outside: Outside, settings: Settings, *, guard: AbstractContextManager[Any] | None = None
    ) -> None:
        self.settings = settings
        self.guard = nullcontext() if guard is None else guard
        """Held while the epoch rules are used, if several threads do. Reentrant."""
        self._writers = Writers(self.guard, self.check)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outside, self._workers = with_workers(outside, self._refusal)
        self._state = State.NEW
        self._failure: BaseException | None = None
        self._rules = EpochRules()
        self._channels: list[AsyncLogChannel] = []
        self._directory: DataDirectory | None = None
        self._propagation: Propagation | None = None
        self._blobs: Blobs | None = None
        self._snapshot: tuple[int, StoreSnapshot] | None = None
        self._persistent: list[Callback] = []
        self._write_epoch: list[Callback] = []
        self._opening = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._epoch_file = asyncio.Lock()
        self._recording: asyncio.Task[None] | None = None
        self._told = 0
        self._rotations: list[Rotation] = []
        """Rotations that wait for an epoch after their border."""
        self._open_rotations: list[Rotation] = []
        """Rotations that a caller waits for."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._upkeep: Upkeep | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- life ---

    async def create_channel(self) -> AsyncLogChannel:
        """Create a log channel.

        Raises:
            WrongTime: `ready` has been called.
            LimestoneError: The limit of open files is too low.
        """
        async with self._opening:
            self._check_new("create_channel")
            directory = await self._opened()
            number = len(self._channels)
            self._check_descriptors(number + 1)
            channel = AsyncLogChannel(self, self._outside, directory.path, number, self.settings.spill)
            if self._propagation is not None:
                await self._propagation.open_channel(number)
            assert self._rules.add_channel() == number
            self._channels.append(channel)
            return channel

    def _check_descriptors(self, channels: int) -> None:
        settings = self.settings
        per_channel = descriptors.per_master_channel(len(settings.replicas), compatible=settings.compatible)
        descriptors.check(self._outside.disk, channels, per_channel)

    async def ready(self) -> None:
        """Recover the directory. Sessions can begin after the first `switch_epoch`.

        Raises:
            WrongTime: The store is ready already.
            DamagedFile: A file is damaged.
            LimestoneError: The recovery fails, or required replicas are unavailable; the store has failed then.
        """
        async with self._opening:
            self._check_new("ready")
            self._loop = asyncio.get_running_loop()
            try:
                await self._recover(await self._opened())
            except BaseException as error:
                self.fail(error)
                raise

    async def _recover(self, directory: DataDirectory) -> None:
        await directory.promote()
        found = await directory.recover()
        ready = await self._outside.blocking(_made_ready, self._outside.disk, directory, found)
        self._snapshot = (found.last_epoch, ready)
        self._blobs = Blobs(self._outside, directory.path, found.max_blob_id + 1, self.guard)
        # A crash may have prevented the notification of the replicas; the original never notifies them again.
        is_pending = bool(self.settings.replicas) and not self.settings.compatible
        self._rules = EpochRules(found.last_epoch, is_pending=is_pending)
        self._told = found.last_epoch
        for _ in self._channels:
            self._rules.add_channel()
        if self._propagation is not None:
            await self._propagation.start(found.last_epoch)
        if self._state is not State.NEW:
            raise self._refusal()  # the store was shut down during the start
        self._upkeep = Upkeep(self._outside, directory.path, self._blobs, self)
        self._become(State.READY)

    async def restore(
        self,
        source: str,
        *,
        replaces: bool = False,
        keeps_source: bool = True,
        entries: Sequence[BackupEntry] | None = None,
    ) -> None:
        """Replace the directory by a backup; replicas are seeded from it.

        Args:
            source: Directory of the backup.
            replaces: Delete the content of the directory; otherwise it must hold no entries.
            keeps_source: Keep the files of the backup; otherwise delete them after the copy.
            entries: The files of the backup. By default, all files of `source`.

        Raises:
            WrongTime: `ready` has been called.
            LimestoneError: The backup is incomplete, or the directory holds entries.
        """
        async with self._opening:
            self._check_new("restore")
            if self._directory is not None:
                self._directory.release()
                self._directory = None
            work = partial(backup.restore, replaces=replaces, keeps_source=keeps_source, entries=entries)
            await self._outside.blocking(_alone, work, self._outside, source, self.settings.path)

    async def shutdown(self) -> None:
        """Release all resources; calling it twice is harmless. Open sessions are discarded.

        Cancelling the call only ends the wait; the next call waits until the shutdown is complete."""
        if self._closing is None:
            with self.guard:
                self._become(State.CLOSED)
            self._give_up(self._refusal())
            self._closing = asyncio.ensure_future(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        if self._upkeep is not None:
            await self._upkeep.close()
        if self._propagation is not None:
            await self._propagation.close()
        # Threads and workers that still write must finish before the lock is released.
        for task in (*(channel.ending for channel in self._channels), self._recording):
            if task is not None:
                with suppress(Exception, asyncio.CancelledError):
                    await asyncio.shield(task)
        await self._writers.all_done()
        async with self._opening, self._reading:  # a snapshot that is being read is stored first, and closed here
            await self._workers.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._snapshot is not None:
            self._snapshot[1].close()
        for channel in self._channels:
            channel.let_go()
        if self._directory is not None:
            self._directory.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _opened(self) -> DataDirectory:
        if self._directory is None:
            try:
                self._directory = await DataDirectory.open(self._outside, self.settings.path)
            except OSError as error:
                reason = f"cannot open the data directory {self.settings.path}: {error.strerror or error}"
                raise LimestoneError(reason, hint="check its path and permissions; a missing one is created") from error
            if self.settings.replicas and self._propagation is None:
                self._propagation = Propagation(self._outside, self.settings, self)
        return self._directory

    # --- epochs ---

    @property
    def last_epoch(self) -> int:
        """The largest epoch that recovery found. The first epoch to switch to must be larger."""
        self.check()
        return self._rules.floor

    @property
    def durable_epoch(self) -> int:
        """The largest epoch that was recorded."""
        return self._rules.durable

    async def switch_epoch(self, epoch: int) -> None:
        """Begin an epoch: sessions that begin from now on belong to it.

        Return once the epochs that this makes durable are recorded.

        Raises:
            WrongTime: The store is not ready, or `epoch` is not larger than the current one.
            DatastoreFailed: The store could not write, sync or replicate.
        """
        with self.guard:
            self.check()
            due = self._rules.switch(epoch)
            begun = [rotation for rotation in self._rotations if epoch > rotation.border]
            self._rotations = [rotation for rotation in self._rotations if epoch <= rotation.border]
            try:
                for rotation in begun:
                    rotation.switched()
            except BaseException as error:
                self.fail(error)
                raise
        await self.done(due)

    def add_persistent_callback(self, callback: Callback) -> None:
        """Call `callback` with each epoch that becomes durable. It covers all epochs before; some are skipped.

        It runs in the event loop of the store and must not wait for the store. Its errors go to the exception handler
        of the loop."""
        self._persistent.append(callback)

    def add_write_epoch_callback(self, callback: Callback) -> None:
        """Call `callback` with each epoch that has been recorded, before it is reported durable."""
        self._write_epoch.append(callback)

    async def until_durable(self, epoch: int) -> None:
        """Wait until this epoch is durable: a later epoch must begin, and the sessions of this one must end.

        Raises:
            DatastoreFailed: The store has failed.
        """
        self.check()
        if epoch <= self._rules.informed:
            return
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((epoch, told))
        await told

    async def done(self, due: Due) -> None:
        """Do the work in `due` and wait for it, but not for work that becomes due meanwhile."""
        self.check()  # the store may have failed since another thread scheduled this call
        if (recording := self._act(due)) is not None:
            await asyncio.shield(recording)

    def _act(self, due: Due) -> asyncio.Task[None] | None:
        """Report the epoch that is durable, and start to record the next one; return the task that records it."""
        if due.inform is not None:
            self._inform(due.inform)
        if due.record is None:
            return None
        self._recording = asyncio.ensure_future(self._record(due.record))
        self._recording.add_done_callback(_seen)
        return self._recording

    async def _record(self, epoch: int) -> None:
        try:
            await self._group_commit(epoch)
        except BaseException as error:
            self.fail(error)
            raise
        self.check()
        self._call(self._write_epoch, epoch)
        with self.guard:
            due = self._rules.recorded(epoch)
        self._act(due)

    async def _group_commit(self, epoch: int) -> None:
        """Record an epoch here and on the replicas. Both sides have all its sessions already, so any order is safe."""
        assert self._directory is not None
        if epoch == self._rules.durable and self._propagation is not None:
            await self._propagation.group_commit(epoch)  # after a restart: it is already recorded here
            return
        write = partial(self._write_epoch_file, self._directory.epochs.write, epoch)
        if self._propagation is None:
            await write()
        elif self.settings.group_commit == "concurrent":
            await both(write(), self._propagation.group_commit(epoch))
        elif self.settings.group_commit == "replica_first":
            await self._propagation.group_commit(epoch)
            await write()
        else:
            await write()
            await self._propagation.group_commit(epoch)

    async def _write_epoch_file(self, change: Callable[..., object], *arguments: object) -> None:
        """Change the epoch file in a worker, one change at a time: a record and a rotation must not overlap."""
        async with self._epoch_file:
            await self._outside.blocking(change, *arguments)

    def _inform(self, epoch: int) -> None:
        if epoch <= self._told:
            return  # another thread has already reported a later epoch
        self._told = epoch
        waiting, self._waiting = self._waiting, []
        for wanted, told in waiting:
            if wanted > epoch:
                self._waiting.append((wanted, told))
            elif not told.done():
                told.set_result(None)
        self._call(self._persistent, epoch)

    def _call(self, callbacks: Sequence[Callback], epoch: int) -> None:
        for callback in callbacks:
            try:
                callback(epoch)
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"callback of epoch {epoch} failed", "exception": error}
                )

    # --- what it holds ---

    async def snapshot(self) -> StoreSnapshot:
        """Return the rows at the durable epoch, which later writes do not change; readable until the shutdown.

        Cancelling the call only ends the wait; the next call begins when this one is complete."""
        found = await asyncio.shield(asyncio.ensure_future(self._read_durable()))
        self.check()  # a shutdown that began meanwhile closes the snapshot
        return found

    async def _read_durable(self) -> StoreSnapshot:
        async with self._reading:
            self.check()
            assert self._directory is not None
            assert self._snapshot is not None
            epoch = self._rules.durable
            if self._snapshot[0] != epoch:
                fresh = await self._outside.blocking(
                    _read_snapshot, self._outside.disk, self._directory.path, epoch, self.finished_sizes
                )
                self._snapshot = (epoch, fresh)
            return self._snapshot[1]

    def blob_pool(self) -> BlobPool:
        """Return a pool that registers blobs for future entries."""
        self.check()
        assert self._blobs is not None
        return self._blobs.pool()

    def blob_path(self, blob_id: int) -> str:
        """Return the path of a blob.

        Raises:
            BlobError: There is no file.
        """
        self.check()
        assert self._blobs is not None
        return self._blobs.found_path(blob_id)

    def generate_reference_tag(self, blob_id: int, transaction_id: int) -> int:
        """Return a number that authorises a client to read a blob.

        The number is constant while the store is open, and cannot be guessed.
        """
        self.check()
        assert self._blobs is not None
        return self._blobs.reference_tag(blob_id, transaction_id)

    async def compact(self) -> Compacted:
        """Compact all sessions up to the current epoch, once that epoch is durable.

        A later epoch must begin meanwhile. Sessions continue, and replicas are not notified."""
        self.check()
        assert self._upkeep is not None
        return await self._upkeep.compact()

    async def begin_backup(self, *, rotates: bool = True) -> Backup:
        """Return the files to copy, in order. No blob is deleted until the end of the backup is notified.

        Args:
            rotates: Rotate all files first, so that none of them changes; a later epoch must begin meanwhile. Otherwise
                the active files are listed, and the copy may contain later writes.
        """
        self.check()
        assert self._directory is not None
        assert self._upkeep is not None
        return await backup.begin(
            self._outside,
            self._directory.path,
            self._upkeep.open_backups,
            self._upkeep.in_worker,
            lambda: self._rules.switched,
            self._rotate_all if rotates else None,
        )

    async def _rotate_all(self) -> None:
        """Rotate the epoch file, then the logs: the rotated epoch file names no epoch that the rotated logs lack."""
        assert self._directory is not None
        disk, path = self._outside.disk, self._directory.path
        milliseconds = int(self._outside.clock.wall() * 1000)
        await self._write_epoch_file(backup.rotate_epoch_file, disk, path, milliseconds, self._rules.switched)
        await self.rotate()

    def switch_available_boundary_version(self, version: WriteVersion) -> None:
        """Promise that no reader reads versions before this one. Compaction may then delete blobs that only older
        versions name."""
        self.check()
        assert self._upkeep is not None
        self._upkeep.boundary = WriteVersion(*version)

    async def rotate(self) -> Rotated:
        """Rotate all log files at the border of the current epoch: a later epoch must begin.

        If there is nothing to rotate, return at once, with the durable epoch."""
        self.check()
        assert self._directory is not None
        rotation = Rotation(self._outside, self._directory.path, self._channels, self._rules.switched)
        if not rotation.has_work():
            return Rotated((), self._rules.durable)
        self._rotations.append(rotation)
        self._open_rotations.append(rotation)
        try:
            return await rotation.finished()
        finally:
            self._open_rotations.remove(rotation)

    # --- what channels and replicas ask ---

    @property
    def path(self) -> str:
        """The directory of the store."""
        assert self._directory is not None
        return self._directory.path

    @property
    def instance_uuid(self) -> str:
        """The identity of the directory, wherever it is."""
        assert self._directory is not None
        return self._directory.instance_uuid

    def finished_sizes(self) -> dict[str, int]:
        """Return the bytes of ended sessions by name of each file that a channel has open. Thread-safe."""
        with self.guard:
            return {channel.name: channel.finished_size for channel in self._channels if channel.has_file}

    def begin(self, channel: int) -> int:
        """Begin a session on this channel, and return its epoch."""
        return self._rules.begin(channel)

    def check(self) -> None:
        """Raise unless the store is ready and has not failed."""
        if self._state is not State.READY:
            raise self._refusal() from self._failure

    def _become(self, state: State) -> None:
        assert state in TRANSITIONS[self._state], f"invalid transition: {self._state.value} to {state.value}"
        self._state = state

    def writing(self) -> AbstractContextManager[None]:
        """Return a context for writes of a channel: the directory is not released before it ends. Thread-safe."""
        return self._writers.writing()

    def fail(self, error: BaseException) -> None:
        """Stop the store: nothing more is written or reported. The first error is the reported one. Thread-safe."""
        with self.guard:
            if State.FAILED not in TRANSITIONS[self._state]:
                return
            self._become(State.FAILED)
            self._failure = error
        if self._loop is None or _running_loop() is self._loop:
            self._give_up(self._refusal())
        else:
            self._loop.call_soon_threadsafe(self._give_up, self._refusal())

    def uses_blobs(self, blob_ids: AbstractSet[int]) -> None:
        """Note that a session names these blobs. Called in the thread of a channel."""
        assert self._blobs is not None
        self._blobs.use(blob_ids)

    def logs_blobs(self, blob_ids: AbstractSet[int]) -> None:
        """Note that the session that names these blobs has ended. Called in the thread of a channel."""
        assert self._blobs is not None
        self._blobs.log(blob_ids)

    async def takes_blobs_back(self, blob_ids: AbstractSet[int]) -> None:
        """Note that the session that names these blobs was aborted."""
        assert self._blobs is not None
        if left := self._blobs.take_back(blob_ids):
            await self._outside.blocking(blobs.delete, self._outside.disk, self.path, left)

    def replicated(self, channel: int, epoch: int, parts: Parts) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that waits until the quorum has a session; None if there are no replicas."""
        return None if self._propagation is None else self._propagation.end_session(channel, epoch, parts)

    def finish(self, channel: int) -> Due:
        """Note that the session of a channel is durable, here and on the quorum."""
        return self._rules.finish(channel)

    def abort(self, channel: int) -> Due:
        """Note that the session of a channel was aborted and left nothing."""
        return self._rules.abort(channel)

    # --- what it can say ---

    def status(self) -> Status:
        """Return the status, in any state."""
        return Status(
            self._state,
            self._directory.instance_uuid if self._directory else None,
            len(self._channels),
            self._rules.switched,
            self._rules.durable,
            self._rules.informed,
            None if self._failure is None else str(self._failure),
            self._propagation.status() if self._propagation else None,
        )

    def _check_new(self, what: str) -> None:
        if self._state is State.READY:
            raise WrongTime(f"cannot call {what}(): datastore {self.settings.path} is already ready")
        if self._state is not State.NEW:
            self.check()

    def _refusal(self) -> LimestoneError:
        name = f"datastore {self.settings.path}"
        if self._state is State.FAILED:
            return DatastoreFailed(
                f"{name} has stopped: {self._failure}", hint="fix the cause, shut it down and open it again"
            )
        if self._state is State.CLOSED:
            return WrongTime(f"{name} is shut down")
        return WrongTime(f"{name} is not ready", hint="call ready() first")

    def _give_up(self, error: LimestoneError) -> None:
        """Stop all notifications."""
        for rotation in self._open_rotations:
            rotation.give_up(error)
        waiting, self._waiting = self._waiting, []
        for _, told in waiting:
            if not told.done():
                told.set_exception(error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _seen(task: asyncio.Task[None]) -> None:
    """Mark the error of a task as retrieved: the store keeps it, and no caller waits for the task."""
    if not task.cancelled():
        task.exception()


def _alone(work: Callable[[Outside, str, str], None], outside: Outside, source: str, target: str) -> None:
    """Run `work` with the target directory locked."""
    try:
        lock: AbstractContextManager[object] = manifest.lock(outside.disk, target)
    except FileNotFoundError:
        lock = nullcontext()  # there is no data directory yet
    with lock:
        work(outside, source, target)


def _made_ready(disk: Disk, directory: DataDirectory, found: RecoveredDirectory) -> StoreSnapshot:
    """Complete the start after recovery, in the original's order. After a crash, the next start repeats all steps."""
    path = directory.path
    stored = found.snapshot.stored(disk, path, with_removes=bool(found.catalog.compacted))
    try:
        blobs.collect_at_start(disk, path, stored.blob_ids(), found.max_blob_id)
        disk.make_directory(f"{path}/{CONTROL}")
        if found.last_epoch:
            # Sessions that were not durable are invalidated, so their epoch may be recorded as durable.
            directory.epochs.write(found.last_epoch)
        for name in disk.list_directory(path):
            if names.is_epoch_file(name) and name != names.EPOCH:
                disk.unlink(f"{path}/{name}")
    except BaseException:
        stored.close()
        raise
    return stored


def _read_snapshot(disk: Disk, directory: str, epoch: int, finished_sizes: FinishedSizes) -> StoreSnapshot:
    """Return the rows at `epoch` of a directory that is being written."""
    found = recover_live(disk, directory, epoch, finished_sizes)
    try:
        return found.snapshot.stored(disk, directory, with_removes=bool(found.catalog.compacted))
    except BaseException:
        found.snapshot.close()
        raise
