"""A disk in memory that fills up, fails, dies at a given byte and loses power: the basis of durability tests.

`FaultDisk` is a Disk. It keeps written data apart from synced data; `after_death()` is the disk that the next process
finds after a kill, `after_power_loss()` after a power loss.
"""

from __future__ import annotations

import errno
import posixpath
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Literal, Self

from flowstone.outside import AlreadyLocked, Outside, production


class Died(BaseException):
    """The process was killed during a call; nothing catches this error."""


class Inode:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)


class FaultDisk:
    """`room`: bytes until the disk is full. `life`: bytes until the process dies. `broken`: calls that fail."""

    def __init__(self) -> None:
        self.names: dict[str, Inode] = {}
        self.synced_names: dict[str, Inode] = {}
        self.directories: set[str] = set()
        self.locked: set[str] = set()
        self.open_paths: list[str] = []
        self.room: int | None = None
        self.life: int | None = None
        self.broken: set[str] = set()
        self.on_death: Callable[[], object] = lambda: None
        self.appends = 0
        self.syncs = 0
        self.calls: Counter[str] = Counter()

    def count(self, name: str) -> int:
        """Return how often the call `name` was made."""
        return self.calls[name]

    def outside(self) -> Outside:
        """Return an Outside with this disk."""
        world = production()
        disk: Any = self
        return Outside(disk, world.clock, world.random, world.blocking, world.network)

    def after_death(self) -> FaultDisk:
        """Return the disk with all written data."""
        return self._successor({path: Inode(bytes(inode.data)) for path, inode in self.names.items()})

    def after_power_loss(self, rng: Random) -> FaultDisk:
        """Return the disk with all synced data, and any part of the rest, or garbage in its place."""
        found: dict[str, Inode] = {}
        for path in sorted({*self.names, *self.synced_names}):
            candidates = [names[path] for names in (self.names, self.synced_names) if path in names]
            if path not in self.synced_names and rng.random() < 0.5:
                continue
            if path not in self.names and rng.random() < 0.5:
                continue
            found[path] = Inode(_survived(candidates[-1], rng))
        return self._successor(found)

    def _successor(self, names: dict[str, Inode]) -> FaultDisk:
        disk = FaultDisk()
        disk.names = names
        disk.synced_names = dict(names)
        disk.directories = set(self.directories)
        return disk

    def call(self, name: str, path: str) -> None:
        self.calls[name] += 1
        if self.life is not None and self.life < 0:
            raise Died
        if name in self.broken:
            raise OSError(errno.EIO, "Input/output error", path)

    def open(self, path: str) -> FaultFile:
        self.call("open", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return FaultFile(self, path, self.names[path])

    append_to = open

    def create(self, path: str) -> FaultFile:
        self.call("create", path)
        if path in self.names:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        self.names[path] = Inode()
        return FaultFile(self, path, self.names[path])

    def rename(self, old: str, new: str) -> None:
        self.call("rename", old)
        self.names[new] = self.names.pop(old)

    def unlink(self, path: str) -> None:
        self.call("unlink", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        del self.names[path]

    def make_directory(self, path: str) -> None:
        self.directories.add(path)

    def list_directory(self, path: str) -> list[str]:
        self.call("list_directory", path)
        return sorted(posixpath.basename(name) for name in list(self.names) if posixpath.dirname(name) == path)

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        if path in self.names:
            return "file"
        return "directory" if path in self.directories else None

    def is_link(self, path: str) -> bool:
        return False

    def size(self, path: str) -> int:
        return len(self.names[path].data)

    def sync_directory(self, path: str) -> None:
        self.call("sync_directory", path)
        others = {name: inode for name, inode in self.synced_names.items() if posixpath.dirname(name) != path}
        here = {name: inode for name, inode in self.names.items() if posixpath.dirname(name) == path}
        self.synced_names = others | here

    def lock(self, path: str) -> FaultLock:
        if path in self.locked:
            raise AlreadyLocked(f"cannot lock {path}: it is in use")
        self.locked.add(path)
        return FaultLock(self, path)

    def free_space(self, path: str) -> int:
        return 2**60 if self.room is None else self.room


class FaultLock:
    def __init__(self, disk: FaultDisk, path: str) -> None:
        self.disk, self.path = disk, path

    def release(self) -> None:
        self.disk.locked.discard(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class FaultFile:
    def __init__(self, disk: FaultDisk, path: str, inode: Inode) -> None:
        self.disk, self.path, self.inode = disk, path, inode
        self.is_open = True
        disk.open_paths.append(path)

    def size(self) -> int:
        return len(self.inode.data)

    def read_at(self, offset: int, size: int) -> bytes:
        return bytes(self.inode.data[offset : offset + size])

    def append(self, *parts: bytes) -> None:
        disk = self.disk
        disk.call("append", self.path)
        disk.appends += 1
        data = b"".join(parts)
        if disk.life is not None:
            if len(data) > disk.life:
                self.inode.data += data[: disk.life]
                disk.life = -1
                disk.on_death()
                raise Died
            disk.life -= len(data)
        if disk.room is not None:
            if len(data) > disk.room:
                self.inode.data += data[: disk.room]
                disk.room = 0
                raise OSError(errno.ENOSPC, "No space left on device", self.path)
            disk.room -= len(data)
        self.inode.data += data

    def truncate(self, size: int) -> None:
        self.disk.call("truncate", self.path)
        del self.inode.data[size:]

    def sync(self) -> None:
        self.disk.call("sync", self.path)
        self.disk.syncs += 1
        self.inode.synced = bytes(self.inode.data)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.disk.open_paths.remove(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _survived(inode: Inode, rng: Random) -> bytes:
    """Return a file after a power loss: synced bytes, and a possibly garbled prefix of the later ones."""
    data, synced = bytes(inode.data), inode.synced
    common = len(synced) if data[: len(synced)] == synced else 0
    if not common and synced:
        return rng.choice((data, synced))
    kept = bytearray(data[: rng.randint(common, len(data))])
    if len(kept) > common and rng.random() < 0.5:
        at = rng.randrange(common, len(kept))
        kept[at:] = bytes(len(kept) - at)
    return bytes(kept)
