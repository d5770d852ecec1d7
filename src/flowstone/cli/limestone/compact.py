"""`flowstone limestone compact`: merge the log files of a data directory that is not in use into one file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowstone.cli import extras
from flowstone.cli.console import UsageError, say
from flowstone.cli.lake.spark_progress import Line, tasks_shown
from flowstone.cli.limestone import options as options

if TYPE_CHECKING:
    from flowstone.limestone.store.compaction import Writer
    from flowstone.limestone.tools.offline_compaction import CompactionPlan, OfflineCompacted

EXAMPLE = "Example: `flowstone limestone compact --force /var/lib/tsurugi/log`"

EXIT_CODES = """Exit codes, as of `tglogutil compaction`: 0 done, or not confirmed; 64 cannot compact: the directory is
damaged, in use, a symbolic link or not a data directory, or the command line is wrong."""


def compact(
    directory: options.Directory,
    epoch: options.Epoch = None,
    force: Annotated[bool, typer.Option("--force", help="Skip the confirmation.")] = False,
    dry_run: options.DryRun = False,
    make_backup: options.MakeBackup = True,
    working_dir: Annotated[
        str | None,
        typer.Option(
            "--working-dir",
            metavar="DIR",
            help="Existing directory in which the new file is written before it is moved into place. Default: "
            "compaction_temp in the data directory.",
        ),
    ] = None,
    on_spark: Annotated[
        bool,
        typer.Option("--spark", help="Sort on Spark, for directories too large for one process; same result."),
    ] = False,
    master: Annotated[str, typer.Option("--master", metavar="URL", help="Spark master.")] = "local[*]",
    as_json: options.AsJson = False,
) -> int:
    """Merge the rows of all durable sessions into one file, and remove the log files they came from.

    The command works in place, with the directory locked; a crash at any moment leaves the same rows. Blobs that no row
    references are removed; all others are kept, with their ids. A running datastore compacts itself.
    """
    from flowstone.limestone.store import offline_directory as offline
    from flowstone.limestone.store.compaction import TEMPORARY
    from flowstone.limestone.tools import offline_compaction
    from flowstone.outside import production

    if as_json and not (force or dry_run):
        raise UsageError("--json cannot ask for confirmation", hint="add --force or --dry-run")
    if on_spark:
        extras.need("spark", "--spark")
    outside, path = production(), options.data_directory(directory)
    temporary = options.plain(working_dir) if working_dir is not None else f"{path}/{TEMPORARY}"
    if working_dir is not None and outside.disk.kind(working_dir) != "directory":
        raise UsageError(f"--working-dir {working_dir}: no such directory", hint="create it first")
    offline_compaction.refuse_link(outside.disk, path)
    line = Line()
    try:
        with offline.held(outside.disk, path, only_looks=dry_run):
            planned = offline_compaction.plan(outside.disk, path, epoch)
            if not as_json:
                _print_plan(directory, planned, temporary, with_epoch=epoch is None)
            if dry_run and planned.has_work:
                line.tell("reading")
                rows = offline_compaction.check(outside.disk, path, planned)
                line.close()
                _print_dry_run(directory, planned, rows, as_json)
                return 0
            if planned.has_work and not force and not _is_confirmed(path, planned, keeps_backup=make_backup):
                say("flowstone: aborted")
                return 0
            with _writing(on_spark and planned.has_work, master, line) as write:
                done = offline_compaction.execute(
                    outside, path, planned, keeps_backup=make_backup, write=write, temporary=temporary, tell=line.tell
                )
    finally:
        line.close()
    _print_done(directory, done, as_json, dry_run=dry_run)
    return 0


@contextmanager
def _writing(on_spark: bool, master: str, line: Line) -> Iterator[Writer]:
    """Yield the function that sorts the rows and writes the file, in this process or on Spark."""
    from flowstone.limestone.store.compaction import write_here

    if not on_spark:
        yield write_here
        return
    from flowstone.spark.restoration.limestone_compact import writer
    from flowstone.spark.spark_session import session

    line.tell("starting Spark")
    with session("flowstone limestone compact", master=master) as spark, tasks_shown(line):
        yield writer(spark)


def _is_confirmed(path: str, planned: CompactionPlan, *, keeps_backup: bool) -> bool:
    count = len(planned.inputs) + len(planned.superfluous)
    print(
        f"removes: {count} log files, replaced by one file with their rows up to epoch {planned.epoch}; "
        "unreferenced blobs"
    )
    kept = f"a backup of the directory, in {options.quoted(f'{path}.backup_XXXXXX')}" if keeps_backup else "no backup"
    print(f"keeps: {kept}")
    print("execute? (y/N) ", end="", flush=True)
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    return answer.strip()[:1] in ("y", "Y")


def _print_plan(directory: str, planned: CompactionPlan, temporary: str, *, with_epoch: bool) -> None:
    print(f"dblogdir: {options.quoted(directory)}")
    if with_epoch:
        print(f"durable-epoch: {planned.epoch}")
    print(f"working-directory: {options.quoted(temporary)}")


def _print_dry_run(directory: str, planned: CompactionPlan, rows: int, as_json: bool) -> None:
    if as_json:
        print(options.as_text(_object(directory, planned, rows) | {"dry_run": True}))
        return
    print(f"would compact: {len(planned.inputs)} log files of {planned.bytes_before} bytes to {rows} rows")
    print("compaction will be successfully completed (dry-run mode)")


def _print_done(directory: str, done: OfflineCompacted, as_json: bool, *, dry_run: bool) -> None:
    if as_json:
        more = {
            "dry_run": dry_run,
            "bytes_after": done.bytes_after,
            "removed_blobs": list(done.collected),
            "max_blob_id": done.catalog.max_blob_id,
            "backup": done.backup,
        }
        print(options.as_text(_object(directory, done.plan, done.rows) | more))
        return
    if not done.plan.has_work:
        print(f"nothing to do: already compacted to {done.rows} rows, {done.bytes_after} bytes")
        return
    print(f"compacted: {done.rows} rows, {done.plan.bytes_before} bytes to {done.bytes_after}")
    if done.backup is not None:
        print(f"backup: {options.quoted(done.backup)}")
    print(f"compaction was successfully completed: {options.quoted(directory)}")


def _object(directory: str, planned: CompactionPlan, rows: int) -> dict[str, Any]:
    return {
        "directory": directory,
        "durable_epoch": planned.epoch,
        "inputs": list(planned.inputs),
        "superfluous": list(planned.superfluous),
        "bytes_before": planned.bytes_before,
        "rows": rows,
    }
