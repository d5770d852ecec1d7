"""The directory of an archive: its manifest, its snapshots and the log that goes on, under one lock.

Everything here waits for the disk: one worker at a time calls it. A start reads what a real server would recover from
(the newest snapshot and the logs behind it), and what the manifest lacks of that is put right.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Final, Self
from uuid import UUID

from flowstone.node import archive_manifest
from flowstone.node.archive_log import WAL_MAX_SIZE, ArchiveLog, logs_behind, start_verdicts
from flowstone.node.archive_manifest import (
    FIRST,
    GAP,
    INTERVAL,
    Gap,
    Manifest,
    NotAnArchive,
    Snapshot,
    Upstream,
    missing_rows,
)
from flowstone.node.archive_overtaken import overtaken_rows
from flowstone.node.archive_snapshot import IncomingSnapshot, replicaset_uuid_of
from flowstone.node.archive_verdicts import Verdicts
from flowstone.outside.disk import AlreadyLocked, Disk, Lock
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.reader import Slab

RowFilter = Callable[[bytes], bytes]
"""What adds to rows on their way to the file."""

_NOBODYS_FILES: Final = frozenset({archive_manifest.TEMPORARY, "lost+found"})
"""What may be in the directory of a new archive: what a start that was killed left, and what a file system has."""


class Store:
    """An archive on disk. `log` is None until there is a snapshot to begin from.

    A new one leaves nothing in its directory before the first snapshot comes: `is_begun`.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        lock: Lock,
        manifest: Manifest,
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
        """The archive in `directory`, which is made if need be; `new_uuid` is for a new one."""
        try:
            disk.make_directory(directory)
        except OSError as error:
            what = f"cannot make the directory {directory} for the archive: {error.strerror or error}"
            raise NotAnArchive(what, hint="name another one") from error
        try:
            lock = disk.lock(directory)
        except AlreadyLocked as error:
            message = f"cannot archive into {directory}: another archive, or a server, is running in it"
            raise AlreadyLocked(message, hint="stop it first, or name another directory") from error
        try:
            manifest = archive_manifest.load(disk, directory)
            found = scan_directory(disk, directory)
            if manifest is None:
                _refuse_foreign_files(disk, directory)
            store = cls(disk, directory, lock, manifest or Manifest(str(new_uuid)), wall, wal_max_size=wal_max_size)
            store.is_begun = manifest is not None
            for leftover in found.leftovers:
                disk.unlink(leftover)
            store._recover(found)
        except BaseException:
            lock.release()
            raise
        return store

    def close(self) -> None:
        """Ends the log with its marker and lets others in."""
        try:
            if self.log is not None:
                self.log.close()
            self.save()
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Lets others in, and leaves everything as it is: after an error nothing is known for certain."""
        if self.log is not None:
            self.log.abandon()
        self._lock.release()

    # --- what there is ---

    @property
    def vclock(self) -> VClock:
        """What is durable."""
        return self.log.vclock if self.log is not None else VClock()

    @property
    def settled(self) -> VClock:
        return self.log.verdicts.settled if self.log is not None else VClock()

    @property
    def newest_snapshot_at(self) -> float:
        """By the clock as it was then, which may have been wrong: it need not be the largest."""
        return self.manifest.snapshots[-1].at if self.manifest.snapshots else 0.0

    def save(self) -> None:
        """Brings index and manifest up to the log, once the archive is begun."""
        if not self.is_begun:
            return
        manifest = self.manifest
        if self.log is not None:
            self.log.flush()
            manifest.pending_transactions = self.log.verdicts.pending_transactions
        manifest.position, manifest.settled = self.vclock.to_mapping(), self.settled.to_mapping()
        manifest.at = self._wall()
        archive_manifest.save(self._disk, self.directory, manifest)

    def know_until(self, time: float) -> None:
        """What the upstream wrote up to then is here. As the times of rows it never goes back."""
        self.manifest.known_until = max(self.manifest.known_until, time)

    def follow(self, upstream: Upstream) -> bool:
        """Whom rows come from now; whether that is another, or of another version, than before."""
        if self.log is not None:
            self.log.version = upstream.version
        is_new = self.manifest.upstream != upstream
        self.manifest.upstream = upstream
        return is_new

    # --- rows ---

    def write(self, slabs: Sequence[Slab]) -> None:
        """Rows of whole transactions, none of them known; durable on return."""
        assert self.log is not None
        rows = overtaken_rows(slabs, self.log.verdicts.tenure)
        self.log.write(self.on_rows(rows) if self.on_rows is not None else rows)

    def cut(self, vclock: VClock) -> None:
        """A snapshot of `vclock` is on its way: a file of the log is to begin there."""
        assert self.log is not None
        self.log.cut(vclock)

    # --- snapshots ---

    def receive_snapshot(self, vclock: VClock, version: str, instance_uuid: str) -> IncomingSnapshot:
        """Begins a snapshot; `instance_uuid` is that of a new archive's files."""
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
        """The log begins, or begins anew, at `snapshot`, which is complete; the gap before it, and `why` it is there.

        The snapshot gets its name before the manifest says so; a start that finds it takes it as the beginning, too.
        If the disk fails, the log stays closed; the call may be repeated with a later snapshot.
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

    def publish(self, snapshot: IncomingSnapshot) -> Snapshot | None:
        """Gives a snapshot by interval its name, if the log has been cut where it stands; None: of no use."""
        assert self.log is not None
        if not self.log.was_cut:
            snapshot.abandon()
            return None
        path = snapshot.finish()
        added = self._add_snapshot(path, snapshot.vclock, INTERVAL)
        self.save()
        return added

    def _add_snapshot(self, path: str, vclock: VClock, reason: str) -> Snapshot:
        name = posixpath.basename(path)
        added = Snapshot(name, vclock.to_mapping(), self._wall(), reason)
        self.manifest.snapshots = [*(each for each in self.manifest.snapshots if each.file != name), added]
        return added

    def _note_gap(self, after: VClock, until: VClock, why: str) -> Gap:
        gap = Gap(after.to_mapping(), until.to_mapping(), missing_rows(after, until), self._wall(), why)
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
        """Goes on behind what is there, if there is something."""
        if found.snapshots:
            self._resume(found, self._start_at(found.snapshots[-1]))

    def _resume(self, found: LogDirectory, log: ArchiveLog) -> None:
        """Goes on behind the logs that follow where `log` starts, as a server would that is started here."""
        log.resume(logs_behind(found, log.vclock))
        manifest = self.manifest
        manifest.instance_uuid = log.instance_uuid
        if found.snapshots:
            self._know(found, found.snapshots[-1])
        if manifest.upstream is not None:
            log.version = manifest.upstream.version

    def _know(self, found: LogDirectory, snapshot: ListedFile) -> None:
        """Adds to the manifest what it lacks of the newest snapshot."""
        manifest = self.manifest
        if manifest.replicaset_uuid is None and (uuid := replicaset_uuid_of(self._disk, snapshot.path)) is not None:
            manifest.replicaset_uuid = str(uuid)
        if posixpath.basename(snapshot.path) not in {each.file for each in manifest.snapshots}:
            start = VClock(snapshot.meta.vclock)
            self._adopt(snapshot, start, logs_behind(found, start))

    def _adopt(self, snapshot: ListedFile, start: VClock, logs: Sequence[ListedFile]) -> None:
        """A snapshot that the manifest does not know: the process ended between the two.

        Where the log was only cut for it, the file that begins there names the one before.
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
            f"{directory} has files, such as {foreign[0]}, and no {archive_manifest.NAME}: it is no archive",
            hint="name an empty directory",
        )
