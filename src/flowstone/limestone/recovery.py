"""A data directory as it is found: its durable epoch, the files that count, what is wrong with them, its snapshot.

Through the Disk one is handed, and blocking; the rules are in `scan.py` and `columns.py` (reference: ready()).
Nothing here changes a directory but `apply`, which is asked for by name: `recover` with `repairs=False` only looks.
Never takes the lock: whoever changes a directory holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowstone.limestone import catalog, epoch_file, names
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.columns import COMPACTED, Winners
from flowstone.limestone.cursor import Source, StoreSnapshot
from flowstone.limestone.entries import EntryType, Torn
from flowstone.limestone.entry_table import Tail, tables
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.scan import RECOVERY, Changes, Finding, Mode, Scan, Verdict
from flowstone.outside import Disk

INVALIDATED = bytes((EntryType.MARKER_INVALIDATED_BEGIN,))


@dataclass(frozen=True)
class FileReport:
    """What was found in one log file, and what it needs."""

    name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    changes: Changes
    max_epoch: int
    counted: int


@dataclass(frozen=True)
class Recovered:
    """A directory's content. `last_epoch`: durable, or seen in any marker: no new session may have a smaller one."""

    durable_epoch: int
    last_epoch: int
    snapshot: StoreSnapshot
    catalog: Catalog
    files: tuple[FileReport, ...]

    @property
    def max_blob_id(self) -> int:
        return max(self.snapshot.max_blob_id, self.catalog.max_blob_id)


def input_files(disk: Disk, directory: str, listed: Catalog) -> list[str]:
    """The names of log files that are read at start: all but the compacted one and those that it has replaced."""
    left_out = frozenset({names.COMPACTED, names.COMPACTED_PREVIOUS, *listed.detached})
    found = (name for name in disk.list_directory(directory) if names.is_pwal(name) and name not in left_out)
    return [name for name in found if disk.kind(f"{directory}/{name}") == "file"]


def read_file(
    disk: Disk, directory: str, name: str, durable_epoch: int, mode: Mode, winners: Winners, origin: int
) -> FileReport:
    """Add to the winners what counts in a log file, which is their file number `origin`."""
    scan = Scan((), durable_epoch, mode, is_detached=names.is_detached(name))
    with disk.open(f"{directory}/{name}") as file:
        for part in tables(file.read_at, file.size()):
            if isinstance(part, Tail):
                scan.take_end(*part)
                break
            takes = np.empty(part.table.shape[1], np.uint8)
            goes_on = scan.take_table(part.table, takes, part.base)
            winners.add(part.buf, part.base, origin, part.table, takes)
            if not goes_on:
                break
    return FileReport(name, scan.verdict, tuple(scan.findings), scan.changes, scan.max_epoch, scan.counted)


def compacted_path(disk: Disk, directory: str) -> str | None:
    """The compacted file, if there is one.

    The one before it counts where compaction was cut short between taking that away and putting the new one there."""
    paths = [f"{directory}/{name}" for name in (names.COMPACTED, names.COMPACTED_PREVIOUS)]
    return next((path for path in paths if disk.kind(path) == "file"), None)


def read_compacted(disk: Disk, path: str, winners: Winners) -> None:
    """Add the entries of the compacted file, before all others. DamagedFile if it is not whole."""
    with disk.open(path) as file:
        for part in tables(file.read_at, file.size()):
            if isinstance(part, Tail):
                what = "it ends inside an entry" if isinstance(part.token, Torn) else "there is no entry"
                hint = "restore it from a backup: nothing else has its rows"
                raise DamagedFile(path, part.offset, what, hint=hint)
            winners.add(part.buf, part.base, COMPACTED, part.table, np.ones(part.table.shape[1], np.uint8))


def apply(disk: Disk, path: str, changes: Changes) -> None:
    """Make the changes that a file needs, durably."""
    for mark in changes.marks:
        disk.overwrite(path, mark, INVALIDATED)
    if changes.cut is not None:
        with disk.append_to(path) as file:
            file.truncate(changes.cut)
            file.sync()


def recover(
    disk: Disk,
    directory: str,
    mode: Mode = RECOVERY,
    *,
    repairs: bool = True,
    durable_epoch: int | None = None,
    files: Sequence[str] | None = None,
) -> Recovered:
    """Read a directory, whose manifest has been seen to. What does not count is marked or cut off where `repairs`.

    `durable_epoch`: instead of that of the epoch file. `files`: log files to read instead of those that are read at
    start. DamagedFile if one has lost what was durable, or holds what the mode does not forgive; then nothing changes.
    """
    if durable_epoch is None:
        durable_epoch = epoch_file.read(disk, directory).durable
    listed = catalog.read(disk, directory) or Catalog()
    found = input_files(disk, directory, listed) if files is None else files
    winners = Winners()
    compacted = compacted_path(disk, directory)
    if compacted is not None:
        read_compacted(disk, compacted, winners)
    reports = tuple(
        read_file(disk, directory, name, durable_epoch, mode, winners, number) for number, name in enumerate(found, 1)
    )
    for report in reports:
        if not report.verdict.is_clean:
            raise _damaged(directory, report)
    for report in reports if repairs else ():
        apply(disk, f"{directory}/{report.name}", report.changes)
    last_epoch = max((report.max_epoch for report in reports), default=0)
    sources = [Source(disk, compacted or ""), *(Source(disk, f"{directory}/{name}") for name in found)]
    snapshot = StoreSnapshot(sources, winners.sorted(), winners.cleared, winners.max_blob_id)
    return Recovered(durable_epoch, max(durable_epoch, last_epoch), snapshot, listed, reports)


def _damaged(directory: str, report: FileReport) -> DamagedFile:
    worst = max(report.findings, key=lambda finding: finding.verdict)
    hint = "repair the directory" if worst.verdict.is_repairable else "durable entries are lost: restore a backup"
    return DamagedFile(f"{directory}/{report.name}", worst.offset, worst.what, hint=hint)
