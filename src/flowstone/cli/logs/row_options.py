"""The options of `cat` and `play` that select logs and rows. Spelled as in `tt cat`.

Also rewrites the hints of library errors in the spelling of the command line. Reads no rows.
"""

from __future__ import annotations

import datetime
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flowstone.cli.console import OK, SKIPPED, UsageError, say
from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from flowstone.history.log_reading import Reading, ReadReport
    from flowstone.history.selection import Selection
    from flowstone.outside import Outside

Paths = Annotated[
    list[str], typer.Argument(metavar="FILE|DIR...", help="Log files, or directories of log files.", show_default=False)
]
From = Annotated[int | None, typer.Option("--from", metavar="LSN", min=0, help="Only rows with at least this LSN.")]
To = Annotated[int | None, typer.Option("--to", metavar="LSN", min=0, help="Only rows below this LSN (exclusive).")]
Timestamp = Annotated[
    str | None,
    typer.Option(
        "--timestamp",
        metavar="TIME",
        help="Only rows written before this time (exclusive): seconds since 1970, or RFC 3339 such as "
        "2024-05-01T12:00:00.5Z.",
    ),
]
Spaces = Annotated[
    list[str] | None,
    typer.Option("--space", metavar="ID|NAME", help="Only rows of this space, by id or name. May be repeated."),
]
Replicas = Annotated[
    list[int] | None,
    typer.Option("--replica", metavar="ID", min=0, max=31, help="Only rows written by this replica. May be repeated."),
]
DecimalScale = Annotated[
    int | None,
    typer.Option(
        "--decimal-scale", min=0, max=38, metavar="N", help="Store decimals with N digits after the point, not as text."
    ),
]
ShowSystem = Annotated[bool, typer.Option("--show-system", help="Include rows of system spaces.")]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Search subdirectories.")]
Force = Annotated[bool, typer.Option("--force", help="Continue past damage and gaps, and report what was skipped.")]

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The values of the shared options."""

    paths: Sequence[str]
    selection: Selection
    settled: bool
    recursive: bool
    force: bool

    def files(self, outside: Outside) -> list[str]:
        """Return the log files in reading order; raise UsageError for a path that cannot be a log."""
        from flowstone.history.files import find_logs

        for path in self.paths:
            _refuse_special(path)
        files = find_logs(outside.disk, self.paths, recursive=self.recursive)
        for path in files:
            _refuse_vinyl(outside, path)
        return files

    def reading(
        self, outside: Outside, files: Sequence[str], on_progress: Callable[[int, str], None] | None
    ) -> Reading:
        """Return a reading of `files`; `on_progress` receives the bytes and the path of each chunk read."""
        from flowstone.history.log_reading import Reading

        return Reading(
            outside,
            files,
            selection=self.selection,
            settled=self.settled,
            force=self.force,
            on_progress=on_progress,
        )


def _refuse_special(path: str) -> None:
    """Raise UsageError if `path` is a device, a pipe or a socket: none of them can hold a log."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # find_logs reports it
    kinds = {stat.S_ISCHR: "a device", stat.S_ISBLK: "a device", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    kind = next((kind for is_one, kind in kinds.items() if is_one(mode)), None)
    if kind is not None:
        raise UsageError(f"{path}: {kind}, not a log file", hint="log files end in .xlog or .snap")


def _refuse_vinyl(outside: Outside, path: str) -> None:
    """Raise UsageError if `path` is a file of the vinyl engine: it looks like a log, but its rows mean other things."""
    from flowstone.xlog.errors import XlogError
    from flowstone.xlog.meta import FileType
    from flowstone.xlog.reader import LogFile

    try:
        with LogFile.open(outside.disk, path, force=True) as log:
            kind = log.meta.file_type
    except (XlogError, OSError):
        return  # the reader reports it, after the rows of the files before it
    if kind not in (FileType.XLOG, FileType.SNAP):
        raise UsageError(f"{path}: a {kind.value} file of the vinyl engine", hint="only XLOG and SNAP files are logs")


def make_selection(
    from_lsn: int | None,
    to_lsn: int | None,
    timestamp: str | None,
    spaces: list[str] | None,
    replicas: list[int] | None,
    show_system: bool,
    *,
    truncates: bool = False,
) -> Selection:
    """Return the selection of rows; raise UsageError if a bound is invalid."""
    from flowstone.history.selection import Selection

    if from_lsn is not None and to_lsn is not None and from_lsn > to_lsn:
        raise UsageError(f"--from {from_lsn} is greater than --to {to_lsn}", hint="swap them: no row is in this range")
    return Selection(
        from_lsn=from_lsn,
        to_lsn=to_lsn,
        timestamp=parse_timestamp(timestamp) if timestamp is not None else None,
        spaces=tuple(int(space) if space.isdecimal() else space for space in spaces or ()),
        replicas=tuple(replicas or ()),
        show_system=show_system,
        truncates=truncates,
    )


def parse_timestamp(text: str) -> float:
    """Return `text`, a number of seconds since 1970 or an RFC 3339 time, as seconds since 1970."""
    seconds = _seconds(text)
    if seconds < 0:
        raise UsageError(f"--timestamp {text!r} is before 1970", hint="no log is that old")
    return seconds


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if seconds == seconds and abs(seconds) != float("inf"):
            return seconds
    match = _MOMENT.fullmatch(text.strip())
    hint = "use seconds since 1970, such as 1714564800.5, or RFC 3339 with a time zone, such as 2024-05-01T12:00:00.5Z"
    if match is None:
        raise UsageError(f"--timestamp {text!r} is not a valid time", hint=hint)
    try:
        moment = datetime.datetime.fromisoformat(match[1].upper() + match[3].upper())
    except ValueError as error:
        raise UsageError(f"--timestamp {text!r} is not a valid time: {error}", hint=hint) from None
    # Convert the digits as text: the sum of two doubles may not be the double nearest to them.
    return float(f"{int(moment.timestamp())}.{match[2] or 0}")


SPELLINGS = {
    "with force": "with --force",
    "read without settling": "read with --no-settled",
    "read the space in the generic shape": "omit --space to get raw tuples",
    "unsignedAs=": "--unsigned-as=",
    "decimalScale": "--decimal-scale",
    "stringsAs=": "--strings-as=",
    "set failOnDataLoss=false": "use --no-fail-on-data-loss",
    "register=true": "--register",
}
"""Parameters as hints of library errors name them, and the same in the spelling of the command line."""


@contextmanager
def advice(*, force: bool) -> Iterator[None]:
    """Rewrite the hints of errors in the spelling of the command line; with `force`, drop the advice to use --force."""
    try:
        yield
    except FlowstoneError as error:
        error.hint = spelled(error.hint, force=force)
        raise


def spelled(hint: str | None, *, force: bool) -> str | None:
    """Return `hint` in the spelling of the command line; None if no advice is left."""
    if hint is None:
        return None
    if force:
        hint = ", or ".join(way for way in hint.split(", or ") if "with force" not in way)
    for name, option in SPELLINGS.items():
        hint = hint.replace(name, option)
    return hint or None


def finish(report: ReadReport) -> int:
    """Print the warnings and notes of a reading, one line each, and return the exit code."""
    for line in report.warnings():
        say(f"warning: {line}")
    for line in report.notes():
        say(f"note: {line}")
    return SKIPPED if report.skipped or report.gaps else OK
