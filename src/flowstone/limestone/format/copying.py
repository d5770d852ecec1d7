"""Copies of whole files, for blobs, backups and restores.

Uses the Disk that is passed in, and blocks. The content of a copy is durable when the call returns. Its name is durable
once its directory is synced, which is left to the caller, because one sync serves many copies.
"""

from __future__ import annotations

from typing import Final

from flowstone.outside import Disk, File

PIECE_SIZE: Final = 1 << 20


def write(disk: Disk, path: str, data: bytes) -> None:
    """Create a file with this content. An existing file is unlinked first, so that its other hard links keep theirs."""
    remove(disk, path)
    with disk.create(path) as file:
        file.append(data)
        file.sync()


def copy(disk: Disk, old: str, new: str) -> None:
    """Copy the current content of `old` to a new file."""
    remove(disk, new)
    with disk.open(old) as source, disk.create(new) as target:
        copy_range(source, target, 0, source.size())
        target.sync()


def copy_range(source: File, target: File, start: int, end: int) -> None:
    """Append the bytes from `start` to `end` of a file to another, as far as they exist."""
    while start < end and (data := source.read_at(start, min(PIECE_SIZE, end - start))):
        target.append(data)
        start += len(data)


def link_or_copy(disk: Disk, old: str, new: str) -> None:
    """Make a hard link if the file system supports it, otherwise a copy. Only for files that no longer change."""
    remove(disk, new)
    try:
        disk.link(old, new)
    except OSError:
        copy(disk, old, new)


def move(disk: Disk, old: str, new: str) -> None:
    """Rename a file; across file systems, copy and delete it."""
    try:
        disk.rename(old, new)
    except OSError:
        copy(disk, old, new)
        disk.unlink(old)


def remove(disk: Disk, path: str) -> None:
    if disk.kind(path) == "file":
        disk.unlink(path)
