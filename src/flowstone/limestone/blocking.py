"""The datastore for programs with threads and without an event loop: one thread per log channel, epochs from another.

Every call is that of `datastore.py` and `channel.py`, made in a loop in a thread of its own and waited for. What a
channel can do alone stays in the caller's thread: to begin, to add, to write and to sync; going over to the loop and
back costs more than that. Callbacks are called in the loop's thread: they must not call the store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from flowstone.limestone.backup import Backup, BackupEntry
from flowstone.limestone.blobs import BlobPool
from flowstone.limestone.channel import AsyncLogChannel
from flowstone.limestone.compaction import Compacted
from flowstone.limestone.cursor import StoreSnapshot
from flowstone.limestone.datastore import AsyncDatastore, Callback, Status
from flowstone.limestone.entries import WriteVersion
from flowstone.limestone.epochs import Due
from flowstone.limestone.errors import WrongTime
from flowstone.limestone.settings import Settings, SettingsFields
from flowstone.outside import Outside, production
from flowstone.outside.loop_thread import LoopEnded, LoopThread, Started

T = TypeVar("T")

NOTHING: Final = Due()


class _Calls:
    """Passes the calls of a store, its channels and its pools to the loop; raises WrongTime after a shutdown."""

    def __init__(self, thread: LoopThread, path: str) -> None:
        self._thread = thread
        self._path = path

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        with self._refusing():
            return self._thread.run(call)

    def start(self, call: Coroutine[Any, Any, T]) -> Started[T]:
        with self._refusing():
            return self._thread.start(call)

    def result(self, started: Started[T]) -> T:
        with self._refusing():
            return self._thread.result(started)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except LoopEnded:
            raise WrongTime(f"the datastore {self._path} is shut down") from None


class LogChannel:
    """Made by `Datastore.create_channel`; used by one thread at a time."""

    def __init__(self, channel: AsyncLogChannel, store: AsyncDatastore, calls: _Calls) -> None:
        self.id = channel.id
        self._channel = channel
        self._store = store
        self._calls = calls
        # These are the channel's own: they are called a million times a second.
        self.add_entry = channel.add_entry
        self.add_entries = channel.add_entries
        self.remove_entry = channel.remove_entry
        self.add_storage = channel.add_storage
        self.remove_storage = channel.remove_storage
        self.truncate_storage = channel.truncate_storage

    def begin_session(self) -> None:
        """What is added from now on belongs together, and to the current epoch."""
        self._channel.begin()

    def end_session(self) -> None:
        """Return when the session is on disk here and on every replica that counts."""
        self._channel.close_for_entries()
        try:
            self._write()
            due = self._finished()
            # An interrupted caller does not cancel this: no other call records the due epoch.
            recording = None if due == NOTHING else self._calls.start(self._store.done(due))
        except BaseException as error:
            self._store.fail(error)
            raise
        if recording is not None:
            self._calls.result(recording)

    def _write(self) -> None:
        """Write and sync here, while the loop waits for the replicas. Who shuts the store down waits for the first."""
        with self._store.writing():
            file, replicated = self._channel.write_end()
            if replicated is None:
                file.sync()
                return
            replicating = self._calls.start(replicated)
            try:
                file.sync()
            except BaseException:
                replicating.cancel()
                raise
        try:
            self._calls.result(replicating)
        except BaseException:
            replicating.cancel()
            raise

    def _finished(self) -> Due:
        with self._store.guard:
            if not self._channel.has_hooks:
                return self._channel.finish()
        return self._calls.run(self._finished_in_loop())

    async def _finished_in_loop(self) -> Due:
        return self._channel.finish()

    def abort_session(self) -> None:
        """Take back what was added since the session began."""
        self._calls.run(self._channel.abort_session())


class BlockingBlobPool:
    """Registers blobs for entries to come; what no entry has named when it is released is deleted."""

    def __init__(self, pool: BlobPool, calls: _Calls) -> None:
        self._pool = pool
        self._calls = calls

    def register_data(self, data: bytes) -> int:
        """Store these bytes."""
        return self._calls.run(self._pool.register_data(data))

    def register_file(self, path: str, *, is_temporary: bool = False) -> int:
        """Store a file's content; a temporary one is moved there, or gone after it was copied."""
        return self._calls.run(self._pool.register_file(path, is_temporary=is_temporary))

    def duplicate_data(self, blob_id: int) -> int:
        """Another blob of the same content."""
        return self._calls.run(self._pool.duplicate_data(blob_id))

    def release(self) -> None:
        """Delete what was registered and never named. Releasing twice is harmless."""
        self._calls.run(self._pool.release())


class _Handover:
    """Hands a backup from the loop to a thread, and ends the backup if the thread was interrupted meanwhile."""

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock
        self._given: Backup | None = None
        self._is_refused = False

    async def give(self, begin: Callable[[], Coroutine[Any, Any, Backup]]) -> Backup:
        begun = await begin()
        with self._lock:
            self._given = begun
            if self._is_refused:
                begun.notify_end_backup()
        return begun

    def refuse(self) -> None:
        with self._lock:
            self._is_refused = True
            if self._given is not None:
                self._given.notify_end_backup()


