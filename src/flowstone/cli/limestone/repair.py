"""`flowstone limestone repair`: repair a data directory after a crash or a disk failure, so that it can be opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowstone.cli.console import progress_bar, say
from flowstone.cli.limestone import options as options

if TYPE_CHECKING:
    from flowstone.limestone.tools.repair import RepairPlan

EXAMPLE = "Example: `flowstone limestone repair --dry-run /var/lib/tsurugi/log`"

EXIT_CODES = """Exit codes, as of `tglogutil repair`: 0 OK or repaired; 16 unrepairable: durable entries are lost, and
nothing was changed; 64 cannot repair: the directory is in use or not a data directory, or the command line is wrong."""

UNREPAIRABLE = 16


def repair(
    directory: options.Directory,
    epoch: options.Epoch = None,
    cut: Annotated[bool, typer.Option("--cut", help="Cut off broken tails instead of marking them as void.")] = False,
    dry_run: options.DryRun = False,
    make_backup: options.MakeBackup = True,
    as_json: options.AsJson = False,
) -> int:
    """Mark sessions that never became durable as void, and detach all log files, so that the directory can be opened.

    A torn or damaged epoch file is rewritten with the largest epoch known to be durable; if none is known, specify it
    with --epoch. If durable entries are lost, nothing is changed.
    """
    from flowstone.limestone.store import offline_directory as offline
    from flowstone.limestone.tools import inspection
    from flowstone.limestone.tools import repair as work
    from flowstone.outside import production

    outside, path = production(), options.data_directory(directory)
    disk = outside.disk
    if not as_json:
        print(f"dblogdir: {options.quoted(directory)}")
    backup = None
    with offline.held(disk, path, only_looks=dry_run) as manifest:
        total = sum(disk.size(f"{path}/{name}") for name in inspection.log_files(disk, path))
        with progress_bar(total) as bar:
            milliseconds = int(outside.clock.wall() * 1000)
            planned = work.plan(disk, path, milliseconds, epoch=epoch, cuts=cut, tell=bar.advance)
        if not dry_run:
            backup = work.execute(outside, path, manifest, planned, keeps_backup=make_backup)
    _tell_findings(planned)
    if as_json:
        print(options.as_text(_object(directory, planned, dry_run, backup)))
    else:
        if epoch is None:
            print(f"durable-epoch: {'unknown' if planned.durable_epoch is None else planned.durable_epoch}")
        for line in _changes(planned) if dry_run else ():
            print(line)
        if backup is not None:
            print(f"backup: {options.quoted(backup)}")
        print(f"status: {planned.status.value}{' (dry-run mode)' if dry_run else ''}")
    return UNREPAIRABLE if planned.status is work.RepairStatus.UNREPAIRABLE else 0


def _tell_findings(planned: RepairPlan) -> None:
    if planned.epoch_file.problem is not None:
        say(f"epoch: {planned.epoch_file.problem}")
    if planned.durable_epoch is None:
        largest = max((file.max_epoch for file in planned.files), default=0)
        say(f"epoch: durable epoch unknown; give it with --epoch (the largest epoch of any session is {largest})")
    options.tell_findings(planned.files)


def _changes(planned: RepairPlan) -> list[str]:
    """Return the changes that a repair would make, one line each."""
    if not planned.changes_anything:
        return []
    lines = [f"would rename: {old} to {new}" for old, new in planned.renames]
    for file in planned.files:
        lines += [f"would mark: {file.name} at byte {mark}" for mark in file.changes.marks]
        if file.changes.cut is not None:
            lines.append(f"would cut: {file.name} at byte {file.changes.cut}")
    if planned.epoch_file.problem is not None:
        lines.append(f"would write: epoch with the record {planned.durable_epoch}")
    return lines


def _object(directory: str, planned: RepairPlan, dry_run: bool, backup: str | None) -> dict[str, Any]:
    files = []
    for file in planned.files:
        changes = {"marks": list(file.changes.marks), "cut": file.changes.cut}
        files.append(options.file_object(file) | {"renamed": dict(planned.renames).get(file.name), "changes": changes})
    return {
        "directory": directory,
        "status": planned.status.value,
        "dry_run": dry_run,
        "durable_epoch": planned.durable_epoch,
        "epoch_file": {"problem": planned.epoch_file.problem},
        "backup": backup,
        "files": files,
    }
