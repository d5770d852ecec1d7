"""Backups: consistent, checked copies of a running member or of an archive, with a list of their files.

A backup is an archive, which a server starts from, and which `restore` and `verify` read. It is written beside its
destination, read back, synced and renamed: a directory with the name of a backup is complete. Never changes its source.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.archive import Archive
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.manifest import NotAnArchive
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.outside import AlreadyLocked, Disk, Outside, production
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.reader import EndingKind, LogFile

LIST: Final = "backup.json"
INPROGRESS: Final = ".inprogress"
CHUNK: Final = 1 << 20


class BackupExists(FlowstoneError):
    """The destination exists."""


class DamagedBackup(FlowstoneError):
    """A file of a backup is missing, or is not the file that was backed up."""


class BackupFile(msgspec.Struct, frozen=True):
    name: str
    size: int
    sha256: str


class ArchiveBackup(msgspec.Struct, frozen=True):
    """The list of a backup. `position` is the vclock at which the data ends, `settled` its settled part."""

    instance_uuid: str
    replicaset_uuid: str
    position: dict[int, int]
    settled: dict[int, int]
    files: tuple[BackupFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


async def back_up_member(
    uri: str | Uri,
    destination: str,
    *,
    on_event: Callable[[ArchiveEvent], None] = lambda event: None,
    outside: Outside | None = None,
) -> ArchiveBackup:
    """Write what a running member has to `destination`, which must not exist; return the list of files.

    Raises:
        BackupExists: The destination exists.
        FlowstoneError: The member cannot be reached, or rejects the backup; nothing is left then.
    """
    outside = outside or production()
    with _unfinished(outside.disk, destination) as directory:
        await Archive(uri, directory, snapshot_interval=0, on_event=on_event, outside=outside).run(once=True)
        return await outside.blocking(_complete, outside.disk, directory)


def back_up_archive(disk: Disk, source: str, destination: str) -> ArchiveBackup:
    """Copy an archive, which may be in use, to `destination`, which must not exist; return the list of files.

    Raises:
        BackupExists: The destination exists.
        NotAnArchive: `source` is not an archive.
        FlowstoneError: A file is damaged; nothing is left then.
    """
    if archive_manifest.load(disk, source) is None:
        hint = "give an archive, or the address of a running member"
        raise NotAnArchive(f"{source} has no {archive_manifest.NAME}", hint=hint)
    with _unfinished(disk, destination) as directory:
        # An archive writes a log before its index, and the index before the manifest: in this order of the copies, each
        # describes only what the next ones have.
        for name in sorted(_files(disk, source), key=_copied_when):
            _copy(disk, posixpath.join(source, name), posixpath.join(directory, name))
        return _complete(disk, directory)


def check_backup(disk: Disk, directory: str) -> ArchiveBackup:
    """Return the list of a backup whose files are all there, and unchanged; raise DamagedBackup otherwise."""
    try:
        with disk.open(posixpath.join(directory, LIST)) as file:
            backup = msgspec.json.decode(file.read_at(0, file.size()), type=ArchiveBackup)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedBackup(f"{directory} is not a complete backup: {error}", hint="use another one") from error
    for each in backup.files:
        path = posixpath.join(directory, each.name)
        if disk.kind(path) != "file" or _file(disk, directory, each.name) != each:
            raise DamagedBackup(f"{path} is missing or has changed since the backup", hint="use another backup")
    return backup


@contextmanager
def _unfinished(disk: Disk, destination: str) -> Iterator[str]:
    """Yield a directory that gets the name `destination` if the block succeeds, and is emptied if it fails."""
    destination = disk.real_path(destination)
    if disk.kind(destination) is not None or disk.is_link(destination):
        raise BackupExists(f"{destination} exists", hint="a backup overwrites nothing; choose a new directory")
    directory = destination + INPROGRESS
    disk.make_directory(directory)
    try:
        disk.lock(directory).release()
    except AlreadyLocked as error:
        raise BackupExists(f"another backup is writing {destination}", hint="wait for the other backup") from error
    _empty(disk, directory)  # of a killed backup
    try:
        yield directory
        disk.rename(directory, destination)
    except BaseException:
        _empty(disk, directory)
        raise
    disk.sync_directory(posixpath.dirname(destination))


def _empty(disk: Disk, directory: str) -> None:
    for name in disk.list_directory(directory):
        disk.unlink(posixpath.join(directory, name))


def _files(disk: Disk, directory: str) -> Iterator[str]:
    """Yield the files to copy: no locks, and nothing that is being written under a temporary name."""
    for name in disk.list_directory(directory):
        if name != LIST and name.endswith((".json", ".jsonl", ".snap", ".xlog")):
            yield name


def _copied_when(name: str) -> tuple[int, str]:
    kinds = (archive_manifest.NAME, ".jsonl", ".json", ".snap", ".xlog")
    return next(number for number, kind in enumerate(kinds) if name.endswith(kind)), name


def _copy(disk: Disk, old: str, new: str) -> None:
    """Copy a file; of a log that is being written, only whole blocks."""
    with disk.open(old) as source:
        end = source.size()
        if old.endswith(".xlog"):
            end = min(end, _whole(disk, old))
        with disk.create(new) as target:
            at = 0
            while at < end and (data := source.read_at(at, min(CHUNK, end - at))):
                target.append(data)
                at += len(data)
            target.sync()


def _whole(disk: Disk, path: str) -> int:
    """Return the offset after the last whole block, or after the end marker."""
    with LogFile.open(disk, path) as log:
        for _ in log.slabs():
            pass
        ending = log.ending
    return ending.offset if ending is not None and ending.kind is EndingKind.TORN else disk.size(path)


def _complete(disk: Disk, directory: str) -> ArchiveBackup:
    """Read all logs and snapshots back, write the list of files, and sync it."""
    manifest = archive_manifest.load(disk, directory)
    if manifest is None:
        raise NotAnArchive(f"{directory} has no {archive_manifest.NAME}", hint="back up again")
    found = scan_directory(disk, directory)
    for listed in (*found.snapshots, *found.logs):
        with LogFile.open(disk, listed.path) as log:
            for _ in log.slabs():
                pass
    files = tuple(_file(disk, directory, name) for name in sorted(_files(disk, directory)))
    uuids = manifest.instance_uuid or "", manifest.replicaset_uuid or ""
    backup = ArchiveBackup(*uuids, dict(manifest.position), dict(manifest.settled), files)
    with disk.create(posixpath.join(directory, LIST)) as file:
        file.append(msgspec.json.format(msgspec.json.encode(backup), indent=1) + b"\n")
        file.sync()
    disk.sync_directory(directory)
    return backup


def _file(disk: Disk, directory: str, name: str) -> BackupFile:
    digest, at = hashlib.sha256(), 0
    with disk.open(posixpath.join(directory, name)) as file:
        while data := file.read_at(at, CHUNK):
            digest.update(data)
            at += len(data)
    return BackupFile(name, at, digest.hexdigest())
