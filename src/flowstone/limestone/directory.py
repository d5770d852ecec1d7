"""A data directory in somebody's hands: locked, its manifest settled, made or migrated, its epoch file ready to write.

On the Outside one is handed, every step in a worker (reference: manifest and lock, data directory). What the files say
is for `recovery.py`; what is written to the log files, for channels. Only who holds one of these changes a directory.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from flowstone.limestone import catalog, manifest, names, offline, replica_seeding
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.epoch_file import EpochWriter
from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.files import write_whole
from flowstone.limestone.manifest import Manifest
from flowstone.limestone.recovery import Recovered, recover
from flowstone.outside import Disk, Lock, Outside
from flowstone.outside.worker import by_worker


class DataDirectory:
    """Held from `open` to `release`. `manifest` is that of the current formats, whatever was found."""

    def __init__(self, outside: Outside, path: str, manifest: Manifest, epochs: EpochWriter, lock: Lock) -> None:
        self.path = path
        self.manifest = manifest
        self.epochs = epochs
        self._outside = outside
        self._lock = lock

    @classmethod
    async def open(cls, outside: Outside, path: str, *, create: bool = True) -> DataDirectory:
        """Take the directory; `create` makes one where nothing is. AlreadyLocked if somebody else has it.

        One of an older format becomes one of ours: its manifest, and its log files, to which nothing is appended."""
        fresh_uuid = str(outside.random.uuid())
        milliseconds = int(outside.clock.wall() * 1000)
        opening = _Opening(outside.disk, path.rstrip("/") or "/", fresh_uuid, milliseconds)
        try:
            found, epochs, lock = await by_worker(outside, opening.run, create)
        except asyncio.CancelledError:
            opening.release()  # the caller never gets the lock that the worker has taken
            raise
        return cls(outside, opening.path, found, epochs, lock)

    @property
    def instance_uuid(self) -> str:
        assert self.manifest.instance_uuid is not None
        return self.manifest.instance_uuid

    async def promote(self) -> None:
        """It is a store from now on, even if it has been a replica's; then it is one that nobody resumes or follows."""
        self.manifest, self.epochs = await by_worker(self._outside, self._promote)

    def _promote(self) -> tuple[Manifest, EpochWriter]:
        disk = self._outside.disk
        if replica_seeding.read(disk, self.path).follows is not None:
            # Whoever knows it by its name knows it from a time when it was a store with other epochs.
            offline.rename_instance(self._outside, self.path)
        replica_seeding.promote(disk, self.path)
        return manifest.read(disk, self.path) or self.manifest, EpochWriter.open(disk, self.path)

    async def recover(self) -> Recovered:
        """What the directory holds; what does not count is marked or cut off. DamagedFile if something is lost."""
        return await by_worker(self._outside, recover, self._outside.disk, self.path)

    def release(self) -> None:
        """Let go; twice is harmless."""
        self._lock.release()


class _Opening:
    """The steps of `open`, in a worker."""

    def __init__(self, disk: Disk, path: str, fresh_uuid: str, milliseconds: int) -> None:
        self.path = path
        self._disk = disk
        self._fresh_uuid = fresh_uuid
        self._milliseconds = milliseconds
        self._lock: Lock | None = None

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def run(self, create: bool) -> tuple[Manifest, EpochWriter, Lock]:
        disk, path = self._disk, self.path
        if disk.kind(path) is None and create:
            self._make_directory()
        if disk.kind(path) != "directory":
            raise LimestoneError(f"{path} is no directory")
        lock = self._lock = self._locked(create)
        try:
            manifest.settle(disk, path)
            self._write_first(create)
            with disk.append_to(f"{path}/{names.MANIFEST}") as file:
                # Of a maker that was killed it may be in the kernel's memory only.
                file.sync()
            return self._migrated(), self._epochs(), lock
        except BaseException:
            lock.release()
            raise

    def _make_directory(self) -> None:
        missing = [self.path]
        while (parent := _parent(missing[-1])) and self._disk.kind(parent) is None:
            missing.append(parent)
        self._disk.make_directory(self.path)
        for path in missing:
            self._disk.sync_directory(_parent(path))

    def _locked(self, create: bool) -> Lock:
        disk, path = self._disk, self.path
        try:
            return manifest.lock(disk, path)
        except FileNotFoundError:
            if not create:
                raise LimestoneError(f"{path} is no data directory: it has no {names.MANIFEST}") from None
        manifest.refuse_files(disk, path)
        with suppress(FileExistsError):
            disk.create(f"{path}/{names.MANIFEST}").close()
        return manifest.lock(disk, path)

    def _write_first(self, create: bool) -> None:
        """Of a directory that we have just made, or whose maker died in it."""
        disk, path = self._disk, self.path
        try:
            manifest.read(disk, path)
        except DamagedFile:
            if not create or not self._is_unborn():
                raise
            write_whole(disk, f"{path}/{names.MANIFEST}", manifest.encode(Manifest(self._fresh_uuid)))
            disk.sync_directory(path)

    def _is_unborn(self) -> bool:
        """Whether the manifest is all there is."""
        found = [name for name in self._disk.list_directory(self.path) if self._kind(name) == "file"]
        return found == [names.MANIFEST]

    def _kind(self, name: str) -> str | None:
        return self._disk.kind(f"{self.path}/{name}")

    def _migrated(self) -> Manifest:
        disk, path = self._disk, self.path
        found = manifest.read(disk, path)
        if found is None:
            raise LimestoneError(f"the manifest of {path} was taken away while it was opened", hint="try again")
        if found.is_current:
            return found
        if not found.has_end_markers:
            # First, so that after a crash it is done again.
            self._detach()
        ours = found.migrated(self._fresh_uuid)
        manifest.migrate(disk, path, ours)
        return ours

    def _detach(self) -> None:
        """Put every log file aside that something is in: its sessions have no end markers, ours do."""
        disk, path = self._disk, self.path
        for name in disk.list_directory(path):
            if names.is_pwal(name) and not names.is_detached(name) and disk.size(f"{path}/{name}"):
                disk.rename(f"{path}/{name}", f"{path}/{free_name(disk, path, name, self._milliseconds)}")
        disk.sync_directory(path)

    def _epochs(self) -> EpochWriter:
        catalog.settle(self._disk, self.path)
        if catalog.read(self._disk, self.path) is None:
            catalog.write(self._disk, self.path, Catalog())
        return EpochWriter.open(self._disk, self.path)


def _parent(path: str) -> str:
    above, slash, _ = path.rpartition("/")
    return above or slash or "."


def free_name(disk: Disk, directory: str, name: str, milliseconds: int) -> str:
    """The first name that nothing has, of those that `name` may get when it is put aside at this moment."""
    number = 0
    while disk.kind(f"{directory}/{(found := names.rotated(name, milliseconds, number))}") is not None:
        number += 1
    return found
