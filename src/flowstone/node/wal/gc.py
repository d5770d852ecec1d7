"""The garbage collector of a node: deletes old snapshots and logs that are no longer needed.

The newest `checkpoint_count` checkpoints are kept, and older checkpoints while a backup refers to them or to an earlier
one. Logs are kept from the oldest checkpoint, or from the slowest consumer, whichever is earlier. Registered replicas
are consumers from their first connection on. If a file cannot be deleted, the error is logged, and the next collection
retries. All access to files goes through `outside.disk`.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from flowstone.iproto import errors
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, scan_directory
from flowstone.xlog.errors import XlogError
from flowstone.xlog.meta import FileType, file_name

LOG = logging.getLogger("flowstone.node")

CHECKPOINT_COUNT = 2
"""Default of `checkpoint_count`."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A snapshot on disk. `references` names the users that keep it beyond `checkpoint_count`."""

    vclock: VClock
    references: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Consumer:
    """A replica, or a join, that needs the logs from `vclock` on."""

    name: str
    vclock: VClock


class GarbageCollector:
    """The checkpoints and consumers of a node, and the files that they keep."""

    def __init__(
        self, outside: Outside, memtx_dir: str, wal_dir: str, *, checkpoint_count: int = CHECKPOINT_COUNT
    ) -> None:
        """Find the existing checkpoints; delete nothing yet."""
        self._outside = outside
        self._memtx_dir = memtx_dir
        self.wal_dir = wal_dir
        self.checkpoint_count = checkpoint_count
        self.consumers: list[Consumer] = []
        self.checkpoints: list[Checkpoint] = []
        self._backup: Checkpoint | None = None
        self._collection: asyncio.Task[None] | None = None
        self._next_log_start: VClock | None = None
        # Consumers are kept in memory only. After a restart, the logs that members need are unknown until they
        # subscribe (docs/spec/replication.md#garbage-collection).
        self._awaited: dict[UUID, None] = {}
        self._logs: deque[ListedFile] = deque()
        self._oldest_snapshot: VClock | None = None
        disk = outside.disk
        for listed in scan_directory(disk, memtx_dir).snapshots:
            try:
                self.checkpoints.append(Checkpoint(VClock(listed.meta.vclock)))
            except XlogError as error:
                LOG.warning("ignoring unreadable snapshot: %s", error)
        logs = scan_directory(disk, wal_dir).logs
        self._log_start = VClock(logs[0].meta.vclock) if logs else self._newest_vclock()

    @property
    def vclock(self) -> VClock:
        """The position at which the oldest existing log begins."""
        return self._log_start

    def add_checkpoint(self, vclock: VClock) -> None:
        """Add a snapshot at `vclock` that was written to disk."""
        if not self.checkpoints or self._newest_vclock() != vclock:
            self.checkpoints.append(Checkpoint(vclock))

    def add_consumer(self, name: str, vclock: VClock) -> Consumer:
        """Keep all logs from `vclock` on until the consumer is advanced or removed."""
        consumer = Consumer(name, vclock)
        self.consumers.append(consumer)
        return consumer

    def advance(self, consumer: Consumer, vclock: VClock) -> None:
        """Move the consumer to `vclock`, and schedule a collection if that releases a log."""
        consumer.vclock = vclock
        following = self._next_log_start
        # Checked in this order: most ACKs do not reach the next log, and the minimum over all consumers costs more.
        if following is not None and following.without_zero() <= vclock and following <= self._needed():
            self.collect_soon()

    def remove_consumer(self, consumer: Consumer) -> None:
        """Remove the consumer, if it was not removed before. The next collection deletes the logs it kept."""
        if consumer in self.consumers:
            self.consumers.remove(consumer)

    def start_backup(self, checkpoint: int = 0) -> list[str]:
        """Keep the files of a checkpoint (0 is the newest) until `stop_backup`; return their paths."""
        if self._backup is not None:
            raise errors.BackupInProgress("Backup is already in progress")
        if not 0 <= checkpoint < len(self.checkpoints):
            raise errors.MissingSnapshot("Can't find snapshot")
        self._backup = self.checkpoints[-1 - checkpoint]
        self._backup.references.append("backup")
        return [posixpath.join(self._memtx_dir, file_name(self._backup.vclock.to_mapping(), FileType.SNAP))]

    def stop_backup(self) -> None:
        """Release the files of the backup, if there is one. The next collection deletes the files that are too old."""
        if self._backup is not None:
            self._backup.references.remove("backup")
            self._backup = None

    def pause(self, members: Iterable[UUID]) -> None:
        """Delete no files until all these members have reconnected, because after a restart the logs that they need are
        unknown."""
        self._awaited = dict.fromkeys(members)

    def came_back(self, member: UUID) -> None:
        """Stop waiting for a member: it has subscribed or joined, or was expelled."""
        if member in self._awaited:
            del self._awaited[member]
            if not self._awaited:
                self.collect_soon()

    def resume(self) -> None:
        """End the pause, even if members have not reconnected."""
        if self._awaited:
            LOG.info("resuming deletion of old files: %d members have not reconnected", len(self._awaited))
            self._awaited = {}
            self.collect_soon()

    @property
    def is_paused(self) -> bool:
        return bool(self._awaited)

    def collect_soon(self) -> None:
        """Start a collection in the background, unless one is running."""
        if self._collection is None or self._collection.done():
            self._collection = asyncio.get_running_loop().create_task(self.collect())

    async def close(self) -> None:
        """Wait until the running collection, if any, has ended."""
        if self._collection is not None:
            await asyncio.gather(self._collection, return_exceptions=True)

    async def collect(self) -> None:
        """Delete the files that are no longer needed; do nothing while paused, or without a checkpoint."""
        if self.is_paused:
            return
        while len(self.checkpoints) > self.checkpoint_count and not self.checkpoints[0].references:
            del self.checkpoints[0]
        if not self.checkpoints:
            return
        oldest = self.checkpoints[0].vclock
        try:
            found = await self._outside.blocking(self._delete, oldest, self._needed())
        except OSError as error:  # the next collection retries
            LOG.warning("cannot list old files: %s", error)
            return
        # Set even if files could not be deleted: ballots must name only rows that certainly exist.
        self._log_start, self._next_log_start = found

    def info(self) -> dict[str, Any]:
        """Return `box.info.gc()`, without the checkpoint in progress."""
        return {
            "is_paused": self.is_paused,
            "vclock": self._log_start.to_mapping(),
            "signature": self._log_start.signature,
            "checkpoints": [
                {
                    "references": list(checkpoint.references),
                    "vclock": checkpoint.vclock.to_mapping(),
                    "signature": checkpoint.vclock.signature,
                }
                for checkpoint in self.checkpoints
            ],
            "consumers": [
                {"name": consumer.name, "vclock": consumer.vclock.to_mapping(), "signature": consumer.vclock.signature}
                for consumer in self.consumers
            ],
        }

    def _needed(self) -> VClock:
        """Return the position from which on the oldest checkpoint or a consumer needs logs."""
        needed = self.checkpoints[0].vclock
        for consumer in self.consumers:
            needed = _earlier(needed, consumer.vclock)
        return needed

    def _newest_vclock(self) -> VClock:
        return self.checkpoints[-1].vclock if self.checkpoints else VClock()

    def _delete(self, oldest: VClock, needed: VClock) -> tuple[VClock, VClock | None]:
        """Delete snapshots before `oldest` and logs that end before `needed`; return where the first two logs begin.

        A replica that catches up releases one log after the other, perhaps thousands. So directories are listed, and
        headers read, only if something may have changed.
        """
        disk = self._outside.disk
        if oldest != self._oldest_snapshot:
            snapshots = scan_directory(disk, self._memtx_dir).snapshots
            self._oldest_snapshot = oldest
            for snapshot in snapshots:
                if snapshot.signature < oldest.signature:
                    self._unlink(snapshot.path)
        # Files were deleted by others: list the directory again.
        if self._logs and disk.kind(self._logs[0].path) is None:
            self._logs.clear()
        starts = self._drop_logs(needed)
        if len(starts) < 2:
            self._logs = deque(scan_directory(disk, self.wal_dir).logs)
            starts = self._drop_logs(needed)
        return starts[0] if starts else oldest, starts[1] if len(starts) > 1 else None

    def _drop_logs(self, needed: VClock) -> list[VClock]:
        """Delete the known logs that end before `needed`; return where the first two of the others begin."""
        # The first needed row is in the last log that begins at or before `needed`; earlier logs can be deleted.
        starts: list[VClock] = []
        kept = 0
        for number, log in enumerate(self._logs):
            try:
                start = VClock(log.meta.vclock)
            except (XlogError, FileNotFoundError):
                continue
            if start <= needed:
                kept, starts = number, [start]
            else:
                starts.append(start)
                if len(starts) > 1:
                    break
        for log in [self._logs.popleft() for _ in range(kept)]:
            self._unlink(log.path)
        return starts

    def _unlink(self, path: str) -> None:
        try:
            self._outside.disk.unlink(path)
        except FileNotFoundError:
            return  # already deleted
        except OSError as error:
            LOG.warning("cannot delete %s: %s", path, error.strerror or error)
            self._oldest_snapshot = None  # makes the next collection list the directories again
            self._logs.clear()
        else:
            LOG.info("deleted %s", path)


def _earlier(needed: VClock, consumer: VClock) -> VClock:
    """Return the earlier position of both, with component 0 of `needed`, because consumers get no local rows."""
    common = needed.common(consumer).to_mapping()
    common.pop(0, None)
    if local := needed.get(0):
        common[0] = local
    return VClock(common)