class Datastore:
    """Make channels, then `ready`, then use them, then `shutdown`; or `with`, which ends with it.

    `settings` is a Settings, or the path of a directory with the fields of Settings as keywords.
    """

    def __init__(
        self, settings: Settings | str, *, outside: Outside | None = None, **fields: Unpack[SettingsFields]
    ) -> None:
        if not isinstance(settings, Settings):
            settings = Settings(settings, **fields)
        elif fields:
            raise TypeError("fields of settings are given with a path, not with Settings")
        self._thread = LoopThread("flowstone-limestone")
        self._calls = _Calls(self._thread, settings.path)
        self._store = AsyncDatastore(outside or production(), settings, guard=self._thread.lock)

    @classmethod
    def from_environment(cls, path: str, environment: Mapping[str, str], **fields: Unpack[SettingsFields]) -> Datastore:
        """A store as the original's variables want it, `os.environ` or another mapping."""
        return cls(Settings.from_environment(path, environment, **fields))

    def create_channel(self) -> LogChannel:
        """Create a log channel. Only before `ready`. Raises LimestoneError if the limit of open files is too low."""
        return LogChannel(self._calls.run(self._store.create_channel()), self._store, self._calls)

    def ready(self) -> None:
        """Recover what the directory holds, and let sessions begin once an epoch has been switched to."""
        self._calls.run(self._store.ready())

    def restore(
        self,
        source: str,
        *,
        replaces: bool = False,
        keeps_source: bool = True,
        entries: Sequence[BackupEntry] | None = None,
    ) -> None:
        """Make the directory what a backup holds; replicas are seeded from it. Before `ready` only.

        `replaces`: what was in the directory may go; else it must hold no entries."""
        self._calls.run(self._store.restore(source, replaces=replaces, keeps_source=keeps_source, entries=entries))

    @property
    def last_epoch(self) -> int:
        """The largest epoch that recovery has found; the first one to switch to is larger."""
        return self._store.last_epoch

    @property
    def durable_epoch(self) -> int:
        """The largest epoch that was recorded."""
        return self._store.durable_epoch

    def switch_epoch(self, epoch: int) -> None:
        """Sessions that begin from now on are of this epoch. What becomes durable by that is recorded first."""
        self._calls.run(self._store.switch_epoch(epoch))

    def add_persistent_callback(self, callback: Callback) -> None:
        """Have `callback` called with each epoch that is durable, and all before it with it; some are skipped."""
        self._store.add_persistent_callback(callback)

    def add_write_epoch_callback(self, callback: Callback) -> None:
        """Have `callback` called with each epoch that has been recorded, before it is told to be durable."""
        self._store.add_write_epoch_callback(callback)

    def until_durable(self, epoch: int) -> None:
        """Return when this epoch is durable. Somebody has to switch to a later one, and end its sessions."""
        self._calls.run(self._store.until_durable(epoch))

    def snapshot(self) -> StoreSnapshot:
        """The rows at the durable epoch, whatever is written later; to be read until the store is shut down."""
        return self._calls.run(self._store.snapshot())

    def blob_pool(self) -> BlockingBlobPool:
        """Where the blobs of entries to come are registered."""
        return BlockingBlobPool(self._store.blob_pool(), self._calls)

    def blob_path(self, blob_id: int) -> str:
        """The file of a blob; BlobError if there is none."""
        return self._store.blob_path(blob_id)

    def generate_reference_tag(self, blob_id: int, transaction_id: int) -> int:
        """What a client has to show for a blob: the same as long as the store is open, and nobody can make it up."""
        return self._store.generate_reference_tag(blob_id, transaction_id)

    def compact(self) -> Compacted:
        """Put the rows of all sessions up to the current epoch into the compacted file, when that epoch is durable.

        Another thread has to switch to a later one meanwhile. Sessions go on, and nothing of it is told to replicas."""
        return self._calls.run(self._store.compact())

    def switch_available_boundary_version(self, version: WriteVersion) -> None:
        """Nobody will read versions before this one: compaction may delete blobs that only those name."""
        self._store.switch_available_boundary_version(version)

    def begin_backup(self, *, rotates: bool = True) -> Backup:
        """Files to copy, in their order; until the end of that is notified no blob is deleted.

        `rotates`: all files are put aside first; another thread has to switch to a later epoch meanwhile."""
        handover = _Handover(self._thread.lock)
        try:
            return self._calls.run(handover.give(partial(self._store.begin_backup, rotates=rotates)))
        except BaseException:
            handover.refuse()
            raise

    def status(self) -> Status:
        """At any time."""
        return self._store.status()

    def shutdown(self) -> None:
        """Release all resources; calling it twice is harmless. Open sessions are discarded.

        An interrupted shutdown continues. The next call, from any thread, waits until it is complete."""
        with suppress(LoopEnded):  # another thread has completed the shutdown and closes the loop
            self._thread.run(self._store.shutdown())
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
