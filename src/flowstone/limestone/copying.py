"""Whole copies of files: what blobs, backups and restores have in common.

Through the Disk one is handed, and blocking. A copy is durable when the call has returned, its name when its directory
is synced, which is the caller's: one sync serves many copies.
"""

from __future__ import annotations

from typing import Final

from flowstone.outside import Disk, File

PIECE_SIZE: Final = 1 << 20


def write(disk: Disk, path: str, data: bytes) -> None:
    """A file with this content; one that has the name is gone first, so that no other name of it changes."""
    remove(disk, path)
    with disk.create(path) as file:
        file.append(data)
        file.sync()


def copy(disk: Disk, old: str, new: str) -> None:
    """The bytes that `old` has now, as a file of their own."""
    remove(disk, new)
    with disk.open(old) as source, disk.create(new) as target:
        copy_range(source, target, 0, source.size())
        target.sync()


def copy_range(source: File, target: File, start: int, end: int) -> None:
    """Append these bytes of a file to another one; as many as there are."""
    while start < end and (data := source.read_at(start, min(PIECE_SIZE, end - start))):
        target.append(data)
        start += len(data)


def link_or_copy(disk: Disk, old: str, new: str) -> None:
    """For files that nobody changes any more: a second name where the file system has such, else a copy."""
    remove(disk, new)
    try:
        disk.link(old, new)
    except OSError:
        copy(disk, old, new)


def move(disk: Disk, old: str, new: str) -> None:
    """Another name for a file, in another file system if need be: then by a copy."""
    try:
        disk.rename(old, new)
    except OSError:
        copy(disk, old, new)
        disk.unlink(old)


def remove(disk: Disk, path: str) -> None:
    if disk.kind(path) == "file":
        disk.unlink(path)
