"""Finds the log files for the paths of a command line, in the order in which to read them.

A directory means its history, with each row once: all its logs, and the snapshot that they start from.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from flowstone.errors import FlowstoneError
from flowstone.outside.disk import Disk
from flowstone.xlog.directory import LogDirectory, scan_directory

SUFFIXES = (".snap", ".xlog")


class NoSuchLog(FlowstoneError):
    """A path contains no log file."""


def find_logs(disk: Disk, paths: Sequence[str], *, recursive: bool = False) -> list[str]:
    """Return the log files at `paths`: files as given, directories as their history."""
    found: list[str] = []
    for path in paths:
        kind = disk.kind(path)
        if kind == "file":
            if not path.endswith(SUFFIXES):
                raise NoSuchLog(f"{path}: not a log file", hint="log files end in .xlog or .snap")
            found.append(path)
        elif kind == "directory":
            below = list(_in_directory(disk, path, recursive))
            if not below:
                hint = "check the path" if recursive else "check the path, or look into subdirectories with --recursive"
                raise NoSuchLog(f"{path}: no .xlog or .snap file in this directory", hint=hint)
            found.extend(below)
        else:
            raise NoSuchLog(f"{path}: no such file or directory")
    return found


def _in_directory(disk: Disk, path: str, recursive: bool) -> Iterator[str]:
    yield from _history(scan_directory(disk, path))
    if recursive:
        for name in disk.list_directory(path):
            below = posixpath.join(path, name)
            # Skip symbolic links: they can form cycles, and would list a log twice.
            if disk.kind(below) == "directory" and not disk.is_link(below):
                yield from _in_directory(disk, below, recursive)


def _history(directory: LogDirectory) -> Iterator[str]:
    """Yield the snapshot that the logs start from, and all logs. Later snapshots only repeat the logs."""
    first = directory.logs[0].signature if directory.logs else None
    bases = [file for file in directory.snapshots if first is None or file.signature <= first]
    yield from (file.path for file in bases[-1:])
    yield from (file.path for file in directory.logs)
