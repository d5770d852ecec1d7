"""The rows of a data directory: all in key order, in partitions, by key or by key range, read lazily from its files.

Uses the Disk that is passed in, and blocks. `latest_entries.py` determines the rows. Memory holds 64 bytes and the key
of each row. Entries are read in windows of GATHER_SIZE, with one pass over the files per window. A directory that is
opened for writing has a sorted copy of them in `data/snapshot`: one pass over it suffices, and log files may be moved
or removed meanwhile.
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

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode
from flowstone.limestone.format.entry_table import Bytes
from flowstone.limestone.format.entry_walk import entries_of
from flowstone.limestone.store import winner_table as columns
from flowstone.limestone.store.latest_entries import Sorted
from flowstone.limestone.store.winner_kernels import copy_spans, zero_versions
from flowstone.limestone.store.winner_table import COMPACTED, Order, Rows
from flowstone.outside import Disk, File

GATHER_SIZE: Final = 64 << 20
"""Bytes of entries that are sorted at once. A longer entry is read alone."""

READ_SIZE: Final = 4 << 20
"""Bytes that are read from a file at once to merge files."""

BEGIN: Final = encode(Marker(EntryType.MARKER_BEGIN, 0))
_STORAGE: Final = struct.Struct("<Q")


def sort_key(storage_id: int, key: bytes) -> bytes:
    """Return the key that snapshots, compacted files and cursors are sorted by: storage id as on disk, then key."""
    return _STORAGE.pack(storage_id) + key


@dataclass(frozen=True)
class RowSource:
    """A file with rows. It is opened for each read, unless it is held open."""

    disk: Disk | None
    path: str
    held: File | None = None

    def opened(self) -> AbstractContextManager[File]:
        """Open the file for one read."""
        if self.held is not None:
            return nullcontext(self.held)
        assert self.disk is not None
        return self.disk.open(self.path)

    def opened_for_long(self) -> RowSource:
        """Return the same file held open until `close`, so that it survives a rename or deletion."""
        if self.disk is None or self.held is not None:
            return self
        return replace(self, held=self.disk.open(self.path))

    def close(self) -> None:
        if self.held is not None:
            self.held.close()


NO_SOURCE: Final = RowSource(None, "")
"""Placeholder for a missing compacted file. It contains no row."""


@dataclass(frozen=True)
class Gathered:
    """Consecutive entries as in a file: `data`, and the offset in it of each of `rows`.

    `data` is valid until the next object is requested."""

    data: Bytes
    rows: Rows
    targets: Order


def gather(sources: Sequence[RowSource], rows: Rows, window: int = GATHER_SIZE) -> Iterator[Gathered]:
    """Yield the entries of the rows, in order. Raise DamagedFile if a file has become shorter."""
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
    """Read the file once from start to end, skipping bytes that are not needed."""
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
            raise DamagedFile(file.path, at + len(data), "file has become shorter since it was opened")
        part = slice(first, last)
        copy_spans(np.frombuffer(data, np.uint8), starts[part] - at, sizes[part], out, targets[part])
        first = last


class StoreSnapshot:
    """The state of a directory at one durable epoch. Thread-safe.

    Example:
        snapshot = store.snapshot()
        for entry in snapshot.scan(1, begin=b"a", end=b"b"):
            print(entry.key, entry.value)
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        winners: Sorted,
        cleared: Mapping[int, WriteVersion],
        max_blob_id: int,
        *,
        is_in_order: bool = False,
    ) -> None:
        self.cleared = cleared
        """Per storage, the version of the last clear or removal in the log files."""
        self.max_blob_id = max_blob_id
        """The largest blob id that any entry has named, so that no id is assigned twice."""
        self._sources = sources
        self._window = READ_SIZE if is_in_order else GATHER_SIZE
        self._winners = winners
        self._puts = winners.only(winners.is_put)

    def __len__(self) -> int:
        return len(self._puts.rows)

    def cursor(self) -> Iterator[Entry]:
        """Return an iterator over all rows in key order."""
        return self._entries(self._puts.rows)

    def rows(self) -> list[Entry]:
        """Return all rows in key order."""
        return list(self.cursor())

    def partitioned_cursors(self, count: int) -> list[Iterator[Entry]]:
        """Return iterators over consecutive key ranges with about the same number of rows.

        Args:
            count: Number of iterators.
        """
        bounds = [len(self) * part // count for part in range(count + 1)]
        return [self._entries(self._puts.rows[start:end]) for start, end in pairwise(bounds)]

    def find(self, storage_id: int, key: bytes) -> Entry | None:
        """Return the row of this key, or None."""
        place = self._place(sort_key(storage_id, key))
        if place == len(self) or self._sort_key(place) != sort_key(storage_id, key):
            return None
        return next(self._entries(self._puts.rows[place : place + 1]))

    def scan(self, storage_id: int, begin: bytes = b"", end: bytes | None = None) -> Iterator[Entry]:
        """Return an iterator over the rows of a storage, in key order.

        Args:
            storage_id: Id of the storage.
            begin: First key, inclusive.
            end: Last key, exclusive; None: no limit.
        """
        return self._entries(self._range(storage_id, begin, end))

    def gathered(self, storage_id: int | None = None) -> Iterator[Gathered]:
        """Yield all rows, or those of one storage, in key order, encoded as in a log file."""
        rows = self._puts.rows if storage_id is None else self._range(storage_id)
        return gather(self._sources, rows, self._window)

    def blob_ids(self) -> set[int]:
        """Return the blobs of all rows."""
        with_blobs = self._puts.rows[self._puts.has_blobs]
        return {blob_id for entry in self._entries(with_blobs) for blob_id in entry.blob_ids}

    def changes(self, *, with_removes: bool) -> list[Entry]:
        """Return the content of a snapshot file: the winning entries of the log files, in key order.

        A directory with a compacted file needs `with_removes`: removes hide the keys of the compacted file."""
        return list(self._entries(self._changes(with_removes)))

    def write_compacted(self, file: File) -> int:
        """Write the rows as a compacted file, with versions older than any log entry; return the number of rows."""
        file.append(BEGIN)
        for part in gather(self._sources, self._puts.rows, self._window):
            zero_versions(part.data, part.targets, part.rows[:, columns.KEY_SIZE].astype(np.int64))
            file.append(part.data.data)
        return len(self)

    def write_snapshot(self, file: File, *, with_removes: bool) -> None:
        """Write the content of `data/snapshot`; see `changes`."""
        file.append(BEGIN)
        for part in gather(self._sources, self._changes(with_removes), self._window):
            file.append(part.data.data)

    def stored(self, disk: Disk, directory: str, *, with_removes: bool) -> StoreSnapshot:
        """Write `data/snapshot`, and return a snapshot that reads from it. It holds its files open until `close`.

        Do not read from this object afterwards: its files are closed, or their names may change."""
        path = f"{directory}/{names.SNAPSHOT}"
        disk.make_directory(path.rpartition("/")[0])
        if disk.kind(path) is not None:
            disk.unlink(path)
        with disk.create(path) as file:
            self.write_snapshot(file, with_removes=with_removes)
        compacted, *logs = self._sources
        compacted = compacted.opened_for_long()
        try:
            written = RowSource(disk, path, disk.open(path))
        except BaseException:
            compacted.close()
            raise
        for source in logs:
            source.close()
        moved = Sorted(self._winners.rows.copy(), self._winners.keys)
        changed = (moved.origins != COMPACTED) & (moved.is_put | with_removes)
        sizes = moved.rows[changed, columns.SIZE]
        moved.rows[changed, columns.AT] = np.cumsum(sizes) - sizes + np.uint64(len(BEGIN))
        moved.rows[changed, columns.ORIGIN] = moved.types[changed] | np.uint64(1 << 8)
        moved = moved.only(changed | (moved.origins == COMPACTED))
        return StoreSnapshot((compacted, written), moved, self.cleared, self.max_blob_id, is_in_order=True)

    def close(self) -> None:
        """Close the files that are held open. No row can be read afterwards."""
        for source in self._sources:
            source.close()

    def _changes(self, with_removes: bool) -> Rows:
        winners = self._winners
        return winners.only((winners.origins != COMPACTED) & (winners.is_put | with_removes)).rows

    def _entries(self, rows: Rows) -> Iterator[Entry]:
        for part in gather(self._sources, rows, self._window):
            yield from entries_of(part.data.tobytes())

    def _range(self, storage_id: int, begin: bytes = b"", end: bytes | None = None) -> Rows:
        first = self._place(sort_key(storage_id, begin))
        if end is not None:
            last = self._place(sort_key(storage_id, end))
        else:
            last = bisect_left(range(len(self)), True, first, key=lambda place: self._storage_id(place) != storage_id)
        return self._puts.rows[first:last]

    def _storage_id(self, place: int) -> int:
        return int(self._puts.rows[place, columns.STORAGE_ID])

    def _sort_key(self, place: int) -> bytes:
        return sort_key(self._storage_id(place), self._puts.key(place))

    def _place(self, wanted: bytes) -> int:
        """Return the index of the first row whose key is not smaller."""
        return bisect_left(range(len(self)), wanted, key=self._sort_key)
