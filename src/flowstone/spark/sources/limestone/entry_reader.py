"""Reading of planned pieces of a Limestone directory in executors, as checked chunks of entries.

A file that was rotated since planning is found under its new name. Each piece is verified by its checksum, so other
bytes are never mistaken for the planned ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from flowstone.limestone.format import names
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import MAJOR, MINOR, STORAGE_ID, TYPE
from flowstone.outside.disk import Disk, File
from flowstone.spark.index.limestone_index import EpochLost, PiecePlace, PieceSlice
from flowstone.spark.index.limestone_pieces import ReadAt, Version
from flowstone.spark.index.limestone_walk import VALID, EntryChunk, walk

Rows = NDArray[np.int64]
IS_POINT = np.zeros(256, np.bool_)
IS_POINT[[EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB, EntryType.REMOVE]] = True


def chunks_of(disk: Disk, part: PieceSlice) -> Iterator[EntryChunk]:
    """Yield all entries of a slice, whether they count or not."""
    with _open(disk, part) as file:
        for place in part.places:
            data = _bytes(file, place)
            if data is None:
                raise _gone(part)
            start = place.start
            read_at = _reading(data, start)
            yield from walk(read_at, start, place.end, place.session, file.path, window=len(data))


def _reading(data: bytes, start: int) -> ReadAt:
    return lambda at, size: data[at - start : at - start + size]


def _bytes(file: File, place: PiecePlace) -> bytes | None:
    """Return the bytes of a piece, or None if they differ from the plan."""
    size = place.end - place.start
    if file.size() < place.end:
        return None
    data = file.read_at(place.start, size)
    return data if len(data) == size and crc32c(data) == place.checksum else None


def _open(disk: Disk, part: PieceSlice) -> File:
    for name in _names(part):
        path = f"{part.directory}/{name}"
        with suppress(FileNotFoundError):
            file = disk.open(path)
            if not part.places or _bytes(file, part.places[0]) is not None:
                return file
            file.close()
    raise _gone(part)


def _names(part: PieceSlice) -> Iterator[str]:
    """Yield the possible names of the file: its own name, and the names that rotation may have given it."""
    yield part.name
    if part.is_compacted:
        yield names.COMPACTED_PREVIOUS
        return
    there = os.listdir(part.directory)
    yield from sorted((name for name in there if name.startswith(part.name + ".")), reverse=True)


def _gone(part: PieceSlice) -> EpochLost:
    return EpochLost(
        f"{part.directory}/{part.name}: file is gone or has changed since the query was planned",
        hint="files were deleted or compacted; run the query again",
    )


def counted(chunk: EntryChunk, start: int, end: int) -> Rows:
    """Return the numbers of the entries in valid sessions after `start` up to `end`; `end` is durable."""
    chosen = (chunk.states == VALID) & (chunk.epochs <= np.uint64(end)) & ~chunk.is_marker
    if start >= 0:
        chosen &= chunk.epochs > np.uint64(start)
    return np.flatnonzero(chosen)


def points(chunk: EntryChunk, rows: Rows) -> Rows:
    """Return the entries that are about one key."""
    is_point: NDArray[np.bool_] = IS_POINT[chunk.table[TYPE, rows].astype(np.uint8)]
    return rows[is_point]


def surviving(chunk: EntryChunk, rows: Rows, clears: Mapping[int, Version], *, is_compacted: bool = False) -> Rows:
    """Return the entries that no clear of their storage made void."""
    if not clears or not len(rows):
        return rows
    storage_ids, majors, minors = (chunk.table[line, rows] for line in (STORAGE_ID, MAJOR, MINOR))
    if is_compacted:
        majors, minors = np.zeros_like(majors), np.zeros_like(minors)
    void = np.zeros(len(rows), np.bool_)
    for storage_id, (major, minor) in clears.items():
        older = (majors < np.uint64(major)) | ((majors == np.uint64(major)) & (minors < np.uint64(minor)))
        void |= (storage_ids == np.uint64(storage_id)) & older
    return rows[~void]
