"""Backups of a running datastore: which files to copy, in which order, and how to restore a directory from them.

Uses the Outside that is passed in (`docs/spec/limestone.md#backup-and-restore`). The caller copies the entries of a
backup, in the order in which they are listed, to one flat directory. A file that refers to others comes before them, so
the copy is consistent even if sessions end meanwhile. The datastore rotates the log files; this module rotates only the
epoch file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Self

from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import catalog, copying, lineage, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.store import blobs
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.seeding import FILE as REPLICA_FILE
from flowstone.outside import Disk, Outside


@dataclass(frozen=True)
class BackupEntry:
    """A file to copy: its path, and its name in the backup."""

    source: str
    destination: str
    is_mutable: bool = False
    """True if the file may change after it was copied, without harm."""
    is_detached: bool = False
    """True if the file is no longer part of the log. The original never sets this."""


class OpenBackups:
    """The number of open backups of one datastore.

    While a backup is open, no compaction runs and no blob is deleted: a listed file could be replaced, or a newer
    catalog could refer to files that the backup does not list."""

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0


class Backup:
    """The files that make up a directory. `log_finish`: the current epoch when the files were listed."""

    def __init__(self, entries: Iterable[BackupEntry], log_finish: int, on_end: Callable[[], None]) -> None:
        self.entries = tuple(entries)
        self.log_finish = log_finish
        self._on_end: Callable[[], None] | None = on_end

    def notify_end_backup(self) -> None:
        """End the backup: all files have been copied. Calling it again has no effect."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.notify_end_backup()


async def begin(
    outside: Outside,
    directory: str,
    open_backups: OpenBackups,
    compacting: AbstractAsyncContextManager[object],
    current_epoch: Callable[[], int],
    rotate: Callable[[], Awaitable[None]] | None = None,
) -> Backup:
    """Begin a backup. `rotate` rotates the epoch file and then every log file, and only rotated files are listed, which
    no longer change. Without it, all files are listed, active ones included.

    `compacting` is the lock that a compaction holds while its worker runs. The backup waits for that compaction; no
    other one begins while the backup is open."""

    def end() -> None:
        open_backups.count -= 1

    open_backups.count += 1
    try:
        async with compacting:
            pass
        if rotate is not None:
            await rotate()
        entries = await outside.blocking(entries_of, outside.disk, directory, rotate is None)
    except BaseException:
        end()
        raise
    return Backup(entries, current_epoch(), end)


def entries_of(disk: Disk, directory: str, with_active: bool) -> list[BackupEntry]:
    """Return the files of a directory in the order to copy them.

    Epoch files come before the sessions they cover, and entries before blobs. The manifest comes last: without it, an
    incomplete copy is not a data directory."""
    listed = catalog.read(disk, directory) or Catalog()
    found = [name for name in disk.list_directory(directory) if disk.kind(f"{directory}/{name}") == "file"]
    log_files = [name for name in found if names.is_pwal(name) and name != names.COMPACTED_PREVIOUS]
    epoch_files = [name for name in found if names.is_epoch_file(name)]
    if not with_active:
        log_files = [name for name in log_files if names.is_detached(name)]
        epoch_files = [name for name in epoch_files if name != names.EPOCH]
    log_files.sort(key=lambda name: (name != names.COMPACTED, name))
    chosen = [*epoch_files, *(name for name in (names.CATALOG,) if name in found), *log_files]
    entries = [_entry(directory, name, is_detached=name in listed.detached) for name in chosen]
    for blob_id in blobs.stored_ids(disk, directory):
        path = names.blob(blob_id)
        entries.append(BackupEntry(f"{directory}/{path}", path.rpartition("/")[2]))
    entries.append(_entry(directory, names.MANIFEST, is_mutable=True))
    return entries


def _entry(directory: str, name: str, *, is_mutable: bool = False, is_detached: bool = False) -> BackupEntry:
    return BackupEntry(f"{directory}/{name}", name, is_mutable, is_detached)


def rotate_epoch_file(disk: Disk, directory: str, milliseconds: int, epoch: int) -> str:
    """Rename the epoch file, create an empty one, and return the new name. `epoch`: the current epoch.

    The caller must not write an epoch meanwhile. If a crash leaves no epoch file, the rotated ones are read instead;
    the next start removes them after it has written a record."""
    # Without this, a second rotation within a millisecond would replace the records of the first by an empty file.
    while disk.kind(f"{directory}/{(name := names.rotated(names.EPOCH, milliseconds, epoch))}") is not None:
        milliseconds += 1
    disk.rename(f"{directory}/{names.EPOCH}", f"{directory}/{name}")
    disk.create(f"{directory}/{names.EPOCH}").close()
    disk.sync_directory(directory)
    return name


# --- restore --------------------------------------------------------------------------------------


