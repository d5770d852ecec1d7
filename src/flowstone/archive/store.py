"""The directory of an archive: its manifest, its snapshots and its log, under one lock.

All calls block on the disk; call them from one worker at a time. A start reads the files that a real server would
recover from (the newest snapshot and the logs after it), and updates the manifest from them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Final, Self
from uuid import UUID

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.archive_log import WAL_MAX_SIZE, ArchiveLog, logs_behind, start_verdicts
from flowstone.archive.late_rows import overtaken_rows
from flowstone.archive.manifest import (
    FIRST,
    GAP,
    INTERVAL,
    ArchivedSnapshot,
    ArchivedUpstream,
    ArchiveManifest,
    Gap,
    NotAnArchive,
)
from flowstone.archive.received_snapshot import IncomingSnapshot, replicaset_uuid_of
from flowstone.archive.settled_tracker import Verdicts
from flowstone.iproto.slab import Slab
from flowstone.outside.disk import AlreadyLocked, Disk, Lock
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory

RowFilter = Callable[[bytes], bytes]
"""Transforms rows before they are written, such as by adding images."""

_NOBODYS_FILES: Final = frozenset({archive_manifest.TEMPORARY, "lost+found"})
"""Files that a directory for a new archive may have: a leftover of a killed start, and the file system's own."""


