"""`flowstone limestone inspect`: report the contents of a data directory and the problems in it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowstone.cli.console import progress_bar, say
from flowstone.cli.limestone import options as options

if TYPE_CHECKING:
    from flowstone.limestone.tools.inspection import Inspection

EXAMPLE = "Example: `flowstone limestone inspect --files /var/lib/tsurugi/log`"

EXIT_CODES = """Exit codes, as of `tglogutil inspect`: 0 OK; 1 auto-repairable; 2 unrepairable: durable entries are
lost; 64 cannot inspect: the directory is in use or not a data directory, or the command line is wrong."""


def inspect(
    directory: options.Directory,
    epoch: options.Epoch = None,
    files: Annotated[
        bool | None,
        typer.Option("--files/--no-files", help="Print a table of the log files. Default: yes on a terminal, else no."),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Report the contents of a data directory and whether it needs repair, without changing it.

    Every log file is read, including files that a compaction has replaced. Problems are printed on stderr, a line each.
    """
    from flowstone.limestone.store import offline_directory as offline
    from flowstone.limestone.tools import inspection
    from flowstone.outside import production

    disk, path = production().disk, options.data_directory(directory)
    with offline.held(disk, path, only_looks=True) as manifest:
        total = sum(disk.size(f"{path}/{name}") for name in inspection.log_files(disk, path))
        with progress_bar(total) as bar:
            found = inspection.inspect(disk, path, manifest, epoch=epoch, tell=bar.advance)
    _tell_findings(found)
    if as_json:
        print(options.as_text(_object(directory, found)))
    else:
        _print_lines(directory, found)
        if sys.stdout.isatty() if files is None else files:
            _print_table(found)
    return list(inspection.InspectionStatus).index(found.status)


def _tell_findings(found: Inspection) -> None:
    if found.epoch_file.problem is not None:
        say(f"epoch: {found.epoch_file.problem}")
    if found.catalog_problem is not None:
        say(found.catalog_problem)
    options.tell_findings(found.files)
    for blob_id in found.missing_blobs:
        say(f"blob {blob_id} is missing, but a row references it")


def _print_lines(directory: str, found: Inspection) -> None:
    from flowstone.limestone.format.entries import EntryType

    counted = found.counts.get(EntryType.NORMAL, 0) + found.counts.get(EntryType.REMOVE, 0)
    print(f"dblogdir: {options.quoted(directory)}")
    print("persistent-format-version: 1")  # the original prints this whatever the manifest says
    print(f"durable-epoch: {'unknown' if found.durable_epoch is None else found.durable_epoch}")
    print(f"max-appeared-epoch: {found.max_epoch}")
    print(f"count-durable-wal-entries: {counted}")
    print(f"status: {found.status.value}")


def _print_table(found: Inspection) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for heading in ("file", "bytes", "sessions", "largest epoch", "durable entries", "verdict"):
        table.add_column(heading, justify="left" if heading in ("file", "verdict") else "right")
    for file in found.files:
        verdict = file.verdict.name.lower() + (", replaced by compaction" if file.is_superfluous else "")
        numbers = (file.size, file.sessions, file.max_epoch, sum(file.counts.values()))
        table.add_row(file.name, *map(str, numbers), verdict)
    kinds = ", ".join(f"{count} {name}" for name, count in options.counts_by_name(found.counts).items())
    screen = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    screen.print(table)
    missing = f", {len(found.missing_blobs)} missing" if found.missing_blobs else ""
    screen.print(f"durable entries: {kinds or 'none'}; blobs: {found.blob_count}{missing}", highlight=False)


def _object(directory: str, found: Inspection) -> dict[str, Any]:
    return {
        "directory": directory,
        "status": found.status.value,
        "format_version": found.manifest.format_version,
        "persistent_format_version": found.manifest.persistent_format_version,
        "instance_uuid": found.manifest.instance_uuid,
        "durable_epoch": found.durable_epoch,
        "max_appeared_epoch": found.max_epoch,
        "entries": options.counts_by_name(found.counts),
        "epoch_file": {"problem": found.epoch_file.problem},
        "catalog": {
            "problem": found.catalog_problem,
            "compacted": [name for name, _ in found.catalog.compacted],
            "detached": list(found.catalog.detached),
            "max_epoch_id": found.catalog.max_epoch_id,
            "max_blob_id": found.catalog.max_blob_id,
        },
        "blobs": {"stored": found.blob_count, "missing": list(found.missing_blobs)},
        "files": [options.file_object(file) for file in found.files],
    }
