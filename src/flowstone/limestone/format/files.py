"""Small files: read as a whole, and replaced so that a crash at any point leaves a usable file.

Uses the Disk that is passed in. `manifest.py`, `epoch_file.py` and `catalog.py` define the content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flowstone.limestone.errors import DamagedFile
from flowstone.outside import Disk

T = TypeVar("T")

SMALL_FILE_MAX = 64 << 20
"""A catalog that lists a million log files, or an epoch file that was never replaced, is smaller than this limit."""


def read_whole(disk: Disk, path: str) -> bytes | None:
    """Return the bytes of a file, or None if there is none; a writer may delete it at any time."""
    if disk.kind(path) != "file":
        return None
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    with file:
        size = file.size()
        if size > SMALL_FILE_MAX:
            raise DamagedFile(path, SMALL_FILE_MAX, f"file has {size} bytes, far more than any writer produces")
        return file.read_at(0, size)


def read_or_back(disk: Disk, path: str, back: str, parse: Callable[[bytes, str], T]) -> T | None:
    """Parse a file, or its backup copy if the file cannot be read; return None if neither exists."""
    data, damage = read_whole(disk, path), None
    if data is not None:
        try:
            return parse(data, path)
        except DamagedFile as error:
            damage = error
    kept = read_whole(disk, back)
    if kept is not None:
        return parse(kept, back)
    if damage is not None:
        raise damage
    return None


def write_whole(disk: Disk, path: str, data: bytes) -> None:
    """Write a file durably in place. A lock on it survives, and a crash may leave it empty or torn."""
    exists = disk.kind(path) == "file"
    with disk.append_to(path) if exists else disk.create(path) as file:
        if exists:
            file.truncate(0)
        file.append(data)
        file.sync()


def replace(disk: Disk, directory: str, name: str, temporary: str, data: bytes) -> None:
    """Replace a file durably by rename: a reader finds the old or the new content, never a part."""
    write_whole(disk, f"{directory}/{temporary}", data)
    disk.rename(f"{directory}/{temporary}", f"{directory}/{name}")
    disk.sync_directory(directory)
