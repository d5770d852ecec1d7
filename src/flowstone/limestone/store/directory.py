"""An open data directory: locked, its manifest created or migrated, its epoch file ready for writing.

Uses the Outside that is passed in; every step runs in a worker (`docs/spec/limestone.md#manifest-and-lock`,
`docs/spec/limestone.md#data-directory`). `recovery.py` reads the files, and channels write the log files. Only the
holder of a DataDirectory changes the directory.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.epoch_file import EpochWriter
from flowstone.limestone.format.files import write_whole
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.recovery import RecoveredDirectory, recover
from flowstone.outside import Disk, Lock, Outside
from flowstone.outside.worker import by_worker


class DataDirectory:
    """Held from `open` to `release`. `manifest` has the current formats, even if the one that was found is older."""

    def __init__(self, outside: Outside, path: str, manifest: Manifest, epochs: EpochWriter, lock: Lock) -> None:
        self.path = path
        self.manifest = manifest
        self.epochs = epochs
        self._outside = outside
        self._lock = lock

    @classmethod
    async def open(cls, outside: Outside, path: str, *, create: bool = True) -> DataDirectory:
        """Lock the directory; `create` makes a new one if the path is empty. Raise AlreadyLocked if it is in use.

        A directory of an older format is migrated: its manifest is rewritten, and its log files are rotated, because
        nothing may be appended to them."""
        fresh_uuid = str(outside.random.uuid())
        milliseconds = int(outside.clock.wall() * 1000)
        opening = _Opening(outside.disk, path.rstrip("/") or "/", fresh_uuid, milliseconds)
        try:
            found, epochs, lock = await by_worker(outside, opening.run, create)
        except asyncio.CancelledError:
            opening.release()  # the caller never receives the lock that the worker has taken
            raise
        return cls(outside, opening.path, found, epochs, lock)

    @property
    def instance_uuid(self) -> str:
        assert self.manifest.instance_uuid is not None
        return self.manifest.instance_uuid

    async def promote(self) -> None:
        """Make the directory a store, even if a replica wrote it. The directory then gets a new identity, so that no
        peer resumes from it or follows it."""
        self.manifest, self.epochs = await by_worker(self._outside, self._promote)

    def _promote(self) -> tuple[Manifest, EpochWriter]:
        disk = self._outside.disk
        if replica_seeding.read(disk, self.path).follows is not None:
            # Peers that know this identity associate it with other epochs.
            offline.rename_instance(self._outside, self.path)
        replica_seeding.promote(disk, self.path)
        return manifest.read(disk, self.path) or self.manifest, EpochWriter.open(disk, self.path)

    async def recover(self) -> RecoveredDirectory:
        """Read the directory; invalidate or cut off what does not count. Raise DamagedFile if durable data is lost."""
        return await by_worker(self._outside, recover, self._outside.disk, self.path)

    def release(self) -> None:
        """Release the lock; calling it twice is harmless."""
        self._lock.release()


class _Opening:
    """The steps of `open`, which run in a worker."""

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
            raise LimestoneError(f"{path} is not a directory")
        lock = self._lock = self._locked(create)
        try:
            manifest.settle(disk, path)
            self._write_first(create)
            with disk.append_to(f"{path}/{names.MANIFEST}") as file:
                # If its creator was killed, the content may not be on disk yet.
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
                raise LimestoneError(f"{path} is not a data directory: {names.MANIFEST} is missing") from None
        manifest.refuse_files(disk, path)
        with suppress(FileExistsError):
            disk.create(f"{path}/{names.MANIFEST}").close()
        return manifest.lock(disk, path)

    def _write_first(self, create: bool) -> None:
        """Write the manifest of a directory that was just created, or whose creator was killed while creating it."""
        disk, path = self._disk, self.path
        try:
            manifest.read(disk, path)
        except DamagedFile:
            if not create or not self._is_unborn():
                raise
            write_whole(disk, f"{path}/{names.MANIFEST}", manifest.encode(Manifest(self._fresh_uuid)))
            disk.sync_directory(path)

    def _is_unborn(self) -> bool:
        """Return True if the manifest is the only file."""
        found = [name for name in self._disk.list_directory(self.path) if self._kind(name) == "file"]
        return found == [names.MANIFEST]

    def _kind(self, name: str) -> str | None:
        return self._disk.kind(f"{self.path}/{name}")

    def _migrated(self) -> Manifest:
        disk, path = self._disk, self.path
        found = manifest.read(disk, path)
        if found is None:
            raise LimestoneError(f"manifest of {path} was removed while it was being opened", hint="try again")
        if found.is_current:
            return found
        if not found.has_end_markers:
            # Done before the manifest is written, so that it is repeated after a crash.
            self._detach()
        ours = found.migrated(self._fresh_uuid)
        manifest.migrate(disk, path, ours)
        return ours

    def _detach(self) -> None:
        """Rotate every log file with content: sessions of the old format have no end markers, new ones do."""
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
    """Return the first unused name that `name` may get when it is rotated at this time."""
    number = 0
    while disk.kind(f"{directory}/{(found := names.rotated(name, milliseconds, number))}") is not None:
        number += 1
    return found