def restore(
    outside: Outside,
    source: str,
    target: str,
    *,
    replaces: bool = False,
    keeps_source: bool = True,
    entries: Sequence[BackupEntry] | None = None,
) -> None:
    """Make `target` a directory with the content of a backup and a new identity. No program may be using it.

    The new identity keeps replicas that are ahead of the backup from taking the directory for the master they followed.
    `replaces`: delete the content of the target; otherwise it must hold no entries. `source` is a flat backup or a
    complete data directory. `entries` name the files explicitly: sources relative to `source`, or absolute. The
    manifest is written last: a directory that a crash left without a manifest cannot be opened, and can be restored
    again."""
    disk = outside.disk
    chosen = _found(disk, source) if entries is None else [_resolved(source, entry) for entry in entries]
    last = [entry for entry in chosen if entry.destination == names.MANIFEST]
    if not last:
        raise LimestoneError(f"{source} is not a backup: {names.MANIFEST} is missing")
    identity = _renamed(outside, last[0].source)
    former = [*_identities(disk, target), *_identities(disk, source)]
    _check_sources(disk, chosen, target)
    if not replaces:
        _check_target(disk, target)
    disk.make_directory(target)
    _purge(disk, target)
    parents: dict[str, None] = {target: None}
    for entry in chosen:
        if entry.destination != names.MANIFEST:
            copying.copy(disk, entry.source, f"{target}/{_place(disk, target, entry.destination, parents)}")
    for parent in parents:
        disk.sync_directory(parent)
    catalog.settle(disk, target)  # the original opens the restored directory, too
    lineage.add(disk, target, former)
    copying.write(disk, f"{target}/{names.MANIFEST}", identity)
    disk.sync_directory(target)
    if not keeps_source:
        for entry in reversed(chosen):
            copying.remove(disk, entry.source)


def _renamed(outside: Outside, path: str) -> bytes:
    """Return the manifest with a new identity. A manifest without an identity gets one when its directory is opened."""
    data = read_whole(outside.disk, path) or b""
    found = manifest.parse(data, path)
    if found.instance_uuid is None:
        return data
    return manifest.encode(replace(found, instance_uuid=str(outside.random.uuid())))


def _identities(disk: Disk, directory: str) -> list[str | None]:
    """Return the current and former identities of a directory, whose replicas the restored directory may seed."""
    if disk.kind(directory) != "directory":
        return []
    try:
        found = manifest.read(disk, directory)
    except LimestoneError:
        found = None
    return [None if found is None else found.instance_uuid, *lineage.read(disk, directory)]


def _check_sources(disk: Disk, chosen: Sequence[BackupEntry], target: str) -> None:
    inside = disk.real_path(target).rstrip("/") + "/"
    for entry in chosen:
        if disk.kind(entry.source) != "file":
            raise LimestoneError(f"cannot restore {target}: file {entry.source} does not exist")
        if disk.real_path(entry.source).startswith(inside):
            raise LimestoneError(
                f"cannot restore {target}: source {entry.source} is inside it and would be deleted",
                hint="restore to another directory",
            )


def _check_target(disk: Disk, target: str) -> None:
    if replica_seeding.has_data_aside(disk, target):
        raise LimestoneError(
            f"cannot restore {target}: its data is in {replica_seeding.ASIDE}, because a seeding did not complete",
            hint="restore to another directory, or pass replaces=True to delete the data",
        )
    for name in disk.list_directory(target) if disk.kind(target) == "directory" else ():
        path = f"{target}/{name}"
        if names.is_pwal(name) and disk.kind(path) == "file" and disk.size(path):
            raise LimestoneError(
                f"cannot restore {target}: {name} contains entries",
                hint="restore to another directory, or pass replaces=True to delete the entries",
            )


def _found(disk: Disk, source: str) -> list[BackupEntry]:
    if disk.kind(source) != "directory":
        raise LimestoneError(f"{source}: no such directory")
    # What a replica recorded about its master does not apply to the restored directory.
    files = (name for name in disk.list_directory(source) if name not in (REPLICA_FILE, lineage.FILE))
    flat = [name for name in files if disk.kind(f"{source}/{name}") == "file"]
    nested = [names.blob(blob_id) for blob_id in blobs.stored_ids(disk, source)]
    placed = [BackupEntry(f"{source}/{path}", path.rpartition("/")[2]) for path in nested]
    return [*(BackupEntry(f"{source}/{name}", name) for name in flat), *placed]


def _resolved(source: str, entry: BackupEntry) -> BackupEntry:
    if "/" in entry.destination or entry.destination in ("", ".", ".."):
        raise LimestoneError(f"cannot restore to {entry.destination!r}: a backup is flat; pass a plain file name")
    path = entry.source if entry.source.startswith("/") else f"{source}/{entry.source}"
    return BackupEntry(path, entry.destination)


def _place(disk: Disk, target: str, name: str, parents: dict[str, None]) -> str:
    blob_id = names.blob_id(name)
    if blob_id is None:
        return name
    parents[blobs.make_directory(disk, target, blob_id)] = None
    return names.blob(blob_id)


def _purge(disk: Disk, target: str) -> None:
    """Delete the manifest first, durably: what is left cannot be opened as a data directory."""
    copying.remove(disk, f"{target}/{names.MANIFEST}")
    disk.sync_directory(target)
    replica_seeding.delete_aside(disk, target)
    for name in disk.list_directory(target):
        copying.remove(disk, f"{target}/{name}")
    blobs.delete(disk, target, blobs.stored_ids(disk, target))
    copying.remove(disk, f"{target}/{names.SNAPSHOT}")
