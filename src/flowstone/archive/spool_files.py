"""The files of a spool: an archive that keeps rows only until its reader has read them.

Unlike other archives, a spool may start in the middle of the log, without a snapshot. It writes the index of durable
rows at once, gives up the unsettled end of its log if the upstream no longer has it, and deletes files that its reader
no longer needs. `N.definitions` has the schema at the start of each log file (`definitions_file.py`).
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from flowstone.archive.archive_log import ArchiveLog, verdicts_of
from flowstone.archive.block_index import path_of as index_of
from flowstone.archive.block_index import read_blocks
from flowstone.archive.definitions_file import (
    DefinitionRow,
    DefinitionsFile,
    definition_files,
    path_of,
    read_definitions,
    rows_of,
    write_definitions,
)
from flowstone.archive.encoded_rows import log_rows
from flowstone.archive.manifest import Gap
from flowstone.archive.received_snapshot import IncomingSnapshot
from flowstone.archive.settled_tracker import Verdicts
from flowstone.archive.store import ArchiveStore
from flowstone.archive.upstream_query import UpstreamFacts
from flowstone.iproto import scan
from flowstone.iproto.slab import Slab
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import LogDirectory, scan_directory
from flowstone.xlog.reader import LogFile

WAL_MAX_SIZE = 64 * 1024**2
"""Size of a log file. Small, because a spool can only delete whole files."""


class SpoolStore(ArchiveStore):
    """A store that keeps rows until its reader has read them."""

    @property
    def earliest(self) -> VClock:
        """The start of the oldest log: the spool has the rows after this position."""
        logs = scan_directory(self._disk, self.directory).logs
        return VClock(logs[0].meta.vclock) if logs else self.vclock

    def write(self, slabs: Sequence[Slab]) -> None:
        super().write(slabs)
        assert self.log is not None
        # Update the index with each write: readers of a spool follow it, while an archive is read later.
        self.log.flush()

    # --- starting ---

    def begin_at(self, vclock: VClock, facts: UpstreamFacts, rows: Sequence[DefinitionRow]) -> None:
        """Delete all files and start the log at `vclock`; `rows` are the definitions at that position."""
        if self.log is not None:
            self.log.close()
            self.log = None
        # Delete before the manifest is saved: after a crash in between, `_recover` finds no start and drops the rest.
        self._drop(scan_directory(self._disk, self.directory), None)
        manifest = self.manifest
        manifest.snapshots, manifest.gaps = [], []
        manifest.instance_uuid, manifest.replicaset_uuid = str(facts.instance_uuid), facts.replicaset_uuid
        self.is_begun = True
        self.save()
        definitions = DefinitionsFile(vclock.to_mapping(), str(facts.instance_uuid), facts.version, tuple(rows))
        write_definitions(self._disk, self.directory, definitions)
        self._start_log(vclock, verdicts_of(definitions), str(facts.instance_uuid), facts.version)
        self.save()

    def begin_from(self, snapshot: IncomingSnapshot, why: str) -> Gap | None:
        gap = super().begin_from(snapshot, why)
        self._keep_definitions()
        return gap

    def _start_log(self, vclock: VClock, verdicts: Verdicts, instance_uuid: str, version: str) -> ArchiveLog:
        log = super()._start_log(vclock, verdicts, instance_uuid, version)
        log.before_file = self._keep_definitions
        return log

    def _keep_definitions(self) -> None:
        """Write the definitions at this position, unless transactions are pending: then reading cannot start here."""
        log = self.log
        assert log is not None
        if log.verdicts.is_quiet and self._disk.kind(path_of(self.directory, log.vclock)) is None:
            rows, owner = rows_of(log.verdicts.schema), log.verdicts.owner
            definitions = DefinitionsFile(log.vclock.to_mapping(), log.instance_uuid, log.version, rows, owner)
            write_definitions(self._disk, self.directory, definitions)

    def _recover(self, found: LogDirectory) -> None:
        """Resume after the newest snapshot or the newest definitions, whichever is newer."""
        files = definition_files(self._disk, self.directory)
        newest = found.snapshots[-1].signature if found.snapshots else -1
        if not files or files[-1].signature < newest:
            if not found.snapshots:
                self._drop(found, None)  # a crash prevented the write of the new start
            super()._recover(found)
            return
        definitions = read_definitions(self._disk, files[-1].path)
        vclock, server = VClock(definitions.vclock), definitions.server
        self._resume(found, self._start_log(vclock, verdicts_of(definitions), definitions.instance_uuid, server))

    # --- deleting ---

    def collect(self, position: VClock) -> None:
        """Delete the logs and snapshots that have no rows after `position`; keep the definitions there."""
        files = definition_files(self._disk, self.directory)
        covered = [each for each in files if VClock(read_definitions(self._disk, each.path).vclock) <= position]
        if not covered:
            return
        found = scan_directory(self._disk, self.directory)
        # The last definitions at or before the position: reading can resume there.
        keep = covered[-1].signature
        snapshots = {posixpath.basename(each.path) for each in found.snapshots if each.signature <= keep}
        if not snapshots and len(covered) == 1:
            return
        self._drop(found, keep)
        manifest = self.manifest
        manifest.snapshots = [each for each in manifest.snapshots if each.file not in snapshots]
        manifest.gaps = [gap for gap in manifest.gaps if VClock(gap.until).signature > keep]
        self.save()

    def _drop(self, found: LogDirectory, keep: int | None) -> None:
        """Delete the files before signature `keep`, oldest first, so that no gap arises; None: delete all files."""
        for log in found.logs:
            if keep is None or log.signature < keep:
                self._disk.unlink(log.path)
                with suppress(FileNotFoundError):
                    self._disk.unlink(index_of(log.path))
        for snapshot in found.snapshots:
            if keep is None or snapshot.signature <= keep:
                self._disk.unlink(snapshot.path)
        for file in definition_files(self._disk, self.directory):
            if keep is None or file.signature < keep:
                self._disk.unlink(file.path)

    def take_back(self) -> None:
        """Delete the rows after the settled position, which no reader has seen: the upstream has other rows there."""
        assert self.log is not None
        self.log.close()
        kept = self._cut_log(self.log.verdicts.settled)
        # Recover from the files, as after a crash: the tracker cannot be rewound.
        self._recover(scan_directory(self._disk, self.directory))
        if kept:
            self.log.write(kept)
        self.save()

    def _cut_log(self, settled: VClock) -> bytes:
        """Truncate the log before the first run with a row after `settled`. Return that run's rows up to `settled`."""
        # Delete the newest first: after a crash in between, the remaining files are a prefix of the log.
        for listed in reversed(scan_directory(self._disk, self.directory).logs):
            blocks = read_blocks(self._disk, listed.path)
            runs = blocks.runs if blocks is not None else ()
            is_wanted = VClock(listed.meta.vclock) <= settled
            cut = next((run for run in runs if not VClock(run.vclock) <= settled), None)
            if is_wanted and cut is None:
                return b""
            self._disk.unlink(index_of(listed.path))
            if is_wanted and cut is not None:
                with LogFile.open(self._disk, listed.path) as log:
                    kept = b"".join([_up_to(slab, settled) for slab in log.slabs(cut.offset, cut.end)])
                with self._disk.append_to(listed.path) as file:
                    file.truncate(cut.offset)
                    file.sync()
                return kept
            self._disk.unlink(listed.path)
        return b""


def _up_to(slab: Slab, settled: VClock) -> bytes:
    """Return the rows of a slab up to a position, which must be a position of its log."""
    origins, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
    limits = np.array([settled.get(number) for number in range(int(origins.max(initial=0)) + 1)], np.int64)
    return log_rows(slab, 0, int((lsns <= limits[origins]).sum()))
