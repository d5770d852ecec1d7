"""Repair of a data directory: invalidate or cut off what never became durable, and make the epoch file readable again.

Uses the Outside that is passed in, and blocks (`docs/spec/limestone.md#repair`). A repair is a plan, which is all that
a dry run needs, and its execution. As in the original, every log file with content is rotated, even a healthy one, so
that nothing is appended to a repaired file. Unlike the original, it repairs a torn or damaged epoch file, changes
nothing if durable entries are lost, and makes a backup.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from flowstone.limestone.format import catalog, epoch_file, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import MARKER_SIZE, EntryType, only_zeros
from flowstone.limestone.format.files import replace as replace_file
from flowstone.limestone.format.log_scan import REPAIR, REPAIR_CUT, FileRepair, Verdict
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.directory import free_name
from flowstone.limestone.store.recovery import apply
from flowstone.limestone.tools.inspection import EpochFile, InspectedFile, Tell, log_files, look_at, look_at_epoch_file
from flowstone.outside import Disk, Outside

BEGIN: Final = bytes((EntryType.MARKER_BEGIN,))


class RepairStatus(Enum):
    """The result of a repair, in the terms of tglogutil."""

    OK = "OK"
    REPAIRED = "repaired"
    UNREPAIRABLE = "unrepairable"


@dataclass(frozen=True)
class RepairPlan:
    """The planned actions of a repair. `durable_epoch`: sessions of later epochs are invalidated; None if it is
    unknown.

    `renames`: log files to rotate, and their new names. `files` have their current names."""

    durable_epoch: int | None
    epoch_file: EpochFile
    renames: tuple[tuple[str, str], ...]
    files: tuple[InspectedFile, ...]

    @property
    def status(self) -> RepairStatus:
        worst = max((file.verdict for file in self.files), default=Verdict.OK)
        if worst > Verdict.TAIL_BROKEN_BUT_MARKED or self.durable_epoch is None:
            return RepairStatus.UNREPAIRABLE
        is_whole = worst is Verdict.OK and self.epoch_file.problem is None
        return RepairStatus.OK if is_whole else RepairStatus.REPAIRED

    @property
    def changes_anything(self) -> bool:
        if self.status is RepairStatus.UNREPAIRABLE:
            return False
        return bool(self.renames) or self.status is RepairStatus.REPAIRED


def plan(
    disk: Disk,
    directory: str,
    milliseconds: int,
    *,
    epoch: int | None = None,
    cuts: bool = False,
    tell: Tell | None = None,
) -> RepairPlan:
    """Plan the repair of a locked directory. `epoch` replaces the durable epoch. `cuts`: cut broken tails off instead
    of invalidating them. Raise DamagedFile if the catalog cannot be read: then it is unknown which log files count."""
    listed = catalog.read(disk, directory) or Catalog()
    epochs = look_at_epoch_file(disk, directory, listed)
    durable = epochs.durable_epoch if epoch is None else epoch
    mode = REPAIR_CUT if cuts else REPAIR
    found = (
        look_at(disk, directory, name, durable or 0, mode, listed, is_detached=True, tell=tell)
        for name in log_files(disk, directory)
    )
    files = tuple(_without_made_up_epochs(disk, directory, file) for file in found)
    renames = tuple(
        (file.name, free_name(disk, directory, file.name, milliseconds))
        for file in files
        if file.size and not file.is_detached
    )
    return RepairPlan(durable, epochs, renames, files)


def _without_made_up_epochs(disk: Disk, directory: str, file: InspectedFile) -> InspectedFile:
    """Cut a file at a damaged byte that the plan would mark.

    The original marks a byte that begins no entry, which turns it and the following bytes into a begin marker. The next
    start would read an epoch from this marker and continue after it. If there are enough bytes for a marker, cut
    instead."""
    if not file.changes.marks:
        return file
    last = file.changes.marks[-1]
    with disk.open(f"{directory}/{file.name}") as opened:
        size = opened.size()
        is_begin = opened.read_at(last, 1) == BEGIN
        if is_begin or size - last < MARKER_SIZE or only_zeros(opened.read_at, last, size):
            return file
    return replace(file, changes=FileRepair(file.changes.marks[:-1], cut=last))


def execute(
    outside: Outside, directory: str, manifest: Manifest, planned: RepairPlan, *, keeps_backup: bool = True
) -> str | None:
    """Execute a plan in a directory that has been locked since; return the path of the backup, if one was made.

    After a crash at any point, the repair can be planned and executed again."""
    disk = outside.disk
    if not planned.changes_anything:
        return None
    assert planned.durable_epoch is not None
    changed = frozenset(file.name for file in planned.files if file.changes)
    backup = offline.put_aside(outside, directory, changed) if keeps_backup else None
    if planned.durable_epoch != planned.epoch_file.durable_epoch:
        replica_seeding.promote(disk, directory)  # an epoch set by the operator differs from what the master sent
    renamed = dict(planned.renames)
    for old, new in planned.renames:
        disk.rename(f"{directory}/{old}", f"{directory}/{new}")
    disk.sync_directory(directory)
    offline.migrate(outside, directory, manifest)
    for file in planned.files:
        apply(disk, f"{directory}/{renamed.get(file.name, file.name)}", file.changes)
    if planned.epoch_file.problem is not None:
        record = epoch_file.record(planned.durable_epoch)
        replace_file(disk, directory, names.EPOCH, names.EPOCH_TEMPORARY, record)
    return backup
