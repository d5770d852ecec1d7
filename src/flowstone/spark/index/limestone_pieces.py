"""A Limestone log file as pieces of entries: their offsets, epochs and versions, without keys.

Durable entries are walked once and kept. The part of a file that starts with its first session that is not yet durable
is walked again each time: a crash may invalidate or truncate it, and recovery may write other entries in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from flowstone.columns.arrow_columns import span_column
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.entry_table import (
    AT,
    BLOB_COUNT,
    END,
    KEY_AT,
    KEY_END,
    MAJOR,
    MINOR,
    OTHER,
    STORAGE_ID,
    TYPE,
    VALUE_AT,
    VALUE_END,
)
from flowstone.limestone.tsurugi.definitions import METADATA_STORAGE
from flowstone.spark.index.limestone_walk import OUTSIDE, VALID, VOID, EntryChunk, EntrySession, walk

SMALL_PIECE: Final = 1 << 20
"""A piece below this size is walked again with the entries appended to it, which limits the number of pieces."""

NO_LIMIT: Final = (1 << 63) - 1

Version = tuple[int, int]
ReadAt = Callable[[int, int], bytes]
EMPTYING: Final = (EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE)
POINTS: Final = (EntryType.NORMAL, EntryType.NORMAL_WITH_BLOB, EntryType.REMOVE)


class Clear(NamedTuple):
    """A storage was emptied: its entries with a lower version do not count."""

    epoch: int
    storage_id: int
    version: Version


class Definition(NamedTuple):
    """An entry of Tsurugi's metadata storage; `value` is None if it removes the definition of its key."""

    epoch: int
    version: Version
    key: bytes
    value: bytes | None


@dataclass(frozen=True)
class EntryPiece:
    """Entries of a file between two offsets, and a summary of the entries that count.

    `epochs` ascend, `counts` has the number of entries of each epoch, `least` and `greatest` their versions.
    """

    start: int
    end: int
    session: EntrySession
    checksum: int
    epochs: NDArray[np.int64]
    counts: NDArray[np.int64]
    least: NDArray[np.uint64]
    greatest: NDArray[np.uint64]

    def is_between(self, start: int, end: int) -> bool:
        return bool(len(self.epochs)) and self.epochs[-1] > start and self.epochs[0] <= end

    def least_between(self, start: int, end: int) -> Version | None:
        chosen = (self.epochs > start) & (self.epochs <= end)
        return min(map(_version, self.least[:, chosen].T), default=None)

    def reaches(self, version: Version, end: int) -> bool:
        """Return True if any entry of epochs up to `end` has this version or a greater one."""
        majors, minors = self.greatest[:, self.epochs <= end]
        major, minor = map(np.uint64, version)
        return bool(((majors > major) | ((majors == major) & (minors >= minor))).any())

    def count_between(self, start: int, end: int) -> int:
        chosen = (self.epochs > start) & (self.epochs <= end)
        return int(self.counts[chosen].sum())


@dataclass
class PieceFile:
    """One file as far as it was walked: `sound` is final, `tail` is valid only until the next walk."""

    identity: tuple[int, int]
    name: str
    sound: list[EntryPiece] = field(default_factory=list)
    tail: list[EntryPiece] = field(default_factory=list)
    clears: dict[Clear, None] = field(default_factory=dict)
    """In order and without duplicates: a small piece is walked again."""
    tail_clears: dict[Clear, None] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    tail_storages: dict[int, int] = field(default_factory=dict)
    definitions: dict[Definition, None] = field(default_factory=dict)
    tail_definitions: dict[Definition, None] = field(default_factory=dict)
    head: bytes = b""
    size: int = 0
    changed_at: int = 0
    max_blob_id: int = 0
    """The largest blob id referenced by an entry that counts."""
    limit: int = NO_LIMIT
    """The last epoch that counts here: compaction copied sessions of later epochs to another file."""
    last_begin: tuple[int, int] = (0, OUTSIDE)
    """The offset of the last begin marker, and the state of its session."""
    _session_behind: EntrySession = field(default_factory=EntrySession)

    @property
    def pieces(self) -> list[EntryPiece]:
        return [*self.sound, *self.tail]

    def pieces_between(self, start: int, end: int) -> list[EntryPiece]:
        return [piece for piece in self.pieces if piece.is_between(start, min(end, self.limit))]

    @property
    def all_definitions(self) -> list[Definition]:
        return [*self.definitions, *self.tail_definitions]

    @property
    def oldest(self) -> int | None:
        return min((int(piece.epochs[0]) for piece in self.pieces if len(piece.epochs)), default=None)

    @property
    def newest(self) -> int:
        found = max((int(piece.epochs[-1]) for piece in self.pieces if len(piece.epochs)), default=0)
        return min(found, self.limit)

    def is_walked(self, size: int, changed_at: int) -> bool:
        """Return True if a file of this size and modification time has nothing new."""
        return bool(self.sound) and not self.tail and self.size == size == self.at and self.changed_at == changed_at

    @property
    def at(self) -> int:
        return self.sound[-1].end if self.sound else 0

    def take_last_small(self) -> tuple[int, EntrySession]:
        """Return where the walk resumes, and the session there.

        The walk resumes after the sound pieces. If the last one is small, it is removed and walked again.
        """
        if self.sound and self.sound[-1].end - self.sound[-1].start < SMALL_PIECE:
            last = self.sound.pop()
            self._session_behind = last.session
            return last.start, last.session
        return self.at, self._session_behind


