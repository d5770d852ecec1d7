"""From the paths a person names to the log files they mean, in the order in which they are to be read.

A directory means its history, each row once: all its logs, and the snapshot from which they start.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from flowstone.errors import FlowstoneError
from flowstone.outside.disk import Disk
from flowstone.xlog.directory import LogDirectory, scan_directory

SUFFIXES = (".snap", ".xlog")


class NoSuchLog(FlowstoneError):
    """A path leads to no log file."""


def find_logs(disk: Disk, paths: Sequence[str], *, recursive: bool = False) -> list[str]:
    """The log files at `paths`: files as named, directories as their history."""
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
            # Links may lead in circles, and nobody wants a log twice.
            if disk.kind(below) == "directory" and not disk.is_link(below):
                yield from _in_directory(disk, below, recursive)


def _history(directory: LogDirectory) -> Iterator[str]:
    """Every log, and the snapshot they start from. Later snapshots only repeat what the logs say."""
    first = directory.logs[0].signature if directory.logs else None
    bases = [file for file in directory.snapshots if first is None or file.signature <= first]
    yield from (file.path for file in bases[-1:])
    yield from (file.path for file in directory.logs)
