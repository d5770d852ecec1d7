"""Small files, read whole and replaced in the orders that a crash may cut anywhere.

Through the Disk one is handed. What is in them is for `manifest.py`, `epoch_file.py` and `catalog.py` to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flowstone.limestone.errors import DamagedFile
from flowstone.outside import Disk

T = TypeVar("T")

SMALL_FILE_MAX = 64 << 20
"""A catalog that lists a million log files, or an epoch file that was never replaced, stays below this."""


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
            raise DamagedFile(path, SMALL_FILE_MAX, f"it has {size} bytes, far more than any writer puts there")
        return file.read_at(0, size)


def read_or_back(disk: Disk, path: str, back: str, parse: Callable[[bytes, str], T]) -> T | None:
    """What a file says, or the one kept beside it where it cannot be read; None where there is neither."""
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
    """Give a file this content, durably and in place: a lock on it stays, a crash may leave it empty or torn."""
    exists = disk.kind(path) == "file"
    with disk.append_to(path) if exists else disk.create(path) as file:
        if exists:
            file.truncate(0)
        file.append(data)
        file.sync()


def replace(disk: Disk, directory: str, name: str, temporary: str, data: bytes) -> None:
    """Give a file this content by rename: whoever looks finds the old one or the new one, whole."""
    write_whole(disk, f"{directory}/{temporary}", data)
    disk.rename(f"{directory}/{temporary}", f"{directory}/{name}")
    disk.sync_directory(directory)
