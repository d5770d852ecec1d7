"""Inspection of a data directory, file by file, without changing anything.

Uses the Disk that is passed in, and blocks (`docs/spec/limestone.md#tools`). Like the original, it reads every log
file, even files that a compaction has replaced. `limestone/format/log_scan.py` returns the verdicts; this module
derives one status from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import catalog, epoch_file, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import MAJOR, TYPE
from flowstone.limestone.format.entry_walk import EntryTail, tables
from flowstone.limestone.format.epoch_file import Epochs
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.format.log_scan import INSPECT, RECOVERY, FileRepair, LogScan, ScanFinding, ScanMode, Verdict
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import blobs
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Disk

Tell = Callable[[int, str], None]
"""Called with the number of bytes read, and the name of the file."""


class InspectionStatus(Enum):
    """The state of a directory, and whether it can be repaired, in the terms of tglogutil."""

    OK = "OK"
    AUTO_REPAIRABLE = "auto-repairable"
    UNREPAIRABLE = "unrepairable"


@dataclass(frozen=True)
class InspectedFile:
    """One log file. `counts`: entries that count, by type. `sessions`: all begin markers, even invalidated ones."""

    name: str
    size: int
    verdict: Verdict
    findings: tuple[ScanFinding, ...]
    changes: FileRepair
    max_epoch: int
    sessions: int
    counts: dict[EntryType, int]
    is_superfluous: bool
    """A compaction has replaced the file; it is not read at start."""

    @property
    def is_detached(self) -> bool:
        return names.is_detached(self.name)


@dataclass(frozen=True)
class EpochFile:
    """The content of the epoch file. `durable_epoch`: the durable epoch by all evidence; None if it is unknown.

    `problem`: what is wrong with the file, or None."""

    epochs: Epochs
    durable_epoch: int | None
    problem: str | None = None


@dataclass(frozen=True)
class Inspection:
    """The state of a directory. `missing_blobs`: blobs that rows name but do not exist. `durable_epoch`: or None if it
    is unknown."""

    manifest: Manifest
    epoch_file: EpochFile
    durable_epoch: int | None
    catalog: Catalog
    catalog_problem: str | None
    files: tuple[InspectedFile, ...]
    blob_count: int
    missing_blobs: tuple[int, ...]

    @property
    def max_epoch(self) -> int:
        """The largest epoch that is durable or in any marker."""
        return max(self.durable_epoch or 0, *(file.max_epoch for file in self.files), 0)

    @property
    def counts(self) -> dict[EntryType, int]:
        total: Counter[EntryType] = Counter()
        for file in self.files:
            total.update(file.counts)
        return dict(sorted(total.items()))

    @property
    def status(self) -> InspectionStatus:
        worst = max((file.verdict for file in self.files), default=Verdict.OK)
        if not worst.is_repairable or self.durable_epoch is None or self.catalog_problem is not None:
            return InspectionStatus.UNREPAIRABLE
        if worst is not Verdict.OK or self.epoch_file.problem is not None:
            return InspectionStatus.AUTO_REPAIRABLE
        return InspectionStatus.OK


def inspect(
    disk: Disk, directory: str, manifest: Manifest, *, epoch: int | None = None, tell: Tell | None = None
) -> Inspection:
    """Inspect a locked directory. `epoch` replaces the durable epoch of the epoch file."""
    listed, catalog_problem = _catalog(disk, directory)
    epochs = look_at_epoch_file(disk, directory, listed)
    durable = epochs.durable_epoch if epoch is None else epoch
    files = tuple(
        look_at(disk, directory, name, durable or 0, INSPECT, listed, tell=tell) for name in log_files(disk, directory)
    )
    stored = blobs.stored_ids(disk, directory)
    missing = _missing_blobs(disk, directory, durable, files, frozenset(stored))
    return Inspection(manifest, epochs, durable, listed, catalog_problem, files, len(stored), missing)


def log_files(disk: Disk, directory: str) -> list[str]:
    found = (name for name in disk.list_directory(directory) if names.is_pwal(name))
    return [name for name in found if disk.kind(f"{directory}/{name}") == "file"]


def look_at(
    disk: Disk,
    directory: str,
    name: str,
    durable_epoch: int,
    mode: ScanMode,
    listed: Catalog,
    *,
    is_detached: bool | None = None,
    tell: Tell | None = None,
) -> InspectedFile:
    """Scan a log file in a mode, and return what was found. `is_detached` overrides what its name says."""
    detached = names.is_detached(name) if is_detached is None else is_detached
    scan = LogScan((), durable_epoch, mode, is_detached=detached)
    counts: Counter[EntryType] = Counter()
    sessions = 0
    with disk.open(f"{directory}/{name}") as file:
        size, told = file.size(), 0
        for part in tables(file.read_at, size):
            if isinstance(part, EntryTail):
                scan.take_end(*part)
                break
            takes = np.empty(part.table.shape[1], np.uint8)
            goes_on = scan.take_table(part.table, takes, part.base)
            types = part.table[TYPE]
            found = np.bincount(types[takes != 0].astype(np.int64), minlength=len(EntryType) + 1)
            counts.update({kind: int(found[kind]) for kind in EntryType if found[kind]})
            sessions += int(np.isin(types, _BEGINS).sum())
            if tell is not None and part.base > told:
                tell(part.base - told, name)
                told = part.base
            if not goes_on:
                break
        if tell is not None:
            tell(size - told, name)
    return InspectedFile(
        name,
        size,
        scan.verdict,
        tuple(scan.findings),
        scan.changes,
        scan.max_epoch,
        sessions,
        dict(sorted(counts.items())),
        name in listed.detached,
    )


_BEGINS = np.array([EntryType.MARKER_BEGIN, EntryType.MARKER_INVALIDATED_BEGIN], np.uint64)


def look_at_epoch_file(disk: Disk, directory: str, listed: Catalog) -> EpochFile:
    """Return the durable epoch, as far as it can be determined.

    In a damaged file, a record at a record boundary counts unless its epoch is impossible: every durable epoch had a
    session, in a log file or in a compacted one. Compacted epochs were durable. A file without a record is normal in
    the first epoch; if there were more epochs, records are lost."""
    path = f"{directory}/{names.EPOCH}"
    data = read_whole(disk, path) or b""
    found = epoch_file.parse(data)
    if not found.is_damaged:
        problem = f"the last {len(data) - found.sound_size} bytes are not a record" if found.is_torn else None
        durable = found.durable if found.sound_size else epoch_file.read(disk, directory).durable
        if durable or (not listed.max_epoch_id and _epoch_count(disk, directory) < 2):
            return EpochFile(found, durable, problem)
        return EpochFile(found, listed.max_epoch_id or None, "no epoch is recorded, but there were several")
    appeared = max((_largest_epoch(disk, directory, name) for name in log_files(disk, directory)), default=0)
    largest = max(appeared, listed.max_epoch_id)
    known = [epoch for epoch in epoch_file.records(data) if epoch <= largest]
    known += [listed.max_epoch_id] if listed.max_epoch_id else []
    return EpochFile(found, max(known, default=None), f"invalid epoch record at byte {found.sound_size}")


def _largest_epoch(disk: Disk, directory: str, name: str) -> int:
    return look_at(disk, directory, name, 0, INSPECT, Catalog()).max_epoch


def _epoch_count(disk: Disk, directory: str) -> int:
    """Return the number of epochs with sessions that are not invalidated."""
    found = np.empty(0, np.uint64)
    for name in log_files(disk, directory):
        with disk.open(f"{directory}/{name}") as file:
            for part in tables(file.read_at, file.size()):
                if not isinstance(part, EntryTail):
                    begun = part.table[MAJOR, part.table[TYPE] == np.uint64(EntryType.MARKER_BEGIN)]
                    found = np.union1d(found, begun)
    return len(found)


def _catalog(disk: Disk, directory: str) -> tuple[Catalog, str | None]:
    try:
        return catalog.read(disk, directory) or Catalog(), None
    except DamagedFile as error:
        return Catalog(), error.message


def _missing_blobs(
    disk: Disk, directory: str, durable: int | None, files: tuple[InspectedFile, ...], stored: frozenset[int]
) -> tuple[int, ...]:
    """Return the ids of missing blobs; none if no row names blobs or the rows cannot be read."""
    if durable is None or not any(EntryType.NORMAL_WITH_BLOB in file.counts for file in files):
        return ()
    try:
        found = recover(disk, directory, RECOVERY, repairs=False, durable_epoch=durable)
    except DamagedFile:
        return ()
    return tuple(sorted(found.snapshot.blob_ids() - stored))
