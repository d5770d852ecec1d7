"""Blobs, which are values in files of their own: allocation of ids, ownership, and garbage collection.

Files are written through the Outside that is passed in, and are durable when a call returns their id. Pure functions
decide which files may be deleted (`docs/spec/limestone.md#blobs`). A blob belongs to the pool that registered it until
an entry names it. From then on it belongs to the log, and only a collection deletes it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import copying, names
from flowstone.limestone.format.entries import Entry, WriteVersion
from flowstone.outside import Disk, Outside

ID_MAX: Final = (1 << 64) - 1
ROOT: Final = "blob"
_KEY_SIZE: Final = 16


class BlobError(LimestoneError):
    """A blob does not exist, or a pool cannot register more."""


# --- rules ----------------------------------------------------------------------------------------


def visible_ids(entries: Iterable[Entry], boundary: WriteVersion) -> set[int]:
    """Return the ids of the blobs that a reader may still see, if no reader reads versions older than `boundary`.

    These are the blobs of all `entries` from the boundary on, and for each key the blobs of the newest entry before
    it."""
    found: set[int] = set()
    newest: dict[tuple[int, bytes], Entry] = {}
    for entry in entries:
        if entry.version >= boundary:
            found.update(entry.blob_ids)
            continue
        before = newest.get((entry.storage_id, entry.key))
        if before is None or before.version <= entry.version:
            newest[entry.storage_id, entry.key] = entry
    for entry in newest.values():
        found.update(entry.blob_ids)
    return found


def garbage(stored: Iterable[int], kept: AbstractSet[int], max_id: int) -> list[int]:
    """Return the stored blobs to delete: ids up to `max_id`, the largest that any entry named, except `kept`."""
    return sorted(blob_id for blob_id in stored if blob_id <= max_id and blob_id not in kept)


# --- files ----------------------------------------------------------------------------------------


def stored_ids(disk: Disk, directory: str) -> list[int]:
    """Return the ids of all blob files that are in their directories, sorted."""
    root = f"{directory}/{ROOT}"
    if disk.kind(root) != "directory":
        return []
    found = []
    for child in disk.list_directory(root):
        if disk.kind(f"{root}/{child}") != "directory":
            continue
        for name in disk.list_directory(f"{root}/{child}"):
            blob_id = names.blob_id(name)
            if blob_id is not None and names.blob_directory(blob_id) == f"{ROOT}/{child}":
                found.append(blob_id)
    return sorted(found)


def make_directory(disk: Disk, directory: str, blob_id: int) -> str:
    """Return the directory of a blob; create it durably if it is missing."""
    path = f"{directory}/{names.blob_directory(blob_id)}"
    if disk.kind(path) is None:
        disk.make_directory(path)
        disk.sync_directory(f"{directory}/{ROOT}")
        disk.sync_directory(directory)
    return path


def delete(disk: Disk, directory: str, blob_ids: Iterable[int]) -> None:
    """Delete blob files; missing ones are skipped. Nothing is synced: a file that reappears after a crash is still
    garbage."""
    for blob_id in blob_ids:
        copying.remove(disk, f"{directory}/{names.blob(blob_id)}")


def collect_at_start(disk: Disk, directory: str, referenced: AbstractSet[int], max_blob_id: int) -> list[int]:
    """Delete the garbage of a directory that is being opened, and return the deleted ids.

    `referenced`: blobs of the rows of its cursor. `max_blob_id`: as recovered; blobs with larger ids stay."""
    found = garbage(stored_ids(disk, directory), referenced, max_blob_id)
    delete(disk, directory, found)
    return found


# --- registering ----------------------------------------------------------------------------------


@dataclass
class _Named:
    """A blob that open sessions name. `pool` owns the blob again if all these sessions are aborted; None if the log
    owns the blob."""

    pool: BlobPool | None
    sessions: int = 0


class Blobs:
    """The blobs of a running datastore. Each belongs to its pool, then to the sessions that name it, then to the log.

    `guard` is held while a blob changes its owner; needed if several threads use this object."""

    def __init__(
        self, outside: Outside, directory: str, next_id: int, guard: AbstractContextManager[Any] | None = None
    ) -> None:
        self.next_id = next_id
        self._outside = outside
        self._directory = directory
        self._guard = nullcontext() if guard is None else guard
        self._key = outside.random.bytes(_KEY_SIZE)
        self._provisional: dict[int, BlobPool] = {}
        self._named: dict[int, _Named] = {}
        self._watched: set[int] | None = None

    def pool(self) -> BlobPool:
        return BlobPool(self._outside, self._directory, self)

    def path(self, blob_id: int) -> str:
        """Return the path of a blob, whether the file exists or not."""
        return f"{self._directory}/{names.blob(blob_id)}"

    def found_path(self, blob_id: int) -> str:
        """Return the path of an existing blob. Raise BlobError if there is no file."""
        if not 0 <= blob_id <= ID_MAX or self._outside.disk.kind(self.path(blob_id)) != "file":
            raise BlobError(f"blob {blob_id} does not exist in {self._directory}")
        return self.path(blob_id)

    def content(self, blob_id: int) -> bytes:
        """Return the content of a blob. Raise BlobError if there is no file."""
        with self._outside.disk.open(self.found_path(blob_id)) as file:
            return file.read_at(0, file.size())

    def use(self, blob_ids: AbstractSet[int]) -> None:
        """Note that a session names these blobs for the first time: their pools no longer delete them. Thread-safe.

        Raise BlobError, and change nothing, if one of them does not exist."""
        with self._guard:
            for blob_id in sorted(blob_ids):
                if blob_id not in self._provisional and blob_id not in self._named:
                    self.found_path(blob_id)
            for blob_id in sorted(blob_ids):
                named = self._named.get(blob_id)
                if named is None:
                    named = self._named[blob_id] = _Named(self._provisional.pop(blob_id, None))
                named.sessions += 1
            if self._watched is not None:
                self._watched.update(blob_ids)

    def log(self, blob_ids: AbstractSet[int]) -> None:
        """Note that a session that names these blobs has ended: the log owns them. Thread-safe."""
        with self._guard:
            for blob_id in sorted(blob_ids):
                self._named[blob_id].pool = None
                self._leave(blob_id)

    def take_back(self, blob_ids: AbstractSet[int]) -> list[int]:
        """Note that a session that names these blobs was aborted: their pools own them again.

        Return the blobs to delete: blobs of released pools that no other session names."""
        left = []
        with self._guard:
            for blob_id in sorted(blob_ids):
                pool = self._leave(blob_id)
                if pool is not None and pool.is_released:
                    left.append(blob_id)
                elif pool is not None:
                    self._provisional[blob_id] = pool
        return left

    def _leave(self, blob_id: int) -> BlobPool | None:
        """Note that a session no longer names a blob; return the pool if no other session names the blob."""
        named = self._named[blob_id]
        named.sessions -= 1
        if named.sessions:
            return None
        del self._named[blob_id]
        return named.pool

    def take_id(self, pool: BlobPool) -> int:
        """Return the next id. The blob belongs to `pool` until a session names it."""
        if self.next_id >= ID_MAX:
            raise BlobError("blob ids are exhausted")
        with self._guard:
            blob_id, self.next_id = self.next_id, self.next_id + 1
            self._provisional[blob_id] = pool
        return blob_id

    def give_back(self, blob_ids: Iterable[int]) -> list[int]:
        """Release blob ids from their pool; return the ids that no entry has named."""
        with self._guard:
            return [blob_id for blob_id in blob_ids if self._provisional.pop(blob_id, None) is not None]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the blobs that sessions name during a compaction, whose inputs do not contain them. Enter it before the
        rotation."""
        with self._guard:
            self._watched = set(self._named)
        try:
            yield
        finally:
            self._watched = None

    def held(self) -> frozenset[int]:
        """Return the blobs that a collection must keep: registered blobs that no entry has named yet, blobs that open
        sessions name, and blobs that sessions have named since `watching` began. Thread-safe."""
        with self._guard:
            return frozenset([*self._provisional, *self._named, *(self._watched or ())])

    def reference_tag(self, blob_id: int, transaction_id: int) -> int:
        """Return a number that cannot be guessed, and that proves a client's right to read a blob."""
        message = blob_id.to_bytes(8, "little") + transaction_id.to_bytes(8, "little")
        return int.from_bytes(hmac.new(self._key, message, hashlib.sha256).digest()[:8], "little")


