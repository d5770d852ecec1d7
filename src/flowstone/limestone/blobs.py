"""Blobs: values that are files of their own. Who hands out their ids, and which files nobody needs any more.

Files are written through the Outside one is handed, and are durable when a call has returned their id; what may be
deleted is decided by pure functions (reference: blobs). A blob belongs to the pool that registered it until an entry
names it; from then on to the log, and only a collection takes it away.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from flowstone.limestone import copying, names
from flowstone.limestone.entries import Entry, WriteVersion
from flowstone.limestone.errors import LimestoneError
from flowstone.outside import Disk, Outside

ID_MAX: Final = (1 << 64) - 1
ROOT: Final = "blob"
_KEY_SIZE: Final = 16


class BlobError(LimestoneError):
    """A blob that is not there, or a pool that can give no more."""


# --- rules ----------------------------------------------------------------------------------------


def visible_ids(entries: Iterable[Entry], boundary: WriteVersion) -> set[int]:
    """Blobs that a reader may still see of these entries with blobs, where none reads older versions than `boundary`.

    All of versions from the boundary on, and per key the newest below it."""
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
    """Which stored blobs may go: those up to the largest id that any entry has named, but the kept ones."""
    return sorted(blob_id for blob_id in stored if blob_id <= max_id and blob_id not in kept)


# --- files ----------------------------------------------------------------------------------------


def stored_ids(disk: Disk, directory: str) -> list[int]:
    """The ids of all blob files where they belong, sorted."""
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
    """The directory that a blob lies in, made durably if it is missing."""
    path = f"{directory}/{names.blob_directory(blob_id)}"
    if disk.kind(path) is None:
        disk.make_directory(path)
        disk.sync_directory(f"{directory}/{ROOT}")
        disk.sync_directory(directory)
    return path


def delete(disk: Disk, directory: str, blob_ids: Iterable[int]) -> None:
    """Delete blob files; one that is gone already is none to delete. Nothing is synced: a blob that comes back is
    garbage still."""
    for blob_id in blob_ids:
        copying.remove(disk, f"{directory}/{names.blob(blob_id)}")


def collect_at_start(disk: Disk, directory: str, referenced: AbstractSet[int], max_blob_id: int) -> list[int]:
    """Delete what a directory that nobody uses yet has no use for; the ids that are gone.

    `referenced`: blobs of the rows that its cursor shows. `max_blob_id`: as recovered; larger ones stay."""
    found = garbage(stored_ids(disk, directory), referenced, max_blob_id)
    delete(disk, directory, found)
    return found


# --- registering ----------------------------------------------------------------------------------


@dataclass
class _Named:
    """A blob that open sessions name. `pool`: where it goes if all of them are taken back; None if the log has it."""

    pool: BlobPool | None
    sessions: int = 0


class Blobs:
    """The blobs of one running datastore: each is its pool's, then that of the sessions that name it, then the log's.

    `guard` is held while one changes hands, where several threads do that."""

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
        """Where the file of a blob lies, or would."""
        return f"{self._directory}/{names.blob(blob_id)}"

    def found_path(self, blob_id: int) -> str:
        """The file of a blob; BlobError if it is not there."""
        if not 0 <= blob_id <= ID_MAX or self._outside.disk.kind(self.path(blob_id)) != "file":
            raise BlobError(f"there is no blob {blob_id} in {self._directory}")
        return self.path(blob_id)

    def content(self, blob_id: int) -> bytes:
        """What a blob holds; BlobError if it is not there."""
        with self._outside.disk.open(self.found_path(blob_id)) as file:
            return file.read_at(0, file.size())

    def use(self, blob_ids: AbstractSet[int]) -> None:
        """A session that has not named these before does: their pools keep their hands off them. In any thread.

        BlobError, and nothing is changed, if one of them is not there."""
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
        """A session that names these has ended. In any thread."""
        with self._guard:
            for blob_id in sorted(blob_ids):
                self._named[blob_id].pool = None
                self._leave(blob_id)

    def take_back(self, blob_ids: AbstractSet[int]) -> list[int]:
        """A session that names these was taken back: they are their pools' again. Those whose pool is released, and
        which nobody else names: they are to be deleted."""
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
        """One session less; the pool of a blob that none names any more."""
        named = self._named[blob_id]
        named.sessions -= 1
        if named.sessions:
            return None
        del self._named[blob_id]
        return named.pool

    def take_id(self, pool: BlobPool) -> int:
        """The next id, which belongs to a pool until it is used."""
        if self.next_id >= ID_MAX:
            raise BlobError("there are no ids of blobs left")
        with self._guard:
            blob_id, self.next_id = self.next_id, self.next_id + 1
            self._provisional[blob_id] = pool
        return blob_id

    def give_back(self, blob_ids: Iterable[int]) -> list[int]:
        """Those of these that no entry has named; nobody will any more."""
        with self._guard:
            return [blob_id for blob_id in blob_ids if self._provisional.pop(blob_id, None) is not None]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a compaction from before its rotation on: what open sessions name is in no file that it reads."""
        with self._guard:
            self._watched = set(self._named)
        try:
            yield
        finally:
            self._watched = None

    def held(self) -> frozenset[int]:
        """What a collection may not touch: blobs that wait for their entry, and what sessions have named that were
        open when `watching` began, or later. In any thread."""
        with self._guard:
            return frozenset([*self._provisional, *self._named, *(self._watched or ())])

    def reference_tag(self, blob_id: int, transaction_id: int) -> int:
        """A number that whoever shows a blob to a client can ask back for: nobody else can make it up."""
        message = blob_id.to_bytes(8, "little") + transaction_id.to_bytes(8, "little")
        return int.from_bytes(hmac.new(self._key, message, hashlib.sha256).digest()[:8], "little")


class BlobPool:
    """Registers blobs for entries to come; what no entry has named when it is released is deleted."""

    def __init__(self, outside: Outside, directory: str, blobs: Blobs) -> None:
        self._outside = outside
        self._directory = directory
        self._blobs = blobs
        self._registered: list[int] = []
        self.is_released = False

    async def register_data(self, data: bytes) -> int:
        """Store these bytes."""
        blob_id = self._take_id()
        await self._outside.blocking(self._store, blob_id, data)
        return blob_id

    async def register_file(self, path: str, *, is_temporary: bool = False) -> int:
        """Store a file's content; a temporary one is moved there, or gone after it was copied."""
        if self._outside.disk.kind(path) != "file":
            raise BlobError(f"cannot make a blob of {path}: there is no such file")
        blob_id = self._take_id()
        await self._outside.blocking(self._move if is_temporary else self._copy, blob_id, path)
        return blob_id

    async def duplicate_data(self, blob_id: int) -> int:
        """Another blob of the same content."""
        if self._outside.disk.kind(self._blobs.path(blob_id)) != "file":
            raise BlobError(f"cannot duplicate blob {blob_id}: it is not there")
        new_id = self._take_id()
        await self._outside.blocking(self._duplicate, new_id, blob_id)
        return new_id

    async def release(self) -> None:
        """Delete what was registered and never named. Releasing twice is harmless."""
        self.is_released = True
        registered, self._registered = self._registered, []
        left = self._blobs.give_back(registered)
        if left:
            await self._outside.blocking(delete, self._outside.disk, self._directory, left)

    def _take_id(self) -> int:
        if self.is_released:
            raise BlobError("this pool has been released", hint="take another one from the datastore")
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
