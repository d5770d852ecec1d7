"""Compaction of a directory that no program uses: afterwards the compacted file is the whole log.

Uses the Outside that is passed in, and blocks (`docs/spec/limestone.md#offline-compaction`). Unlike the original, it
works in place, under the lock, and is safe at every write. It keeps the blobs that rows name and the largest blob id,
and names the compacted file in the catalog; otherwise the original would bring removed keys back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, copying, epoch_file, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import TYPE, Bytes
from flowstone.limestone.format.entry_walk import EntryPart
from flowstone.limestone.format.files import replace as replace_file
from flowstone.limestone.store import blobs
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.compaction import TEMPORARY, Writer, commit, prepare, remove_detached, settle, write_here
from flowstone.limestone.store.cursor import RowSource
from flowstone.limestone.store.recovery import input_files, read_compacted, recover
from flowstone.outside import Disk, Outside

Tell = Callable[[str], None]

_ROW_TYPES: Final = (EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB)


@dataclass(frozen=True)
class CompactionPlan:
    """The inputs of a compaction: the compacted file, and all sessions up to `epoch` of these log files."""

    epoch: int
    inputs: tuple[str, ...]
    superfluous: tuple[str, ...]
    """Log files that an earlier compaction has replaced; they are deleted, too."""
    bytes_before: int
    has_work: bool = True
    """False if the compacted file is already the whole log, and the epoch is the durable one."""


@dataclass(frozen=True)
class OfflineCompacted:
    """The result of a compaction. `backup`: the path of the backup; None if none was requested."""

    plan: CompactionPlan
    catalog: Catalog
    rows: int
    bytes_after: int
    collected: tuple[int, ...]
    backup: str | None


def refuse_link(disk: Disk, directory: str) -> None:
    if disk.is_link(directory.rstrip("/")):
        raise LimestoneError(
            f"{directory} is a symbolic link, which cannot be compacted", hint="specify the target of the link"
        )


def plan(disk: Disk, directory: str, epoch: int | None = None) -> CompactionPlan:
    """Plan the compaction of a locked directory. Raise DamagedFile if its epoch file or catalog cannot be read."""
    wanted = epoch_file.read(disk, directory).durable if epoch is None else epoch
    listed = catalog.read(disk, directory) or Catalog()
    inputs = input_files(disk, directory, listed)
    found = [name for name in disk.list_directory(directory) if names.is_pwal(name)]
    superfluous = tuple(name for name in found if name in listed.detached)
    sizes = {name: disk.size(f"{directory}/{name}") for name in found}
    has_work = (
        any(sizes[name] for name in inputs)  # channels append to empty ones
        or bool(superfluous)
        or not _is_settled(disk, directory, listed)
        or (epoch is not None and not _is_durable(disk, directory, epoch))
    )
    return CompactionPlan(wanted, tuple(inputs), superfluous, sum(sizes.values()), has_work)


def _is_durable(disk: Disk, directory: str, epoch: int) -> bool:
    try:
        return epoch_file.read(disk, directory).durable == epoch
    except DamagedFile:
        return False


def _is_settled(disk: Disk, directory: str, listed: Catalog) -> bool:
    """Return True if a compaction by Flowstone has completed: the original does not name its file in the catalog."""
    present = disk.list_directory(directory)
    found = manifest.read(disk, directory)
    return (
        names.COMPACTED in present
        and names.COMPACTED_PREVIOUS not in present
        and names.COMPACTED in dict(listed.compacted)
        and [name for name in present if names.is_epoch_file(name)] == [names.EPOCH]
        and found is not None
        and found.is_current
    )


def check(disk: Disk, directory: str, planned: CompactionPlan) -> int:
    """Read all inputs without changing anything, and return the number of rows. Raise DamagedFile as the compaction
    would."""
    return len(recover(disk, directory, repairs=False, durable_epoch=planned.epoch, files=planned.inputs).snapshot)


def compact_offline(
    outside: Outside,
    directory: str,
    *,
    epoch: int | None = None,
    keeps_backup: bool = True,
    write: Writer = write_here,
) -> OfflineCompacted:
    """Compact a directory that no program uses. Raise AlreadyLocked if one does."""
    refuse_link(outside.disk, directory)
    with offline.held(outside.disk, directory):
        planned = plan(outside.disk, directory, epoch)
        return execute(outside, directory, planned, keeps_backup=keeps_backup, write=write)


def execute(
    outside: Outside,
    directory: str,
    planned: CompactionPlan,
    *,
    keeps_backup: bool = True,
    write: Writer = write_here,
    temporary: str | None = None,
    tell: Tell = lambda what: None,
) -> OfflineCompacted:
    """Execute a plan in a directory that has been locked since. A crash at any point leaves the same rows.

    If there is nothing to do, nothing changes, not even the identity, so replicas need not be seeded again."""
    disk = outside.disk
    if not planned.has_work:
        tell("reading")
        rows, size = _count(disk, directory), disk.size(f"{directory}/{names.COMPACTED}")
        return OfflineCompacted(planned, catalog.read(disk, directory) or Catalog(), rows, size, (), None)
    settle(disk, directory)
    tell("compacting")
    made, written = prepare(disk, directory, planned.inputs, planned.epoch, write=write, temporary=temporary)
    made = _beside_its_place(disk, directory, made)
    backup = None
    if keeps_backup:
        tell("making a backup")
        backup = offline.put_aside(outside, directory, frozenset())
    tell("putting the new file in place")
    # Without the log files, nobody can tell which epochs never became durable. The new identity shows that to peers.
    offline.rename_instance(outside, directory)
    if not _is_durable(disk, directory, planned.epoch):
        replica_seeding.promote(disk, directory)  # an epoch set by the operator differs from what the master sent
    listed = catalog.read(disk, directory) or Catalog()
    new = commit(disk, directory, listed, planned.inputs, planned.epoch, made, written)
    replace_file(disk, directory, names.EPOCH, names.EPOCH_TEMPORARY, epoch_file.record(planned.epoch))
    new = remove_detached(disk, directory, new)
    for name in disk.list_directory(directory):
        if names.is_epoch_file(name) and name != names.EPOCH:
            copying.remove(disk, f"{directory}/{name}")
    copying.remove(disk, f"{directory}/{names.SNAPSHOT}")
    collected = blobs.collect_at_start(disk, directory, written.blob_ids, new.max_blob_id)
    disk.sync_directory(directory)
    size = disk.size(f"{directory}/{names.COMPACTED}")
    return OfflineCompacted(planned, new, written.rows, size, tuple(collected), backup)


def _count(disk: Disk, directory: str) -> int:
    """Return the number of rows of the compacted file. Raise DamagedFile if it is incomplete."""
    rows = 0

    def add(part: EntryPart, takes: Bytes) -> None:
        nonlocal rows
        rows += int(np.isin(part.table[TYPE], _ROW_TYPES).sum())

    read_compacted(RowSource(disk, f"{directory}/{names.COMPACTED}"), add)
    return rows


def _beside_its_place(disk: Disk, directory: str, made: str) -> str:
    """Move a file that was written elsewhere to where a rename can put it in place; return its path."""
    path = f"{directory}/{TEMPORARY}/{names.COMPACTED}"
    if made != path:
        disk.make_directory(f"{directory}/{TEMPORARY}")
        copying.move(disk, made, path)
    return path
