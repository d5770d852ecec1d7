"""What a Limestone data directory holds, by epochs: which pieces of which files, and nothing of their keys and values.

The driver walks the log files once, by a compiled kernel, and then only what was appended; executors read the pieces.
A directory is read while a master writes it: first the durable epoch, then the files, so whatever is durable is whole
in them. What stands behind the first session that is not durable yet is walked anew at each refresh: a crash may have
it marked or cut off. Files are known by their identity, so rotation, which gives them other names, moves nothing.
Never changes a directory, and takes no lock.
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

from flowstone.errors import FlowstoneError
from flowstone.limestone import catalog, epoch_file, manifest, names
from flowstone.limestone.catalog import Catalog
from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.outside.disk import Disk
from flowstone.spark.limestone_pieces import NO_LIMIT, SMALL_PIECE, LogFile, Piece, Version, Walk
from flowstone.spark.limestone_walk import Session

SLICE_SIZE: Final = 32 << 20
"""Bytes of a file that one task reads."""

HEAD_SIZE: Final = 32
"""Bytes at the beginning of a log by which it is known again: they have the epoch of its first session."""

TRIES: Final = 200
"""How often a directory may change under our eyes while it is looked at."""

PAUSE_SECONDS: Final = 0.02
"""Between two looks."""

NO_UUID: Final = "00000000-0000-0000-0000-000000000000"
"""Of directories of formats that had none."""


class NotALimestone(LimestoneError):
    """A directory is no Limestone data directory."""


class EpochLost(LimestoneError):
    """Epochs that are asked for are in no file any more: compaction has left one state of them."""


class NotDurable(LimestoneError):
    """An epoch that is asked for is not durable, or not yet."""


class Place(NamedTuple):
    """What executors have to know of a piece: where it is, in which session it begins, and a checksum of its bytes."""

    start: int
    end: int
    session: Session
    checksum: int


@dataclass(frozen=True)
class Slice:
    """Pieces of one file that one task reads. `number` is the file's place among all: of equal versions the last wins.

    `is_compacted`: it is a compacted file, to whose entries those of any log are newer. Sessions behind epoch `limit`
    are in another file, too, and count there."""

    directory: str
    name: str
    number: int
    places: tuple[Place, ...]
    is_compacted: bool = False
    limit: int = NO_LIMIT

    @property
    def size(self) -> int:
        return sum(place.end - place.start for place in self.places)


class LimestoneIndex:
    """A directory, as of the last `refresh`. Epochs are numbers; `durable` is the newest that can be shown."""

    def __init__(self, disk: Disk, directory: str, *, durable: int | None = None) -> None:
        self._given = durable
        self.disk = disk
        self.directory = directory
        self.durable = 0
        self.catalog = Catalog()
        self._files: dict[tuple[int, int], LogFile] = {}
        self._logs: list[LogFile] = []
        self._compacted: LogFile | None = None
        self._pairs: dict[tuple[tuple[int, int], tuple[int, int]], bool] = {}
        """Rotated files of which the one was seen to end with the other, or not."""
        found = manifest.read(disk, directory) if os.path.isdir(directory) else None
        if found is None:
            raise NotALimestone(f"{directory} is no Limestone data directory", hint=f"it has no {names.MANIFEST}")
        self.instance_uuid = found.instance_uuid or NO_UUID

    @classmethod
    def open(cls, disk: Disk, directory: str, *, durable: int | None = None) -> LimestoneIndex:
        """`durable`: this epoch is taken for the durable one, whatever the epoch file says."""
        index = cls(disk, os.path.abspath(directory), durable=durable)
        index.refresh()
        return index

    # --- looking --------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes in what came since. A directory that is rotated or compacted meanwhile is looked at again."""
        for left in reversed(range(TRIES)):
            try:
                if self._is_taken_in():
                    return
            except FileNotFoundError:
                pass  # it got another name
            except DamagedFile as error:
                # A catalog is written in place, so half of one may be seen.
                if not left or os.path.basename(error.path) not in (names.CATALOG, names.CATALOG_BACK):
                    raise
            time.sleep(PAUSE_SECONDS)
        raise LimestoneError(f"{self.directory} changes all the time", hint="try again")

    def _is_taken_in(self) -> bool:
        """Looks once; False if compaction has changed something meanwhile."""
        listed = catalog.read(self.disk, self.directory) or Catalog()
        durable = self._given
        if durable is None:
            durable = epoch_file.read(self.disk, self.directory).durable
        there = self._listed()
        logs, compacted = self._look(durable, list(there))
        # Of a file that got another name while we looked we would have seen only its successor.
        if self._listed() != there or (catalog.read(self.disk, self.directory) or Catalog()) != listed:
            return False
        self.durable, self.catalog, self._logs, self._compacted = durable, listed, logs, compacted
        self._files = {each.identity: each for each in (*logs, *([compacted] if compacted else []))}
        return True

    def _listed(self) -> dict[str, tuple[int, int]]:
        """The log files by name, and which file each is."""
        found: dict[str, tuple[int, int]] = {}
        for name in sorted(os.listdir(self.directory)):
            if names.is_pwal(name) and self._is_file(name):
                stat = os.stat(f"{self.directory}/{name}")
                found[name] = stat.st_dev, stat.st_ino
        return found

    def _look(self, durable: int, there: Sequence[str]) -> tuple[list[LogFile], LogFile | None]:
        special = (names.COMPACTED, names.COMPACTED_PREVIOUS)
        compacted = next((name for name in special if name in there), None)
        logs = [self._walked(name, durable) for name in there if name not in special]
        self._find_copies(logs)
        return logs, self._walked(compacted, durable) if compacted is not None else None

    def _find_copies(self, logs: Sequence[LogFile]) -> None:
        """Compaction copies sessions that are too new for it from the end of a rotated file to one of their own."""
        channels: dict[str, list[tuple[int, LogFile]]] = {}
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

    def _ends_with(self, whole: LogFile, copy: LogFile) -> bool:
        pair = whole.identity, copy.identity
        if pair not in self._pairs:  # nobody writes to files that were rotated
            self._pairs[pair] = self._are_copies(whole, copy)
        return self._pairs[pair]

    def _are_copies(self, whole: LogFile, copy: LogFile) -> bool:
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

    def _walked(self, name: str, durable: int) -> LogFile:
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
            # A log grows; a compacted file never does, and may have got the identity of the one before it.
            is_compacted = name.startswith(names.COMPACTED)
            if found is None or is_compacted or size < found.at or head[: len(found.head)] != found.head:
                found = LogFile((stat.st_dev, stat.st_ino), name)
            found.name, found.size, found.changed_at = name, size, stat.st_mtime_ns
            Walk(found, durable, path).run(file.read_at, size)
            found.head = head[: min(len(head), found.at)]
        return found

    # --- what is there --------------------------------------------------------------------------------------------

    @property
    def has_compacted(self) -> bool:
        return self._compacted is not None

    @property
    def horizon(self) -> int:
        """The epoch up to which a compacted file has one state of everything; 0 where there is none."""
        if self._compacted is None:
            return 0
        detached = [each.newest for each in self._logs if each.name in self.catalog.detached]
        known = max([self.catalog.max_epoch_id, *detached])
        # Other tools make compacted files without saying of when.
        return known or max(0, (self._oldest or self.durable + 1) - 1)

    @property
    def earliest(self) -> int:
        """Changes of all epochs behind this one are there."""
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
        """A log file with sessions of epoch 0, as the original replica writes them; None where there is none."""
        for each in self._logs:
            if any(len(piece.epochs) and piece.epochs[0] == 0 for piece in each.pieces):
                return each.name
        return None

    def storages(self, epoch: int) -> list[int]:
        """The storages that had entries up to an epoch, in the order of their ids."""
        found: set[int] = set()
        for each in (*self._logs, *([self._compacted] if self._compacted else [])):
            for known in (each.storages, each.tail_storages):
                found |= {storage_id for storage_id, first in known.items() if first <= epoch}
        return sorted(found)

    def input_names(self, epoch: int) -> list[str]:
        """The log files that make the state at an epoch, with the compacted one."""
        left_out = self.catalog.detached if self._compacted is not None and epoch >= self.horizon else ()
        return [each.name for each in self._logs if each.name not in left_out]

    @property
    def max_blob_id(self) -> int:
        """The largest id that any entry has named which makes the state of now."""
        wanted = self.input_names(self.durable)
        logs = [each for each in self._logs if each.name in wanted]
        return max((each.max_blob_id for each in (*logs, *([self._compacted] if self._compacted else []))), default=0)

    def check_changes(self, start: int, end: int) -> None:
        """Raises where the changes behind `start` up to `end` are not all there."""
        if end > self.durable:
            raise NotDurable(
                f"{self.directory}: epoch {end} is not durable, {self.durable} is", hint="was the directory set back?"
            )
        if start < min(self.earliest, end):
            raise EpochLost(
                f"{self.directory}: changes behind epoch {start} are gone: it was compacted, and those that are left"
                f" begin behind epoch {self.earliest}",
                hint="begin with the state (startingOffsets=snapshot), or set failOnDataLoss to false",
            )

    def check_state(self, epoch: int) -> None:
        """Raises where the state at an epoch cannot be shown."""
        if epoch > self.durable:
            raise NotDurable(f"{self.directory}: epoch {epoch} is not durable, {self.durable} is")
        if epoch < self.horizon and self.earliest:
            raise EpochLost(
                f"{self.directory}: the state at epoch {epoch} is gone: compaction has left that of {self.horizon}",
                hint=f"ask for one from {self.horizon} on",
            )

    def can_show(self, epoch: int) -> bool:
        try:
            self.check_state(epoch)
        except LimestoneError:
            return False
        return True

    # --- what is read ---------------------------------------------------------------------------------------------

    def slices(self, start: int, end: int, *, size: int = SLICE_SIZE) -> list[Slice]:
        """Where the changes behind `start` up to `end` are; other epochs may be among them."""
        numbered = list(enumerate(self._logs))
        return [part for number, each in numbered for part in self._of_file(each, number, start, end, size)]

    def state_slices(self, epoch: int, *, size: int = SLICE_SIZE) -> list[Slice]:
        """Where everything is that makes the state at an epoch: the compacted file, and the logs that it does not have.

        Of an epoch before compaction, all logs."""
        self.check_state(epoch)
        wanted = self.input_names(epoch)
        found: list[Slice] = []
        if self._compacted is not None and epoch >= self.horizon:
            places = [_place(piece) for piece in self._compacted.pieces]
            found += [self._slice(self._compacted, 0, part, is_compacted=True) for part in _parts(places, size)]
        for number, each in enumerate(self._logs):
            if each.name in wanted:
                found += self._of_file(each, number, -1, epoch, size)
        return found

    def rivals(self, start: int, end: int, *, size: int = SLICE_SIZE) -> list[Slice]:
        """Where entries up to `start` may be with greater versions than some behind it up to `end`: none, mostly."""
        lesser = (piece.least_between(start, until) for piece, until in self._pieces(start, end))
        least = min((version for version in lesser if version is not None), default=None)
        if least is None:
            return []
        left_out = self.catalog.detached if self._compacted is not None and start >= self.horizon else ()
        found: list[Slice] = []
        for number, each in enumerate(self._logs):
            if each.name in left_out:
                continue
            pieces = [piece for piece in each.pieces_between(-1, start) if piece.reaches(least, start)]
            found += [self._slice(each, number, part) for part in _parts([_place(piece) for piece in pieces], size)]
        return found

    def _of_file(self, file: LogFile, number: int, start: int, end: int, size: int) -> Iterator[Slice]:
        places = [_place(piece) for piece in file.pieces_between(start, end)]
        return (self._slice(file, number, part) for part in _parts(places, size))

    def _slice(self, file: LogFile, number: int, places: Sequence[Place], *, is_compacted: bool = False) -> Slice:
        return Slice(self.directory, file.name, number, tuple(places), is_compacted, file.limit)

    def clears(self, epoch: int, *, behind: int = -1, with_detached: bool = False) -> dict[int, Version]:
        """Per storage, with what version it was emptied last, up to an epoch.

        Without those in files that compaction has taken in, unless they are asked for."""
        left_out = self.catalog.detached if self._compacted is not None and not with_detached else ()
        found: dict[int, Version] = {}
        for each in self._logs:
            for clear in (*each.clears, *each.tail_clears) if each.name not in left_out else ():
                if behind < clear.epoch <= epoch:
                    found[clear.storage_id] = max(found.get(clear.storage_id, (0, 0)), clear.version)
        return found

    def _pieces(self, start: int, end: int) -> Iterator[tuple[Piece, int]]:
        """Pieces with such epochs, and up to which they count in each."""
        for each in self._logs:
            for piece in each.pieces_between(start, end):
                yield piece, min(end, each.limit)

    def row_count(self, start: int, end: int) -> int:
        """Entries behind `start` up to `end`."""
        return sum(piece.count_between(start, until) for piece, until in self._pieces(start, end))

    def size_between(self, start: int, end: int) -> int:
        return sum(piece.end - piece.start for piece, _ in self._pieces(start, end))

    def cut(self, start: int, *, max_rows: int | None = None, max_bytes: int | None = None) -> int:
        """The epoch at which a batch that begins behind `start` ends: the durable one, or less, but a whole epoch."""
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


def _sizes(piece: Piece) -> NDArray[np.int64]:
    """Bytes of each epoch of a piece, about."""
    return piece.counts * ((piece.end - piece.start) // max(1, int(piece.counts.sum())))


def _place(piece: Piece) -> Place:
    return Place(piece.start, piece.end, piece.session, piece.checksum)


def _parts(places: Sequence[Place], size: int) -> Iterator[list[Place]]:
    """Pieces of a file in parts of about that size."""
    taken = 0
    marked: list[tuple[int, Place]] = []
    for place in places:
        marked.append((taken // size, place))
        taken += place.end - place.start
    for _, part in groupby(marked, key=lambda each: each[0]):
        yield [place for _, place in part]


def is_limestone(directory: str) -> bool:
    """Whether a directory looks like a Limestone data directory."""
    return os.path.isfile(os.path.join(directory, names.MANIFEST))


def parse_epoch(text: str) -> int:
    """An epoch as users write it."""
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise FlowstoneError(f"{text!r} is no epoch", hint="an epoch is a whole number")
    return int(text)
