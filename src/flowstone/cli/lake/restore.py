"""`flowstone restore`: write the state at a settled position of a log, as files for a server or a query engine.

Checks the arguments and reports the result; the work is done by `spark/restoration/restore.py`.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, cast

import typer

from flowstone.cli import extras
from flowstone.cli.console import OK, UsageError, say
from flowstone.cli.lake.spark_progress import Line, tasks_shown

if TYPE_CHECKING:
    from flowstone.spark.restoration.archive_restore import Format, Restored

EXAMPLE = (
    "Example: `flowstone restore /backup/db1 --to 2026-05-01T12:00:00Z --out /restored/db1`, then `tarantool` with "
    "`box.cfg{}` in a copy of /restored/db1\n\n"
    "The newest state: `flowstone restore /backup/db1 --to newest --out /restored/db1`\n\n"
    "As tables: `flowstone restore /backup/db1 --to '{1: 500}' --format delta --out /lake/db1-at-500`\n\n"
    "Limestone: `flowstone restore /var/lib/tsurugi/log --out /restored/log`"
)

EXIT_CODES = """Exit codes: 0 done; 1 the archive is damaged or incomplete, or Spark failed; 2 the command line is
wrong: the position is not settled, or the output directory is not empty; 130 interrupted. Unless the exit code is 0,
nothing is written."""


def restore(
    archive: Annotated[
        str,
        typer.Argument(
            metavar="ARCHIVE",
            help="An archive, a directory of .snap and .xlog files, or a Limestone data directory.",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="A new or empty directory.", show_default=False)],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TIME|AGO|VCLOCK|LSN|EPOCH|newest",
            help="Position to restore: a time with a time zone (2026-05-01T12:00:00Z), a duration (5 minutes ago), "
            "seconds since 1970 with a fraction, a vclock ({1: 500}), an LSN if only one instance has written, or "
            "`newest`. For Limestone, an epoch; the default is the durable epoch.",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="snap|limestone|delta|parquet",
            help="What to write: a snapshot that Tarantool can start from (default), a data directory (default for "
            "Limestone), Delta tables or Parquet tables. May be repeated; DIR then has a subdirectory for each format.",
        ),
    ] = None,
    master: Annotated[str, typer.Option("--master", metavar="URL", help="Spark master.")] = "local[*]",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object (docs/reference/restore.md).")
    ] = False,
) -> int:
    """Write the state at a settled position: a snapshot that Tarantool can start from, or Delta or Parquet tables.

    The state is the newest snapshot before the position plus the changes up to the position, without changes that were
    rolled back. A position is rejected if it is inside a transaction, if a transaction is still pending there, or if it
    is after the end of the archive; the error names the nearest valid ones. A server started from the result has the
    identity of the archived instance: do not let it join the live one. A snapshot requires the extra `arrow`; tables,
    Limestone data and snapshots of many million rows require the extra `spark` and Java 17.
    """
    extras.need("spark" if {*(formats or ())} - {"snap"} else "arrow", "flowstone restore")
    from flowstone.spark.index.limestone_index import EpochLost, NotDurable, is_limestone
    from flowstone.spark.index.log_index import EndsEarlier, NotSettled
    from flowstone.spark.restoration.archive_restore import OutputTaken
    from flowstone.spark.restoration.restore import NEWEST
    from flowstone.spark.restoration.restore import restore as restored_to
    from flowstone.spark.sources.options import WrongOption

    if not os.path.isdir(archive):
        raise UsageError(f"{archive}: no such directory", hint="specify an archive or a log directory")
    if to is None and not is_limestone(archive):
        raise UsageError("--to is missing", hint=f"specify a time, a vclock, an LSN or {NEWEST}")
    line = Line()
    try:
        with tasks_shown(line):
            wanted = cast("list[Format] | None", formats)  # checked by the call
            restored = restored_to(archive, out, to=to or NEWEST, format=wanted, master=master, on_step=line.tell)
    except EndsEarlier as error:
        raise UsageError(error.message, hint=f"use that time, or --to {NEWEST} for the newest state") from error
    except (NotSettled, NotDurable, EpochLost, OutputTaken, WrongOption) as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        line.close()
    for note in restored.notes:
        say(f"flowstone: note: {note}")
    print(_as_json(restored, out) if as_json else _sentence(restored))
    return OK


def _as_json(restored: Restored, out: str) -> str:
    return json.dumps(
        {
            "directory": out,
            "position": restored.position.to_mapping(),
            "instance_uuid": restored.instance_uuid,
            "replicaset_uuid": restored.replicaset_uuid,
            "files": restored.files,
            "rows": restored.row_count,
            "spaces": [{"id": each.id, "name": each.name, "rows": each.row_count} for each in restored.spaces],
            "notes": restored.notes,
            "seconds": round(restored.seconds, 3),
        }
    )


def _sentence(restored: Restored) -> str:
    where = ", ".join(restored.files.values())
    count = f"{restored.row_count} rows of {len(restored.spaces)} spaces"
    return f"restored {count} at {restored.position} to {where} in {restored.seconds:.1f} s"
