"""A disk in memory that loses unsynced data in a power loss.

`Storage` is what remains when a process dies; `SimulatedDisk` is the Disk for one life of a process, unusable after it.
Content and names are separate, as in file systems: fsync of a file makes its bytes durable, fsync of a directory its
names. Directories themselves are durable when they are created.
"""

from __future__ import annotations

import errno
import posixpath
from collections import Counter
from collections.abc import Callable
from enum import Enum
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self
from weakref import WeakKeyDictionary

from flowstone.outside import AlreadyLocked, Disk, File, Lock
from flowstone.outside.disk import check_within
from tests.simulation.loop import Died, Life
from tests.simulation.trace import Trace

if TYPE_CHECKING:
    from typing_extensions import Buffer

ROOM: Final = 2**40

SECTOR: Final = 512
"""Bytes that a disk writes atomically."""

HOLE_PROBABILITY: Final = 0.3


class Loss(Enum):
    """The data lost in a crash."""

    NOTHING = "nothing"
    """The process died; the kernel writes its data."""

    UNSYNCED = "unsynced"
    """A power loss in which all unsynced data is lost."""

    ANY = "any"
    """A power loss in which any part of the unsynced data survives, per file and independently of names: appended bytes
    up to some offset, with zeros at the end, or with holes if a disk is not `is_ordered`; of the names, a prefix of the
    changes, as with a journaling file system."""


