"""Recovery of a box from its files, and bootstrap of a replica set in an empty directory.

Recovery finds the newest snapshot and the logs after it, checks that there are no gaps, and passes their rows to
`node/wal/replay.py`. It removes incomplete files that a crash has left, and changes no other file. `RecoveredBox` has
what the node needs to continue: vclock, identity, last log, and the state of elections and limbo.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import posixpath
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from flowstone.box import system
from flowstone.box.bootstrap import FirstUser, bootstrap_rows
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect, from_greeting
from flowstone.box.engine import statements
from flowstone.errors import FlowstoneError
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.slab import Slab
from flowstone.node.schema_row import schema_row
from flowstone.node.wal.checkpoint import SynchroStates, write_snapshot
from flowstone.node.wal.journal import LastLog
from flowstone.node.wal.replay import Replay, Synchro
from flowstone.outside import AlreadyLocked, Disk, Lock, Outside
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.errors import BY_FORCE, LogGap, XlogError
from flowstone.xlog.reader import EndingKind, LogFile
from flowstone.xlog.writer import INPROGRESS

LOG = logging.getLogger("flowstone.node")

FLAGS_SINCE = (2, 8, 1)
"""Rows have flags for synchronous transactions since this version; for rows of earlier versions, the definition of the
space decides."""

COPIED_AT_ONCE: Final = 1 << 20

Report = Callable[[str], None]

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)", re.ASCII)


@dataclass(slots=True)
class RecoveredBox:
    """The result of recovery. `replica_id` is 0 for an instance that is not, or no longer, registered in `_cluster`."""

    vclock: VClock
    instance_uuid: UUID
    replicaset_uuid: UUID | None
    replica_id: int
    synchro: Synchro
    last: LastLog | None = None
    row_count: int = 0
    left_out: list[str] = field(default_factory=list)
    """A text for each part that force_recovery skipped."""


class NothingToRecover(FlowstoneError):
    """The directory has logs, but no snapshot that they start from."""


def lock_directory(disk: Disk, directory: str) -> Lock:
    """Lock `directory` against other processes, including Tarantool; create it if it does not exist.

    Raise AlreadyLocked if another process holds the lock.
    """
    disk.make_directory(directory)
    try:
        return disk.lock(directory)
    except AlreadyLocked as error:
        raise AlreadyLocked(
            f"another instance is running in {directory}", hint="stop it first, or choose another work_dir"
        ) from error


def find_files(disk: Disk, memtx_dir: str, wal_dir: str) -> LogDirectory:
    """Return the snapshots in `memtx_dir` and the logs in `wal_dir`, which may be the same directory."""
    snapshots = scan_directory(disk, memtx_dir)
    if posixpath.normpath(memtx_dir) == posixpath.normpath(wal_dir):
        return _without_empty_end(disk, snapshots)
    logs = scan_directory(disk, wal_dir)
    directory = LogDirectory(
        memtx_dir,
        snapshots.snapshots,
        logs.logs,
        snapshots.leftovers + logs.leftovers,
        snapshots.vinyl_count + logs.vinyl_count,
    )
    return _without_empty_end(disk, directory)


def _without_empty_end(disk: Disk, directory: LogDirectory) -> LogDirectory:
    """Treat an empty last log as a leftover: a file system may keep the name of a file and lose its content."""
    if not directory.snapshots or not directory.logs or disk.size(directory.logs[-1].path):
        return directory
    path = directory.logs[-1].path
    LOG.warning("%s is empty and has no header: treating it as a leftover of a crash", path)
    return replace(directory, logs=directory.logs[:-1], leftovers=(*directory.leftovers, path))


def is_empty(directory: LogDirectory) -> bool:
    """Return True if there is nothing to recover, so that the instance has to join or bootstrap."""
    return not directory.snapshots and not directory.logs


def dialect_of(directory: LogDirectory) -> Dialect | None:
    """Return the dialect of the newest file; None if there are no files."""
    newest = max((*directory.snapshots[-1:], *directory.logs[-1:]), key=lambda file: file.signature, default=None)
    if newest is None:
        return None
    version = _version(newest.meta.version)
    return Dialect.V2_11 if version is None else from_greeting(version)


async def recover(outside: Outside, directory: LogDirectory, box: Box, *, force: bool = False) -> RecoveredBox:
    """Load the files of `directory` into `box`, which must be new.

    Raise an error with file and position for damage, gaps, and rows that cannot be applied. With `force` they are
    skipped and logged instead.
    """
    snapshot = directory.newest_snapshot()
    if snapshot is None:
        raise NothingToRecover(
            f"no snapshot in {directory.path}, but {len(directory.logs)} logs",
            hint="restore the .snap file that the logs start from",
        )
    if directory.vinyl_count:
        LOG.warning("ignoring %d files of the vinyl engine in %s", directory.vinyl_count, directory.path)
    for leftover in directory.leftovers:
        # Delete before anything is written: a leftover could have the name of the next file.
        outside.disk.unlink(leftover)
    left_out: list[str] = []

    def report(what: str) -> None:
        LOG.warning("force_recovery: %s", what)
        left_out.append(what)

    box.is_recovering = True
    try:
        with advice():
            replay = Replay(box, force=force, report=report)
            await _read_snapshot(outside, snapshot, replay, force, report)
            last = await _read_logs(outside, directory, snapshot, replay, force, report)
    finally:
        box.is_recovering = False
    replay.synchro.pending = replay.pending
    instance_uuid = UUID(snapshot.meta.instance_uuid)
    return RecoveredBox(
        replay.vclock,
        instance_uuid,
        replicaset_uuid_of(box),
        replica_id_of(box, instance_uuid),
        replay.synchro,
        last,
        replay.row_count,
        left_out,
    )


def make_durable(disk: Disk, directory: LogDirectory, last: LastLog | None) -> None:
    """Sync the last log and the directories.

    Rows of a killed process may be in the page cache only. From now on peers see the recovered vclock: they count this
    instance for a quorum, and delete logs that it no longer needs.

    A sync that fails marks the pages as clean, and no later sync writes them, not even one of the next process. So the
    log is written anew, unless the disk has no room for another copy.
    """
    if last is not None:
        copy = f"{last.path}{INPROGRESS}"
        try:
            _copy(disk, last.path, copy)
        except OSError as error:
            if disk.kind(copy) is not None:
                disk.unlink(copy)
            if error.errno != errno.ENOSPC:
                raise
            with disk.append_to(last.path) as file:
                file.sync()
        else:
            disk.rename(copy, last.path)
        disk.sync_directory(posixpath.dirname(last.path) or ".")
    disk.sync_directory(directory.path)


def _copy(disk: Disk, path: str, copy: str) -> None:
    """Write the file anew as `copy`, and sync it."""
    if disk.kind(copy) is not None:  # of a process that was killed
        disk.unlink(copy)
    with disk.open(path) as file, disk.create(copy) as written:
        for offset in range(0, file.size(), COPIED_AT_ONCE):
            written.append(file.read_at(offset, COPIED_AT_ONCE))
        written.sync()


@contextmanager
def advice() -> Iterator[None]:
    """Replace `force`, an argument of the file readers, with the option `force_recovery` in the hints of errors."""
    try:
        yield
    except XlogError as error:
        error.hint = error.hint and error.hint.replace(BY_FORCE, "with force_recovery")
        raise


async def bootstrap(
    outside: Outside,
    memtx_dir: str,
    box: Box,
    *,
    instance_uuid: UUID | None = None,
    replicaset_uuid: UUID | None = None,
    first_user: FirstUser | None = None,
    peers: Sequence[UUID] = (),
) -> RecoveredBox:
    """Create a replica set: fill `box`, which must be new, and write the first snapshot, with vclock {}.

    `peers` are registered as members with ids from 2 on.
    """
    instance = instance_uuid or outside.random.uuid()
    replicaset = replicaset_uuid or outside.random.uuid()
    now = int(outside.clock.wall())
    box.is_recovering = True
    try:
        for space_id, row in bootstrap_rows(box.dialect, instance, replicaset, first_user, time=now):
            statements.insert(box.begin(), box.space(space_id), row)
        for replica_id, peer in enumerate(peers, 2):
            statements.insert(box.begin(), box.space(system.CLUSTER_ID), pack((replica_id, str(peer))))
    finally:
        box.is_recovering = False
    with box.open_view() as view:
        await write_snapshot(outside, memtx_dir, view, box.dialect, str(instance), VClock(), SynchroStates())
    return RecoveredBox(VClock(), instance, replicaset, replica_id_of(box, instance), Synchro())


def replicaset_uuid_of(box: Box) -> UUID | None:
    """Return the UUID of the replica set in `_schema`, where its key is `cluster`, or `replicaset_uuid` since 3.0."""
    for key in ("cluster", "replicaset_uuid"):
        if row := schema_row(box, key):
            return UUID(str(row[0]))
    return None


def replica_id_of(box: Box, instance_uuid: UUID) -> int:
    """Return the id of the instance in `_cluster`; 0 if it is not registered."""
    for row in _rows(box, system.CLUSTER_ID):
        if UUID(str(row[1])) == instance_uuid:
            return int(row[0])
    return 0


def _rows(box: Box, space_id: int) -> Iterator[tuple[Any, ...]]:
    return (unpack(raw) for raw in box.space(space_id).tuples())


async def _read_snapshot(outside: Outside, listed: ListedFile, replay: Replay, force: bool, report: Report) -> None:
    LOG.info("recovering from %s", listed.path)
    vclock = VClock(listed.meta.vclock)
    with LogFile.open(outside.disk, listed.path, force=force) as file:
        async for slab in _slabs(outside, file):
            replay.push_snapshot(slab)
        _report_skipped(file, report)
    replay.start_logs(vclock)
    LOG.info("recovered %d rows of the snapshot at %s", replay.row_count, vclock)


async def _read_logs(
    outside: Outside, directory: LogDirectory, snapshot: ListedFile, replay: Replay, force: bool, report: Report
) -> LastLog | None:
    last: LastLog | None = None
    for listed in directory.files_from(snapshot.meta.vclock, force=force):
        start = VClock(listed.meta.vclock)
        # A log must start at or before the end of the one before it, else rows between them are missing.
        if not start <= replay.vclock:
            gap = _gap(listed, replay.vclock)
            if not force:
                raise gap
            report(str(gap))
        LOG.info("recovering from %s", listed.path)
        version = _version(listed.meta.version)
        replay.start_log(listed.path, start, has_flags=version is None or version >= FLAGS_SINCE)
        with LogFile.open(outside.disk, listed.path, force=force) as file:
            async for slab in _slabs(outside, file):
                replay.push_log(slab)
            _report_skipped(file, report)
            ending = file.ending
        assert ending is not None  # a log read to its end without an error has one
        if ending.kind is EndingKind.TORN:
            LOG.warning(
                "%s: ignoring %d bytes of an incomplete write at byte %d: %s",
                listed.path,
                ending.lost,
                ending.offset,
                ending.what,
            )
        # The offset of a torn tail is where the journal continues: these bytes were never acknowledged.
        last = LastLog(listed.path, listed.meta, ending.offset, ending.kind is EndingKind.COMPLETE)
    return last


async def _slabs(outside: Outside, file: LogFile) -> AsyncIterator[Slab]:
    """Yield the decoded chunks of a file. A worker reads and decodes the next one while the caller uses this one."""
    chunks = file.chunks()

    def decode_next() -> Slab | None:
        chunk = next(chunks, None)
        return None if chunk is None else chunk.decode()

    def begin() -> asyncio.Task[Slab | None]:
        return asyncio.get_running_loop().create_task(outside.blocking(decode_next))

    ahead = begin()
    try:
        while (slab := await ahead) is not None:
            ahead = begin()
            # Yield to the event loop once, so that the worker starts before the caller keeps this thread busy.
            await outside.clock.sleep(0)
            file.skipped.extend(slab.skipped)
            yield slab
    finally:
        ahead.cancel()


def _report_skipped(file: LogFile, report: Report) -> None:
    for skipped in file.skipped:
        report(f"{skipped.path}: skipped bytes {skipped.offset} to {skipped.end}: {skipped.why}")


def _gap(listed: ListedFile, have: VClock) -> LogGap:
    need = VClock(listed.meta.vclock)
    missing = [(number, have.get(number) + 1, lsn) for number, lsn in need if lsn > have.get(number)]
    return LogGap(listed.path, have.to_mapping(), need.to_mapping(), missing)


def _version(text: str) -> tuple[int, int, int] | None:
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
