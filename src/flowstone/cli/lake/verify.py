"""`flowstone verify`: compare two of live node, archive, log directory and lake at one settled position.

Parses the arguments and prints the report; the comparison is `spark/verification/verify.py`.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flowstone.cli import extras
from flowstone.cli.console import INTERRUPTED, OK, USAGE, UsageError, say, silence
from flowstone.cli.lake.mirror import SALT_VARIABLE
from flowstone.cli.lake.spark_progress import Line, tasks_shown
from flowstone.cli.logs.play import PASSWORD_HELP, USERNAME_VARIABLE, login
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from rich.console import Console

    from flowstone.spark.verification.report import ShownDifference, VerifyReport

EXAMPLE = (
    "Example: `flowstone verify replicator:secret@db1:3301 /lake/db1`\n\n"
    "Two replicas: `flowstone verify db1:3301 db2:3301`. A backup at noon: "
    "`flowstone verify --at 2026-05-01T12:00:00Z /backup/db1 /backup/db2`"
)

EXIT_CODES = """Exit codes: 0 both are equal; 1 they differ, or one lacks rows; 2 the comparison failed: the command
line is wrong, a server is unreachable, or a log is damaged; 130 interrupted."""

EQUAL, DIFFERENT, TROUBLE = OK, 1, USAGE
SIDE_HELP: Final = (
    "A live node ([user[:password]@]host:port, unix/:/path, or a port), a lake, or the directory of an archive, "
    "of logs or of Limestone data."
)
VALUE_WIDTH: Final = 600
"""Characters shown of a tuple; --json prints all of it."""


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE_HELP, show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The other side, in the same forms.", show_default=False)],
    spaces: Annotated[
        list[str] | None,
        typer.Option("--space", metavar="ID|NAME", help="Compare only this space and its definition. May be repeated."),
    ] = None,
    system: Annotated[
        bool,
        typer.Option("--system", help="Also compare users, privileges, functions and collations."),
    ] = False,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="POSITION",
            help="Compare two logs at this vclock ({1: 500}), LSN, epoch or time, or at `common`, the newest position "
            "that both have. Default: the newest position of either side; a side that lacks rows up to it differs.",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for a side that lags."),
    ] = 10.0,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="Number of differing keys to show; all are counted.")
    ] = 20,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User of live nodes. Default: {USERNAME_VARIABLE}.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option", metavar="NAME=VALUE", help="Option for a lake in object storage, as in deltalake."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Compare Tsurugi's tables as storages, with raw keys and values.")
    ] = False,
    master: Annotated[str, typer.Option("--master", metavar="URL", help="Spark master.")] = "local[*]",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object (docs/reference/verify.md).")
    ] = False,
) -> int:
    """Check whether two of live node, archive, log directory and lake are equal.

    Both sides are compared byte by byte at one settled position, including definitions: first the counts and digests of
    each space, then the keys that differ, with both values. In a lake, the columns of each row are also checked against
    its tuple.
    """
    line = Line()
    try:
        extras.need("spark", "flowstone verify")
        report = _verified(a, b, spaces, system, at, wait, limit, username, password, storage, raw, master, line)
    except FlowstoneError as error:
        say(f"flowstone: {error}")
        return TROUBLE
    except OSError as error:
        say(f"flowstone: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        return TROUBLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        # No failure may have exit code 1, which means that the sides differ.
        traceback.print_exc()
        return TROUBLE
    finally:
        line.close()
    try:
        print(report.to_json()) if as_json else show(report)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)  # the reader closed the pipe; the exit code is still the result
    return EQUAL if report.is_equal else DIFFERENT


def _verified(
    a: str,
    b: str,
    spaces: list[str] | None,
    system: bool,
    at: str | None,
    wait: float,
    limit: int,
    username: str | None,
    password: str | None,
    storage: list[str] | None,
    raw: bool,
    master: str,
    line: Line,
) -> VerifyReport:
    from flowstone.spark.sources.options import WrongOption
    from flowstone.spark.verification.verify import verify as verified

    username, password = login((a, b), username, password)
    try:
        with tasks_shown(line):
            return verified(
                a,
                b,
                space=[int(each) if each.isdecimal() else each for each in spaces or ()],
                system=system,
                at=at,
                wait=wait,
                limit=limit,
                username=username,
                password=password,
                storage_options=dict(_setting(each) for each in storage or ()),
                mask_salt=os.environ.get(SALT_VARIABLE),
                raw=raw,
                master=master,
                on_step=line.tell,
            )
    except WrongOption as error:
        raise UsageError(f"invalid --at: {at!r}", hint=error.hint) from None


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        # The text may be a secret, so the error does not show it.
        raise UsageError("invalid --storage-option", hint="use NAME=VALUE, such as region=eu-west-1")
    return name, value


# --- text output ---


FILE_WIDTH: Final = 200
"""Columns of the report if stdout is not a terminal."""


def show(report: VerifyReport, console: Console | None = None) -> None:
    """Print the report as text: a table of spaces, then the keys that differ."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # Nothing may be truncated in a file.
    console = console or Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    for letter, side in (("A", report.a), ("B", report.b)):
        console.print(f"{letter}  {escape(side.name)} ({side.kind}) at {_position(side.position)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("space", "rows in A", "rows in B", "not in A", "not in B", "differ", ""):
        table.add_column(name, justify="left" if name in ("space", "") else "right", no_wrap=True)
    for space in report.spaces:
        if not space.rows_a and not space.rows_b and space.name.startswith("_") and space.is_equal:
            continue
        counts = (space.missing_in_a, space.missing_in_b, space.differing + space.twice)
        verdict = "[green]equal[/]" if space.is_equal else "[red]different[/]"
        numbers = [str(count) if count else "" for count in counts]
        table.add_row(escape(space.name), str(space.rows_a), str(space.rows_b), *numbers, verdict + _remarks(space))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {escape(note)}")
    for sentence in report.lateness():
        console.print(f"[red]lag:[/] {escape(sentence)}")
    for difference in report.differences:
        _show_difference(console, difference)
    for row in report.wrong:
        console.print(f"[bold]{escape(row.space)}[/] {escape(row.key)}: {row.side} is inconsistent: {escape(row.what)}")
    hidden = report.difference_count - len(report.differences) - len(report.wrong)
    if hidden > 0:
        console.print(f"… and {hidden} more (--limit)")
    verdict = "[green]equal[/]" if report.is_equal else "[red]different[/]"
    console.print(f"{verdict}: {_summary(report)}, in {report.seconds:.1f} s")


def _position(position: dict[int, int]) -> str:
    return "{" + ", ".join(f"{number}: {lsn}" for number, lsn in position.items()) + "}"


def _remarks(space: Any) -> str:
    remarks = []
    if space.encoded:
        remarks.append(f"{space.encoded} encoded differently, same values")
    if space.wrong_a or space.wrong_b:
        remarks.append(f"{space.wrong_a + space.wrong_b} inconsistent")
    return f" ({', '.join(remarks)})" if remarks else ""


def _summary(report: VerifyReport) -> str:
    rows = sum(max(space.rows_a, space.rows_b) for space in report.spaces)
    count = report.difference_count
    late = "; ".join(f"{letter} lacks rows" for letter, side in (("A", report.a), ("B", report.b)) if side.lacks)
    if report.is_equal:
        return f"{rows} rows of {len(report.spaces)} spaces"
    if not count:
        return f"{late}; the {rows} compared rows are equal"
    found = f"{count} {'difference' if count == 1 else 'differences'} in {rows} rows"
    return f"{found}; {late}" if late else found


def _show_difference(console: Console, difference: ShownDifference) -> None:
    from rich.markup import escape

    head = f"[bold]{escape(difference.space)}[/] {escape(difference.key)}: [red]{difference.kind}[/]"
    if difference.kind == "twice":
        head += f" ({difference.count_a} × in A, {difference.count_b} × in B)"
    if difference.fields:
        head += " in " + ", ".join(escape(each.path) or "all" for each in difference.fields)
    console.print(head)
    for each in difference.fields:
        console.print(f"    {escape(each.path)}: A {escape(_cut(each.a))}, B {escape(_cut(each.b))}")
    for letter, value in (("A", difference.a), ("B", difference.b)):
        if value is not None:
            console.print(f"  {letter}  {escape(_cut(value))}")


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_WIDTH else f"{text[:VALUE_WIDTH]}…"
