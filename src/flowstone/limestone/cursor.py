"""The rows of a data directory: in key order, in parts, by key, of a range of keys; lazily, from the files they are in.

Through the Disk one is handed, and blocking. Which entries these are, `columns.py` has found out. Kept in memory are 64
bytes and the key of each row; entries are read by windows of GATHER_SIZE, by as many passes over the files as there are
windows. A directory that is opened for writing has them once more, in order, in `data/snapshot`: from there one pass
suffices, and log files may be moved or removed meanwhile.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from flowstone.kernels.wide import Bytes
from flowstone.limestone import columns, names
from flowstone.limestone.columns import COMPACTED, Order, Rows, Sorted
from flowstone.limestone.entries import Entry, EntryType, Marker, WriteVersion, encode
from flowstone.limestone.entry_table import entries_of
from flowstone.limestone.errors import DamagedFile
from flowstone.outside import Disk, File

GATHER_SIZE: Final = 64 << 20
"""Of entries that are brought into order at once; one that is longer comes alone."""

READ_SIZE: Final = 4 << 20
"""What is read of a file at once, for that."""

BEGIN: Final = encode(Marker(EntryType.MARKER_BEGIN, 0))
_STORAGE: Final = struct.Struct("<Q")


def sort_key(storage_id: int, key: bytes) -> bytes:
    """The order of snapshots, compacted files and cursors: the storage id as it is on disk, then the key."""
    return _STORAGE.pack(storage_id) + key


@dataclass(frozen=True)
class Source:
    """A file that rows are in: opened for each reading, unless it is held open."""

    disk: Disk | None
    path: str
    held: File | None = None

    def opened(self) -> AbstractContextManager[File]:
        """For one reading."""
        if self.held is not None:
            return nullcontext(self.held)
        assert self.disk is not None
        return self.disk.open(self.path)

    def opened_for_long(self) -> Source:
        """The same file, whatever becomes of its name, until `close`."""
        if self.disk is None or self.held is not None:
            return self
        return replace(self, held=self.disk.open(self.path))

    def close(self) -> None:
        if self.held is not None:
            self.held.close()


NO_SOURCE: Final = Source(None, "")
"""In the place of a compacted file that is not there: no row is in it."""


@dataclass(frozen=True)
class Gathered:
    """Entries one behind the other, as in a file: `data`, and where in it each of `rows` begins.

    `data` holds until the next one is asked for."""

    data: Bytes
    rows: Rows
    targets: Order


def gather(sources: Sequence[Source], rows: Rows, window: int = GATHER_SIZE) -> Iterator[Gathered]:
    """The entries of the rows, in their order. DamagedFile if a file has become shorter than it was."""
    sizes = rows[:, columns.SIZE].astype(np.int64)
    ends = np.cumsum(sizes)
    first, space = 0, np.empty(0, np.uint8)
    while first < len(rows):
        start = int(ends[first] - sizes[first])
        last = max(first + 1, int(np.searchsorted(ends, start + window, "right")))
        part = slice(first, last)
        size = int(ends[last - 1]) - start
        if size > space.size:
            space = np.empty(size, np.uint8)
        out = space[:size]
        targets = ends[part] - sizes[part] - start
        origins = (rows[part, columns.ORIGIN] >> np.uint64(8)).astype(np.int64)
        for origin in np.flatnonzero(np.bincount(origins)).tolist():
            chosen = np.flatnonzero(origins == origin)
            with sources[origin].opened() as file:
                starts = rows[part, columns.AT][chosen].astype(np.int64)
                _gather_from(file, starts, sizes[part][chosen], out, targets[chosen])
        yield Gathered(out, rows[part], targets)
        first = last


def _gather_from(file: File, starts: Order, sizes: Order, out: Bytes, targets: Order) -> None:
    """Read the file once, from its begin to its end, skipping what is not wanted."""
    if (np.diff(starts) < 0).any():
        order = np.argsort(starts)
        starts, sizes, targets = starts[order], sizes[order], targets[order]
    ends = starts + sizes
    first = 0
    while first < len(starts):
        at = int(starts[first])
        last = max(first + 1, int(np.searchsorted(ends, at + READ_SIZE, "right")))
        size = int(ends[last - 1]) - at
        data = file.read_at(at, size)
        if len(data) < size:
            raise DamagedFile(file.path, at + len(data), "it was longer when it was looked at first")
        part = slice(first, last)
        columns.copy_spans(np.frombuffer(data, np.uint8), starts[part] - at, sizes[part], out, targets[part])
        first = last


class StoreSnapshot:
    """The state of a directory at one durable epoch. Any thread may read it, several at a time."""

    def __init__(
        self,
        sources: Sequence[Source],
        winners: Sorted,
        cleared: Mapping[int, WriteVersion],
        max_blob_id: int,
        *,
        is_in_order: bool = False,
    ) -> None:
        self.cleared = cleared
        """Per storage, when it was last cleared or removed, as far as the log files say."""
        self.max_blob_id = max_blob_id
        """The largest id of any blob that any entry has named, so that none is given out again."""
        self._sources = sources
        self._window = READ_SIZE if is_in_order else GATHER_SIZE
        self._winners = winners
        self._puts = winners.only(winners.is_put)

    def __len__(self) -> int:
        return len(self._puts.rows)

    def cursor(self) -> Iterator[Entry]:
        """All rows in key order."""
        return self._entries(self._puts.rows)

    def rows(self) -> list[Entry]:
        """All rows at once."""
        return list(self.cursor())

    def partitioned_cursors(self, count: int) -> list[Iterator[Entry]]:
        """The rows in `count` parts of about the same length, one behind the other in key order."""
        bounds = [len(self) * part // count for part in range(count + 1)]
        return [self._entries(self._puts.rows[start:end]) for start, end in pairwise(bounds)]

    def find(self, storage_id: int, key: bytes) -> Entry | None:
        """The row of this key."""
        place = self._place(sort_key(storage_id, key))
        if place == len(self) or self._sort_key(place) != sort_key(storage_id, key):
            return None
        return next(self._entries(self._puts.rows[place : place + 1]))

    def scan(self, storage_id: int, begin: bytes = b"", end: bytes | None = None) -> Iterator[Entry]:
        """The rows of a storage from key `begin` on, up to and without `end`, in key order."""
        first = self._place(sort_key(storage_id, begin))
        if end is not None:
            last = self._place(sort_key(storage_id, end))
        else:
            last = bisect_left(range(len(self)), True, first, key=lambda place: self._storage_id(place) != storage_id)
        return self._entries(self._puts.rows[first:last])

    def gathered(self) -> Iterator[Gathered]:
        """All rows in key order, as bytes of a log file."""
        return gather(self._sources, self._puts.rows, self._window)

    def blob_ids(self) -> set[int]:
        """The blobs of all rows."""
        with_blobs = self._puts.rows[self._puts.has_blobs]
        return {blob_id for entry in self._entries(with_blobs) for blob_id in entry.blob_ids}

    def changes(self, *, with_removes: bool) -> list[Entry]:
        """What a snapshot file holds: what log files have decided, in key order.

        Removes are for a directory with a compacted file, whose copy of the key they hide."""
        return list(self._entries(self._changes(with_removes)))

    def write_compacted(self, file: File) -> int:
        """The rows as a compacted file, of versions that every log file's entry is newer than; how many they are."""
        file.append(BEGIN)
        for part in gather(self._sources, self._puts.rows, self._window):
            columns.zero_versions(part.data, part.targets, part.rows[:, columns.KEY_SIZE].astype(np.int64))
            file.append(part.data.data)
        return len(self)

    def write_snapshot(self, file: File, *, with_removes: bool) -> None:
        """The content of `data/snapshot`: see `changes`."""
        file.append(BEGIN)
        for part in gather(self._sources, self._changes(with_removes), self._window):
            file.append(part.data.data)

    def stored(self, disk: Disk, directory: str, *, with_removes: bool) -> StoreSnapshot:
        """Write `data/snapshot`, and read from there. The files that are read then are held open until `close`.

        This one has held files, too, or it reads by names that may change: it is not to be read any more."""
        path = f"{directory}/{names.SNAPSHOT}"
        disk.make_directory(path.rpartition("/")[0])
        if disk.kind(path) is not None:
            disk.unlink(path)
        with disk.create(path) as file:
            self.write_snapshot(file, with_removes=with_removes)
        compacted, *logs = self._sources
        compacted = compacted.opened_for_long()
        for source in logs:
            source.close()
        moved = Sorted(self._winners.rows.copy(), self._winners.keys)
        changed = (moved.origins != COMPACTED) & (moved.is_put | with_removes)
        sizes = moved.rows[changed, columns.SIZE]
        moved.rows[changed, columns.AT] = np.cumsum(sizes) - sizes + np.uint64(len(BEGIN))
        moved.rows[changed, columns.ORIGIN] = moved.types[changed] | np.uint64(1 << 8)
        moved = moved.only(changed | (moved.origins == COMPACTED))
        source = Source(disk, path, disk.open(path))
        return StoreSnapshot((compacted, source), moved, self.cleared, self.max_blob_id, is_in_order=True)

    def close(self) -> None:
        """Let go of the files that are held open; no row can be read any more."""
        for source in self._sources:
            source.close()

    def _changes(self, with_removes: bool) -> Rows:
        winners = self._winners
        return winners.only((winners.origins != COMPACTED) & (winners.is_put | with_removes)).rows

    def _entries(self, rows: Rows) -> Iterator[Entry]:
        for part in gather(self._sources, rows, self._window):
            yield from entries_of(part.data.tobytes())

    def _storage_id(self, place: int) -> int:
        return int(self._puts.rows[place, columns.STORAGE_ID])

    def _sort_key(self, place: int) -> bytes:
        return sort_key(self._storage_id(place), self._puts.key(place))

    def _place(self, wanted: bytes) -> int:
        """Of the first row whose key is not smaller."""
        return bisect_left(range(len(self)), wanted, key=self._sort_key)