class ArchiveStore:
    """An archive on disk. `log` is None until there is a snapshot to start from.

    A new archive writes no files until its first snapshot is granted; `is_begun` is True from then on.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        lock: Lock,
        manifest: ArchiveManifest,
        wall: Callable[[], float],
        *,
        wal_max_size: int = WAL_MAX_SIZE,
    ) -> None:
        self._disk = disk
        self._lock = lock
        self._wall = wall
        self._wal_max_size = wal_max_size
        self.directory = directory
        self.manifest = manifest
        self.is_begun = True
        self.log: ArchiveLog | None = None
        self.on_rows: RowFilter | None = None

    @classmethod
    def open(
        cls, disk: Disk, directory: str, new_uuid: UUID, wall: Callable[[], float], *, wal_max_size: int = WAL_MAX_SIZE
    ) -> Self:
        """Open the archive in `directory`, which is created if missing; `new_uuid` is the UUID of a new archive.

        Raise AlreadyLocked if another process uses the directory, and NotAnArchive if it has other files or cannot be
        created.
        """
        try:
            disk.make_directory(directory)
        except OSError as error:
            what = f"cannot create archive directory {directory}: {error.strerror or error}"
            raise NotAnArchive(what, hint="use another directory") from error
        try:
            lock = disk.lock(directory)
        except AlreadyLocked as error:
            message = f"cannot archive into {directory}: another archive or a server is using it"
            raise AlreadyLocked(message, hint="stop it first, or use another directory") from error
        try:
            manifest = archive_manifest.load(disk, directory)
            found = scan_directory(disk, directory)
            if manifest is None:
                # Check before the first write: an archive must never mix its files with those of a server.
                _refuse_foreign_files(disk, directory)
            store = cls(
                disk, directory, lock, manifest or ArchiveManifest(str(new_uuid)), wall, wal_max_size=wal_max_size
            )
            # The manifest of a new archive is written with its first snapshot: a typo in the URI leaves an empty
            # directory.
            store.is_begun = manifest is not None
            for leftover in found.leftovers:
                disk.unlink(leftover)
            store._recover(found)
        except BaseException:
            lock.release()
            raise
        return store

    def close(self) -> None:
        """Close the log with its end marker, save the manifest and release the lock."""
        try:
            if self.log is not None:
                self.log.close()
            self.save()
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Release the lock and leave the files as they are, because their state is uncertain after an error."""
        if self.log is not None:
            self.log.abandon()
        self._lock.release()

    # --- state ---

    @property
    def vclock(self) -> VClock:
        """The position up to which rows are durable."""
        return self.log.vclock if self.log is not None else VClock()

    @property
    def settled(self) -> VClock:
        return self.log.verdicts.settled if self.log is not None else VClock()

    @property
    def newest_snapshot_at(self) -> float:
        """The time of the newest snapshot, by the clock at that time, which may have been wrong; 0 if there is none."""
        return self.manifest.snapshots[-1].at if self.manifest.snapshots else 0.0

    def save(self) -> None:
        """Write the index and the manifest up to the end of the log. No effect before the archive has begun."""
        if not self.is_begun:
            return
        manifest = self.manifest
        if self.log is not None:
            # Must precede the manifest, which records the end of the index.
            self.log.flush()
            manifest.pending_transactions = self.log.verdicts.pending_transactions
        manifest.position, manifest.settled = self.vclock.to_mapping(), self.settled.to_mapping()
        manifest.at = self._wall()
        archive_manifest.save(self._disk, self.directory, manifest)

    def know_until(self, time: float) -> None:
        """Record that the archive has everything the upstream wrote until `time`. The recorded time never decreases."""
        self.manifest.known_until = max(self.manifest.known_until, time)

    def follow(self, upstream: ArchivedUpstream) -> bool:
        """Record the server that rows come from now. Return True if the server or its version has changed."""
        if self.log is not None:
            self.log.version = upstream.version
        is_new = self.manifest.upstream != upstream
        self.manifest.upstream = upstream
        return is_new

    # --- rows ---

    def write(self, slabs: Sequence[Slab]) -> None:
        """Write new rows of whole transactions; they are durable on return."""
        assert self.log is not None
        # Rows of a former owner that arrive after the PROMOTE of its successor: servers do not start from a log with
        # them (docs/spec/synchro.md#late-rows).
        rows = overtaken_rows(slabs, self.log.verdicts.tenure)
        self.log.write(self.on_rows(rows) if self.on_rows is not None else rows)

    def cut(self, vclock: VClock) -> None:
        """Make a log file start at `vclock`, the position of a snapshot that is being received."""
        assert self.log is not None
        self.log.cut(vclock)

    # --- snapshots ---

    def receive_snapshot(self, vclock: VClock, version: str, instance_uuid: str) -> IncomingSnapshot:
        """Start to receive a snapshot; `instance_uuid` is for the files of a new archive."""
        if self.manifest.instance_uuid is None:
            self.manifest.instance_uuid = instance_uuid
        if not self.is_begun:
            self.is_begun = True
            self.save()
        return IncomingSnapshot(
            self._disk,
            self.directory,
            instance_uuid=self.manifest.instance_uuid,
            vclock=vclock,
            version=version,
            timestamp=self._wall(),
        )

    def begin_from(self, snapshot: IncomingSnapshot, why: str) -> Gap | None:
        """Start the log at a complete snapshot, or start it again there. Return the gap before it, if there is one.

        `why` is the reason for the gap. The snapshot is published before the manifest is saved; after a crash between
        the two, the next start adds it to the manifest. If the disk fails, the log stays closed; the call may be
        repeated with a later snapshot.
        """
        before = self.log
        if before is not None:
            before.close()
        path = snapshot.finish()
        if snapshot.replicaset_uuid is not None:
            self.manifest.replicaset_uuid = str(snapshot.replicaset_uuid)
        has_gap = before is not None and before.vclock != snapshot.vclock
        gap = self._note_gap(self.vclock, snapshot.vclock, why) if has_gap else None
        self._add_snapshot(path, snapshot.vclock, FIRST if before is None else GAP)
        self._start_at(next(each for each in scan_directory(self._disk, self.directory).snapshots if each.path == path))
        self.save()
        return gap

    def publish(self, snapshot: IncomingSnapshot) -> ArchivedSnapshot | None:
        """Publish a snapshot by interval if a log file starts at its position; otherwise discard it and return None."""
        assert self.log is not None
        if not self.log.was_cut:
            snapshot.abandon()
            return None
        path = snapshot.finish()
        added = self._add_snapshot(path, snapshot.vclock, INTERVAL)
        self.save()
        return added

    def _add_snapshot(self, path: str, vclock: VClock, reason: str) -> ArchivedSnapshot:
        name = posixpath.basename(path)
        added = ArchivedSnapshot(name, vclock.to_mapping(), self._wall(), reason)
        self.manifest.snapshots = [*(each for each in self.manifest.snapshots if each.file != name), added]
        return added

    def _note_gap(self, after: VClock, until: VClock, why: str) -> Gap:
        gap = Gap(after.to_mapping(), until.to_mapping(), after.missing_rows(until), self._wall(), why)
        self.manifest.gaps = [*self.manifest.gaps, gap]
        return gap

    # --- starting ---

    def _start_log(self, vclock: VClock, verdicts: Verdicts, instance_uuid: str, version: str) -> ArchiveLog:
        self.log = ArchiveLog(
            self._disk,
            self.directory,
            instance_uuid=instance_uuid,
            vclock=vclock,
            verdicts=verdicts,
            version=version,
            wal_max_size=self._wal_max_size,
        )
        return self.log

    def _start_at(self, snapshot: ListedFile) -> ArchiveLog:
        meta = snapshot.meta
        verdicts = start_verdicts(self._disk, snapshot)
        return self._start_log(VClock(meta.vclock), verdicts, meta.instance_uuid, meta.version)

    def _recover(self, found: LogDirectory) -> None:
        """Resume after the newest snapshot and its logs, if there is a snapshot."""
        if found.snapshots:
            self._resume(found, self._start_at(found.snapshots[-1]))

    def _resume(self, found: LogDirectory, log: ArchiveLog) -> None:
        """Resume after the logs that follow the start of `log`, as a server started here would do."""
        log.resume(logs_behind(found, log.vclock))
        manifest = self.manifest
        manifest.instance_uuid = log.instance_uuid
        try:
            if found.snapshots:
                self._know(found, found.snapshots[-1])
        except BaseException:
            log.abandon()
            raise
        if manifest.upstream is not None:
            # The header of the last file may name the version of an earlier upstream; the next file gets the current
            # one.
            log.version = manifest.upstream.version

    def _know(self, found: LogDirectory, snapshot: ListedFile) -> None:
        """Add the newest snapshot and its replica set UUID to the manifest if they are missing."""
        manifest = self.manifest
        if manifest.replicaset_uuid is None and (uuid := replicaset_uuid_of(self._disk, snapshot.path)) is not None:
            manifest.replicaset_uuid = str(uuid)
        if posixpath.basename(snapshot.path) not in {each.file for each in manifest.snapshots}:
            start = VClock(snapshot.meta.vclock)
            self._adopt(snapshot, start, logs_behind(found, start))

    def _adopt(self, snapshot: ListedFile, start: VClock, logs: Sequence[ListedFile]) -> None:
        """Add a snapshot that is missing from the manifest because the process ended before it was saved.

        If the log was only cut for the snapshot, the log file that starts there names its predecessor.
        """
        if not self.manifest.snapshots:
            reason = FIRST
        elif logs and VClock(logs[0].meta.vclock) == start and logs[0].meta.prev_vclock is not None:
            reason = INTERVAL
        else:
            reason = GAP
            self._note_gap(VClock(self.manifest.position), start, "the upstream no longer had these rows")
        self._add_snapshot(snapshot.path, start, reason)


def _refuse_foreign_files(disk: Disk, directory: str) -> None:
    foreign = [name for name in disk.list_directory(directory) if name not in _NOBODYS_FILES]
    if foreign:
        raise NotAnArchive(
            f"{directory} is not an archive: it has files such as {foreign[0]}, but no {archive_manifest.NAME}",
            hint="use an empty directory",
        )
