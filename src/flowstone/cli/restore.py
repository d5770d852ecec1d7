"""`flowstone restore`: the state of a settled moment of an archive, as files that a server or a query engine reads."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.console import OK, UsageError, note_compilation, say
from flowstone.cli.spark_progress import Line, tasks_shown

if TYPE_CHECKING:
    from flowstone.spark.options import AsOf
    from flowstone.spark.restore import Format, Restored

EXAMPLE = (
    "Example: `flowstone restore /backup/db1 --to 2026-05-01T12:00:00Z --out /restored/db1`, then `tarantool` with "
    "`box.cfg{}` in a copy of /restored/db1\n\n"
    "As tables: `flowstone restore /backup/db1 --to '{1: 500}' --format delta --out /lake/db1-at-500`"
)

EXIT_CODES = """Exit codes: 0 done; 1 the archive is damaged or lacks what is needed, or Spark failed; 2 the command
line is wrong: no settled moment, an output that is not empty; 130 interrupted. Then nothing is written."""


def restore(
    archive: Annotated[
        str,
        typer.Argument(
            metavar="ARCHIVE", help="An archive, or a directory of .snap and .xlog files.", show_default=False
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TIME|VCLOCK|LSN",
            help="The moment: a time with its zone (2026-05-01T12:00:00Z) or seconds since 1970 with a fraction, "
            "a vclock ({1: 500}), or an LSN where one instance alone has written.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="A directory that is new or empty.", show_default=False)
    ],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="snap|delta|parquet",
            help="What to write: a snapshot that Tarantool starts from (the default), Delta or Parquet tables. May be "
            "repeated; then DIR has a directory for each.",
        ),
    ] = None,
    master: Annotated[str, typer.Option("--master", metavar="URL", help="The Spark to run on.")] = "local[*]",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as one JSON object (docs/restore.md).")
    ] = False,
) -> int:
    """Write the state of a settled moment: a snapshot that Tarantool starts from, or Delta or Parquet tables.

    Takes the newest snapshot before the moment and the changes up to it; what was rolled back is left out. A moment
    inside a transaction, or where something still waits for its quorum, is refused, and the nearest are named.
    The server that starts from it is the instance that was archived: do not let it join the living one.
    """
    from flowstone.outside import production
    from flowstone.spark import restore as job
    from flowstone.spark.archive_index import ArchiveIndex, NotSettled
    from flowstone.spark.session import session

    note_compilation()
    wanted, moment = _formats(formats), _moment(to)
    if not os.path.isdir(archive):
        raise UsageError(f"{archive}: there is no such directory", hint="name an archive, or a directory of logs")
    line = Line()
    try:
        job.check_output(out)
        line.tell("reading the index")
        index = ArchiveIndex.open(production().disk, os.path.abspath(archive))
        position = index.resolve(moment)
        index.snapshot_at(position)
        line.tell("starting Spark")
        with session("flowstone restore", master=master) as spark, tasks_shown(spark, line):
            restored = job.restore(spark, index, position, out, formats=wanted, tell=line.tell)
    except (NotSettled, job.OutputTaken) as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        line.close()
    for note in restored.notes:
        say(f"flowstone: note: {note}")
    print(_as_json(restored, out) if as_json else _sentence(restored))
    return OK


def _formats(given: list[str] | None) -> tuple[Format, ...]:
    from flowstone.spark.restore import FORMATS

    for each in given or ():
        if each not in FORMATS:
            raise UsageError(f"--format is {each!r}", hint=f"it can be {', '.join(FORMATS)}")
    return tuple(each for each in FORMATS if each in (given or ("snap",)))


def _moment(text: str) -> AsOf:
    from flowstone.spark.options import parse_as_of

    try:
        return parse_as_of(text)
    except ValueError as error:
        raise UsageError(f"--to is {text!r}", hint=str(error)) from None


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
