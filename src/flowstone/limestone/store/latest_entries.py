"""The state of a directory as columns: for each key the entry with the highest write version, found by compiled loops.

Pure (`docs/spec/limestone.md#winning-entry`). Takes the tables of `limestone/format/entry_table.py`. Of two entries
with the same version the later one wins, and any entry of a log file wins over one of a compacted file. Values stay in
their files: a winner takes 64 bytes, which include its location, plus its key, so memory use does not depend on the
size of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flowstone.limestone.format import entry_table
from flowstone.limestone.format.entries import EntryType, WriteVersion
from flowstone.limestone.format.entry_table import Bytes, Table
from flowstone.limestone.store.winner_kernels import (
    COUNT,
    MAX_BLOB,
    order_by,
    order_ties,
    prefixes,
    refill,
    settle,
)
from flowstone.limestone.store.winner_table import (
    COMPACTED,
    KEY_AT,
    KEY_SIZE,
    MAJOR,
    MINOR,
    ORIGIN,
    ROW_WORDS,
    STORAGE_ID,
    Rows,
)

_BYTE: Final = np.uint64(0xFF)
_TYPE_BITS: Final = np.uint64(8)
_REMOVE: Final = int(EntryType.REMOVE)
_BLOB: Final = int(EntryType.NORMAL_WITH_BLOB)

_ROWS_FIRST: Final = 1 << 14
_KEYS_FIRST: Final = 1 << 18
_GROWTH: Final = 4
"""Growth is generous: untouched memory costs only address space, but copying the content costs time."""


@dataclass(frozen=True)
class Sorted:
    """Winners that no clear has removed, in the order of snapshot files. `keys` holds their keys, at KEY_AT."""

    rows: Rows
    keys: Bytes

    @property
    def types(self) -> Rows:
        return self.rows[:, ORIGIN] & _BYTE

    @property
    def origins(self) -> Rows:
        """The file numbers of the winners."""
        return self.rows[:, ORIGIN] >> _TYPE_BITS

    @property
    def is_put(self) -> NDArray[np.bool_]:
        return np.not_equal(self.types, _REMOVE)

    @property
    def has_blobs(self) -> NDArray[np.bool_]:
        return np.equal(self.types, _BLOB)

    def key(self, row: int) -> bytes:
        at = int(self.rows[row, KEY_AT])
        return self.keys[at : at + int(self.rows[row, KEY_SIZE])].tobytes()

    def only(self, mask: NDArray[np.bool_]) -> Sorted:
        return self if mask.all() else Sorted(self.rows[mask], self.keys)


def _process_seed() -> int:
    """Return 64 bits that differ between processes. Python seeds its hash of bytes against the same attack."""
    return hash(b"flowstone.limestone.store.latest_entries") & 0xFFFFFFFFFFFFFFFF


class Winners:
    """Collects winners table by table with `add`; `sorted` ends that. `seed` is for the hash and affects no result."""

    def __init__(self, seed: int | None = None) -> None:
        self.cleared: dict[int, WriteVersion] = {}
        """Per storage, the version of the last clear or removal."""
        self._slots = np.zeros(2 * _ROWS_FIRST, np.uint64)
        self._rows = np.empty((_ROWS_FIRST, ROW_WORDS), np.uint64)
        self._keys = np.empty(_KEYS_FIRST, np.uint8)
        seed = _process_seed() if seed is None else seed
        self._state = np.array([0, 8, 0, seed], np.uint64)  # the first eight bytes of the keys are scratch space

    @property
    def max_blob_id(self) -> int:
        """The largest blob id that any entry has named, so that no id is assigned twice."""
        return int(self._state[MAX_BLOB])

    def add(self, buf: Bytes, base: int, origin: int, table: Table, takes: Bytes) -> None:
        """Add the taken entries of a table of `buf`, which begins at offset `base` of its file."""
        start = 0
        while True:
            start = settle(buf, base, origin, table, start, takes, self._slots, self._rows, self._keys, self._state)
            if start < 0:
                break
            self._grow(int(table[entry_table.KEY_END, start] - table[entry_table.KEY_AT, start]))
        if origin != COMPACTED:
            self._clear(table, takes)

    def _grow(self, key_size: int) -> None:
        count, keys_end, *_ = self._state.tolist()
        if keys_end + key_size > self._keys.size:
            keys = np.empty(max(_GROWTH * self._keys.size, keys_end + key_size), np.uint8)
            keys[:keys_end] = self._keys[:keys_end]
            self._keys = keys
        if count == len(self._rows):
            rows = np.empty((_GROWTH * count, ROW_WORDS), np.uint64)
            rows[:count] = self._rows
            self._rows = rows
            slots = np.zeros(_GROWTH * self._slots.size, np.uint64)
            refill(self._slots, slots)
            self._slots = slots

    def _clear(self, table: Table, takes: Bytes) -> None:
        types = table[entry_table.TYPE, : takes.size]
        clears = (types == EntryType.CLEAR_STORAGE) | (types == EntryType.REMOVE_STORAGE)
        for index in np.flatnonzero(clears & (takes != 0)).tolist():
            storage_id = int(table[entry_table.STORAGE_ID, index])
            version = WriteVersion(int(table[entry_table.MAJOR, index]), int(table[entry_table.MINOR, index]))
            self.cleared[storage_id] = max(self.cleared.get(storage_id, version), version)

    def sorted(self) -> Sorted:
        """Return the winners in order. The lookup table is freed, so nothing can be added afterwards."""
        rows, keys = self._rows[: int(self._state[COUNT])], self._keys
        self._slots, self._rows = self._slots[:0], self._rows[:0]
        is_alive = self._is_alive(rows)
        rows = rows if is_alive.all() else rows[is_alive]
        if not len(rows):
            return Sorted(rows, keys)  # opening a new directory does not wait for the compiler
        words = np.empty((3, len(rows)), np.uint64)
        prefixes(rows, keys, words)
        order, other, counts = np.arange(len(rows)), np.empty(len(rows), np.int64), np.empty(256, np.int64)
        for each in words[::-1]:
            if order_by(each, order, other, counts):
                order, other = other, order
        order_ties(rows, keys, words, order)
        return Sorted(rows[order], keys)

    def _is_alive(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the rows that are not older than the last clear of their storage."""
        if not self.cleared:
            return np.ones(len(rows), np.bool_)
        storages, places = np.unique(rows[:, STORAGE_ID], return_inverse=True)
        versions = [self.cleared.get(storage, WriteVersion(0, 0)) for storage in storages.tolist()]
        cleared = np.array(versions, np.uint64).reshape(-1, 2)[places]
        major, minor = rows[:, MAJOR], rows[:, MINOR]
        alive: NDArray[np.bool_] = (major > cleared[:, 0]) | ((major == cleared[:, 0]) & (minor >= cleared[:, 1]))
        return alive
