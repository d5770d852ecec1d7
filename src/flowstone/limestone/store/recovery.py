"""Recovery of a data directory: its durable epoch, the files that count, their damage, and its snapshot.

Uses the Disk that is passed in, and blocks. The rules are in `limestone/format/log_scan.py` and `latest_entries.py`
(`docs/spec/limestone.md#opening-a-directory`). Only `apply` changes a directory: `recover` calls it unless
`repairs=False`. Never takes the lock: the caller holds it if the directory is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, epoch_file, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType, Torn
from flowstone.limestone.format.entry_table import Bytes
from flowstone.limestone.format.entry_walk import EntryPart, EntryTail, tables
from flowstone.limestone.format.log_scan import RECOVERY, FileRepair, LogScan, ScanFinding, ScanMode, Verdict
from flowstone.limestone.store.cursor import NO_SOURCE, RowSource, StoreSnapshot
from flowstone.limestone.store.latest_entries import Winners
from flowstone.limestone.store.winner_table import COMPACTED
from flowstone.outside import Disk

INVALIDATED = bytes((EntryType.MARKER_INVALIDATED_BEGIN,))

ATTEMPTS_MAX: Final = 10
"""Number of attempts to open the files of a directory that is in use, if they are rotated meanwhile."""

FinishedSizes = Callable[[], Mapping[str, int]]
Add = Callable[[EntryPart, Bytes], None]
"""Takes a part of a file, and a mask of its entries that count."""


@dataclass(frozen=True)
class FileReport:
    """The findings in one log file, and the changes that it needs."""

    name: str
    verdict: Verdict
    findings: tuple[ScanFinding, ...]
    changes: FileRepair
    max_epoch: int
    counted: int


@dataclass(frozen=True)
class RecoveredDirectory:
    """The content of a directory. `last_epoch`: the largest epoch that is durable or in any marker; new sessions must
    not have a smaller one."""

    durable_epoch: int
    last_epoch: int
    snapshot: StoreSnapshot
    catalog: Catalog
    files: tuple[FileReport, ...]

    @property
    def max_blob_id(self) -> int:
        return max(self.snapshot.max_blob_id, self.catalog.max_blob_id)


def input_files(disk: Disk, directory: str, listed: Catalog) -> list[str]:
    """Return the names of the log files that are read at start: all except the compacted file and the files that it
    replaced."""
    left_out = frozenset({names.COMPACTED, names.COMPACTED_PREVIOUS, *listed.detached})
    found = (name for name in disk.list_directory(directory) if names.is_pwal(name) and name not in left_out)
    return [name for name in found if disk.kind(f"{directory}/{name}") == "file"]


@dataclass(frozen=True)
class Inputs:
    """The files to read: the compacted file, if any, and log files. `sizes` limits the bytes of a log file."""

    listed: Catalog
    compacted: RowSource | None
    logs: Mapping[str, RowSource]
    sizes: Mapping[str, int]

    @property
    def sources(self) -> list[RowSource]:
        """All sources; the index of a source is its number as the origin of winners."""
        return [self.compacted or NO_SOURCE, *self.logs.values()]

    def close(self) -> None:
        _close(self.sources)


def inputs_of(disk: Disk, directory: str, files: Sequence[str] | None = None) -> Inputs:
    """Return the inputs of a directory by name. No name may change meanwhile."""
    listed = catalog.read(disk, directory) or Catalog()
    compacted = compacted_path(disk, directory)
    found = input_files(disk, directory, listed) if files is None else files
    logs = {name: RowSource(disk, f"{directory}/{name}") for name in found}
    return Inputs(listed, None if compacted is None else RowSource(disk, compacted), logs, {})


def live_inputs_of(disk: Disk, directory: str, finished_sizes: FinishedSizes) -> Inputs:
    """Open the inputs of a directory whose channels write, rotate and compact files meanwhile.

    The opened files are consistent if the names are unchanged afterwards."""
    for _ in range(ATTEMPTS_MAX):
        found = inputs_of(disk, directory)
        held: list[RowSource] = []
        try:
            held += (source.opened_for_long() for source in found.sources)
            logs = dict(zip(found.logs, held[1:], strict=True))
            # File sizes first: a file that belongs to no channel afterwards had no open session at that time.
            sizes = {name: source.held.size() for name, source in logs.items() if source.held is not None}
            sizes |= finished_sizes()
            found = replace(found, compacted=found.compacted and held[0], logs=logs, sizes=sizes)
            again = inputs_of(disk, directory)
            if (again.listed, [*again.logs]) == (found.listed, [*found.logs]):
                return found
        except FileNotFoundError:
            pass
        except BaseException:
            _close(held)
            raise
        _close(held)
    raise LimestoneError(f"{directory}: files change faster than they can be opened", hint="try again")


def _close(sources: Iterable[RowSource]) -> None:
    for source in sources:
        source.close()


def read_file(
    source: RowSource, name: str, size: int | None, durable_epoch: int, mode: ScanMode, add: Add
) -> FileReport:
    """Pass the entries that count in the first `size` bytes of a log file to `add`."""
    scan = LogScan((), durable_epoch, mode, is_detached=names.is_detached(name))
    with source.opened() as file:
        whole = file.size()
        for part in tables(file.read_at, whole if size is None else min(size, whole)):
            if isinstance(part, EntryTail):
                scan.take_end(*part)
                break
            takes = np.empty(part.table.shape[1], np.uint8)
            goes_on = scan.take_table(part.table, takes, part.base)
            add(part, takes)
            if not goes_on:
                break
    return FileReport(name, scan.verdict, tuple(scan.findings), scan.changes, scan.max_epoch, scan.counted)


def compacted_path(disk: Disk, directory: str) -> str | None:
    """Return the path of the compacted file, or None.

    The previous one counts if a compaction was interrupted after removing it and before moving the new one into place.
    """
    paths = [f"{directory}/{name}" for name in (names.COMPACTED, names.COMPACTED_PREVIOUS)]
    return next((path for path in paths if disk.kind(path) == "file"), None)


def read_compacted(source: RowSource, add: Add) -> None:
    """Pass the entries of the compacted file to `add`. Raise DamagedFile if it is incomplete."""
    with source.opened() as file:
        for part in tables(file.read_at, file.size()):
            if isinstance(part, EntryTail):
                what = "file ends inside an entry" if isinstance(part.token, Torn) else "invalid entry"
                hint = "restore it from a backup: no other file has its rows"
                raise DamagedFile(source.path, part.offset, what, hint=hint)
            add(part, np.ones(part.table.shape[1], np.uint8))


def apply(disk: Disk, path: str, changes: FileRepair) -> None:
    """Make the changes that a file needs, durably."""
    if changes.marks:
        disk.overwrite(path, INVALIDATED, *changes.marks)
    if changes.cut is not None:
        with disk.append_to(path) as file:
            file.truncate(changes.cut)
            file.sync()


def recover(
    disk: Disk,
    directory: str,
    mode: ScanMode = RECOVERY,
    *,
    repairs: bool = True,
    durable_epoch: int | None = None,
    files: Sequence[str] | None = None,
) -> RecoveredDirectory:
    """Read a directory whose manifest has been checked. If `repairs`, invalidate or cut off undurable entries.

    `durable_epoch` overrides the epoch file. `files` replaces the log files that are read at start. Raise DamagedFile
    if a file has lost durable entries or has damage that the mode does not allow; then nothing changes.
    """
    if durable_epoch is None:
        durable_epoch = epoch_file.read(disk, directory).durable
    found = _read(inputs_of(disk, directory, files), directory, durable_epoch, mode)
    for report in found.files if repairs else ():
        apply(disk, f"{directory}/{report.name}", report.changes)
        _sync(disk, f"{directory}/{report.name}")
    return found


def _sync(disk: Disk, path: str) -> None:
    """Sync a file: data that a killed process wrote may not be on disk yet, and all later steps rely on it."""
    with disk.append_to(path) as file:
        file.sync()


def recover_live(disk: Disk, directory: str, durable_epoch: int, finished_sizes: FinishedSizes) -> RecoveredDirectory:
    """Read a directory that its store is writing to, without changing it. The snapshot holds its files open.

    `finished_sizes` returns the size of the complete sessions of each active log file. Later bytes may be withdrawn.
    """
    inputs = live_inputs_of(disk, directory, finished_sizes)
    try:
        return _read(inputs, directory, durable_epoch, RECOVERY)
    except BaseException:
        inputs.close()
        raise


def _read(inputs: Inputs, directory: str, durable_epoch: int, mode: ScanMode) -> RecoveredDirectory:
    winners = Winners()

    def adding(origin: int) -> Add:
        return lambda part, takes: winners.add(part.buf, part.base, origin, part.table, takes)

    if inputs.compacted is not None:
        read_compacted(inputs.compacted, adding(COMPACTED))
    reports = tuple(
        read_file(source, name, inputs.sizes.get(name), durable_epoch, mode, adding(number))
        for number, (name, source) in enumerate(inputs.logs.items(), COMPACTED + 1)
    )
    for report in reports:
        if not report.verdict.is_clean:
            raise _damaged(directory, report)
    last_epoch = max((report.max_epoch for report in reports), default=0)
    snapshot = StoreSnapshot(inputs.sources, winners.sorted(), winners.cleared, winners.max_blob_id)
    return RecoveredDirectory(durable_epoch, max(durable_epoch, last_epoch), snapshot, inputs.listed, reports)


def _damaged(directory: str, report: FileReport) -> DamagedFile:
    worst = max(report.findings, key=lambda finding: finding.verdict)
    hint = "repair the directory" if worst.verdict.is_repairable else "durable entries are lost: restore a backup"
    return DamagedFile(f"{directory}/{report.name}", worst.offset, worst.what, hint=hint)
