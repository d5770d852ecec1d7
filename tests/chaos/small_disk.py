"""A directory that can be made full and empty again, without affecting other directories.

Root mounts a file system of its own, and so do other users in a namespace where they are root. If neither is allowed, a
file size limit is set for the process: only the error number differs. `kind` is the method in use.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

SIZE: Final = 96 << 20
BALLAST: Final = "ballast"
IN_NAMESPACE: Final = "FLOWSTONE_CHAOS_IN_NAMESPACE"
GROWTH: Final = 8 << 10
"""Minimum distance of the limit from the log of a process, which is really on another disk."""


class SmallDisk(ABC):
    """The disk of one process."""

    kind: str

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)

    @abstractmethod
    def fill(self) -> bool:
        """Make all further writes fail; False if that is not possible at the moment."""

    @abstractmethod
    def empty(self) -> None:
        """Make space: writes succeed again."""

    @abstractmethod
    def close(self) -> None:
        """Unmount the disk, with its contents."""


class MountedDisk(SmallDisk):
    """A file system in memory; a ballast file fills it."""

    kind = "tmpfs"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        _mount(directory, SIZE)

    def fill(self) -> bool:
        with (self.directory / BALLAST).open("wb") as ballast:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        os.posix_fallocate(ballast.fileno(), ballast.seek(0, os.SEEK_END), size)
        return True

    def empty(self) -> None:
        (self.directory / BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.directory)], check=True)


class LimitedFiles(SmallDisk):
    """Files limited to the size of the newest log.

    `pid`: the current process; `log`: the file that must not reach the limit.
    """

    kind = "limit of file sizes"

    def __init__(self, directory: Path, pid: Callable[[], int], log: Path) -> None:
        super().__init__(directory)
        self._pid = pid
        self._log = log

    def fill(self) -> bool:
        newest = max(self.directory.glob("*.xlog"), key=lambda path: path.name, default=None)
        size = newest.stat().st_size if newest else 0
        if size < self._log.stat().st_size + GROWTH:
            return False
        self._limit(size)
        return True

    def empty(self) -> None:
        with suppress(ProcessLookupError):
            self._limit(resource.getrlimit(resource.RLIMIT_FSIZE)[0])

    def close(self) -> None:
        """Do nothing: nothing is mounted."""

    def _limit(self, size: int) -> None:
        _, hard = resource.prlimit(self._pid(), resource.RLIMIT_FSIZE)
        resource.prlimit(self._pid(), resource.RLIMIT_FSIZE, (size, hard))


def small_disk(directory: Path, pid: Callable[[], int], log: Path) -> SmallDisk:
    """Return the best kind available here."""
    try:
        return MountedDisk(directory)
    except PermissionError:
        directory.rmdir()
        return LimitedFiles(directory, pid, log)


def enter_namespace() -> None:
    """Restart this program as root in a namespace, if it is not root and a namespace is available."""
    if os.geteuid() == 0 or IN_NAMESPACE in os.environ:
        return
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[IN_NAMESPACE] = "1"
        os.execvp(unshare[0], [*unshare, *sys.orig_argv])


def _mount(directory: Path, size: int) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(done.stderr.strip())
