"""Files and directories, with the durability that log files need.

Paths are `str`. Failures are plain OSErrors with `filename` set, so that a message can name the file; the only
exception is `AlreadyLocked`, which has a message for operators. Nothing is cached: every call asks the kernel.
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
"""Modes of new directories and files: logs and snapshots contain password hashes, so only their owner may read them."""

WRITEV_PARTS_MAX = 1024
"""IOV_MAX, the maximum number of parts per writev (1024 on Linux and macOS)."""


class AlreadyLocked(FlowstoneError):
    """The lock is held elsewhere, in this process or another."""


class File(Protocol):
    """An open file. Reads at any offset, writes only at the end."""

    @property
    def path(self) -> str:
        """The path that the file was opened with; a later rename does not change it."""
        ...

    def size(self) -> int:
        """Return the current length, including data that others have appended."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer only at the end of the file, b"" past it."""
        ...

    def append(self, *parts: Buffer) -> None:
        """Write all parts at the end, in order, or raise OSError.

        After an error any prefix may have been written; the caller must truncate the file to its previous size."""
        ...

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes; the next append starts there."""
        ...

    def sync(self) -> None:
        """Make content and length durable: they survive a loss of power once this returns."""
        ...

    def close(self) -> None:
        """Close the file; closing twice is harmless. Does not sync."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lock(Protocol):
    """A lock, held until `release`, the end of the `with` block, or the death of the process."""

    def release(self) -> None:
        """Release the lock; releasing twice is harmless."""
        ...

    def is_at(self, path: str) -> bool:
        """Return True if `path` is still the locked file or directory: it may have been replaced meanwhile."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Disk(Protocol):
    """The file system."""

    def open(self, path: str) -> File:
        """Open an existing file for reading."""
        ...

    def create(self, path: str) -> File:
        """Create a file for writing and reading, accessible to its owner only; raise FileExistsError if it exists.

        The name is durable only after `sync_directory` of its directory."""
        ...

    def append_to(self, path: str) -> File:
        """Open an existing file for appending and reading."""
        ...

    def overwrite(self, path: str, data: bytes, *offsets: int) -> None:
        """Overwrite bytes of an existing file with `data` at each of the offsets, and sync the file.

        For marks that a log file reserves space for. After an error or a crash any of them may have been written.
        Raise ValueError, before anything is written, if the file would grow."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename `old` to `new` atomically, replacing an existing file."""
        ...

    def link(self, old: str, new: str) -> None:
        """Create a hard link `new` to the file `old`; raise FileExistsError if `new` exists.

        Raise OSError if the file system has no hard links, or if `new` is on another file system; then copy the file.
        """
        ...

    def unlink(self, path: str) -> None:
        """Remove a name of a file; with the last name, the file itself."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents, accessible to their owner only; existing ones keep their modes."""
        ...

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """Return the type of `path`, following symbolic links; None if it does not exist or is neither of the two."""
        ...

    def is_link(self, path: str) -> bool:
        """Return True if the path itself is a symbolic link, even a broken one."""
        ...

    def real_path(self, path: str) -> str:
        """Return the absolute path with symbolic links resolved. The path need not exist."""
        ...

    def size(self, path: str) -> int:
        """Return the length of a file."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make creations, renames and removals in this directory durable."""
        ...

    def lock(self, path: str) -> Lock:
        """Lock a directory exclusively, as Tarantool locks its `wal_dir`; raise AlreadyLocked if it is locked."""
        ...

    def lock_file(self, path: str) -> Lock:
        """Lock a file exclusively, as Limestone locks its manifest; raise AlreadyLocked if it is locked.

        The lock is on the file, not on its name: a file that replaces it by rename is not locked."""
        ...

    def free_space(self, path: str) -> int:
        """Return the bytes available to an unprivileged user on the file system of `path`."""
        ...

    def open_files_max(self) -> int | None:
        """Return the maximum number of open files and sockets of this process; None if there is no limit."""
        ...


def check_within(path: str, end: int, size: int, offsets: Iterable[int]) -> None:
    """Raise ValueError unless `size` bytes at each of the offsets are within a file of length `end`."""
    for offset in offsets:
        if offset < 0 or offset + size > end:
            raise ValueError(f"cannot overwrite {size} bytes at offset {offset} of {path}: file ends at {end}")


def make_private_directory(path: str) -> None:
    """Create a directory and its missing parents with `DIRECTORY_MODE`; existing ones keep their modes.

    `os.makedirs` applies its mode to the last directory only.
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
        # Not through append_to: with O_APPEND, Linux appends and ignores the offset.
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
    """An open file descriptor that is closed exactly once: by `close`, the end of a `with` block, or collection."""

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
            # A read can be short because of a signal, or if `size` exceeds the kernel's limit per call.
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
        # Fast path for the common case: few parts, all written by one call. Every WAL write goes through here.
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
                    raise OSError(errno.EIO, "write returned zero bytes")
                pending = _behind(pending, written)

    def truncate(self, size: int) -> None:
        with _named(self._path):
            os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        with _named(self._path):
            # macOS has no fdatasync; fsync guarantees at least as much.
            getattr(os, "fdatasync", os.fsync)(self._descriptor)


def _locked(path: str, descriptor: int) -> _SystemLock:
    """Lock the open file or directory; close the descriptor and raise AlreadyLocked if it is locked."""
    try:
        with _named(path):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadyLocked(
            f"cannot lock {path}: it is in use",
            hint="stop the process that uses it, or choose another directory",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return _SystemLock(descriptor)


def _open(path: str, flags: int) -> _SystemFile:
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    # Opening a directory read-only succeeds; fail here instead of at the first read.
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return _SystemFile(path, descriptor)


def _behind(parts: list[memoryview], written: int) -> list[memoryview]:
    """Return the rest of `parts` after their first `written` bytes."""
    for index, part in enumerate(parts):
        if written < part.nbytes:
            return [part[written:], *parts[index + 1 :]]
        written -= part.nbytes
    return []


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Set `filename` in OSErrors: calls on file descriptors leave it empty."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise
