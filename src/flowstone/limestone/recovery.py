"""A data directory as it is found: its durable epoch, the files that count, what is wrong with them, its snapshot.

Through the Disk one is handed, and blocking; the rules are in `scan.py` and `snapshot.py` (reference: ready()).
Nothing here changes a directory but `apply`, which is asked for by name: `recover` with `repairs=False` only looks.
Never takes the lock: whoever changes a directory holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.limestone import catalog, epoch_file, names
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.entries import Entry, EntryType, Marker, Torn, walk
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.scan import RECOVERY, Changes, Finding, Mode, Scan, Verdict
from flowstone.limestone.snapshot import Snapshot
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
    snapshot: Snapshot
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


def read_file(disk: Disk, directory: str, name: str, durable_epoch: int, mode: Mode, snapshot: Snapshot) -> FileReport:
    """Add to the snapshot what counts in a log file."""
    with disk.open(f"{directory}/{name}") as file:
        tokens = walk(file.read_at, file.size())
        scan = Scan(tokens, durable_epoch, mode, is_detached=names.is_detached(name))
        snapshot.add(scan)
    return FileReport(name, scan.verdict, tuple(scan.findings), scan.changes, scan.max_epoch, scan.counted)


def read_compacted(disk: Disk, directory: str) -> list[Entry]:
    """The entries of the compacted file; none where there is no such file. DamagedFile if it is not whole.

    The one before it counts where compaction was cut short between taking that away and putting the new one there."""
    paths = [f"{directory}/{name}" for name in (names.COMPACTED, names.COMPACTED_PREVIOUS)]
    path = next((path for path in paths if disk.kind(path) == "file"), None)
    if path is None:
        return []
    found: list[Entry] = []
    with disk.open(path) as file:
        for offset, token in walk(file.read_at, file.size()):
            if isinstance(token, Entry):
                found.append(token)
            elif not isinstance(token, Marker):
                what = "it ends inside an entry" if isinstance(token, Torn) else "there is no entry"
                raise DamagedFile(path, offset, what, hint="restore it from a backup: nothing else has its rows")
    return found


def apply(disk: Disk, path: str, changes: Changes) -> None:
    """Make the changes that a file needs, durably."""
    for mark in changes.marks:
        disk.overwrite(path, mark, INVALIDATED)
    if changes.cut is not None:
        with disk.append_to(path) as file:
            file.truncate(changes.cut)
            file.sync()


def recover(disk: Disk, directory: str, mode: Mode = RECOVERY, *, repairs: bool = True) -> Recovered:
    """Read a directory, whose manifest has been seen to. What does not count is marked or cut off where `repairs`.

    DamagedFile if a file has lost what was durable, or holds what the mode does not forgive; then nothing is changed.
    """
    durable_epoch = epoch_file.read(disk, directory).durable
    listed = catalog.read(disk, directory) or Catalog()
    snapshot = Snapshot()
    snapshot.add_compacted(read_compacted(disk, directory))
    reports = tuple(
        read_file(disk, directory, name, durable_epoch, mode, snapshot) for name in input_files(disk, directory, listed)
    )
    for report in reports:
        if not report.verdict.is_clean:
            raise _damaged(directory, report)
    for report in reports if repairs else ():
        apply(disk, f"{directory}/{report.name}", report.changes)
    last_epoch = max((report.max_epoch for report in reports), default=0)
    return Recovered(durable_epoch, max(durable_epoch, last_epoch), snapshot, listed, reports)


def _damaged(directory: str, report: FileReport) -> DamagedFile:
    worst = max(report.findings, key=lambda finding: finding.verdict)
    hint = "repair the directory" if worst.verdict.is_repairable else "durable entries are lost: restore a backup"
    return DamagedFile(f"{directory}/{report.name}", worst.offset, worst.what, hint=hint)