class Walk:
    """One walk over one file, which turns new entries into pieces."""

    def __init__(self, file: PieceFile, durable: int, path: str) -> None:
        self._file = file
        self._durable = durable
        self._path = path

    def run(self, read_at: ReadAt, size: int) -> None:
        file = self._file
        file.tail, file.tail_clears, file.tail_storages, file.tail_definitions = [], {}, {}, {}
        start, session = file.take_last_small()
        is_sound = True
        for chunk in walk(read_at, start, size, session, self._path):
            if chunk.stopped is not None:
                self._check_tail(chunk, read_at, size)
            whole = chunk
            if is_sound:
                undurable = (chunk.states == VALID) & (chunk.epochs > self._durable)
                if undurable.any():
                    # Starts at the session's begin marker, which precedes its entries.
                    count = int(np.argmax(undurable))
                    self._add(chunk.cut(count), is_sound=True)
                    whole, is_sound = _behind(chunk, count), False
            self._add(whole, is_sound=is_sound)
            self._note_begin(chunk)
        self._doubt_void()

    def _note_begin(self, chunk: EntryChunk) -> None:
        begins = np.flatnonzero(chunk.is_marker & (chunk.states != OUTSIDE))
        if len(begins):
            last = int(begins[-1])
            self._file.last_begin = chunk.base + int(chunk.table[AT, last]), int(chunk.states[last])

    def _doubt_void(self) -> None:
        """Move an invalidated last session to the tail, because it may become valid.

        A replica writes a session whose epoch is already durable as invalidated until the session is complete.
        """
        file = self._file
        at, state = file.last_begin
        while state == VOID and file.sound and file.sound[-1].end > at:
            file.tail.insert(0, file.sound.pop())
            file._session_behind = file.tail[0].session

    def _add(self, chunk: EntryChunk, *, is_sound: bool) -> None:
        count = chunk.table.shape[1]
        if not count:
            return
        file = self._file
        counted = (chunk.states == VALID) & (chunk.epochs <= self._durable) & ~chunk.is_marker
        rows = np.flatnonzero(counted)
        start = chunk.start
        data = chunk.buf[start - chunk.base : chunk.end - chunk.base]
        piece = EntryPiece(start, chunk.end, chunk.before, crc32c(data.data), *_by_epoch(chunk, rows))
        (file.sound if is_sound else file.tail).append(piece)
        if is_sound:
            file._session_behind = chunk.session
        file.max_blob_id = max(file.max_blob_id, _max_blob_id(chunk, rows))
        storages = file.storages if is_sound else file.tail_storages
        for storage_id, epoch in _first_epochs(chunk, rows):
            storages[storage_id] = min(storages.get(storage_id, epoch), epoch)
        clears = file.clears if is_sound else file.tail_clears
        for row in rows[np.isin(chunk.table[TYPE, rows], EMPTYING)].tolist():
            version = int(chunk.table[MAJOR, row]), int(chunk.table[MINOR, row])
            clears[Clear(int(chunk.epochs[row]), int(chunk.table[STORAGE_ID, row]), version)] = None
        definitions = file.definitions if is_sound else file.tail_definitions
        definitions |= dict.fromkeys(_definitions(chunk, rows))

    def _check_tail(self, chunk: EntryChunk, read_at: ReadAt, size: int) -> None:
        """Raise DamagedFile unless an incomplete last entry can be one being written, or one cut short by a crash."""
        epoch, state = chunk.session
        if self._file.name in (names.COMPACTED, names.COMPACTED_PREVIOUS):
            raise DamagedFile(self._path, chunk.end, "incomplete entry", hint="restore the file from a backup")
        if state == VALID and epoch <= self._durable:
            raise DamagedFile(
                self._path,
                chunk.end,
                f"incomplete entry in a session of durable epoch {epoch}",
                hint="durable entries are lost; restore a backup",
            )
        if state == OUTSIDE and chunk.stopped == OTHER:
            rest = read_at(chunk.end, min(size - chunk.end, 1 << 20))
            if rest.count(0) != len(rest):
                raise DamagedFile(
                    self._path, chunk.end, "invalid entry", hint="repair the directory with flowstone limestone repair"
                )


