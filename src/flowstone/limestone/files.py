"""Small files, read whole and replaced in the orders that a crash may cut anywhere.

Through the Disk one is handed. What is in them is for `manifest.py`, `epoch_file.py` and `catalog.py` to say.
"""

from __future__ import annotations

from flowstone.limestone.errors import DamagedFile
from flowstone.outside import Disk

SMALL_FILE_MAX = 64 << 20
"""A catalog that lists a million log files, or an epoch file that was never replaced, stays below this."""


def read_whole(disk: Disk, path: str) -> bytes | None:
    """The bytes of a file, None where there is none."""
    if disk.kind(path) != "file":
        return None
    with disk.open(path) as file:
        size = file.size()
        if size > SMALL_FILE_MAX:
            raise DamagedFile(path, SMALL_FILE_MAX, f"it has {size} bytes, far more than any writer puts there")
        return file.read_at(0, size)


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
