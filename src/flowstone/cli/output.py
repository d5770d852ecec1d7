"""The output of a command: stdout, a device or pipe, or a regular file, which is replaced only when it is complete.

A write error names the destination as the user named it.
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
    """Wrap `command` so that it exits with 0 if the reader of its output closes the pipe."""

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
    """Raise UsageError if `path` cannot be written, before any work is done."""
    if _mode(path) is not None and not _is_replaced(path):
        if os.path.isdir(path):
            raise UsageError(f"{path}: is a directory", hint="specify a file in it")
        return
    directory = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(directory):
        raise UsageError(f"{path}: no such directory: {directory}", hint="create it first")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: directory {directory} is not writable")


@contextmanager
def destination(path: str | None) -> Iterator[BinaryIO]:
    """Open `path` for writing, or stdout if it is None. A regular file keeps its old content until all is written."""
    if path is None:
        if sys.stdout is None:
            raise BrokenPipeError  # closed before the start
        with naming_stdout():
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        return
    with _naming(path), _replaced(path) if _is_replaced(path) else open(path, "wb") as file:
        yield file


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Name stdout in write errors, and then silence it: the interpreter would fail again when it flushes at exit."""
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
    """Return True if `path` is a regular file or does not exist: nothing else may be replaced by a file."""
    mode = _mode(path)
    return mode is None or stat.S_ISREG(mode)


@contextmanager
def _replaced(path: str) -> Iterator[BinaryIO]:
    target = os.path.realpath(path)  # keep a symbolic link, and replace its target
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
    """Name `place` in write errors, which have no file name. Errors of reading have one already, and keep it."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.filename == f"{os.path.realpath(place)}.inprogress":
            error.filename = place
        raise
