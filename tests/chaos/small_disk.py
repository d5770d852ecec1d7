"""A place for files that can be made full and empty again, without harm to any other.

Root mounts a file system of its own, and so does everybody else in a namespace where they are root. Where neither is
allowed, the kernel is told that the files of a process may not grow: the process sees another error number, no other
difference. Which of these it is, `kind` says.
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
"""The log of a process, which is on another disk in truth, must have this much room before its other files stop."""


class SmallDisk(ABC):
    """One for each process."""

    kind: str

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)

    @abstractmethod
    def fill(self) -> bool:
        """From now on nothing can be written; False where that is not possible just now."""

    @abstractmethod
    def empty(self) -> None:
        """As before."""

    @abstractmethod
    def close(self) -> None:
        """Takes the disk away, with all that is on it."""


class MountedDisk(SmallDisk):
    """A file system in memory, which is full when its ballast has taken the rest."""

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
    """Files that may not grow beyond the newest log. `pid`: whose they are, now; `log`: what it must not hit."""

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
        """There is none to take away."""

    def _limit(self, size: int) -> None:
        _, hard = resource.prlimit(self._pid(), resource.RLIMIT_FSIZE)
        resource.prlimit(self._pid(), resource.RLIMIT_FSIZE, (size, hard))


def small_disk(directory: Path, pid: Callable[[], int], log: Path) -> SmallDisk:
    """The best that can be had here."""
    try:
        return MountedDisk(directory)
    except PermissionError:
        directory.rmdir()
        return LimitedFiles(directory, pid, log)


def enter_namespace() -> None:
    """Begins this program again where it is root, if it is not and such a place can be had."""
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