class BlobPool:
    """Registers blobs for future entries. Releasing the pool deletes the blobs that no entry has named."""

    def __init__(self, outside: Outside, directory: str, blobs: Blobs) -> None:
        self._outside = outside
        self._directory = directory
        self._blobs = blobs
        self._registered: list[int] = []
        self.is_released = False

    async def register_data(self, data: bytes) -> int:
        """Store `data` as a blob, and return its id."""
        blob_id = self._take_id()
        await self._outside.blocking(self._store, blob_id, data)
        return blob_id

    async def register_file(self, path: str, *, is_temporary: bool = False) -> int:
        """Store a file as a blob, and return its id.

        Args:
            path: Path of the file.
            is_temporary: Move the file, or copy and delete it.

        Raises:
            BlobError: The file does not exist, or the pool has been released.
        """
        if self._outside.disk.kind(path) != "file":
            raise BlobError(f"cannot register {path} as a blob: file does not exist")
        blob_id = self._take_id()
        await self._outside.blocking(self._move if is_temporary else self._copy, blob_id, path)
        return blob_id

    async def duplicate_data(self, blob_id: int) -> int:
        """Register a new blob with the content of another, and return its id.

        Raises:
            BlobError: The blob does not exist, or the pool has been released.
        """
        if self._outside.disk.kind(self._blobs.path(blob_id)) != "file":
            raise BlobError(f"cannot duplicate blob {blob_id}: blob does not exist")
        new_id = self._take_id()
        await self._outside.blocking(self._duplicate, new_id, blob_id)
        return new_id

    async def release(self) -> None:
        """Delete the registered blobs that no entry has named. Releasing twice has no effect."""
        self.is_released = True
        registered, self._registered = self._registered, []
        left = self._blobs.give_back(registered)
        if left:
            await self._outside.blocking(delete, self._outside.disk, self._directory, left)

    def _take_id(self) -> int:
        if self.is_released:
            raise BlobError("blob pool has been released", hint="acquire another one from the datastore")
        blob_id = self._blobs.take_id(self)
        self._registered.append(blob_id)
        return blob_id

    def _store(self, blob_id: int, data: bytes) -> None:
        parent = make_directory(self._outside.disk, self._directory, blob_id)
        copying.write(self._outside.disk, self._blobs.path(blob_id), data)
        self._outside.disk.sync_directory(parent)

    def _copy(self, blob_id: int, path: str) -> None:
        parent = make_directory(self._outside.disk, self._directory, blob_id)
        copying.copy(self._outside.disk, path, self._blobs.path(blob_id))
        self._outside.disk.sync_directory(parent)

    def _move(self, blob_id: int, path: str) -> None:
        disk = self._outside.disk
        parent = make_directory(disk, self._directory, blob_id)
        with disk.append_to(path) as file:
            file.sync()
        copying.move(disk, path, self._blobs.path(blob_id))
        disk.sync_directory(parent)

    def _duplicate(self, new_id: int, blob_id: int) -> None:
        parent = make_directory(self._outside.disk, self._directory, new_id)
        copying.link_or_copy(self._outside.disk, self._blobs.path(blob_id), self._blobs.path(new_id))
        self._outside.disk.sync_directory(parent)
