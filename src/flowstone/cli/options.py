"""The options that `cat` and `play` share: which rows of which logs. Spelled as in `tt cat`."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.console import UsageError, say

if TYPE_CHECKING:
    from flowstone.history.reading import Reading, Report
    from flowstone.history.selection import Selection
    from flowstone.outside import Outside

Paths = Annotated[
    list[str], typer.Argument(metavar="FILE|DIR...", help="Log files, or directories of them.", show_default=False)
]
From = Annotated[int | None, typer.Option("--from", metavar="LSN", min=0, help="Rows from this LSN on.")]
To = Annotated[
    int | None, typer.Option("--to", metavar="LSN", min=0, help="Rows below this LSN: the bound is exclusive.")
]
Timestamp = Annotated[
    str | None,
    typer.Option(
        "--timestamp",
        metavar="TIME",
        help="Rows written before this moment (exclusive): seconds since 1970, or RFC 3339 as 2024-05-01T12:00:00.5Z.",
    ),
]
Spaces = Annotated[
    list[str] | None,
    typer.Option("--space", metavar="ID|NAME", help="Rows of this space, by number or name. May be repeated."),
]
Replicas = Annotated[
    list[int] | None, typer.Option("--replica", metavar="ID", min=0, help="Rows of this origin. May be repeated.")
]
ShowSystem = Annotated[bool, typer.Option("--show-system", help="Rows of Tarantool's own spaces, too.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Look into subdirectories.")]
Force = Annotated[bool, typer.Option("--force", help="Go on over damage and gaps, and say what was skipped.")]

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the shared options say."""

    paths: Sequence[str]
    selection: Selection
    settled: bool
    recursive: bool
    force: bool

    def files(self, outside: Outside) -> list[str]:
        from flowstone.history.files import find_logs

        return find_logs(outside.disk, self.paths, recursive=self.recursive)

    def reading(
        self, outside: Outside, files: Sequence[str], on_progress: Callable[[int, str], None] | None
    ) -> Reading:
        from flowstone.history.reading import Reading

        return Reading(
            outside,
            files,
            selection=self.selection,
            settled=self.settled,
            force=self.force,
            on_progress=on_progress,
        )


def make_selection(
    from_lsn: int | None,
    to_lsn: int | None,
    timestamp: str | None,
    spaces: list[str] | None,
    replicas: list[int] | None,
    show_system: bool,
) -> Selection:
    from flowstone.history.selection import Selection

    return Selection(
        from_lsn=from_lsn,
        to_lsn=to_lsn,
        timestamp=parse_timestamp(timestamp) if timestamp is not None else None,
        spaces=tuple(int(space) if space.isdecimal() else space for space in spaces or ()),
        replicas=tuple(replicas or ()),
        show_system=show_system,
    )


def parse_timestamp(text: str) -> float:
    """Seconds since 1970 of `text`, which is such a number or a moment in the form of RFC 3339."""
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if seconds == seconds and abs(seconds) != float("inf"):
            return seconds
    match = _MOMENT.fullmatch(text.strip())
    hint = "write seconds, as 1714564800.5, or RFC 3339 with a zone, as 2024-05-01T12:00:00.5Z"
    if match is None:
        raise UsageError(f"--timestamp {text!r} is no moment", hint=hint)
    try:
        moment = datetime.datetime.fromisoformat(match[1].upper() + match[3].upper())
    except ValueError as error:
        raise UsageError(f"--timestamp {text!r} is no moment: {error}", hint=hint) from None
    # By way of text: the double nearest to the digits, which a sum of two doubles may miss.
    whole = int(moment.timestamp())
    fraction = f"0.{match[2] or 0}"
    return float(f"{whole}.{match[2] or 0}") if whole >= 0 else whole + float(fraction)


def warn(report: Report) -> None:
    """What the reading met, a line each."""
    from flowstone.xlog.reader import EndingKind

    for path, ending in report.endings.items():
        if ending.kind is EndingKind.TORN:
            say(f"warning: {path}: torn at byte {ending.offset} ({ending.what}); {ending.lost} bytes are lost")
    for skipped in report.skipped:
        say(f"warning: {skipped.path}: skipped bytes {skipped.offset} to {skipped.end}: {skipped.why}")
    if report.rows_rolled_back:
        say(f"note: {_rows(report.rows_rolled_back)} left out: rolled back")
    if report.rows_pending:
        say(f"note: {_rows(report.rows_pending)} held back: no verdict in this log yet")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
