"""Messages that a command prints besides its output: notes, warnings, errors and progress, one line each on stderr.

Also maps errors to exit codes, and provides the console for tables and paragraphs. Reads no log files; `log.py` formats
the lines of long-running commands.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import typer

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

OK, FAILED, USAGE, SKIPPED, INTERRUPTED = 0, 1, 2, 3, 130

SHOW_AFTER_SECONDS = 1.0
"""Work that takes less time gets no progress bar."""

FILE_WIDTH = 1000
"""Columns of output that does not go to a terminal: enough that nothing is cut off or wrapped."""

Form = Callable[[str, BaseException | None], str]
"""Formats a line; the second argument is the error that the line reports, or None."""

_form: list[Form | None] = [None]

_WRONG_PATH = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class UsageError(FlowstoneError):
    """The command line asks for something that does not exist or makes no sense."""


class UsageErrors(UsageError):
    """Several usage errors, each reported on a line of its own."""

    def __init__(self, problems: Sequence[UsageError]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def say(text: str, *, error: BaseException | None = None) -> None:
    """Print `text` on stderr as one line, without its line breaks; `error` is the failure that it reports, if any."""
    line, form = " ".join(text.split("\n")).rstrip(), _form[0]
    if form is not None:
        line = form(line, error)
    with suppress(OSError, ValueError):  # stderr may be closed
        print(line.encode("utf-8", "replace").decode(), file=sys.stderr, flush=True)


def write_lines_as(form: Form | None) -> None:
    """Let `form` format the lines of `say`, so that a JSON log contains no other lines; None leaves lines unchanged."""
    _form[0] = form


def fail(error: Exception) -> int:
    """Report `error` and return its exit code. Raise an unexpected error again: a bug needs its traceback."""
    if isinstance(error, FlowstoneError):
        for problem in error.problems if isinstance(error, UsageErrors) else (error,):
            say(f"flowstone: {problem}", error=problem)
        return USAGE if _is_usage(error) else FAILED
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        say(f"flowstone: {place}{error.strerror or error}", error=error)
        return USAGE if isinstance(error, _WRONG_PATH) else FAILED
    message = getattr(error, "format_message", None)
    if message is not None:
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "flowstone"
        text = " ".join(message().split())
        if text:  # empty if no command was given: the help was shown instead
            say(f"{path}: {text.rstrip('.')}; see {path} --help", error=error)
        return USAGE
    if isinstance(error, typer.Abort):
        return INTERRUPTED
    raise error


def _is_usage(error: FlowstoneError) -> bool:
    from flowstone.box.bootstrap import FirstUserRefused
    from flowstone.box.schema import UnknownSpace
    from flowstone.history.files import NoSuchLog
    from flowstone.iproto.uri import UriError
    from flowstone.observation.expulsion import NoSuchMember
    from flowstone.outside.network import TlsRefused
    from flowstone.text.row_table import UnknownColumn
    from flowstone.xlog.errors import NotALogFile, UnsupportedLogFormat

    options = (UsageError, UnknownSpace, UnknownColumn, UriError, FirstUserRefused, TlsRefused, NoSuchMember)
    return isinstance(error, (*options, NoSuchLog, NotALogFile, UnsupportedLogFormat))


def output() -> Console:
    """Return a console on stdout for tables and paragraphs. It does not interpret markup: servers may send any text."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def silence(stream: TextIO | None) -> None:
    """Discard everything written to `stream` from now on, including what the interpreter flushes at exit."""
    if stream is None:
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class ProgressBar:
    """A progress bar that appears on a terminal once the work takes a while."""

    def __init__(self, total: int, *, wanted: bool) -> None:
        self._total = total
        self._done = 0
        self._begun = time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None
        self._wanted = wanted

    def advance(self, amount: int, what: str) -> None:
        self._done += amount
        if not self._wanted:
            return
        if self._shown is None:
            if time.monotonic() - self._begun < SHOW_AFTER_SECONDS:
                return
            self._shown = self._show()
        progress, task = self._shown
        progress.update(task, completed=self._done, description=what)

    def _show(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        progress.start()
        return progress, progress.add_task("", total=self._total)

    def close(self) -> None:
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None


@contextmanager
def progress_bar(total: int, *, hidden: bool = False) -> Iterator[ProgressBar]:
    """Show a progress bar for `total` bytes until the block ends."""
    bar = ProgressBar(total, wanted=not hidden and sys.stderr is not None and sys.stderr.isatty())
    try:
        yield bar
    finally:
        bar.close()
