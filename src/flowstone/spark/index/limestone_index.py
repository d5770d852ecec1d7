"""An index of a Limestone data directory: the pieces of files that belong to each epoch, without keys and values.

The driver walks the log files once with a compiled kernel, and then only what is appended; executors read the pieces. A
directory may be read while a master writes it: the durable epoch is read before the files, so the files completely
contain everything durable. The part of a file that starts with its first session that is not yet durable is walked
again at each refresh, because a crash may invalidate or truncate it. Files are recognised by device and inode, so
rotation, which renames them, changes nothing. Never changes a directory, and takes no lock.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, epoch_file, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.tsurugi.sql_schema import SqlSchema, read_schema
from flowstone.outside.disk import Disk
from flowstone.spark.index.limestone_pieces import NO_LIMIT, SMALL_PIECE, EntryPiece, PieceFile, Version, Walk
from flowstone.spark.index.limestone_walk import EntrySession

SLICE_SIZE: Final = 32 << 20
"""Bytes of a file that one task reads."""

HEAD_SIZE: Final = 32
"""Bytes at the beginning of a log that identify it: they contain the epoch of its first session."""

TRIES: Final = 200
"""Number of attempts to read a directory that changes meanwhile."""

PAUSE_SECONDS: Final = 0.02
"""Pause between two attempts."""

NO_UUID: Final = "00000000-0000-0000-0000-000000000000"
"""Placeholder for the UUID of directories whose format has none."""


class NotALimestone(LimestoneError):
    """A directory is not a Limestone data directory."""


class EpochLost(LimestoneError):
    """Requested epochs are no longer in any file: compaction has reduced them to one state."""


class NotDurable(LimestoneError):
    """A requested epoch is not durable, or not yet."""


class PiecePlace(NamedTuple):
    """A piece as executors see it: its offsets, the session in which it begins, and a checksum of its bytes."""

    start: int
    end: int
    session: EntrySession
    checksum: int


@dataclass(frozen=True)
class PieceSlice:
    """Pieces of one file that one task reads.

    `number` is the rank of the file: of two entries with equal versions, the entry of the file with the higher rank
    wins. `is_compacted` marks a compacted file: entries of any log are newer than its entries. Sessions after epoch
    `limit` are skipped here, because another file contains them too.
    """

    directory: str
    name: str
    number: int
    places: tuple[PiecePlace, ...]
    is_compacted: bool = False
    limit: int = NO_LIMIT

    @property
    def size(self) -> int:
        return sum(place.end - place.start for place in self.places)


class LimestoneIndex:
    """A directory as of the last `refresh`. Epochs are numbers; `durable` is the newest one that can be shown."""

    def __init__(self, disk: Disk, directory: str, *, durable: int | None = None) -> None:
        self._given = durable
        self.disk = disk
        self.directory = directory
        self.durable = 0
        self.catalog = Catalog()
        self._files: dict[tuple[int, int], PieceFile] = {}
        self._logs: list[PieceFile] = []
        self._compacted: PieceFile | None = None
        self._pairs: dict[tuple[tuple[int, int], tuple[int, int]], bool] = {}
        """Caches for pairs of rotated files whether the first ends with the contents of the second."""
        found = manifest.read(disk, directory) if os.path.isdir(directory) else None
        if found is None:
            raise NotALimestone(f"{directory} is not a Limestone data directory", hint=f"it has no {names.MANIFEST}")
        self.instance_uuid = found.instance_uuid or NO_UUID

    @classmethod
    def open(cls, disk: Disk, directory: str, *, durable: int | None = None) -> LimestoneIndex:
        """Open a directory. `durable` overrides the epoch file."""
        index = cls(disk, os.path.abspath(directory), durable=durable)
        index.refresh()
        return index

    # --- refresh --------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Add the entries that were written since the last call. Retry if the directory is rotated or compacted
        meanwhile."""
        for left in reversed(range(TRIES)):
            try:
                if self._is_taken_in():
                    return
            except FileNotFoundError:
                pass  # it was renamed
            except DamagedFile as error:
                # A catalog is written in place, so a partial one may be read.
                if not left or os.path.basename(error.path) not in (names.CATALOG, names.CATALOG_BACK):
                    raise
            time.sleep(PAUSE_SECONDS)
        raise LimestoneError(f"{self.directory} keeps changing while it is read", hint="try again")

    def _is_taken_in(self) -> bool:
        """Read the directory once; return False if rotation or compaction changed it meanwhile."""
        listed = catalog.read(self.disk, self.directory) or Catalog()
        durable = self._given
        if durable is None:
            durable = epoch_file.read(self.disk, self.directory).durable
        there = self._listed()
        logs, compacted = self._look(durable, list(there))
        # If a file was renamed meanwhile, only its successor would have been read.
        if self._listed() != there or (catalog.read(self.disk, self.directory) or Catalog()) != listed:
            return False
        self.durable, self.catalog, self._logs, self._compacted = durable, listed, logs, compacted
        self._files = {each.identity: each for each in (*logs, *([compacted] if compacted else []))}
        return True

    def _listed(self) -> dict[str, tuple[int, int]]:
        """Return the log files by name, with the device and inode of each."""
        found: dict[str, tuple[int, int]] = {}
        for name in sorted(os.listdir(self.directory)):
            if names.is_pwal(name) and self._is_file(name):
                stat = os.stat(f"{self.directory}/{name}")
                found[name] = stat.st_dev, stat.st_ino
        return found

    def _look(self, durable: int, there: Sequence[str]) -> tuple[list[PieceFile], PieceFile | None]:
        special = (names.COMPACTED, names.COMPACTED_PREVIOUS)
        compacted = next((name for name in special if name in there), None)
        logs = [self._walked(name, durable) for name in there if name not in special]
        self._find_copies(logs)
        return logs, self._walked(compacted, durable) if compacted is not None else None

    def _find_copies(self, logs: Sequence[PieceFile]) -> None:
        """Set the limit of rotated files whose last sessions are in a file of their own.

        Compaction copies sessions that are too new for it from the end of a rotated file to such a file.
        """
        channels: dict[str, list[tuple[int, PieceFile]]] = {}
        for each in logs:
            if names.is_detached(each.name) and (oldest := each.oldest) is not None:
                channels.setdefault(each.name.partition(".")[0], []).append((oldest, each))
        for found in channels.values():
            found.sort(key=lambda pair: pair[0])
            begins = [oldest for oldest, _ in found]
            for oldest, whole in found:
                for begin, copy in found[bisect_left(begins, oldest) : bisect_right(begins, whole.newest)]:
                    is_twin = copy.size == whole.size and copy.name < whole.name
                    if copy is not whole and copy.size <= whole.size and not is_twin and self._ends_with(whole, copy):
                        whole.limit = min(whole.limit, begin - 1)

    def _ends_with(self, whole: PieceFile, copy: PieceFile) -> bool:
        pair = whole.identity, copy.identity
        if pair not in self._pairs:  # rotated files never change
            self._pairs[pair] = self._are_copies(whole, copy)
        return self._pairs[pair]

    def _are_copies(self, whole: PieceFile, copy: PieceFile) -> bool:
        with (
            self.disk.open(f"{self.directory}/{whole.name}") as ours,
            self.disk.open(f"{self.directory}/{copy.name}") as theirs,
        ):
            for at in range(0, copy.size, SMALL_PIECE):
                size = min(SMALL_PIECE, copy.size - at)
                if ours.read_at(whole.size - copy.size + at, size) != theirs.read_at(at, size):
                    return False
        return True

    def _is_file(self, name: str) -> bool:
        return self.disk.kind(f"{self.directory}/{name}") == "file"

    def _walked(self, name: str, durable: int) -> PieceFile:
        path = f"{self.directory}/{name}"
        stat = os.stat(path)
        found = self._files.get((stat.st_dev, stat.st_ino))
        if found is not None and found.is_walked(stat.st_size, stat.st_mtime_ns):
            found.name = name
            return found
        with self.disk.open(path) as file:
            stat = os.stat(path)
            found = self._files.get((stat.st_dev, stat.st_ino))
            size, head = file.size(), file.read_at(0, HEAD_SIZE)
            # Logs grow; a compacted file never does, and may have the inode of its predecessor.
            is_compacted = name.startswith(names.COMPACTED)
            if found is None or is_compacted or size < found.at or head[: len(found.head)] != found.head:
                found = PieceFile((stat.st_dev, stat.st_ino), name)
            found.name, found.size, found.changed_at = name, size, stat.st_mtime_ns
            Walk(found, durable, path).run(file.read_at, size)
            found.head = head[: min(len(head), found.at)]
        return found

    # --- contents -------------------------------------------------------------------------------------------------

    @property
    def has_compacted(self) -> bool:
        return self._compacted is not None

    @property
    def horizon(self) -> int:
        """The epoch up to which the compacted file holds a single state; 0 without a compacted file."""
        if self._compacted is None:
            return 0
        detached = [each.newest for each in self._logs if each.name in self.catalog.detached]
        known = max([self.catalog.max_epoch_id, *detached])
        # Other tools create compacted files without recording the epoch.
        return known or max(0, (self._oldest or self.durable + 1) - 1)

    @property
    def earliest(self) -> int:
        """The epoch after which all changes are available."""
        if self._compacted is None:
            return 0
        there = {each.name for each in self._logs}
        if not there.issuperset(self.catalog.detached) or self._oldest is None:
            return self.horizon
        return min(self.horizon, self._oldest - 1)

    @property
    def _oldest(self) -> int | None:
        return min((each.oldest for each in self._logs if each.oldest is not None), default=None)

    @property
    def has_unnumbered(self) -> str | None:
        """The name of a log file with sessions of epoch 0, as the original replica writes them, or None."""
        for each in self._logs:
            if any(len(piece.epochs) and piece.epochs[0] == 0 for piece in each.pieces):
                return each.name
        return None

    def storages(self, epoch: int) -> list[int]:
        """Return the storages with entries up to an epoch, in id order."""
        found: set[int] = set()
        for each in (*self._logs, *([self._compacted] if self._compacted else [])):
            for known in (each.storages, each.tail_storages):
                found |= {storage_id for storage_id, first in known.items() if first <= epoch}
        return sorted(found)

    def sql_schema(self, epoch: int) -> SqlSchema:
        """Return Tsurugi's tables at an epoch; none if another program wrote the log."""
        newest: dict[bytes, bytes | None] = {}
        if self._compacted is not None and epoch >= self.horizon:
            newest |= {each.key: each.value for each in self._compacted.definitions}
        wanted = self.input_names(epoch)
        found = [each for file in self._logs if file.name in wanted for each in file.all_definitions]
        for each in sorted(found, key=lambda each: each.version):
            if each.epoch <= epoch:
                newest[each.key] = each.value
        return read_schema(tuple(value for value in newest.values() if value is not None))

    def definition_epoch(self, start: int) -> int | None:
        """Return the first epoch after `start` that defines, alters or drops one of Tsurugi's tables."""
        epochs = (each.epoch for file in self._logs for each in file.all_definitions if each.epoch <= file.limit)
        return min((epoch for epoch in epochs if start < epoch <= self.durable), default=None)

    def input_names(self, epoch: int) -> list[str]:
        """Return the log files that, with the compacted one, make up the state at an epoch."""
        left_out = self.catalog.detached if self._compacted is not None and epoch >= self.horizon else ()
        return [each.name for each in self._logs if each.name not in left_out]

    @property
    def max_blob_id(self) -> int:
        """The largest blob id referenced by any entry of the current state's files."""
        wanted = self.input_names(self.durable)
        logs = [each for each in self._logs if each.name in wanted]
        return max((each.max_blob_id for each in (*logs, *([self._compacted] if self._compacted else []))), default=0)

    def check_changes(self, start: int, end: int) -> None:
        """Raise NotDurable or EpochLost unless all changes after `start` up to `end` are available."""
        if end > self.durable:
            raise NotDurable(
                f"{self.directory}: epoch {end} is not durable; the durable epoch is {self.durable}",
                hint="check whether an older state of the directory was restored",
            )
        if start < min(self.earliest, end):
            raise EpochLost(
                f"{self.directory}: changes after epoch {start} were removed by compaction; the remaining ones"
                f" start after epoch {self.earliest}",
                hint="start from the state with startingOffsets=snapshot, or set failOnDataLoss=false",
            )

    def check_state(self, epoch: int) -> None:
        """Raise NotDurable or EpochLost unless the state at an epoch is available."""
        if epoch > self.durable:
            raise NotDurable(f"{self.directory}: epoch {epoch} is not durable; the durable epoch is {self.durable}")
        if epoch < self.horizon and self.earliest:
            raise EpochLost(
                f"{self.directory}: the state at epoch {epoch} was removed by compaction",
                hint=f"the oldest available state is at epoch {self.horizon}",
            )

    def can_show(self, epoch: int) -> bool:
        try:
            self.check_state(epoch)
        except LimestoneError:
            return False
        return True

    # --- slices ---------------------------------------------------------------------------------------------------

    def slices(self, start: int, end: int, *, size: int = SLICE_SIZE) -> list[PieceSlice]:
        """Return slices with the changes after `start` up to `end`; they may contain other epochs as well."""
        numbered = list(enumerate(self._logs))
        return [part for number, each in numbered for part in self._of_file(each, number, start, end, size)]

    def state_slices(self, epoch: int, *, size: int = SLICE_SIZE) -> list[PieceSlice]:
        """Return slices of the files that make up the state at an epoch: the compacted file and the logs newer than it.

        For an epoch before compaction, all logs are returned.
        """
        self.check_state(epoch)
        wanted = self.input_names(epoch)
        found: list[PieceSlice] = []
        if self._compacted is not None and epoch >= self.horizon:
            places = [_place(piece) for piece in self._compacted.pieces]
            found += [self._slice(self._compacted, 0, part, is_compacted=True) for part in _parts(places, size)]
        for number, each in enumerate(self._logs):
            if each.name in wanted:
                found += self._of_file(each, number, -1, epoch, size)
        return found

    def rivals(self, start: int, end: int, *, size: int = SLICE_SIZE) -> list[PieceSlice]:
        """Return slices with entries up to `start` that may have greater versions than later entries up to `end`.

        There are usually none.
        """
        lesser = (piece.least_between(start, until) for piece, until in self._pieces(start, end))
        least = min((version for version in lesser if version is not None), default=None)
        if least is None:
            return []
        left_out = self.catalog.detached if self._compacted is not None and start >= self.horizon else ()
        found: list[PieceSlice] = []
        for number, each in enumerate(self._logs):
            if each.name in left_out:
                continue
            pieces = [piece for piece in each.pieces_between(-1, start) if piece.reaches(least, start)]
            found += [self._slice(each, number, part) for part in _parts([_place(piece) for piece in pieces], size)]
        return found

    def _of_file(self, file: PieceFile, number: int, start: int, end: int, size: int) -> Iterator[PieceSlice]:
        places = [_place(piece) for piece in file.pieces_between(start, end)]
        return (self._slice(file, number, part) for part in _parts(places, size))

    def _slice(
        self, file: PieceFile, number: int, places: Sequence[PiecePlace], *, is_compacted: bool = False
    ) -> PieceSlice:
        return PieceSlice(self.directory, file.name, number, tuple(places), is_compacted, file.limit)

    def clears(self, epoch: int, *, after: int = -1, with_detached: bool = False) -> dict[int, Version]:
        """Return for each storage the version of its last clear up to an epoch.

        Clears in compacted files are included only with `with_detached`.
        """
        left_out = self.catalog.detached if self._compacted is not None and not with_detached else ()
        found: dict[int, Version] = {}
        for each in self._logs:
            for clear in (*each.clears, *each.tail_clears) if each.name not in left_out else ():
                if after < clear.epoch <= epoch:
                    found[clear.storage_id] = max(found.get(clear.storage_id, (0, 0)), clear.version)
        return found

    def _pieces(self, start: int, end: int) -> Iterator[tuple[EntryPiece, int]]:
        """Yield the pieces with epochs after `start` up to `end`, each with the last epoch that counts in it."""
        for each in self._logs:
            for piece in each.pieces_between(start, end):
                yield piece, min(end, each.limit)

    def row_count(self, start: int, end: int) -> int:
        """Return the number of entries after `start` up to `end`."""
        return sum(piece.count_between(start, until) for piece, until in self._pieces(start, end))

    def size_between(self, start: int, end: int) -> int:
        return sum(piece.end - piece.start for piece, _ in self._pieces(start, end))

    def cut(self, start: int, *, max_rows: int | None = None, max_bytes: int | None = None) -> int:
        """Return the last epoch of a batch that begins after `start`: the durable one or an earlier one.

        A batch always has whole epochs.
        """
        pieces = [piece for piece, _ in self._pieces(start, self.durable)]
        if not pieces or (max_rows is None and max_bytes is None):
            return max(start, self.durable)
        epochs = np.concatenate([piece.epochs for piece in pieces])
        counts = np.concatenate([piece.counts for piece in pieces])
        sizes = np.concatenate([_sizes(piece) for piece in pieces])
        chosen = (epochs > start) & (epochs <= self.durable)
        order = np.argsort(epochs[chosen], kind="stable")
        epochs, counts, sizes = (each[chosen][order] for each in (epochs, counts, sizes))
        lasts = np.flatnonzero(np.append(epochs[1:] != epochs[:-1], True))
        fits = np.ones(len(lasts), np.bool_)
        if max_rows is not None:
            fits &= np.cumsum(counts)[lasts] <= max_rows
        if max_bytes is not None:
            fits &= np.cumsum(sizes)[lasts] <= max_bytes
        if fits.all():
            return self.durable
        return int(epochs[lasts[max(0, int(np.argmin(fits)) - 1)]])


def _sizes(piece: EntryPiece) -> NDArray[np.int64]:
    """Return the approximate number of bytes of each epoch of a piece."""
    return piece.counts * ((piece.end - piece.start) // max(1, int(piece.counts.sum())))


def _place(piece: EntryPiece) -> PiecePlace:
    return PiecePlace(piece.start, piece.end, piece.session, piece.checksum)


def _parts(places: Sequence[PiecePlace], size: int) -> Iterator[list[PiecePlace]]:
    """Split the pieces of a file into parts of about `size` bytes."""
    taken = 0
    marked: list[tuple[int, PiecePlace]] = []
    for place in places:
        marked.append((taken // size, place))
        taken += place.end - place.start
    for _, part in groupby(marked, key=lambda each: each[0]):
        yield [place for _, place in part]


def is_limestone(directory: str) -> bool:
    """Return True if a directory looks like a Limestone data directory."""
    return os.path.isfile(os.path.join(directory, names.MANIFEST))