def _behind(chunk: EntryChunk, count: int) -> EntryChunk:
    """Return the chunk without its first `count` entries."""
    before = chunk.cut(count).session if count else chunk.before
    return EntryChunk(
        chunk.buf,
        chunk.base,
        chunk.table[:, count:],
        chunk.epochs[count:],
        chunk.states[count:],
        before,
        chunk.session,
        chunk.end,
        chunk.stopped,
    )


def _by_epoch(
    chunk: EntryChunk, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the epochs of the entries, the number of entries of each, and their least and greatest versions."""
    epochs, versions = chunk.epochs[rows].astype(np.int64), chunk.table[MAJOR : MINOR + 1, rows]
    if not len(epochs):
        return epochs, epochs, versions, versions
    # Sessions are runs of one epoch; runs of the same epoch are merged below.
    firsts = np.flatnonzero(np.append(True, epochs[1:] != epochs[:-1]))
    counts = np.diff(np.append(firsts, len(epochs)))
    least, greatest = (_extremes(versions, firsts, counts, each) for each in (np.minimum, np.maximum))
    distinct, places = np.unique(epochs[firsts], return_inverse=True)
    if len(distinct) == len(firsts):
        order = np.argsort(epochs[firsts])
        return distinct, counts[order], least[:, order], greatest[:, order]
    lows, highs = np.lexsort((least[1], least[0], places)), np.lexsort((greatest[1], greatest[0], places))
    edges = np.searchsorted(places[lows], np.arange(len(distinct) + 1))
    totals = np.bincount(places, counts).astype(np.int64)
    return distinct, totals, least[:, lows[edges[:-1]]], greatest[:, highs[edges[1:] - 1]]


def _extremes(
    versions: NDArray[np.uint64], firsts: NDArray[np.int64], counts: NDArray[np.int64], which: np.ufunc
) -> NDArray[np.uint64]:
    """Return the least or greatest version of each run."""
    majors, minors = versions
    found = which.reduceat(majors, firsts)
    worst = np.uint64(0) if which is np.maximum else np.iinfo(np.uint64).max
    others = np.where(majors == np.repeat(found, counts), minors, np.uint64(worst))
    return np.stack([found, which.reduceat(others, firsts)])


def _max_blob_id(chunk: EntryChunk, rows: NDArray[np.int64]) -> int:
    with_blobs = rows[chunk.table[BLOB_COUNT, rows] > 0]
    if not len(with_blobs):
        return 0
    starts, ends = (chunk.table[line, with_blobs].astype(np.int64) for line in (VALUE_END, END))
    ids = span_column(chunk.buf, starts + 4, ends).buffers()[2]
    return int(np.frombuffer(ids, np.uint64).max())


def _first_epochs(chunk: EntryChunk, rows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield each storage with its first epoch here."""
    storage_ids, epochs = chunk.table[STORAGE_ID, rows], chunk.epochs[rows]
    if not len(rows):
        return
    distinct, places = np.unique(storage_ids, return_inverse=True)
    firsts = np.full(len(distinct), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(firsts, places, epochs)
    yield from zip(distinct.tolist(), firsts.tolist(), strict=True)


def _definitions(chunk: EntryChunk, rows: NDArray[np.int64]) -> Iterator[Definition]:
    """Yield the entries of the metadata storage, in order."""
    table, buf = chunk.table, chunk.buf
    for row in rows[table[STORAGE_ID, rows] == np.uint64(METADATA_STORAGE)].tolist():
        kind = int(table[TYPE, row])
        if kind not in POINTS:
            continue
        version = int(table[MAJOR, row]), int(table[MINOR, row])
        key = buf[int(table[KEY_AT, row]) : int(table[KEY_END, row])].tobytes()
        value = buf[int(table[VALUE_AT, row]) : int(table[VALUE_END, row])].tobytes()
        yield Definition(int(chunk.epochs[row]), version, key, None if kind == EntryType.REMOVE else value)


def _version(pair: NDArray[np.uint64]) -> Version:
    return int(pair[0]), int(pair[1])
