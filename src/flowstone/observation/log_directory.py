"""Inspection of a directory of log files: which instance wrote it, from where to where it goes, what is readable.

Reads every file once, past damage and gaps, through `history`; changes nothing. The directory's lock, which is acquired
and released, shows whether a process runs on it. `observation/findings/directory_findings.py` draws the conclusions.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.definitions_file import definition_files
from flowstone.archive.received_snapshot import REPLICASET_KEYS
from flowstone.box.schema import Schema, SchemaTracker
from flowstone.box.system import SCHEMA_ID, SCHEMA_SPACE_IDS
from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.history.files import NoSuchLog
from flowstone.history.log_reading import Reading, ReadReport
from flowstone.history.selection import Selection
from flowstone.history.settled_rows import CONTROL
from flowstone.iproto import scan
from flowstone.iproto.constants import Key
from flowstone.iproto.msgpack import unpack_body
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Skipped
from flowstone.observation.findings.fork import digests
from flowstone.outside import Outside
from flowstone.outside.disk import AlreadyLocked, Disk
from flowstone.replication.limbo.control_rows import Demote, Promote, RaftState, decode_control
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.errors import XlogError
from flowstone.xlog.reader import EndingKind, LogFile
from flowstone.xlog.transactions import LogTransaction, TransactionError, group


@dataclass(frozen=True)
class Directory:
    """The result of an inspection by `look_into`."""

    path: str
    listing: LogDirectory
    is_in_use: bool
    is_archive: bool
    """True for an archive. It exists for its history, and its files name the instance that was archived."""

    has_definitions: bool
    """True for a spool, which begins in the middle of a log by design."""

    free_space: int
    instance_uuid: str | None
    replicaset_uuid: str | None
    foreign: tuple[tuple[ListedFile, str], ...]
    """Files of other instances, with their UUIDs."""

    unreadable: tuple[XlogError, ...]
    """Errors of files whose text header cannot be parsed."""

    start: VClock
    end_of_logs: VClock
    """Position of the last row in any log; the newest snapshot may be newer."""

    report: ReadReport
    failure: FlowstoneError | None
    """The error that ended the reading although `force` was set."""

    term: int = 0
    owner_id: int = 0

    @property
    def end(self) -> VClock:
        """Position of the last row in any log or in the newest snapshot."""
        newest = self.listing.newest_snapshot()
        if newest is None or _uuid(newest) is None:
            return self.end_of_logs
        return self.end_of_logs.merged(VClock(newest.meta.vclock).without_zero())

    @property
    def logs(self) -> list[ListedFile]:
        """Readable logs of the instance itself."""
        return [log for log in self.listing.logs if _uuid(log) == self.instance_uuid]

    def has_snapshot_of(self, vclock: VClock) -> bool:
        """Return True if the newest snapshot covers `vclock`, so that a server needs no row up to there to start."""
        newest = self.listing.newest_snapshot()
        return newest is not None and _uuid(newest) is not None and vclock <= VClock(newest.meta.vclock)

    def lacks_file_before(self, path: str) -> bool:
        """Return True if the log names a preceding log that is missing.

        Otherwise, rows that are missing before the log were never logged here: the instance rejoined and received them
        in a snapshot. The first log after a rejoin names the last log before it on a real server, and none on a node.
        """
        number = next(number for number, log in enumerate(self.logs) if log.path == path)
        named = self.logs[number].meta.prev_vclock
        return named is not None and (number == 0 or named != self.logs[number - 1].meta.vclock)

    def needed(self) -> frozenset[str]:
        """Return the paths that a server reads at start: the newest snapshot and the logs from there on."""
        newest = self.listing.newest_snapshot()
        if newest is None:
            return frozenset(log.path for log in self.listing.logs)
        first = max((log.signature for log in self.listing.logs if log.signature <= newest.signature), default=0)
        return frozenset({newest.path, *(log.path for log in self.listing.logs if log.signature >= first)})


def look_into(outside: Outside, path: str) -> Directory:
    """Inspect the directory; raise NoSuchLog if it does not exist or contains no log files."""
    disk = outside.disk
    if disk.kind(path) != "directory":
        raise NoSuchLog(f"{path}: no such directory")
    listing = scan_directory(disk, path)
    if not (listing.logs or listing.snapshots or listing.leftovers):
        raise NoSuchLog(f"{path}: no .xlog or .snap file in this directory", hint="check the path")
    unreadable = tuple(error for file in (*listing.snapshots, *listing.logs) if (error := _header_error(file)))
    instance_uuid = _owner(listing)
    foreign = tuple(
        (file, uuid)
        for file in (*listing.snapshots, *listing.logs)
        if (uuid := _uuid(file)) is not None and uuid != instance_uuid
    )
    health = _Health()
    readable = [file for file in _history(listing) if _uuid(file) is not None and _uuid(file) == instance_uuid]
    health.read(outside, [file.path for file in readable])
    for file in listing.snapshots:
        if _uuid(file) is not None:
            health.check_snapshot(disk, file.path)
    return Directory(
        path=path,
        listing=listing,
        is_in_use=_is_in_use(disk, path),
        is_archive=disk.kind(posixpath.join(path, archive_manifest.NAME)) is not None,
        has_definitions=bool(definition_files(disk, path)),
        free_space=disk.free_space(path),
        instance_uuid=instance_uuid,
        replicaset_uuid=_replicaset_uuid(disk, listing),
        foreign=foreign,
        unreadable=unreadable,
        start=VClock(readable[0].meta.vclock).without_zero() if readable else VClock(),
        end_of_logs=_end(disk, readable),
        report=health.report,
        failure=health.failure,
        term=health.term,
        owner_id=health.owner_id,
    )


@dataclass
class _Health:
    """Collects what a complete reading encounters: damage, gaps, and the last owner of the queue."""

    report: ReadReport = field(default_factory=ReadReport)
    failure: FlowstoneError | None = None
    term: int = 0
    owner_id: int = 0

    def read(self, outside: Outside, paths: list[str]) -> None:
        reading = Reading(outside, paths, selection=Selection(show_system=True), settled=True, force=True, workers=0)
        self.report = reading.report
        try:
            for piece in reading.pieces():
                types = piece.slab.cells[scan.TYPE, piece.rows]
                if np.isin(types, CONTROL).any():
                    self._follow(piece.slab.rows(piece.rows[np.isin(types, CONTROL)]))
        except FlowstoneError as error:
            self.failure = error

    def check_snapshot(self, disk: Disk, path: str) -> None:
        """Check a snapshot, even one that the logs do not start from: without its end, no server can use it."""
        known = set(self.report.skipped)
        with LogFile.open(disk, path, force=True) as file:
            for _ in file.slabs():
                pass
            skipped = list(file.skipped)
            ending = self.report.endings.pop(path, file.ending)
            if ending is not None and ending.kind is not EndingKind.COMPLETE:
                why = f"no end marker, so the snapshot is not complete ({ending.what or 'the file just ends'})"
                skipped.append(Skipped(path, ending.offset, file.file.size(), why))
        self.report.skipped += [one for one in skipped if one not in known]

    def _follow(self, rows: Iterator[Row]) -> None:
        for row in rows:
            try:
                body = decode_control(row.type, row.body)
            except RemoteProtocolError:
                continue
            if isinstance(body, Promote | Demote):
                self.term = max(self.term, body.term)
                self.owner_id = row.replica_id or body.owner_id if isinstance(body, Promote) else 0
            elif isinstance(body, RaftState):
                self.term = max(self.term, body.term)


# --- rows, for comparisons ---


def digests_of(outside: Outside, directory: Directory, *, after: VClock | None = None) -> dict[tuple[int, int], int]:
    """Return the digests of all rows in the logs; rows that `after` covers may be left out."""
    logs = directory.logs
    if after is not None:
        covered = [number for number, log in enumerate(logs) if VClock(log.meta.vclock).without_zero() <= after]
        logs = logs[covered[-1] :] if covered else logs
    return digests(_transactions(outside.disk, logs))


def transactions_behind(
    outside: Outside, directory: Directory, point: VClock, limit: int
) -> tuple[tuple[LogTransaction, ...], Schema, bool]:
    """Return at most `limit` transactions after `point`, the schema at the end, and whether these are all of them."""
    tracker = SchemaTracker()
    found: list[LogTransaction] = []
    is_whole = True
    for snapshot in _bases(directory):
        _learn(outside.disk, snapshot, tracker)
    for transaction in _transactions(outside.disk, directory.logs):
        for row in transaction.rows:
            tracker.apply(row.type, row.body)
        if any(row.replica_id and row.lsn > point.get(row.replica_id) for row in transaction.rows):
            if len(found) < limit:
                found.append(transaction)
            else:
                is_whole = False
    return tuple(found), tracker.schema, is_whole


def _bases(directory: Directory) -> Iterator[ListedFile]:
    """Yield the snapshot that the logs start from and, if logs are missing, the newest one for their definitions."""
    snapshots = directory.listing.snapshots
    first = directory.listing.logs[0].signature if directory.listing.logs else 0
    yield from [file for file in snapshots if file.signature <= first][-1:] or snapshots[:1]
    if directory.report.gaps:
        yield from snapshots[-1:]


def _transactions(disk: Disk, logs: Iterable[ListedFile]) -> Iterator[LogTransaction]:
    for log in logs:
        with LogFile.open(disk, log.path, force=True) as file:
            for slab in file.slabs():
                try:
                    yield from group(slab.rows())
                except TransactionError:
                    continue  # cut short by damage, which `_Health` reports


def _learn(disk: Disk, snapshot: ListedFile, tracker: SchemaTracker) -> None:
    try:
        with LogFile.open(disk, snapshot.path, force=True) as file:
            for slab in file.slabs():
                defining = np.flatnonzero(np.isin(slab.cells[scan.SPACE_ID], sorted(SCHEMA_SPACE_IDS)))
                for row in slab.rows(defining):
                    tracker.apply(row.type, row.body)
    except XlogError:
        return  # rows are then shown without names


# --- headers ---


def _history(listing: LogDirectory) -> Iterator[ListedFile]:
    """Yield the snapshot that the logs start from, then every log."""
    first = listing.logs[0].signature if listing.logs else None
    bases = [file for file in listing.snapshots if first is None or file.signature <= first]
    yield from bases[-1:]
    yield from listing.logs


def _header_error(file: ListedFile) -> XlogError | None:
    try:
        _ = file.meta
    except XlogError as error:
        return error
    return None


def _uuid(file: ListedFile) -> str | None:
    return file.meta.instance_uuid if _header_error(file) is None else None


def _owner(listing: LogDirectory) -> str | None:
    """Return the UUID of the instance that wrote the newest readable file, preferably a snapshot."""
    files = (*reversed(listing.snapshots), *reversed(listing.logs))
    return next((uuid for file in files if (uuid := _uuid(file)) is not None), None)


def _end(disk: Disk, readable: list[ListedFile]) -> VClock:
    """Return the position of the last row in the logs."""
    logs = [file for file in readable if file.path.endswith(".xlog")]
    if not logs:
        return VClock()
    end = VClock(logs[-1].meta.vclock).without_zero()
    with LogFile.open(disk, logs[-1].path, force=True) as log:
        for slab in log.slabs():
            end = end.merged(VClock(slab.newest()).without_zero())
    return end


def _replicaset_uuid(disk: Disk, listing: LogDirectory) -> str | None:
    """Return the replica set's UUID from `_schema` in the newest snapshot, where its rows come first."""
    newest = listing.newest_snapshot()
    if newest is None:
        return None
    try:
        with LogFile.open(disk, newest.path, force=True) as file:
            for slab in file.slabs():
                for row in slab.rows(np.flatnonzero(slab.cells[scan.SPACE_ID] == SCHEMA_ID)):
                    pair = unpack_body(row.body).get(Key.TUPLE)
                    if isinstance(pair, tuple) and len(pair) > 1 and pair[0] in REPLICASET_KEYS:
                        return str(pair[1])
                if (slab.cells[scan.SPACE_ID] > SCHEMA_ID).any():
                    return None
    except (XlogError, RemoteProtocolError):
        return None
    return None


def _is_in_use(disk: Disk, path: str) -> bool:
    try:
        disk.lock(path).release()
    except AlreadyLocked:
        return True
    except OSError:
        return False
    return False
