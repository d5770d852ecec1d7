"""Catch-up of a replica from the files of a running master: the epoch to resume after, and the sessions to send.

A replica that has followed this master resumes after its durable epoch. All other replicas are seeded: they receive the
compacted file, then every log file. A replica is also seeded if it needs entries that exist in the compacted file only.
The directory is not copied; one window of one file is in memory at a time. Sessions that end during the catch-up are
sent as usual. The order of entries does not matter, because write versions decide.

Reads through the Disk that is passed in, in a worker if there is much to read. Never sends, and never changes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, names
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import AT, END, MAJOR, NEED, TABLE_ROWS, TYPE, Table
from flowstone.limestone.format.entry_table_kernels import walk_table
from flowstone.limestone.format.wire_extensions import Action, HelloAck, Prepare
from flowstone.limestone.store.recovery import compacted_path, input_files
from flowstone.outside import Disk, File

WINDOW: Final = 1 << 20
"""Bytes of a log file that are read at once, and maximum size of a session sent for catch-up. A longer entry is read
whole.
"""

TABLE_COLUMNS: Final = 1 << 14
ATTEMPTS_MAX: Final = 10
"""Maximum number of attempts to open the files while they are being rotated."""

_BEGIN: Final = int(EntryType.MARKER_BEGIN)
_INVALIDATED: Final = int(EntryType.MARKER_INVALIDATED_BEGIN)
_MARKERS: Final = np.isin(np.arange(16), (2, 3, 4, 6))
"""True for each entry type that is a marker."""


class CatchUpStore(Protocol):
    """The part of a datastore that catch-up uses."""

    @property
    def path(self) -> str:
        """Directory of the datastore."""
        ...

    @property
    def instance_uuid(self) -> str: ...

    @property
    def durable_epoch(self) -> int:
        """The largest epoch in the epoch file."""
        ...

    def finished_sizes(self) -> dict[str, int]:
        """Return the size of the ended sessions in each file that a channel writes to, by file name.

        The size includes a session before `Propagation.end_session` is called for the session, even if the session is
        not synced."""
        ...


Epochs = NDArray[np.uint64]


@dataclass(frozen=True)
class LogSurvey:
    """The epochs of valid sessions in the log files, and the epochs of sessions that recovery has invalidated; both
    sorted.

    `begun_with` is the largest epoch that recovery has found. Only recovery invalidates sessions, and the store itself
    writes only valid sessions of later epochs. So one survey stays correct until the store is closed."""

    valid: Epochs
    marked: Epochs
    begun_with: int

    def settled(self, epoch: int, horizon_epoch: int) -> int:
        """Return the largest epoch, at most `epoch`, up to which a replica that has recorded `epoch` has the same data
        as this master.

        The replica may have recorded epochs that the master has not recorded: with a group commit order other than
        local first, the master may have crashed in between. Recovery has invalidated the sessions of these epochs, and
        the master may have written later epochs since. A record covers all epochs since the previous record, so all
        invalidated sessions after the last valid epoch are in doubt."""
        if epoch > self.begun_with:
            return epoch
        before = int(np.searchsorted(self.valid, np.uint64(epoch), side="right"))
        counts = int(self.valid[before - 1]) if before else 0
        counts = max(counts, horizon_epoch if horizon_epoch <= epoch else 0)
        in_doubt = np.searchsorted(self.marked, np.uint64(counts), side="right")
        is_doubtful = in_doubt < self.marked.size and int(self.marked[in_doubt]) <= epoch
        return counts if is_doubtful else epoch


def decide(replica: HelloAck, instance: str, durable_epoch: int, horizon_epoch: int, survey: LogSurvey) -> Prepare:
    """Decide whether a replica can resume, and from which epoch, or must be seeded."""
    epoch = survey.settled(min(replica.durable_epoch, durable_epoch), horizon_epoch)
    if replica.follows != instance or epoch < horizon_epoch:
        return Prepare(Action.SEED, durable_epoch)
    return Prepare(Action.RESUME, epoch)


@dataclass(frozen=True)
class OpenLogFile:
    """An open log file. Only its first `size` bytes are used."""

    name: str
    file: File
    size: int


class LogFiles:
    """The files of a directory, held open, so that renaming or removing files has no effect on the reader.

    `superseded` lists the log files whose contents are in the compacted file."""

    def __init__(self, logs: list[OpenLogFile], superseded: tuple[str, ...], horizon_epoch: int) -> None:
        self.logs = logs
        self.superseded = superseded
        self.compacted: OpenLogFile | None = None
        self.horizon = horizon_epoch

    def close(self) -> None:
        for log in self.logs:
            log.file.close()
        if self.compacted is not None:
            self.compacted.file.close()

    def survey(self, disk: Disk, directory: str, begun_with: int) -> LogSurvey:
        """Return the epochs with valid sessions, and the epochs with invalidated sessions."""
        found = [_marker_epochs(log) for log in self.logs]
        for name in self.superseded:
            path = f"{directory}/{name}"
            if disk.kind(path) == "file":
                with disk.open(path) as file:
                    found.append(_marker_epochs(OpenLogFile(name, file, file.size())))
        empty = np.empty(0, np.uint64)
        valid, marked = (np.unique(np.concatenate([empty, *epochs])) for epochs in zip(*found, ((), ()), strict=True))
        return LogSurvey(valid, marked, begun_with)

    def sessions(self, prepared: Prepare) -> Iterator[tuple[int, bytes]]:
        """Yield the epochs and entries that a replica lacks after `prepared`. Each item is about a window in size at
        most."""
        if prepared.action is Action.SEED and self.compacted is not None:
            # The last epochs of the horizon may be empty, and so never recorded: they would not count over there.
            for _, _, data in _runs(self.compacted):
                yield max(min(self.horizon, prepared.epoch), 1), data
        above = 0 if prepared.action is Action.SEED else prepared.epoch
        for log in self.logs:
            yield from _merged(log, above)


def open_files(disk: Disk, directory: str, finished_sizes: Callable[[], dict[str, int]], begun_with: int) -> LogFiles:
    """Open all files of a directory, as of one moment. Blocks only briefly. `begun_with` is the largest epoch that
    recovery found."""
    for _ in range(ATTEMPTS_MAX):
        # The catalog first: when compaction ends after that, its result has more than the files that were left out.
        listed = catalog.read(disk, directory) or catalog.Catalog()
        found = input_files(disk, directory, listed)
        try:
            files = _opened(disk, directory, found, finished_sizes, listed, begun_with)
        except FileNotFoundError:
            continue
        if input_files(disk, directory, listed) == found:
            return files
        files.close()
    raise LimestoneError(f"log files of {directory} keep changing")


def _opened(
    disk: Disk,
    directory: str,
    found: list[str],
    finished_sizes: Callable[[], dict[str, int]],
    listed: catalog.Catalog,
    begun_with: int,
) -> LogFiles:
    logs: list[OpenLogFile] = []
    files = LogFiles(logs, listed.detached, listed.max_epoch_id if listed.compacted else 0)
    try:
        for name in found:
            file = disk.open(f"{directory}/{name}")
            logs.append(OpenLogFile(name, file, file.size()))
        # Last: a file that belongs to no channel now had no open session when its size was read. For any other file
        # only the finished size counts, because the size that was read may be in the middle of a session.
        sizes = finished_sizes()
        logs[:] = [replace(log, size=sizes.get(log.name, log.size)) for log in logs]
        # Compaction names the file in the catalog before it puts the first one there, and may have been cut short.
        path = compacted_path(disk, directory)
        if path is not None:
            file = disk.open(path)
            files.compacted = OpenLogFile(names.COMPACTED, file, file.size())
            if not listed.compacted:  # the original's offline compaction: it may be of all that was there at the start
                files.horizon = begun_with
    except BaseException:
        files.close()
        raise
    return files


def _windows(log: OpenLogFile) -> Iterator[tuple[bytes, Table, int]]:
    """Yield the windows of a file: the bytes, the table of the whole entries in them, and the size of these entries.

    Stop at the first byte that does not begin a whole entry."""
    room = np.empty((TABLE_ROWS, TABLE_COLUMNS), np.uint64)
    at, window = 0, WINDOW
    while at < log.size:
        data = log.file.read_at(at, min(window, log.size - at))
        count, stop, why = walk_table(np.frombuffer(data, np.uint8), 0, room, 0)
        if count:
            yield data, room[:, :count], stop
            at, window = at + stop, WINDOW
        elif why == NEED and len(data) == window:
            window *= 2  # an entry that is longer than that
        else:
            return


def _marker_epochs(log: OpenLogFile) -> tuple[Epochs, Epochs]:
    """Return the epochs of valid sessions, and the epochs of invalidated sessions."""
    found: tuple[list[Epochs], list[Epochs]] = ([], [])
    for _, table, _ in _windows(log):
        for kind, epochs in zip((_BEGIN, _INVALIDATED), found, strict=True):
            epochs.append(np.unique(table[MAJOR, table[TYPE] == kind]))
    empty = np.empty(0, np.uint64)
    valid, marked = (np.unique(np.concatenate([empty, *epochs])) for epochs in found)
    return valid, marked


def _runs(log: OpenLogFile) -> Iterator[tuple[int, int, bytes]]:
    """Yield the entries of a file in pieces without markers, with type and epoch of the preceding begin marker."""
    kind = epoch = at = 0
    for data, table, stop in _windows(log):
        start = 0
        for column in np.flatnonzero(_MARKERS[table[TYPE]]).tolist():
            marker_at = int(table[AT, column])
            if marker_at > start:
                yield kind, epoch, data[start:marker_at]
            kind, epoch, start = int(table[TYPE, column]), int(table[MAJOR, column]), int(table[END, column])
        if stop > start:
            yield kind, epoch, data[start:stop]
        at += stop
    if at < log.size and kind == _BEGIN:
        raise DamagedFile(log.file.path, at, "durable session is incomplete")


def _merged(log: OpenLogFile, above: int) -> Iterator[tuple[int, bytes]]:
    """Yield the sessions of epochs above `above`. Adjacent sessions of one epoch are joined, up to a window."""
    pending: list[bytes] = []
    pending_epoch = size = 0
    for kind, epoch, data in _runs(log):
        if kind != _BEGIN or epoch <= above:
            continue
        if pending and (epoch != pending_epoch or size + len(data) > WINDOW):
            yield pending_epoch, b"".join(pending)
            pending, size = [], 0
        pending.append(data)
        pending_epoch, size = epoch, size + len(data)
    if pending:
        yield pending_epoch, b"".join(pending)
