"""Files and directories, with the durability that log files need.

Paths are `str`. Failures are plain OSErrors with `filename` set, so that a caller can say which file;
the one exception is `AlreadyLocked`, which an operator must understand. Nothing here caches: what a
call has returned is what the kernel said.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Protocol, Self

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in collections.abc only from Python 3.12 on

DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Modes of new directories and files: logs and snapshots hold password hashes, so only their owner may read them."""

# writev takes at most IOV_MAX parts at once (1024 on Linux and macOS).
WRITEV_PARTS_MAX = 1024


class AlreadyLocked(FlowstoneError):
    """Somebody else, in this process or another, holds the lock."""


class File(Protocol):
    """An open file. Reads go anywhere, writes only to the end."""

    @property
    def path(self) -> str:
        """The path it was opened by; a later rename does not change it."""
        ...

    def size(self) -> int:
        """The length now, what others have appended included."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer only where the file ends, b"" behind it."""
        ...

    def append(self, *parts: Buffer) -> None:
        """Write all parts at the end, in order, or raise OSError.

        After an error any prefix may have been written: the caller truncates to the size it knew."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; the next append follows them."""
        ...

    def sync(self) -> None:
        """Return when the content and the length survive a loss of power."""
        ...

    def close(self) -> None:
        """Give the file back; closing twice is harmless. Does not sync."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lock(Protocol):
    """A held lock: until `release`, the end of the `with` block, or the death of the process."""

    def release(self) -> None:
        """Let go; releasing twice is harmless."""
        ...

    def is_at(self, path: str) -> bool:
        """Whether this path leads to what is locked: its name may have been given to something else meanwhile."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Disk(Protocol):
    """The file system."""

    def open(self, path: str) -> File:
        """An existing file, for reading."""
        ...

    def create(self, path: str) -> File:
        """A new file, for writing and reading, by its owner only; FileExistsError if there is one.

        The name survives a loss of power only after `sync_directory` of its directory."""
        ...

    def append_to(self, path: str) -> File:
        """An existing file, for writing at its end and reading."""
        ...

    def overwrite(self, path: str, data: bytes, *offsets: int) -> None:
        """Put `data` over bytes of an existing file at each of the offsets; durable on return, with all appended bytes.

        For marks that a log file has room for. After an error, or a crash, any of them may be there, in no order.
        ValueError, and nothing is written, if the file would grow."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give `old` the name `new`, atomically, replacing a file that has it."""
        ...

    def link(self, old: str, new: str) -> None:
        """Give the file `old` another name; FileExistsError if something has it. What is done to one is done to both.

        OSError where the file system knows no such names, or `new` lies in another one: then a copy must do."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name of a file, and with its last name the file."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents, all readable by their owner only; existing ones keep their modes."""
        ...

    def list_directory(self, path: str) -> list[str]:
        """The names in a directory, sorted."""
        ...

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """What a path leads to, links followed; None if nothing, or neither of the two."""
        ...

    def is_link(self, path: str) -> bool:
        """Whether the path itself is a symbolic link, wherever that leads."""
        ...

    def real_path(self, path: str) -> str:
        """Where a path leads to, from the root on and without links. Nothing needs to be there."""
        ...

    def size(self, path: str) -> int:
        """The length of a file."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when creations, renames and removals in this directory survive a loss of power."""
        ...

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock on a directory, the one that a Tarantool takes on its `wal_dir`, or AlreadyLocked."""
        ...

    def lock_file(self, path: str) -> Lock:
        """Take the exclusive lock on a file, the one that a Limestone takes on its manifest, or AlreadyLocked.

        It is on the file, not its name: whoever replaces a locked file by rename has left the lock behind."""
        ...

    def free_space(self, path: str) -> int:
        """Bytes that an unprivileged writer can still add to the file system holding `path`."""
        ...

    def open_files_max(self) -> int | None:
        """Return how many files and sockets this process may have open at once; None if there is no limit."""
        ...


def check_within(path: str, end: int, size: int, offsets: Iterable[int]) -> None:
    """ValueError if `size` bytes at one of the offsets are not all in a file of this length."""
    for offset in offsets:
        if offset < 0 or offset + size > end:
            raise ValueError(f"cannot overwrite {size} bytes at {offset} of {path}: it ends at {end}")


def make_private_directory(path: str) -> None:
    """Make a directory and its missing parents with `DIRECTORY_MODE`; existing ones keep their modes.

    `os.makedirs` gives its mode to the last directory only.
    """
    parent = os.path.dirname(path.rstrip("/"))
    if parent and not os.path.exists(parent):
        make_private_directory(parent)
    os.makedirs(path, mode=DIRECTORY_MODE, exist_ok=True)


class SystemDisk:
    """The file system of this machine."""

    def open(self, path: str) -> File:
        return _open(path, os.O_RDONLY)

    def create(self, path: str) -> File:
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def append_to(self, path: str) -> File:
        return _open(path, os.O_RDWR | os.O_APPEND)

    def overwrite(self, path: str, data: bytes, *offsets: int) -> None:
        # Not through append_to: with O_APPEND, Linux writes to the end whatever the offset.
        with _named(path), _SystemFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC)) as file:
            check_within(path, file.size(), len(data), offsets)
            for offset in offsets:
                file.write_at(offset, data)
            file.sync()

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        make_private_directory(path)

    def list_directory(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISREG(mode):
            return "file"
        return "directory" if stat.S_ISDIR(mode) else None

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def real_path(self, path: str) -> str:
        return os.path.realpath(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _named(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str) -> Lock:
        return _locked(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def lock_file(self, path: str) -> Lock:
        return _locked(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def free_space(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def open_files_max(self) -> int | None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft


class _Descriptor:
    """An open file descriptor that is closed once, by whoever comes first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _SystemLock(_Descriptor):
    def release(self) -> None:
        # Closing the only descriptor of the open file releases its flock.
        self.close()

    def is_at(self, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False


class _SystemFile(_Descriptor):
    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(descriptor)
        self._path = path

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        with _named(self._path):
            return os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        with _named(self._path):
            data = os.pread(self._descriptor, size, offset)
            if len(data) == size or not data:
                return data
            # A signal or a size above the kernel's limit per call gives less than there is.
            pieces = [data]
            missing = size - len(data)
            while missing > 0:
                data = os.pread(self._descriptor, missing, offset + size - missing)
                if not data:
                    break
                pieces.append(data)
                missing -= len(data)
            return b"".join(pieces)

    def write_at(self, offset: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def append(self, *parts: Buffer) -> None:
        # First as almost always: a few parts, written at once. This is in the way of every write to a log.
        if len(parts) <= WRITEV_PARTS_MAX:
            try:
                written = os.writev(self._descriptor, parts)
            except OSError as error:
                error.filename = self._path
                raise
            missing = -written
            for part in parts:
                missing += len(part) if type(part) is bytes else memoryview(part).nbytes
            if not missing:
                return
        else:
            written = 0
        pending = _behind([view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes], written)
        with _named(self._path):
            while pending:
                written = os.writev(self._descriptor, pending[:WRITEV_PARTS_MAX])
                if written == 0:
                    raise OSError(errno.EIO, "nothing could be written")
                pending = _behind(pending, written)

    def truncate(self, size: int) -> None:
        with _named(self._path):
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        with _named(self._path):
            # macOS has no fdatasync; fsync promises at least as much.
            getattr(os, "fdatasync", os.fsync)(self._descriptor)


def _locked(path: str, descriptor: int) -> _SystemLock:
    """The lock on what the descriptor leads to; closed again if somebody else has it."""
    try:
        with _named(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadyLocked(
            f"cannot lock {path}: it is in use",
            hint="stop the process that holds it, or choose another directory",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return _SystemLock(descriptor)


def _open(path: str, flags: int) -> _SystemFile:
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    # Opening a directory read-only succeeds; the surprise would come with the first read.
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return _SystemFile(path, descriptor)


def _behind(parts: list[memoryview], written: int) -> list[memoryview]:
    """What is left of `parts` when their first `written` bytes are on disk."""
    for index, part in enumerate(parts):
        if written < part.nbytes:
            return [part[written:], *parts[index + 1 :]]
        written -= part.nbytes
    return []


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Calls on descriptors raise OSErrors without a file name: put it there."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise
