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

from flowstone.kernels import inlined, kernel
from flowstone.kernels.wide import Bytes, big64, byte, copy, high_product, little64, number, poke64, word
from flowstone.limestone.format import entry_table
from flowstone.limestone.format.entries import EntryType, WriteVersion
from flowstone.limestone.format.entry_table import Table

Rows = NDArray[np.uint64]
Slots = NDArray[np.uint64]
Order = NDArray[np.int64]

# Columns of a winner. AT and SIZE locate the whole entry in its file; ORIGIN combines the file number and the type.
STORAGE_ID, KEY_AT, KEY_SIZE, MAJOR, MINOR, AT, SIZE, ORIGIN = range(8)
ROW_WORDS: Final = 8

COMPACTED: Final = 0
"""File number of the compacted file. Entries of all other files are newer."""

_BYTE: Final = np.uint64(0xFF)
_TYPE_BITS: Final = np.uint64(8)
_TAG: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_EMPTY: Final = np.uint64(0)
_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)
_REMOVE: Final = int(EntryType.REMOVE)
_BLOB: Final = int(EntryType.NORMAL_WITH_BLOB)

_ROWS_FIRST: Final = 1 << 14
_KEYS_FIRST: Final = 1 << 18
_GROWTH: Final = 4
"""Growth is generous: untouched memory costs only address space, but copying the content costs time."""

SettleState = NDArray[np.uint64]
_COUNT, _KEYS_END, _MAX_BLOB, _SEED = range(4)


@inlined
def _mixed(value: np.uint64, more: np.uint64) -> np.uint64:
    value ^= more
    return np.uint64(value * _PRIME) ^ high_product(value, _PRIME)


@inlined
def _short_word(buf: Bytes, at: int, count: int) -> np.uint64:
    """Return a word of `count` bytes, fewer than eight."""
    value = np.uint64(0)
    for index in range(count):
        value |= word(byte(buf, at + index)) << word(8 * index)
    return value


@inlined
def _tag(buf: Bytes, at: int, size: int, storage_id: np.uint64, seed: np.uint64) -> np.uint64:
    """Return a 32-bit hash of storage and key. Without the seed, nobody can construct keys that collide."""
    value = _mixed(_mixed(_PRIME, seed), storage_id)
    end = at + size
    while end - at >= 8:
        value = _mixed(value, little64(buf, at))
        at += 8
    value = _mixed(_mixed(value, _short_word(buf, at, end - at)), word(size))
    return value & _TAG


@inlined
def _is_same(buf: Bytes, at: int, other: Bytes, other_at: int, size: int) -> bool:
    end = at + size
    while end - at >= 8:
        if little64(buf, at) != little64(other, other_at):
            return False
        at += 8
        other_at += 8
    while at < end:
        if byte(buf, at) != byte(other, other_at):
            return False
        at += 1
        other_at += 1
    return True


@kernel
def settle(
    buf: Bytes,
    base: int,
    origin: int,
    table: Table,
    start: int,
    takes: Bytes,
    slots: Slots,
    rows: Rows,
    keys: Bytes,
    state: SettleState,
) -> int:
    """Process the taken entries of the table from `start` on; return the first that found no room, or -1.

    `state`: number of winners, bytes of keys, largest blob id, seed. A slot combines the tag of a key and its row + 1.
    """
    mask = word(slots.shape[0] - 1)
    count = number(state[_COUNT])
    keys_end = number(state[_KEYS_END])
    for index in range(start, takes.shape[0]):
        kind = number(table[entry_table.TYPE, index])
        if not takes[index] or (kind != 1 and kind != 5 and kind != 10):
            continue
        key_at = number(table[entry_table.KEY_AT, index])
        size = number(table[entry_table.KEY_END, index]) - key_at
        if count == rows.shape[0] or keys_end + size > keys.shape[0]:
            state[_COUNT], state[_KEYS_END] = word(count), word(keys_end)
            return index
        storage_id = table[entry_table.STORAGE_ID, index]
        major, minor = table[entry_table.MAJOR, index], table[entry_table.MINOR, index]
        tag = _tag(buf, key_at, size, storage_id, state[_SEED])
        slot = tag & mask
        row = -1
        while True:
            found = slots[number(slot)]
            if found == _EMPTY:
                break
            if found >> _HALF == tag:
                other = number(found & _TAG) - 1
                if (
                    rows[other, STORAGE_ID] == storage_id
                    and number(rows[other, KEY_SIZE]) == size
                    and _is_same(buf, key_at, keys, number(rows[other, KEY_AT]), size)
                ):
                    row = other
                    break
            slot = (slot + np.uint64(1)) & mask
        if kind == 10:
            end = number(table[entry_table.END, index])
            for blob in range(number(table[entry_table.BLOB_COUNT, index])):
                blob_id = little64(buf, end - 8 * (blob + 1))
                if blob_id > state[_MAX_BLOB]:
                    state[_MAX_BLOB] = blob_id
        if row < 0:
            row = count
            slots[number(slot)] = tag << _HALF | word(row + 1)
            rows[row, STORAGE_ID] = storage_id
            rows[row, KEY_AT] = word(keys_end)
            rows[row, KEY_SIZE] = word(size)
            keys_end = copy(keys, keys_end, buf, key_at, size)
            count += 1
        elif rows[row, ORIGIN] >> _TYPE_BITS != 0 and (
            rows[row, MAJOR] > major or (rows[row, MAJOR] == major and rows[row, MINOR] > minor)
        ):
            continue
        rows[row, MAJOR] = major
        rows[row, MINOR] = minor
        rows[row, AT] = word(base) + table[entry_table.AT, index]
        rows[row, SIZE] = table[entry_table.END, index] - table[entry_table.AT, index]
        rows[row, ORIGIN] = word(origin) << _TYPE_BITS | word(kind)
    state[_COUNT], state[_KEYS_END] = word(count), word(keys_end)
    return -1


