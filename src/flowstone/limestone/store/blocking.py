"""The datastore for programs with threads and without an event loop: one thread per log channel, another for epochs.

Every call runs the call of the same name of `datastore.py` or `channel.py` in an event loop, which has its own thread.
`begin`, `add`, write and sync of a channel run in the caller's thread, because switching to the loop and back would
cost more than the work. Callbacks run in the thread of the loop, and must not call the store.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.settings import Settings, SettingsFields
from flowstone.limestone.store.backup import Backup, BackupEntry
from flowstone.limestone.store.blobs import BlobPool
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.compaction import Compacted
from flowstone.limestone.store.cursor import StoreSnapshot
from flowstone.limestone.store.datastore import AsyncDatastore, Callback, Status
from flowstone.limestone.store.epochs import Due
from flowstone.outside import Outside, production
from flowstone.outside.loop_thread import LoopThread

NOTHING: Final = Due()


class LogChannel:
    """Created by `Datastore.create_channel`; used by one thread at a time."""

    def __init__(self, channel: AsyncLogChannel, store: AsyncDatastore, thread: LoopThread) -> None:
        self.id = channel.id
        self._channel = channel
        self._store = store
        self._thread = thread
        # The channel's own methods, without a wrapper: they are called a million times a second.
        self.add_entry = channel.add_entry
        self.add_entries = channel.add_entries
        self.remove_entry = channel.remove_entry
        self.add_storage = channel.add_storage
        self.remove_storage = channel.remove_storage
        self.truncate_storage = channel.truncate_storage

    def begin_session(self) -> None:
        """Begin a session in the current epoch; all entries that follow belong to it."""
        self._channel.begin()

    def end_session(self) -> None:
        """End the session; return when it is durable here and on the quorum.

        Raises:
            WrongTime: No session is open.
            QuorumLost: Too few replicas acknowledged, and `on_lost` is "fail".
            DatastoreFailed: The store could not write, sync or replicate.
        """
        self._channel.close_for_entries()
        try:
            self._write()
            due = self._finished()
            # An interrupted caller does not cancel this: no other call records the due epoch.
            recording = None if due == NOTHING else self._thread.start(self._store.done(due))
        except BaseException as error:
            self._store.fail(error)
            raise
        if recording is not None:
            self._thread.result(recording)

    def _write(self) -> None:
        """Write and sync here, while the loop waits for the replicas. A shutdown waits for the local write."""
        with self._store.writing():
            file, replicated = self._channel.write_end()
            if replicated is None:
                file.sync()
                return
            replicating = self._thread.start(replicated)
            try:
                file.sync()
            except BaseException:
                replicating.cancel()
                raise
        try:
            self._thread.result(replicating)
        except BaseException:
            replicating.cancel()
            raise

    def _finished(self) -> Due:
        with self._store.guard:
            if not self._channel.has_hooks:
                return self._channel.finish()
        return self._thread.run(self._finished_in_loop())

    async def _finished_in_loop(self) -> Due:
        return self._channel.finish()

    def abort_session(self) -> None:
        """Discard the session and all its entries."""
        self._thread.run(self._channel.abort_session())


class BlockingBlobPool:
    """Registers blobs for future entries. Releasing the pool deletes the blobs that no entry has named."""

    def __init__(self, pool: BlobPool, thread: LoopThread) -> None:
        self._pool = pool
        self._thread = thread

    def register_data(self, data: bytes) -> int:
        """Store `data` as a blob, and return its id."""
        return self._thread.run(self._pool.register_data(data))

    def register_file(self, path: str, *, is_temporary: bool = False) -> int:
        """Store a file as a blob, and return its id.

        Args:
            path: Path of the file.
            is_temporary: Move the file, or copy and delete it.

        Raises:
            BlobError: The file does not exist, or the pool has been released.
        """
        return self._thread.run(self._pool.register_file(path, is_temporary=is_temporary))

    def duplicate_data(self, blob_id: int) -> int:
        """Register a new blob with the content of another, and return its id.

        Raises:
            BlobError: The blob does not exist, or the pool has been released.
        """
        return self._thread.run(self._pool.duplicate_data(blob_id))

    def release(self) -> None:
        """Delete the registered blobs that no entry has named. Releasing twice has no effect."""
        self._thread.run(self._pool.release())


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
    """A Limestone datastore for threads: create channels, call `ready`, use the channels, then call `shutdown`.

    `with` calls `shutdown` at the end of the block. Calls may be made from any thread. A call at the wrong time raises
    WrongTime and changes nothing.

    Args:
        settings: A Settings, or the path of the data directory.
        outside: The door to disk, network and clock; for tests.
        fields: Fields of Settings, if `settings` is a path.

    Raises:
        LocalProtocolError: A field has a value that is not allowed.

    Example:
        with flowstone.limestone.Datastore("/var/lib/shop/log") as store:
            channel = store.create_channel()
            store.ready()
            store.switch_epoch(store.last_epoch + 1)
            channel.begin_session()
            channel.add_entry(1, b"key", b"value", (1, 0))
            channel.end_session()
            store.switch_epoch(store.last_epoch + 2)      # makes the first epoch durable
    """

    def __init__(
        self, settings: Settings | str, *, outside: Outside | None = None, **fields: Unpack[SettingsFields]
    ) -> None:
        if not isinstance(settings, Settings):
            settings = Settings(settings, **fields)
        elif fields:
            raise TypeError("settings fields require a path, not a Settings object")
        message = f"datastore {settings.path} is shut down"
        self._thread = LoopThread("flowstone-limestone", lambda: WrongTime(message))
        self._store = AsyncDatastore(outside or production(), settings, guard=self._thread.lock)

    @classmethod
    def from_environment(cls, path: str, environment: Mapping[str, str], **fields: Unpack[SettingsFields]) -> Datastore:
        """Create a store from the environment variables of the original.

        Args:
            path: Path of the data directory.
            environment: `os.environ` or another mapping.
            fields: Fields of Settings, which take precedence.
        """
        return cls(Settings.from_environment(path, environment, **fields))

    def create_channel(self) -> LogChannel:
        """Create a log channel.

        Raises:
            WrongTime: `ready` has been called.
            LimestoneError: The limit of open files is too low.
        """
        return LogChannel(self._thread.run(self._store.create_channel()), self._store, self._thread)

    def ready(self) -> None:
        """Recover the directory. Sessions can begin after the first `switch_epoch`.

        Raises:
            WrongTime: The store is ready already.
            DamagedFile: A file is damaged.
            LimestoneError: The recovery fails, or required replicas are unavailable; the store has failed then.
        """
        self._thread.run(self._store.ready())

    def restore(
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
        self._thread.run(self._store.restore(source, replaces=replaces, keeps_source=keeps_source, entries=entries))

    @property
    def last_epoch(self) -> int:
        """The largest epoch that recovery found. The first epoch to switch to must be larger."""
        return self._store.last_epoch

    @property
    def durable_epoch(self) -> int:
        """The largest epoch that was recorded."""
        return self._store.durable_epoch

    def switch_epoch(self, epoch: int) -> None:
        """Begin an epoch: sessions that begin from now on belong to it.

        Return once the epochs that this makes durable are recorded.

        Raises:
            WrongTime: The store is not ready, or `epoch` is not larger than the current one.
            DatastoreFailed: The store could not write, sync or replicate.
        """
        self._thread.run(self._store.switch_epoch(epoch))

    def add_persistent_callback(self, callback: Callback) -> None:
        """Call `callback` with each epoch that becomes durable. It covers all epochs before; some are skipped."""
        self._store.add_persistent_callback(callback)

    def add_write_epoch_callback(self, callback: Callback) -> None:
        """Call `callback` with each epoch that has been recorded, before it is reported durable."""
        self._store.add_write_epoch_callback(callback)

    def until_durable(self, epoch: int) -> None:
        """Wait until this epoch is durable: a later epoch must begin, and the sessions of this one must end.

        Raises:
            DatastoreFailed: The store has failed.
        """
        self._thread.run(self._store.until_durable(epoch))

    def snapshot(self) -> StoreSnapshot:
        """Return the rows at the durable epoch, which later writes do not change; readable until the shutdown."""
        return self._thread.run(self._store.snapshot())

    def blob_pool(self) -> BlockingBlobPool:
        """Return a pool that registers blobs for future entries."""
        return BlockingBlobPool(self._store.blob_pool(), self._thread)

    def blob_path(self, blob_id: int) -> str:
        """Return the path of a blob.

        Raises:
            BlobError: There is no file.
        """
        return self._store.blob_path(blob_id)

    def generate_reference_tag(self, blob_id: int, transaction_id: int) -> int:
        """Return a number that authorises a client to read a blob.

        The number is constant while the store is open, and cannot be guessed.
        """
        return self._store.generate_reference_tag(blob_id, transaction_id)

    def compact(self) -> Compacted:
        """Compact all sessions up to the current epoch, once that epoch is durable.

        Another thread must begin a later epoch meanwhile. Sessions continue, and replicas are not notified."""
        return self._thread.run(self._store.compact())

    def switch_available_boundary_version(self, version: WriteVersion) -> None:
        """Promise that no reader reads versions before this one. Compaction may then delete blobs that only older
        versions name."""
        self._store.switch_available_boundary_version(version)

    def begin_backup(self, *, rotates: bool = True) -> Backup:
        """Return the files to copy, in order. No blob is deleted until the end of the backup is notified.

        Args:
            rotates: Rotate all files first, so that none of them changes; another thread must begin a later epoch
                meanwhile. Otherwise the active files are listed, and the copy may contain later writes.

        Example:
            with store.begin_backup() as backup:
                for entry in backup.entries:
                    shutil.copy(entry.source, f"/backup/{entry.destination}")
        """
        handover = _Handover(self._thread.lock)
        try:
            return self._thread.run(handover.give(partial(self._store.begin_backup, rotates=rotates)))
        except BaseException:
            handover.refuse()
            raise

    def status(self) -> Status:
        """Return the status, in any state."""
        return self._store.status()

    def shutdown(self) -> None:
        """Release all resources; calling it twice is harmless. Open sessions are discarded.

        An interrupted shutdown continues. The next call, from any thread, waits until it is complete."""
        try:
            self._thread.run(self._store.shutdown())
        except WrongTime:
            if not self._thread.is_closing:
                raise
            # Another thread has completed the shutdown.
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