class Inode:
    """The current bytes of a file, and those that would survive a power loss."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytearray(data)
        self.unsynced: list[Change] = []
        """Appended bytes, truncations and marks since the last sync, in order."""

    def append(self, data: bytes) -> None:
        self.data += data
        self.unsynced.append(data)

    def truncate(self, size: int) -> None:
        _cut(self.data, size)
        self.unsynced.append(size)

    def overwrite(self, offset: int, data: bytes) -> None:
        """Overwrite one byte, atomically: until it is synced, it survives or not, independently of other changes."""
        _apply(self.data, (offset, data))
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        for change in self.unsynced:
            _apply(self.synced, change)
        self.unsynced = []

    def fail_to_sync(self) -> None:
        """Fail a sync: reads return all written data, but its pages count as clean, and no later sync writes them."""
        self.unsynced = [bytes(len(change)) if isinstance(change, bytes) else change for change in self.unsynced]

    def rot(self, offset: int, bit: int) -> None:
        """Flip one bit, on the disk and for all readers."""
        self.data[offset] ^= 1 << bit
        self.synced = bytearray(self.data)
        self.unsynced = []

    def after(self, loss: Loss, rng: Random, *, is_ordered: bool = True) -> Inode:
        if loss is Loss.NOTHING:
            return Inode(bytes(self.data))
        found = bytearray(self.synced)
        if loss is Loss.ANY and self.unsynced:
            self._keep_some(found, rng)
            if not is_ordered:
                _punch(found, self._first_unsynced_byte(), rng)
        return Inode(bytes(found))

    def _keep_some(self, found: bytearray, rng: Random) -> None:
        lengths = [change for change in self.unsynced if not isinstance(change, tuple)]
        kept = rng.randint(0, len(lengths))
        for change in lengths[:kept]:
            _apply(found, change)
        torn = lengths[kept] if kept < len(lengths) else 0
        if isinstance(torn, bytes) and rng.random() < 0.7:
            piece = bytearray(torn[: rng.randint(0, len(torn))])
            if rng.random() < 0.5:  # the new length was written, but not all of the pages
                start = rng.randint(0, len(piece))
                piece[start:] = bytes(len(piece) - start)
            found += piece
        for mark in self.unsynced:
            if isinstance(mark, tuple) and rng.random() < 0.5:
                _apply(found, mark)

    def _first_unsynced_byte(self) -> int:
        return min([len(self.synced), *(change for change in self.unsynced if isinstance(change, int))])


Change = bytes | int | tuple[int, bytes]


def _apply(data: bytearray, change: Change) -> None:
    if isinstance(change, int):
        _cut(data, change)
    elif isinstance(change, tuple):
        offset, mark = change
        if offset + len(mark) <= len(data):  # else the mark belongs to a lost page
            data[offset : offset + len(mark)] = mark
    else:
        data += change


def _punch(data: bytearray, start: int, rng: Random) -> None:
    """Zero some sectors from `start` on; the bytes before `start` in its sector remain."""
    while start < len(data):
        end = min((start // SECTOR + 1) * SECTOR, len(data))
        if rng.random() < HOLE_PROBABILITY:
            data[start:end] = bytes(end - start)
        start = end


def _cut(data: bytearray, size: int) -> None:
    data[size:] = bytes(max(size - len(data), 0))


class Storage:
    """The disk of one machine. `room`: free bytes. `broken`: names of calls that fail."""

    def __init__(self, name: str, trace: Trace, rng: Random) -> None:
        self.name = name
        self.names: dict[str, Inode] = {}
        self.removed: dict[str, Inode] = {}
        """Unlinked files, for checks of everything that was ever written."""
        self.directories: dict[str, None] = {"/": None}
        self.locked: dict[str | Inode, Life] = {}
        """Locked directories by path, and locked files by inode."""
        self.opened: WeakKeyDictionary[SimulatedFile, Life] = WeakKeyDictionary()
        """Open files and the process that opened them.

        As in reality, a file is closed when its last reference is dropped.
        """
        self.room = ROOM
        self.broken: set[str] = set()
        self.is_ordered = True
        """True if the sectors of a file are written in order, as ext4 does by default."""
        self.is_rotten = False
        """True if a file has changed by bit rot."""
        self.operation_count = 0
        self.reads: Counter[str] = Counter()
        """How often each file was read."""
        self.failure_count = 0
        """Number of calls that failed because the disk is broken or full."""
        self.refused: dict[Inode, None] = {}
        """Files whose last append failed, by inode."""
        self._synced_names: dict[str, Inode] = {}
        self._unsynced_names: list[dict[str, Inode | None]] = []
        self._trace = trace
        self._rng = rng
        self._fuse: int | None = None
        self._on_fuse: Callable[[], None] = lambda: None

    def die_after(self, operations: int, die: Callable[[], None]) -> None:
        """Call `die` in the middle of the disk operation with this number, counted from 1 from now on."""
        self._fuse, self._on_fuse = operations, die

    def spare(self) -> None:
        """Cancel `die_after`."""
        self._fuse = None

    def crash(self, loss: Loss) -> bool:
        """Apply the death of the process; return True if unsynced data existed."""
        self._fuse = None
        self.let_go()
        had_unsynced = bool(self._unsynced_names) or any(inode.unsynced for inode in self.names.values())
        if loss is Loss.NOTHING:
            return had_unsynced
        names = self._synced_names
        kept = self._rng.randint(0, len(self._unsynced_names)) if loss is Loss.ANY else 0
        for changes in self._unsynced_names[:kept]:
            _rename(names, changes)
        survivors = {inode: inode.after(loss, self._rng, is_ordered=self.is_ordered) for inode in names.values()}
        self.names = {path: survivors[inode] for path, inode in names.items()}
        self._synced_names = dict(self.names)
        self._unsynced_names = []
        return had_unsynced

    def as_synced(self) -> Storage:
        """Return the readable state after a power loss now in which all unsynced data is lost."""
        left = Storage(self.name, Trace(lambda: 0.0), Random(0))
        left.directories = self.directories
        left.names = {path: Inode(bytes(inode.synced)) for path, inode in self._synced_names.items()}
        return left

    def let_go(self) -> None:
        """Release the locks and open files of a dead process."""
        self.locked = {}
        self.opened.clear()

    def operate(self, operation: str, path: str, data: bytes | None = None, inode: Inode | None = None) -> None:
        """Called before each change: raise if it cannot be made; return whether the process dies in it."""
        self.operation_count += 1
        self._trace.note(self.name, f"{operation} {path}", data or b"")
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse <= 0:
                self._fuse = None
                if data is not None and inode is not None:
                    inode.append(data[: self._rng.randint(0, len(data))])
                self._on_fuse()
                raise Died
        self.check(operation, path)

    def check(self, operation: str, path: str) -> None:
        if operation in self.broken:
            self.failure_count += 1
            raise OSError(errno.EIO, "Input/output error", path)

    def find(self, path: str) -> Inode:
        inode = self.names.get(path)
        if inode is None:
            raise _missing(path)
        return inode

    def change_names(self, changes: dict[str, Inode | None]) -> None:
        _rename(self.names, changes)
        self._unsynced_names.append(changes)

    def sync_names(self, directory: str) -> None:
        later = []
        for changes in self._unsynced_names:
            if any(posixpath.dirname(path) == directory for path in changes):
                _rename(self._synced_names, changes)
            else:
                later.append(changes)
        self._unsynced_names = later

    def check_directory(self, path: str) -> str:
        path = posixpath.normpath(path)
        if path not in self.directories:
            raise _missing(path)
        return path


def _rename(names: dict[str, Inode], changes: dict[str, Inode | None]) -> None:
    for path, inode in changes.items():
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "No such file or directory", path)


class SimulatedDisk:
    """The Disk of one life of a process. Paths without a leading slash are relative to the root."""

    def __init__(self, storage: Storage, life: Life) -> None:
        self.storage = storage
        self.life = life

    def enter(self) -> Storage:
        if self.life.is_dead:
            raise Died
        return self.storage

    def open(self, path: str) -> File:
        storage, path = self.enter(), _absolute(path)
        storage.check("open", path)
        return SimulatedFile(self, path, storage.find(path), is_writable=False)

    def create(self, path: str) -> File:
        storage, path = self.enter(), _absolute(path)
        storage.operate("create", path)
        storage.check_directory(posixpath.dirname(path))
        if path in storage.names:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        inode = Inode()
        storage.change_names({path: inode})
        return SimulatedFile(self, path, inode, is_writable=True)

    def append_to(self, path: str) -> File:
        storage, path = self.enter(), _absolute(path)
        storage.check("append_to", path)
        return SimulatedFile(self, path, storage.find(path), is_writable=True)

    def overwrite(self, path: str, data: bytes, *offsets: int) -> None:
        storage, path = self.enter(), _absolute(path)
        inode = storage.find(path)
        check_within(path, len(inode.data), len(data), offsets)
        for offset in offsets:
            storage.operate("overwrite", path)
            inode.overwrite(offset, data)
        _sync(storage, path, inode)

    def rename(self, old: str, new: str) -> None:
        storage, old, new = self.enter(), _absolute(old), _absolute(new)
        storage.operate("rename", f"{old} {new}")
        storage.check_directory(posixpath.dirname(new))
        storage.change_names({old: None, new: storage.find(old)})

    def link(self, old: str, new: str) -> None:
        storage, old, new = self.enter(), _absolute(old), _absolute(new)
        storage.operate("link", f"{old} {new}")
        storage.check_directory(posixpath.dirname(new))
        inode = storage.find(old)
        if new in storage.names:
            raise FileExistsError(errno.EEXIST, "File exists", new)
        storage.change_names({new: inode})

    def unlink(self, path: str) -> None:
        storage, path = self.enter(), _absolute(path)
        storage.operate("unlink", path)
        inode = storage.find(path)
        if sum(each is inode for each in storage.names.values()) == 1:
            storage.room += len(inode.data)
        storage.removed[path] = inode
        storage.change_names({path: None})

    def make_directory(self, path: str) -> None:
        storage, path = self.enter(), _absolute(path)
        storage.check("make_directory", path)
        while path not in storage.directories:
            if path in storage.names:
                raise FileExistsError(errno.EEXIST, "File exists", path)
            storage.directories[path] = None
            path = posixpath.dirname(path)

    def list_directory(self, path: str) -> list[str]:
        storage, path = self.enter(), _absolute(path)
        storage.check("list_directory", path)
        storage.check_directory(path)
        paths = (*storage.names, *storage.directories)
        return sorted(posixpath.basename(each) for each in paths if posixpath.dirname(each) == path and each != path)

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        storage, path = self.enter(), _absolute(path)
        if path in storage.names:
            return "file"
        return "directory" if path in storage.directories else None

    def is_link(self, path: str) -> bool:
        return False

    def real_path(self, path: str) -> str:
        return _absolute(path)

    def size(self, path: str) -> int:
        return len(self.enter().find(_absolute(path)).data)

    def sync_directory(self, path: str) -> None:
        storage, path = self.enter(), _absolute(path)
        storage.operate("sync_directory", path)
        storage.sync_names(storage.check_directory(path))

    def lock(self, path: str) -> Lock:
        storage, path = self.enter(), _absolute(path)
        return self._lock(path, storage.check_directory(path))

    def lock_file(self, path: str) -> Lock:
        storage, path = self.enter(), _absolute(path)
        return self._lock(path, storage.find(path))

    def _lock(self, path: str, held: str | Inode) -> Lock:
        storage = self.storage
        if held in storage.locked:
            raise AlreadyLocked(
                f"cannot lock {path}: it is in use",
                hint="stop the process that uses it, or choose another directory",
            )
        storage.locked[held] = self.life
        return SimulatedLock(self, held)

    def free_space(self, path: str) -> int:
        return self.enter().room

    def open_files_max(self) -> int | None:
        return None


class SimulatedLock:
    def __init__(self, disk: SimulatedDisk, held: str | Inode) -> None:
        self._disk, self._held = disk, held

    def release(self) -> None:
        """Release a lock, unless the process is dead: the lock is no longer its own."""
        locked = self._disk.storage.locked
        if locked.get(self._held) is self._disk.life:
            del locked[self._held]

    def is_at(self, path: str) -> bool:
        path = _absolute(path)
        return self._disk.enter().names.get(path, path) == self._held

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SimulatedFile:
    def __init__(self, disk: SimulatedDisk, path: str, inode: Inode, *, is_writable: bool) -> None:
        self.path = path
        self._disk = disk
        self._inode = inode
        self._is_writable = is_writable
        self._is_closed = False
        disk.storage.opened[self] = disk.life

    def size(self) -> int:
        self._enter()
        return len(self._inode.data)

    def read_at(self, offset: int, size: int) -> bytes:
        storage = self._enter()
        storage.check("read_at", self.path)
        storage.reads[self.path] += 1
        return bytes(memoryview(self._inode.data)[offset : offset + size])

    def append(self, *parts: Buffer) -> None:
        storage = self._enter(for_writing=True)
        data = b"".join(parts)
        storage.refused[self._inode] = None  # unless the write is completed
        storage.operate("append", self.path, data, self._inode)
        taken = min(len(data), storage.room)
        storage.room -= taken
        self._inode.append(data[:taken])
        if taken < len(data):
            storage.failure_count += 1
            raise OSError(errno.ENOSPC, "No space left on device", self.path)
        del storage.refused[self._inode]

    def truncate(self, size: int) -> None:
        storage = self._enter(for_writing=True)
        storage.operate("truncate", self.path)
        storage.room += len(self._inode.data) - size
        self._inode.truncate(size)

    def sync(self) -> None:
        _sync(self._enter(), self.path, self._inode)

    def close(self) -> None:
        self._is_closed = True
        self._disk.storage.opened.pop(self, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, *, for_writing: bool = False) -> Storage:
        storage = self._disk.enter()
        if self._is_closed or (for_writing and not self._is_writable):
            raise OSError(errno.EBADF, "Bad file descriptor", self.path)
        return storage


def _sync(storage: Storage, path: str, inode: Inode) -> None:
    try:
        storage.operate("sync", path)
    except OSError:
        inode.fail_to_sync()
        raise
    inode.sync()


def _absolute(path: str) -> str:
    return posixpath.normpath(posixpath.join("/", path))


def _check(disk: SimulatedDisk) -> Disk:
    """Let the type checker compare the class with the protocol."""
    return disk
