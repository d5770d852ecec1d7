"""Catch-up of a replica from the files of a running master: where it can resume, and the sessions that follow.

A replica that has followed this master resumes after its durable epoch. Any other is seeded, as is one that needs
entries that only the compacted file has: with the compacted file, then with every log file. Neither needs a copy of the
directory; both hold one window of one file in memory. Sessions that end meanwhile are sent as usual; the order does not
matter, because write versions decide.

Reads through the Disk that is passed in, in a worker if it is much; never sends, and never changes a file.
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
from flowstone.limestone.format.entry_table import AT, END, MAJOR, NEED, TABLE_ROWS, TYPE, Table, walk_table
from flowstone.limestone.format.wire_extensions import Action, HelloAck, Prepare
from flowstone.limestone.store.recovery import compacted_path, input_files
from flowstone.outside import Disk, File

WINDOW: Final = 1 << 20
"""Bytes of a log file that are read at once, and that one session of ours holds at most; a longer entry is read whole.
"""

TABLE_COLUMNS: Final = 1 << 14
ATTEMPTS_MAX: Final = 10
"""How often files are looked for that somebody rotates meanwhile."""

_BEGIN: Final = int(EntryType.MARKER_BEGIN)
_INVALIDATED: Final = int(EntryType.MARKER_INVALIDATED_BEGIN)
_MARKERS: Final = np.isin(np.arange(16), (2, 3, 4, 6))
"""By type, whether it is a marker."""


class CatchUpStore(Protocol):
    """What is asked of a datastore."""

    @property
    def path(self) -> str:
        """Its directory."""
        ...

    @property
    def instance_uuid(self) -> str: ...

    @property
    def durable_epoch(self) -> int:
        """The largest epoch that its epoch file has."""
        ...

    def finished_sizes(self) -> dict[str, int]:
        """By name of a file that a channel writes to, how many of its bytes are sessions that have ended.

        A session is among them before `Propagation.end_session` is called for it, synced or not."""
        ...


Epochs = NDArray[np.uint64]


@dataclass(frozen=True)
class LogSurvey:
    """The epochs of which log files have sessions that count, and sessions that recovery has marked; both sorted.

    `begun_with` is the largest epoch that recovery has found. It alone marks sessions, so one survey holds for the life
    of a store: all that it writes itself counts, and is of later epochs."""

    valid: Epochs
    marked: Epochs
    begun_with: int

    def settled(self, epoch: int, horizon_epoch: int) -> int:
        """The largest epoch up to this one that a replica which has recorded this one certainly has as we do.

        It may have recorded epochs that we have not, when the order of group commit was not local first and we crashed
        between. We have marked their sessions, and may have gone further since. A record covers all epochs since the
        one before, so what was marked behind the last epoch that counts is in doubt as a whole."""
        if epoch > self.begun_with:
            return epoch
        before = int(np.searchsorted(self.valid, np.uint64(epoch), side="right"))
        counts = int(self.valid[before - 1]) if before else 0
        counts = max(counts, horizon_epoch if horizon_epoch <= epoch else 0)
        in_doubt = np.searchsorted(self.marked, np.uint64(counts), side="right")
        is_doubtful = in_doubt < self.marked.size and int(self.marked[in_doubt]) <= epoch
        return counts if is_doubtful else epoch


def decide(replica: HelloAck, instance: str, durable_epoch: int, horizon_epoch: int, survey: LogSurvey) -> Prepare:
    """What a replica is prepared for."""
    epoch = survey.settled(min(replica.durable_epoch, durable_epoch), horizon_epoch)
    if replica.follows != instance or epoch < horizon_epoch:
        return Prepare(Action.SEED, durable_epoch)
    return Prepare(Action.RESUME, epoch)


@dataclass(frozen=True)
class OpenLogFile:
    """An open log file, of which `size` bytes count."""

    name: str
    file: File
    size: int


class LogFiles:
    """The files of a directory, held open: whatever is renamed or removed meanwhile, they are the ones that were there.

    `superseded` are the names of those whose content the compacted file has, which is None where there is none."""

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
        """What was durable here, and what was not."""
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
        """Epochs and entries, at most about a window each, that a replica lacks which was prepared so."""
        if prepared.action is Action.SEED and self.compacted is not None:
            # The last epochs of the horizon may be empty, and so never recorded: they would not count over there.
            for _, _, data in _runs(self.compacted):
                yield max(min(self.horizon, prepared.epoch), 1), data
        above = 0 if prepared.action is Action.SEED else prepared.epoch
        for log in self.logs:
            yield from _merged(log, above)


def open_files(disk: Disk, directory: str, finished_sizes: Callable[[], dict[str, int]], begun_with: int) -> LogFiles:
    """All that a directory has, at one moment. Blocks little. `begun_with`: the largest epoch that recovery found."""
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
    """A file window by window: its bytes, the table of its whole entries, and how many bytes those are.

    Ends where no entry is, or one is not whole."""
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
    """The epochs of sessions that count, and of those that were marked."""
    found: tuple[list[Epochs], list[Epochs]] = ([], [])
    for _, table, _ in _windows(log):
        for kind, epochs in zip((_BEGIN, _INVALIDATED), found, strict=True):
            epochs.append(np.unique(table[MAJOR, table[TYPE] == kind]))
    empty = np.empty(0, np.uint64)
    valid, marked = (np.unique(np.concatenate([empty, *epochs])) for epochs in found)
    return valid, marked


def _runs(log: OpenLogFile) -> Iterator[tuple[int, int, bytes]]:
    """The entries of a file in pieces without markers, with the type and the epoch of the begin marker before them."""
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
    """Sessions of epochs above this one; those of one epoch that follow each other as one, up to a window."""
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
