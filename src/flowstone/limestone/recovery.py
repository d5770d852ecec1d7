"""A data directory as it is found: its durable epoch, the files that count, what is wrong with them, its snapshot.

Through the Disk one is handed, and blocking; the rules are in `scan.py` and `columns.py` (reference: ready()).
Nothing here changes a directory but `apply`, which is asked for by name: `recover` with `repairs=False` only looks.
Never takes the lock: whoever changes a directory holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from flowstone.limestone import catalog, epoch_file, names
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.columns import COMPACTED, Winners
from flowstone.limestone.cursor import NO_SOURCE, Source, StoreSnapshot
from flowstone.limestone.entries import EntryType, Torn
from flowstone.limestone.entry_table import Bytes, Part, Tail, tables
from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.scan import RECOVERY, Changes, Finding, Mode, Scan, Verdict
from flowstone.outside import Disk

INVALIDATED = bytes((EntryType.MARKER_INVALIDATED_BEGIN,))

ATTEMPTS_MAX: Final = 10
"""How often the files of a directory that is in use are opened anew because they were put aside meanwhile."""

FinishedSizes = Callable[[], Mapping[str, int]]
Add = Callable[[Part, Bytes], None]
"""Takes a part of a file, and which of its entries count."""


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


@dataclass(frozen=True)
class Inputs:
    """What is read of a directory: the compacted file, if any, and log files, of which `sizes` may say how much."""

    listed: Catalog
    compacted: Source | None
    logs: Mapping[str, Source]
    sizes: Mapping[str, int]

    @property
    def sources(self) -> list[Source]:
        """By their numbers as origins of winners."""
        return [self.compacted or NO_SOURCE, *self.logs.values()]

    def close(self) -> None:
        for source in self.sources:
            source.close()


def inputs_of(disk: Disk, directory: str, files: Sequence[str] | None = None) -> Inputs:
    """By their names, which nobody changes meanwhile."""
    listed = catalog.read(disk, directory) or Catalog()
    compacted = compacted_path(disk, directory)
    found = input_files(disk, directory, listed) if files is None else files
    logs = {name: Source(disk, f"{directory}/{name}") for name in found}
    return Inputs(listed, None if compacted is None else Source(disk, compacted), logs, {})


def live_inputs_of(disk: Disk, directory: str, finished_sizes: FinishedSizes) -> Inputs:
    """Of a directory whose channels write to their files, put them aside and compact them meanwhile.

    What was opened is what the names meant if they are still the same afterwards."""
    for _ in range(ATTEMPTS_MAX):
        found = inputs_of(disk, directory)
        held: list[Source] = []
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
        for source in held:
            source.close()
    raise LimestoneError(f"{directory}: its files change faster than they can be opened", hint="try again")


def read_file(source: Source, name: str, size: int | None, durable_epoch: int, mode: Mode, add: Add) -> FileReport:
    """Hand over what counts in the first `size` bytes of a log file."""
    scan = Scan((), durable_epoch, mode, is_detached=names.is_detached(name))
    with source.opened() as file:
        whole = file.size()
        for part in tables(file.read_at, whole if size is None else min(size, whole)):
            if isinstance(part, Tail):
                scan.take_end(*part)
                break
            takes = np.empty(part.table.shape[1], np.uint8)
            goes_on = scan.take_table(part.table, takes, part.base)
            add(part, takes)
            if not goes_on:
                break
    return FileReport(name, scan.verdict, tuple(scan.findings), scan.changes, scan.max_epoch, scan.counted)


def compacted_path(disk: Disk, directory: str) -> str | None:
    """The compacted file, if there is one.

    The one before it counts where compaction was cut short between taking that away and putting the new one there."""
    paths = [f"{directory}/{name}" for name in (names.COMPACTED, names.COMPACTED_PREVIOUS)]
    return next((path for path in paths if disk.kind(path) == "file"), None)


def read_compacted(source: Source, add: Add) -> None:
    """Hand over the entries of the compacted file. DamagedFile if it is not whole."""
    with source.opened() as file:
        for part in tables(file.read_at, file.size()):
            if isinstance(part, Tail):
                what = "it ends inside an entry" if isinstance(part.token, Torn) else "there is no entry"
                hint = "restore it from a backup: nothing else has its rows"
                raise DamagedFile(source.path, part.offset, what, hint=hint)
            add(part, np.ones(part.table.shape[1], np.uint8))


def apply(disk: Disk, path: str, changes: Changes) -> None:
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
    found = _read(inputs_of(disk, directory, files), directory, durable_epoch, mode)
    for report in found.files if repairs else ():
        apply(disk, f"{directory}/{report.name}", report.changes)
        _sync(disk, f"{directory}/{report.name}")
    return found


def _sync(disk: Disk, path: str) -> None:
    """What a killed process wrote, marks among it, may be in the kernel's memory only: from here on it is relied on."""
    with disk.append_to(path) as file:
        file.sync()


def recover_live(disk: Disk, directory: str, durable_epoch: int, finished_sizes: FinishedSizes) -> Recovered:
    """Read a directory that its store writes to meanwhile, and change nothing. Its snapshot holds files open.

    `finished_sizes`: what of each active log file are whole sessions, when it is asked. Later bytes may be taken back.
    """
    inputs = live_inputs_of(disk, directory, finished_sizes)
    try:
        return _read(inputs, directory, durable_epoch, RECOVERY)
    except BaseException:
        inputs.close()
        raise


def _read(inputs: Inputs, directory: str, durable_epoch: int, mode: Mode) -> Recovered:
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
    return Recovered(durable_epoch, max(durable_epoch, last_epoch), snapshot, inputs.listed, reports)


def _damaged(directory: str, report: FileReport) -> DamagedFile:
    worst = max(report.findings, key=lambda finding: finding.verdict)
    hint = "repair the directory" if worst.verdict.is_repairable else "durable entries are lost: restore a backup"
    return DamagedFile(f"{directory}/{report.name}", worst.offset, worst.what, hint=hint)
