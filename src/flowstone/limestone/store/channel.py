"""A log channel: sessions of entries, encoded as they are added, written and synced when they end.

`add_*` only touch the buffer of the channel, and append it to the log file when it is full, so a thread of its own may
call them. The non-blocking steps of beginning and ending a session are plain calls, too, and a lock guards the state
that they share with the store: `blocking.py` makes these calls in the thread of the caller. All other steps run in the
event loop of the store. Nothing of a session is sent before its end. An aborted session is cut off the file, before any
reader has seen it.

Relies on its store for epochs and replicas (`ChannelHost`). One session at a time, and one caller.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, overload
from weakref import WeakSet

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import MARKER_SIZE, Entry, EntryType, Marker, WriteVersion, encode
from flowstone.limestone.format.packing import packed_puts
from flowstone.limestone.store import descriptors
from flowstone.limestone.store.epochs import Due
from flowstone.outside import File, Outside

END_SIZE: Final = 10

Parts = Callable[[], Iterable[bytes]]
"""Returns the entries of a session as on disk, without markers, in parts of whole entries; can be called again."""

Version = WriteVersion | tuple[int, int]

_PUT = struct.Struct("<BIIQ").pack
_REMOVE = struct.Struct("<BIQ").pack
_STORAGE = struct.Struct("<BQQQ").pack
_VERSION = struct.Struct("<QQ").pack
_PUT_BYTE: Final = EntryType.NORMAL.value
_REMOVE_BYTE: Final = EntryType.REMOVE.value
_PUT_SIZE: Final = 33
_REMOVE_SIZE: Final = 29


class ChannelHost(Protocol):
    """The store, as far as a channel needs it. `guard` is held while shared state is inconsistent."""

    @property
    def guard(self) -> AbstractContextManager[Any]: ...

    def check(self) -> None:
        """Raise if the store is not ready, has failed, or is shut down."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Return a context that calls `check` and keeps the directory from being released. Thread-safe."""
        ...

    def fail(self, error: BaseException) -> None:
        """Stop the store: a session is neither open nor closed."""
        ...

    def begin(self, channel: int) -> int: ...
    def finish(self, channel: int) -> Due: ...
    def abort(self, channel: int) -> Due: ...

    async def done(self, due: Due) -> None:
        """Wait for the work that `finish` or `abort` has made due."""
        ...

    def uses_blobs(self, blob_ids: AbstractSet[int]) -> None:
        """Note that a session names these blobs for the first time. Raise BlobError if one does not exist."""
        ...

    def logs_blobs(self, blob_ids: AbstractSet[int]) -> None:
        """Note that the session that names these blobs has ended."""
        ...

    async def takes_blobs_back(self, blob_ids: AbstractSet[int]) -> None:
        """Note that the session that names these blobs was aborted."""
        ...

    def replicated(self, channel: int, epoch: int, parts: Parts) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that waits until the quorum has a session; None if there are no replicas."""
        ...


class AsyncLogChannel:
    """Created by `create_channel` of a store. `id` is its number, which is also in the name of its file."""

    def __init__(self, host: ChannelHost, outside: Outside, directory: str, number: int, spill: int) -> None:
        self.id = number
        self.name = names.pwal(number)
        self.path = f"{directory}/{self.name}"
        self.finished_size = 0
        """The length of all sessions in the file that have ended, or are being synced."""
        self._host = host
        self._outside = outside
        self._directory = directory
        self._spill_size = spill
        self._file: File | None = None
        self._aside: WeakSet[File] = WeakSet()
        """Rotated files that replicas may still read."""
        self._epoch: int | None = None
        self._is_open = False
        self.ending: asyncio.Task[None] | None = None
        """The task that ends or aborts the last session."""
        self._start = 0
        self._spilled: list[tuple[int, int]] = []
        """Offset and length, in the file, of each part of this session that was moved from the buffer."""
        self._buffer = bytearray()
        self._blob_ids: set[int] = set()
        """The blobs that entries of the open session name."""
        self._at_end: list[Callable[[], None]] = []

    @property
    def has_file(self) -> bool:
        """True if a session has begun since the last rotation, or since the store became ready."""
        return self._file is not None

    @property
    def epoch(self) -> int | None:
        """The epoch of the open session, or None."""
        return self._epoch

    # --- sessions ---

    async def begin_session(self) -> None:
        """Begin a session in the current epoch; all entries that follow belong to it."""
        self.begin()

    def begin(self) -> None:
        """All of `begin_session`."""
        with self._host.guard:
            self._host.check()
            if self._epoch is not None:
                raise WrongTime(f"log channel {self.id} has an open session", hint="end or abort it first")
            epoch = self._epoch = self._host.begin(self.id)
        if self._file is None:
            self._open_file()
        self._start = self.finished_size
        self._spilled = []
        self._buffer = bytearray(encode(Marker(EntryType.MARKER_BEGIN, epoch)))
        self._is_open = True

    async def end_session(self) -> None:
        """End the session; return when it is durable here and on the quorum.

        If that makes epochs durable, they are recorded and reported first. Cancelling the call only ends the wait.

        Raises:
            WrongTime: No session is open.
            QuorumLost: Too few replicas acknowledged, and `on_lost` is "fail".
            DatastoreFailed: The store could not write, sync or replicate.
        """
        self.close_for_entries()
        await self._shielded(self._end())

    async def abort_session(self) -> None:
        """Discard the session and all its entries."""
        self.close_for_entries()
        await self._shielded(self._abort())

    def close_for_entries(self) -> None:
        """Stop accepting entries, because the session is about to end."""
        self._host.check()
        if not self._is_open:
            raise self._wrong_time()
        self._is_open = False

    def _wrong_time(self) -> WrongTime:
        if self._epoch is not None:
            return WrongTime(f"session of log channel {self.id} is ending")
        return WrongTime(f"log channel {self.id} has no open session", hint="begin one first")

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        """Shield a transition from cancellation: a session that is neither open nor closed would stop the store."""
        self.ending = asyncio.ensure_future(work)
        self.ending.add_done_callback(self._ended)
        await asyncio.shield(self.ending)

    def _ended(self, ending: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if ending.cancelled() else ending.exception()
        if error is not None:
            self._host.fail(error)

    def _open_file(self) -> None:
        """Open the log file, in the calling thread: it is done once, and a cancellation cannot interrupt it."""
        try:
            with self._host.writing(), descriptors.explained():
                file = _opened(self._outside, self._directory, self.path)
            size = file.size()
            with self._host.guard:  # other threads see both values, or neither
                self.finished_size, self._file = size, file
        except BaseException as error:
            self._host.fail(error)
            raise

    async def _end(self) -> None:
        file, replicated = self.write_end()
        if replicated is None:
            await self._outside.blocking(file.sync)
        else:
            await both(self._outside.blocking(file.sync), replicated)
        await self._host.done(self.finish())

    def write_end(self) -> tuple[File, Coroutine[Any, Any, None] | None]:
        """Write the rest of the session to the file. Return the file to sync and, with replicas, the wait for them."""
        file, epoch, tail = self._open_session()
        tail += encode(Marker(EntryType.MARKER_END, epoch))
        file.append(tail)
        # From here on, a reader of the file up to its finished size has this session; later links are sent it.
        self.finished_size = self._start + self._spilled_size() + len(tail)
        return file, self._host.replicated(self.id, epoch, self._parts(file, tail))

    def finish(self) -> Due:
        """Note that the session is durable, here and on the quorum; return the work that this makes due."""
        with self._host.guard:
            due = self._closed(self._host.finish)
            if self._blob_ids:
                self._host.logs_blobs(self._blob_ids)
                self._blob_ids = set()
            return due

    async def _abort(self) -> None:
        file, _, _ = self._open_session()
        if self._spilled:
            # The cut must be durable: once the epoch is durable, a crash must not restore half of this session.
            await self._outside.blocking(_cut, file, self._start)
        if self._blob_ids:
            await self._host.takes_blobs_back(self._blob_ids)
            self._blob_ids = set()
        await self._host.done(self._closed(self._host.abort))

    def _open_session(self) -> tuple[File, int, bytearray]:
        assert self._file is not None
        assert self._epoch is not None
        return self._file, self._epoch, self._buffer

    def _closed(self, close: Callable[[int], Due]) -> Due:
        with self._host.guard:
            self._host.check()
            self._buffer = bytearray()
            self._epoch = None
            hooks, self._at_end = self._at_end, []
            for hook in hooks:
                hook()
            return close(self.id)

    def _parts(self, file: File, tail: bytearray) -> Parts:
        spilled = tuple(self._spilled)

        def parts() -> Iterator[bytes]:
            skipped = MARKER_SIZE
            for at, size in spilled:
                yield file.read_at(at + skipped, size - skipped)
                skipped = 0
            yield bytes(memoryview(tail)[skipped:-END_SIZE])

        return parts

    def _spilled_size(self) -> int:
        return sum(size for _, size in self._spilled)

    def let_go(self) -> None:
        """Close all files. The store is shut down, so there are no readers or writers."""
        for file in (self._file, *self._aside):
            if file is not None:
                file.close()

    # --- rotation ---

    @property
    def has_hooks(self) -> bool:
        """True if hooks must run in the event loop when this session ends."""
        return bool(self._at_end)

    def when_closed(self, hook: Callable[[], None]) -> None:
        """Call `hook` when no session is open: now, or before the next one can begin. With the guard held."""
        if self._epoch is None:
            hook()
        else:
            self._at_end.append(hook)

    def put_aside(self, name: str) -> str | None:
        """Rename the log file, unless it is empty or missing; the next session begins a new file.

        Between sessions only. Durable when the directory is synced."""
        assert self._epoch is None
        disk = self._outside.disk
        if disk.kind(self.path) != "file" or not disk.size(self.path):
            return None
        disk.rename(self.path, f"{self._directory}/{name}")
        # The file stays open: a lagging replica may still read it. Its last user closes it, or the shutdown of the
        # store.
        if self._file is not None:
            self._aside.add(self._file)
        self._file = None
        self.finished_size = 0
        return name

    # --- entries, in the caller's thread ---

    def add_entry(self, storage_id: int, key: bytes, value: bytes, version: Version, blobs: Sequence[int] = ()) -> None:
        """Set a key to a value.

        Args:
            storage_id: Id of the storage.
            key: The key.
            value: The value.
            version: Major and minor version, as a pair or a WriteVersion. The entry with the largest version wins.
            blobs: Ids of the blobs that the value names, registered in a pool.

        Raises:
            WrongTime: No session is open.
        """
        if not self._is_open:
            raise self._wrong_time()
        if blobs:
            named = tuple(blobs)
            self._add_entry(Entry(EntryType.NORMAL_WITH_BLOB, storage_id, _version(version), key, value, named))
            return
        buffer = self._buffer
        at = len(buffer)
        try:
            key_size, value_size = len(key), len(value)
            buffer += _PUT(_PUT_BYTE, key_size, value_size, storage_id)
            buffer += key
            buffer += _VERSION(*version)
            buffer += value
        except BaseException as error:
            raise self._refused(at, error, storage_id, version, key, value) from None
        end = len(buffer)
        if end - at != _PUT_SIZE + key_size + value_size:
            raise self._refused(at, TypeError("keys and values must be bytes"), storage_id, version)
        if end >= self._spill_size:
            self._spill()

    def remove_entry(self, storage_id: int, key: bytes, version: Version) -> None:
        """Remove a key."""
        if not self._is_open:
            raise self._wrong_time()
        buffer = self._buffer
        at = len(buffer)
        try:
            key_size = len(key)
            buffer += _REMOVE(_REMOVE_BYTE, key_size, storage_id)
            buffer += key
            buffer += _VERSION(*version)
        except BaseException as error:
            raise self._refused(at, error, storage_id, version, key) from None
        if len(buffer) - at != _REMOVE_SIZE + key_size:
            raise self._refused(at, TypeError("keys must be bytes"), storage_id, version)
        if len(buffer) >= self._spill_size:
            self._spill()

    def add_storage(self, storage_id: int, version: Version) -> None:
        """Log a new storage. It has no effect on the stored rows."""
        self._add_of_storage(EntryType.ADD_STORAGE, storage_id, version)

    def remove_storage(self, storage_id: int, version: Version) -> None:
        """Remove all keys of a storage that are older than this version."""
        self._add_of_storage(EntryType.REMOVE_STORAGE, storage_id, version)

    def truncate_storage(self, storage_id: int, version: Version) -> None:
        """Remove all keys of a storage that are older than this version; the storage stays."""
        self._add_of_storage(EntryType.CLEAR_STORAGE, storage_id, version)

    @overload
    def add_entries(self, entries: Iterable[Entry], /) -> None: ...

    @overload
    def add_entries(
        self, storage_id: int, keys: Sequence[bytes], values: Sequence[bytes], version: Version, /
    ) -> None: ...

    def add_entries(self, *arguments: Any) -> None:
        """Add many entries: of any type, or keys with values, whose minor versions count up from `version`."""
        if not self._is_open:
            raise self._wrong_time()
        if len(arguments) == 1:
            for entry in arguments[0]:
                self._add_entry(entry)
            return
        storage_id, keys, values, version = arguments
        if complaint := _complaint(storage_id, version):
            raise LocalProtocolError(complaint)
        for data in packed_puts(storage_id, keys, values, _version(version), self._spill_size):
            self._add(data)

    def _add_of_storage(self, kind: EntryType, storage_id: int, version: Version) -> None:
        if not self._is_open:
            raise self._wrong_time()
        self._add_entry(Entry(kind, storage_id, _version(version)))

    def _add_entry(self, entry: Entry) -> None:
        try:
            data = encode(entry)
        except Exception as error:
            raise self._refused(len(self._buffer), error, *entry[1:5]) from None
        if entry.blob_ids and (new := set(entry.blob_ids) - self._blob_ids):
            self._host.uses_blobs(new)
            self._blob_ids |= new
        self._add(data)

    def _add(self, data: bytes | memoryview) -> None:
        buffer = self._buffer
        buffer += data
        if len(buffer) >= self._spill_size:
            self._spill()

    def _refused(
        self, at: int, error: BaseException, storage_id: object, version: object, *texts: object
    ) -> BaseException:
        """Remove a partially added entry; return the error for the caller that added it."""
        del self._buffer[at:]
        if isinstance(error, struct.error | TypeError | ValueError | LocalProtocolError):
            return LocalProtocolError(_complaint(storage_id, version, *texts) or f"cannot encode entry: {error}")
        return error

    def _spill(self) -> None:
        """Move the buffer to the file. It is not synced: the end of the session does that."""
        assert self._file is not None
        at, buffer = self._start + self._spilled_size(), self._buffer
        with self._host.writing():
            try:
                self._file.append(buffer)
            except BaseException as error:
                self._is_open = False
                self._host.fail(error)
                raise
        self._spilled.append((at, len(buffer)))
        self._buffer = bytearray()


async def both(local: Coroutine[Any, Any, None], remote: Coroutine[Any, Any, None]) -> None:
    """Run `local` and `remote` concurrently, and wait for both. If `local` fails, cancel `remote`, which may wait for
    replicas for ever."""
    away = asyncio.ensure_future(remote)
    try:
        await local
    except BaseException:
        away.cancel()
        raise
    await away


def _version(version: Version) -> WriteVersion:
    if complaint := _complaint(0, version):
        raise LocalProtocolError(complaint)
    return WriteVersion(*version)


def _complaint(storage_id: object, version: object, *texts: object) -> str | None:
    """Return why an entry with these arguments is rejected; None if no known reason applies."""
    if not _is_number(storage_id):
        return f"storage id must be a 64-bit number, not {storage_id!r:.50}"
    if not (isinstance(version, Sequence) and len(version) == 2 and all(map(_is_number, version))):
        return f"version must be a pair of 64-bit numbers (major, minor), not {version!r:.50}"
    for text in texts:
        if not isinstance(text, bytes | bytearray | memoryview):
            return f"keys and values must be bytes, not {type(text).__name__}"
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 64


def _opened(outside: Outside, directory: str, path: str) -> File:
    disk = outside.disk
    if disk.kind(path) == "file":
        return disk.append_to(path)
    file = disk.create(path)
    try:
        disk.sync_directory(directory)
    except BaseException:
        file.close()
        raise
    return file


def _cut(file: File, size: int) -> None:
    file.truncate(size)
    file.sync()
