"""A directory of log files: the newest snapshot, the logs that cover a position, the gaps.

Relies on `outside.disk`. Reads only names and text headers, each header at most once. Ignores other files and never
changes anything. It follows the rules of a real server's recovery (`docs/spec/files.md#log-recovery`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from flowstone.outside.disk import Disk
from flowstone.xlog.errors import DamagedLog, ForeignFile, LogGap, XlogError
from flowstone.xlog.meta import HEADER_READ_SIZE, FileType, Meta, Vclock, parse, signature
from flowstone.xlog.writer import INPROGRESS

_NAME = re.compile(r"(\d{20})\.(snap|xlog)")
_VINYL = re.compile(r"\d{20}\.(?:vylog|run|index)")


@dataclass(frozen=True)
class ListedFile:
    """A log file found by its name. Its header is read on first access."""

    disk: Disk = field(repr=False, compare=False)
    path: str
    file_type: FileType
    signature: int

    @cached_property
    def meta(self) -> Meta:
        """Return the text header. It must match the name: a renamed file would be replayed at a wrong position."""
        with self.disk.open(self.path) as file:
            meta, _ = parse(file.read_at(0, HEADER_READ_SIZE), self.path)
        if meta.file_type is not self.file_type:
            raise DamagedLog(self.path, 0, f"file name says {self.file_type.value}, header {meta.file_type.value}")
        if (total := signature(meta.vclock)) != self.signature:
            raise DamagedLog(self.path, 0, f"file name says signature {self.signature}, vclock {total}")
        return meta


@dataclass(frozen=True)
class LogDirectory:
    """The files that `scan_directory` found. `snapshots` and `logs` are sorted by signature."""

    path: str
    snapshots: tuple[ListedFile, ...]
    logs: tuple[ListedFile, ...]
    leftovers: tuple[str, ...] = ()
    """Paths of `.inprogress` files: left by a crash, or being written."""
    vinyl_count: int = 0
    """Number of vinyl files, which Flowstone does not read."""
    others: tuple[str, ...] = ()
    """Names of all other files and directories."""

    def newest_snapshot(self) -> ListedFile | None:
        return self.snapshots[-1] if self.snapshots else None

    @cached_property
    def instance_uuid(self) -> str | None:
        """Return the UUID of the directory's instance, from the newest snapshot or else the newest log."""
        newest = self.newest_snapshot() or (self.logs[-1] if self.logs else None)
        return newest.meta.instance_uuid if newest else None

    def files_from(self, vclock: Vclock, *, force: bool = False, ignore_local: bool = False) -> list[ListedFile]:
        """Return the logs with the rows after `vclock`: the last log that begins at or before it, and all later ones.

        Raise LogGap if rows between `vclock` and the end are missing, ForeignFile if another instance wrote one of
        these logs, DamagedFile if a header cannot be read; with `force`, accept a gap and omit such files.
        `ignore_local` ignores component 0: in a position of another instance it does not count our local rows.
        """
        chosen: list[ListedFile] = []
        for log in reversed(self.logs):
            if not _is_ours(log, self.instance_uuid, force):
                continue
            chosen.append(log)
            if _covers(log.meta.vclock, vclock, ignore_local):
                break
        else:
            if chosen and not force:
                first = chosen[-1]
                need = {key: lsn for key, lsn in first.meta.vclock.items() if key or not ignore_local}
                raise LogGap(first.path, vclock, need, list(_missing(vclock, need)))
        chosen.reverse()
        if not force:
            _check_chain(chosen)
        return chosen


def scan_directory(disk: Disk, path: str) -> LogDirectory:
    """List the log files in `path`. Reads no file, so that a large directory costs one call."""
    found: dict[str, list[ListedFile]] = {"snap": [], "xlog": []}
    leftovers: list[str] = []
    others: list[str] = []
    vinyl_count = 0
    for name in disk.list_directory(path):
        full = posixpath.join(path, name)
        if match := _NAME.fullmatch(name):
            number, extension = match.groups()
            found[extension].append(ListedFile(disk, full, FileType[extension.upper()], int(number)))
        elif _NAME.fullmatch(name.removesuffix(INPROGRESS)):
            leftovers.append(full)
        elif _VINYL.fullmatch(name):
            vinyl_count += 1
        else:
            others.append(name)
    # Names have 20 digits each, so the order of names is the order of signatures.
    logs, snapshots = tuple(found["xlog"]), tuple(found["snap"])
    return LogDirectory(path, snapshots, logs, tuple(leftovers), vinyl_count, tuple(others))


def _is_ours(log: ListedFile, instance_uuid: str | None, force: bool) -> bool:
    try:
        if log.meta.instance_uuid != instance_uuid and instance_uuid is not None:
            raise ForeignFile(log.path, log.meta.instance_uuid, instance_uuid)
    except XlogError:
        if not force:
            raise
        return False
    return True


def _covers(start: Vclock, position: Vclock, ignore_local: bool) -> bool:
    """Return True if a log that starts at `start` is not ahead of `position` in any component."""
    compared = ((key, lsn) for key, lsn in start.items() if key or not ignore_local)
    return all(lsn <= position.get(key, 0) for key, lsn in compared)


def _check_chain(logs: Sequence[ListedFile]) -> None:
    """Check that each log names the start of the log before it; the first log of a directory need not."""
    for before, log in pairwise(logs):
        named = log.meta.prev_vclock
        if named is not None and named != before.meta.vclock:
            # The missing log started at `named`, where the log before it ended.
            missing = list(_missing(named, log.meta.vclock))
            raise LogGap(log.path, before.meta.vclock, log.meta.vclock, missing)


def _missing(have: Vclock, need: Vclock) -> Iterator[tuple[int, int, int]]:
    for replica_id, lsn in sorted(need.items()):
        if have.get(replica_id, 0) < lsn:
            yield replica_id, have.get(replica_id, 0) + 1, lsn