@kernel
def refill(old: Slots, new: Slots) -> None:
    """Copy the content of a slot table into a larger one."""
    mask = word(new.shape[0] - 1)
    for index in range(old.shape[0]):
        found = old[index]
        if found != _EMPTY:
            slot = (found >> _HALF) & mask
            while new[number(slot)] != _EMPTY:
                slot = (slot + np.uint64(1)) & mask
            new[number(slot)] = found


@kernel
def prefixes(rows: Rows, keys: Bytes, words: NDArray[np.uint64]) -> None:
    """Fill `words` with sort prefixes, which decide most comparisons: storage id as on disk, then 16 key bytes."""
    for row in range(rows.shape[0]):
        poke64(keys, 0, rows[row, STORAGE_ID])
        words[0, row] = big64(keys, 0)
        at, size = number(rows[row, KEY_AT]), number(rows[row, KEY_SIZE])
        for part in range(2):
            left = size - 8 * part
            value = np.uint64(0)
            if left >= 8:
                value = big64(keys, at + 8 * part)
            else:
                for index in range(max(left, 0)):
                    value |= word(byte(keys, at + 8 * part + index)) << word(56 - 8 * index)
            words[1 + part, row] = value


@kernel
def order_by(words: NDArray[np.uint64], order: Order, other: Order, counts: Order) -> int:
    """Sort the order stably by one word per row; return 1 if the result is in `other`.

    A radix sort from the least significant byte on. Bytes that all words have in common are skipped."""
    swapped = 0
    for shift in range(0, 64, 8):
        counts[:] = 0
        for row in range(words.shape[0]):
            counts[number(words[row] >> word(shift) & _BYTE)] += 1
        if words.shape[0] == 0 or counts[number(words[0] >> word(shift) & _BYTE)] == words.shape[0]:
            continue
        place = 0
        for value in range(256):
            count = counts[value]
            counts[value] = place
            place += count
        for index in range(words.shape[0]):
            row = other[index] if swapped else order[index]
            value = number(words[row] >> word(shift) & _BYTE)
            if swapped:
                order[counts[value]] = row
            else:
                other[counts[value]] = row
            counts[value] += 1
        swapped = 1 - swapped
    return swapped


@kernel
def _is_after(rows: Rows, keys: Bytes, row: int, other: int) -> int:
    """Return 1 if the key of `row` sorts after that of `other`, which is of the same storage."""
    at, size = number(rows[row, KEY_AT]), number(rows[row, KEY_SIZE])
    other_at, other_size = number(rows[other, KEY_AT]), number(rows[other, KEY_SIZE])
    shared = min(size, other_size)
    done = 0
    while done + 8 <= shared and little64(keys, at + done) == little64(keys, other_at + done):
        done += 8
    while done < shared:
        mine, theirs = byte(keys, at + done), byte(keys, other_at + done)
        if mine != theirs:
            return 1 if mine > theirs else 0
        done += 1
    return 1 if size > other_size else 0


@kernel
def _sift(rows: Rows, keys: Bytes, order: Order, first: int, root: int, end: int) -> None:
    """Sift `first + root` down in the heap that ends before `first + end`."""
    while 2 * root + 1 < end:
        child = 2 * root + 1
        if child + 1 < end and _is_after(rows, keys, order[first + child + 1], order[first + child]):
            child += 1
        if not _is_after(rows, keys, order[first + child], order[first + root]):
            return
        moved = order[first + root]
        order[first + root] = order[first + child]
        order[first + child] = moved
        root = child


@kernel
def order_ties(rows: Rows, keys: Bytes, words: NDArray[np.uint64], order: Order) -> None:
    """Sort rows with equal prefixes by their whole keys."""
    count = order.shape[0]
    first = 0
    while first < count:
        row = order[first]
        last = first + 1
        while (
            last < count
            and words[0, order[last]] == words[0, row]
            and words[1, order[last]] == words[1, row]
            and words[2, order[last]] == words[2, row]
        ):
            last += 1
        size = last - first
        for root in range(size // 2 - 1, -1, -1):
            _sift(rows, keys, order, first, root, size)
        for end in range(size - 1, 0, -1):
            moved = order[first]
            order[first] = order[first + end]
            order[first + end] = moved
            _sift(rows, keys, order, first, 0, end)
        first = last


@kernel
def copy_spans(buf: Bytes, starts: Order, sizes: Order, out: Bytes, targets: Order) -> None:
    """Copy spans of a buffer to their targets."""
    for index in range(starts.shape[0]):
        copy(out, targets[index], buf, starts[index], sizes[index])


@kernel
def zero_versions(out: Bytes, targets: Order, key_sizes: Order) -> None:
    """Set the write versions of puts to (0, 0)."""
    for index in range(targets.shape[0]):
        at = targets[index] + 17 + key_sizes[index]
        poke64(out, at, np.uint64(0))
        poke64(out, at + 8, np.uint64(0))


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
        return int(self._state[_MAX_BLOB])

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
        rows, keys = self._rows[: int(self._state[_COUNT])], self._keys
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
