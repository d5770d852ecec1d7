"""Backups of a running datastore: which files to copy, in which order, and how they become a directory again.

Through the Outside one is handed (reference: backup). Whoever takes a backup copies the entries in the order they come
in, to one flat directory: what speaks of other files comes before them, so that a copy is sound whatever sessions end
meanwhile. Rotating the log files is the datastore's; here is only what is done to the epoch file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Self

from flowstone.limestone import blobs, catalog, copying, lineage, manifest, names, replica_seeding
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.files import read_whole
from flowstone.limestone.replica_seeding import FILE as REPLICA_FILE
from flowstone.outside import Disk, Outside


@dataclass(frozen=True)
class BackupEntry:
    """A file to copy: from where, and what it is called in the backup."""

    source: str
    destination: str
    is_mutable: bool = False
    """It may change after it was copied, without harm."""
    is_detached: bool = False
    """It is no part of the log any more. The original never says so."""


class OpenBackups:
    """How many backups of one datastore have not ended. While there is one, nothing is compacted and no blob deleted:
    what it lists could be another file by then, or miss what a newer catalog says is elsewhere."""

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0


class Backup:
    """Files that together are a directory. `log_finish`: the epoch that was current when they were listed."""

    def __init__(self, entries: Iterable[BackupEntry], log_finish: int, on_end: Callable[[], None]) -> None:
        self.entries = tuple(entries)
        self.log_finish = log_finish
        self._on_end: Callable[[], None] | None = on_end

    def notify_end_backup(self) -> None:
        """All files have been copied. Saying so twice is harmless."""
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
    """Begin a backup. `rotate` puts the epoch file and then every log file aside; then only files are listed that do
    not change any more. Without it all files are, as they are.

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
    """The files of a directory in the order to copy them: records of epochs before the sessions that they speak of,
    entries before blobs, and the manifest last: without one the copy is no directory yet."""
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
    """Put the epoch file aside, and an empty one in its place; its new name. `epoch`: the current one.

    Whoever calls writes no epoch meanwhile. A crash in between leaves no epoch file, which those put aside stand in
    for; the next start removes them, when it has written a record itself."""
    # Two rotations within a millisecond: the second epoch file is empty, and would replace all records of the first.
    while disk.kind(f"{directory}/{(name := names.rotated(names.EPOCH, milliseconds, epoch))}") is not None:
        milliseconds += 1
    disk.rename(f"{directory}/{names.EPOCH}", f"{directory}/{name}")
    disk.create(f"{directory}/{names.EPOCH}").close()
    disk.sync_directory(directory)
    return name


# --- back -----------------------------------------------------------------------------------------


def restore(
    outside: Outside,
    source: str,
    target: str,
    *,
    replaces: bool = False,
    keeps_source: bool = True,
    entries: Sequence[BackupEntry] | None = None,
) -> None:
    """Make `target` the directory that a backup holds, with an identity of its own. Nobody may use it.

    What has been written since the backup is not part of it: replicas that know more must not take it for the master
    that they followed. `replaces`: what is in the target may go; else it must hold no entries. `source` is flat, or a
    directory as it was put aside. `entries` name its files where they are not to be found by their names: sources
    relative to `source`, or absolute. The manifest comes last: a directory that a crash left without one is refused by
    everybody, and can be restored again."""
    disk = outside.disk
    chosen = _found(disk, source) if entries is None else [_resolved(source, entry) for entry in entries]
    last = [entry for entry in chosen if entry.destination == names.MANIFEST]
    if not last:
        raise LimestoneError(f"{source} is no backup: it has no {names.MANIFEST}")
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
    """A manifest with another identity. One that has none gets it when its directory is opened."""
    data = read_whole(outside.disk, path) or b""
    found = manifest.parse(data, path)
    if found.instance_uuid is None:
        return data
    return manifest.encode(replace(found, instance_uuid=str(outside.random.uuid())))


def _identities(disk: Disk, directory: str) -> list[str | None]:
    """Who a directory is and has been; its replicas may be seeded by what takes its place."""
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
            raise LimestoneError(f"cannot restore {target}: {entry.source} is not there")
        if disk.real_path(entry.source).startswith(inside):
            raise LimestoneError(
                f"cannot restore {target}: {entry.source} lies in it, and would be gone",
                hint="restore to another directory",
            )


def _check_target(disk: Disk, target: str) -> None:
    if replica_seeding.has_data_aside(disk, target):
        raise LimestoneError(
            f"cannot restore {target}: its data is in {replica_seeding.ASIDE}, for a master was sending it anew",
            hint="restore to another directory, or say replaces=True if it may go",
        )
    for name in disk.list_directory(target) if disk.kind(target) == "directory" else ():
        path = f"{target}/{name}"
        if names.is_pwal(name) and disk.kind(path) == "file" and disk.size(path):
            raise LimestoneError(
                f"cannot restore {target}: it holds entries, in {name}",
                hint="restore to another directory, or say replaces=True if they may go",
            )


def _found(disk: Disk, source: str) -> list[BackupEntry]:
    if disk.kind(source) != "directory":
        raise LimestoneError(f"{source}: there is no such directory")
    # What a replica's directory says of its master is not true of the new one.
    files = (name for name in disk.list_directory(source) if name not in (REPLICA_FILE, lineage.FILE))
    flat = [name for name in files if disk.kind(f"{source}/{name}") == "file"]
    nested = [names.blob(blob_id) for blob_id in blobs.stored_ids(disk, source)]
    placed = [BackupEntry(f"{source}/{path}", path.rpartition("/")[2]) for path in nested]
    return [*(BackupEntry(f"{source}/{name}", name) for name in flat), *placed]


def _resolved(source: str, entry: BackupEntry) -> BackupEntry:
    if "/" in entry.destination or entry.destination in ("", ".", ".."):
        raise LimestoneError(f"cannot restore to {entry.destination!r}: backups are flat, a name is expected")
    path = entry.source if entry.source.startswith("/") else f"{source}/{entry.source}"
    return BackupEntry(path, entry.destination)


def _place(disk: Disk, target: str, name: str, parents: dict[str, None]) -> str:
    blob_id = names.blob_id(name)
    if blob_id is None:
        return name
    parents[blobs.make_directory(disk, target, blob_id)] = None
    return names.blob(blob_id)


def _purge(disk: Disk, target: str) -> None:
    """The manifest goes first, durably: what is left is no directory that anybody would open."""
    copying.remove(disk, f"{target}/{names.MANIFEST}")
    disk.sync_directory(target)
    replica_seeding.delete_aside(disk, target)
    for name in disk.list_directory(target):
        copying.remove(disk, f"{target}/{name}")
    blobs.delete(disk, target, blobs.stored_ids(disk, target))
    copying.remove(disk, f"{target}/{names.SNAPSHOT}")
