"""The runs of a plain directory of logs, such as a server's own: found by a first pass, kept in memory.

Every row is read once, as an archive reads it before writing it to disk, so settled rows are found in the same way. A
log that a server is still writing is read on from where the last poll stopped. Never writes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from flowstone.archive.archive_log import start_verdicts, version_of
from flowstone.archive.block_index import RunBuilder, blocks_of
from flowstone.archive.manifest import Gap, NotAnArchive
from flowstone.archive.received_snapshot import replicaset_uuid_of
from flowstone.archive.settled_tracker import FLAGS_SINCE, Verdicts
from flowstone.box.schema import UnknownSpace
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.slab import Slab
from flowstone.outside.blocking import ThreadBlocking
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_runs import Added, DirectoryFacts, News, SnapshotFile, snapshots_of
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.errors import ForeignFile
from flowstone.xlog.reader import Chunk, LogFile

UNKNOWN_REPLICASET: Final = "00000000-0000-0000-0000-000000000000"
"""Placeholder for the UUID of logs without a snapshot: only a snapshot names the replica set."""

DECODERS: Final = 2
"""Threads that decode ahead of the pass that finds settled rows."""


class OverlappingLogs(FlowstoneError):
    """A log begins before the previous one ends."""


@dataclass(slots=True)
class _Open:
    """The log being read, so far up to byte `at`."""

    path: str
    at: int
    runs: RunBuilder
    verdicts: Verdicts


@dataclass
class DirectoryRuns:
    """The run feed of a directory without a manifest."""

    disk: Disk
    directory: str
    _verdicts: Verdicts | None = None
    _open: _Open | None = None
    _reached: VClock = field(default_factory=VClock)
    _gaps: list[Gap] = field(default_factory=list)
    _snapshots: dict[str, SnapshotFile] = field(default_factory=dict)
    _replicaset_uuid: str | None = None
    _done: set[str] = field(default_factory=set)

    def poll(self) -> News:
        if self.disk.kind(self.directory) != "directory":
            raise NotAnArchive(f"{self.directory}: no such directory", hint="specify a directory with logs")
        listed = scan_directory(self.disk, self.directory)
        if not listed.snapshots and not listed.logs:
            raise NotAnArchive(
                f"{self.directory}: neither an archive nor logs of a server",
                hint="specify a directory with .xlog and .snap files",
            )
        snapshots = snapshots_of(listed, self._snapshots)
        logs = _logs_from_first_snapshot(listed)
        here = {log.path for log in logs}
        gone = frozenset(self._done - here)
        self._done -= gone
        added: list[Added] = []
        for number, log in enumerate(logs):
            if log.path in self._done:
                continue
            if self._open is None or self._open.path != log.path:
                self._begin(listed, log)
            added += self._read(log)
            if number < len(logs) - 1:
                self._done.add(log.path)
                self._open = None
        if not logs:
            self._reached = snapshots[-1].vclock
        settled = self._verdicts.settled if self._verdicts is not None and logs else self._reached
        facts = DirectoryFacts(self._uuid(listed), settled, self._reached, tuple(self._gaps), None, snapshots)
        return News(facts, gone, added)

    def _begin(self, listed: LogDirectory, log: ListedFile) -> None:
        """Open the next log: it continues where the previous one ended, or a gap is recorded."""
        if log.meta.instance_uuid != listed.instance_uuid and listed.instance_uuid is not None:
            raise ForeignFile(log.path, log.meta.instance_uuid, listed.instance_uuid)
        start = VClock(log.meta.vclock)
        verdicts = self._verdicts
        if verdicts is None or start != self._reached:
            if verdicts is not None:
                self._note_gap(log.path, start)
            verdicts = self._verdicts = self._started(listed, start)
        self._reached = start
        verdicts.follow_version(version_of(log.meta.version))
        with LogFile.open(self.disk, log.path) as file:
            self._open = _Open(log.path, file.first_block, RunBuilder(start, file.first_block, verdicts), verdicts)

    def _started(self, listed: LogDirectory, start: VClock) -> Verdicts:
        found = [snapshot for snapshot in listed.snapshots if VClock(snapshot.meta.vclock) <= start]
        verdicts = start_verdicts(self.disk, found[-1]) if found else Verdicts()
        if not found or VClock(found[-1].meta.vclock) != start:
            verdicts.start(start)
        return verdicts

    def _note_gap(self, path: str, start: VClock) -> None:
        if not self._reached <= start:
            raise OverlappingLogs(
                f"{path} starts at {start}, but the log before it ends at {self._reached}",
                hint="the directory has logs of two histories; remove the logs of one history",
            )
        missing = self._reached.missing_rows(start)
        self._gaps.append(
            Gap(self._reached.to_mapping(), start.to_mapping(), missing, 0.0, "no log in the directory has them")
        )

    def _read(self, log: ListedFile) -> list[Added]:
        """Read what was appended to the open log since the last read."""
        opened = self._open
        assert opened is not None
        before = opened.runs.vclock
        by_schema = version_of(log.meta.version) < FLAGS_SINCE
        with LogFile.open(self.disk, log.path) as file:
            for chunk, slab in _decoded(file.chunks(opened.at)):
                unknown = _undefined(slab, opened.verdicts) if by_schema else set()
                for first, stop, end in blocks_of(chunk, slab):
                    opened.runs.add(slab, first, stop, end)
                if unknown and (still := unknown & _undefined(slab, opened.verdicts)):
                    raise UnknownSpace(
                        f"{log.path}: cannot tell whether rows of space {min(still)} are settled: "
                        "the log does not define it",
                        hint="put the snapshot into the same directory",
                    )
                opened.at = chunk.end
        self._reached = opened.runs.vclock
        runs = opened.runs.take(unfinished=True)
        return [Added(log.path, before, runs)] if runs else []

    def _uuid(self, listed: LogDirectory) -> str:
        if self._replicaset_uuid is None and listed.snapshots:
            found = replicaset_uuid_of(self.disk, listed.snapshots[-1].path)
            self._replicaset_uuid = str(found) if found is not None else None
        return self._replicaset_uuid or UNKNOWN_REPLICASET


def _decoded(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Slab]]:
    return ThreadBlocking().map(lambda chunk: (chunk, chunk.decode()), chunks, DECODERS)


def _logs_from_first_snapshot(listed: LogDirectory) -> list[ListedFile]:
    """Return the logs from the first snapshot on; for earlier logs, the definitions at their beginning are unknown."""
    if not listed.snapshots:
        return list(listed.logs)
    first = listed.snapshots[0].signature
    older = {log.path for log, behind in pairwise(listed.logs) if behind.signature <= first}
    return [log for log in listed.logs if log.path not in older]


def _undefined(slab: Slab, verdicts: Verdicts) -> set[int]:
    """Return the user spaces in a slab that have no definition.

    Rows of an old server have no flag for synchronous rows, so only the definition tells whether they are synchronous.
    """
    schema = verdicts.schema.schema
    ids = np.unique(slab.cells[scan.SPACE_ID]).tolist()
    return {space_id for space_id in ids if space_id >= FIRST_USER_SPACE_ID and schema.get(space_id) is None}
