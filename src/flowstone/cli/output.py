"""Where a command's output goes: stdout, a file that gets its name when it is whole, or a device or pipe as it is.

An error of writing names the place by what the user called it.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import BinaryIO, ParamSpec

from flowstone.cli.console import OK, UsageError, silence

P = ParamSpec("P")


def quiet(command: Callable[P, int]) -> Callable[P, int]:
    """`command`, for which it is no error that whoever reads its output has seen enough."""

    @wraps(command)
    def run_command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = command(*args, **kwargs)
            if sys.stdout is not None:
                with naming_stdout():
                    sys.stdout.flush()
        except BrokenPipeError:
            silence(sys.stdout)
            return OK
        return code

    return run_command


def check_output(path: str) -> None:
    """Refuses a path that cannot be written, before any work is done for it."""
    if _mode(path) is not None and not _is_replaced(path):
        if os.path.isdir(path):
            raise UsageError(f"{path}: is a directory", hint="name a file in it")
        return
    directory = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(directory):
        raise UsageError(f"{path}: there is no directory {directory}", hint="make it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: directory {directory} may not be written to")


@contextmanager
def destination(path: str | None) -> Iterator[BinaryIO]:
    """Opens `path` for writing, stdout where it is None. A regular file is the old one until all is written."""
    if path is None:
        if sys.stdout is None:
            raise BrokenPipeError  # it was closed before we began
        with naming_stdout():
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    with _naming(path), _replaced(path) if _is_replaced(path) else open(path, "wb") as file:
        yield file


@contextmanager
def naming_stdout() -> Iterator[None]:
    """What goes wrong with stdout says so; then nothing more goes there, not even when the interpreter ends."""
    try:
        with _naming("stdout"):
            yield
    except OSError as error:
        if error.filename == "stdout" and not isinstance(error, BrokenPipeError):
            silence(sys.stdout)
        raise


def _mode(path: str) -> int | None:
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def _is_replaced(path: str) -> bool:
    """Only what is a regular file, or nothing yet, may get another file in its place."""
    mode = _mode(path)
    return mode is None or stat.S_ISREG(mode)


@contextmanager
def _replaced(path: str) -> Iterator[BinaryIO]:
    target = os.path.realpath(path)  # a symbolic link stays one
    unfinished = f"{target}.inprogress"
    try:
        with open(unfinished, "wb") as file:
            yield file
        if os.path.exists(target):
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Errors of writing come without a name; whoever reads names its files itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.filename == f"{os.path.realpath(place)}.inprogress":
            error.filename = place
        raise
