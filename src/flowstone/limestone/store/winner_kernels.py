"""Compiled: finding the winning entry of each key in a hash table, and sorting the winners by key."""

from __future__ import annotations

import cython

if not cython.compiled:  # compiled, the .pxd provides these
    import numpy as np
    from numpy.typing import NDArray

    from flowstone.limestone.format import entry_table
    from flowstone.limestone.format.entry_table import Bytes, Table
    from flowstone.limestone.store.winner_table import (
        AT,
        KEY_AT,
        KEY_SIZE,
        MAJOR,
        MINOR,
        ORIGIN,
        SIZE,
        STORAGE_ID,
        Order,
        Rows,
        Slots,
    )
    from flowstone.native.words import (
        big64,
        byte,
        copy,
        high_product,
        little64,
        poke64,
        signed,
        source,
        target,
        word,
    )

    Words = NDArray[np.uint64]

    # Elements of the state of a collection of winners.
    COUNT, KEYS_END, MAX_BLOB, SEED = range(4)

PRIME = 0x9E3779B97F4A7C15
TAG = 0xFFFFFFFF
"""The bits of a tag, and those of a row number."""


def _mixed(value: int, more: int) -> int:
    value ^= more
    return word(value * PRIME) ^ high_product(value, PRIME)


def _short_word(data: Bytes, at: int, count: int) -> int:
    """Return a word of `count` bytes, fewer than eight."""
    value = word(0)
    for index in range(count):
        value |= word(byte(data, at + index)) << (8 * index)
    return value


def _tag(data: Bytes, at: int, size: int, storage_id: int, seed: int) -> int:
    """Return a 32-bit hash of storage and key. Without the seed, keys that collide cannot be constructed."""
    value = _mixed(_mixed(PRIME, seed), storage_id)
    end = at + size
    while end - at >= 8:
        value = _mixed(value, little64(data, at))
        at += 8
    value = _mixed(_mixed(value, _short_word(data, at, end - at)), word(size))
    return value & TAG


def _is_same(data: Bytes, at: int, other: Bytes, other_at: int, size: int) -> bool:
    end = at + size
    while end - at >= 8:
        if little64(data, at) != little64(other, other_at):
            return False
        at += 8
        other_at += 8
    while at < end:
        if byte(data, at) != byte(other, other_at):
            return False
        at += 1
        other_at += 1
    return True


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
    state: Words,
) -> int:
    """Add the taken entries of the table from `start` on; return the first one for which there is no room, or -1.

    `state`: number of winners, bytes of keys, largest blob id, seed. A slot combines the tag of a key and its row + 1.
    """
    data, key_data = source(buf), target(keys)
    mask = word(slots.shape[0] - 1)
    count = signed(state[COUNT])
    keys_end = signed(state[KEYS_END])
    with cython.nogil:
        for index in range(start, takes.shape[0]):
            kind = signed(table[entry_table.TYPE, index])
            if not takes[index] or (kind != 1 and kind != 5 and kind != 10):
                continue
            key_at = signed(table[entry_table.KEY_AT, index])
            size = signed(table[entry_table.KEY_END, index]) - key_at
            if count == rows.shape[0] or keys_end + size > keys.shape[0]:
                state[COUNT], state[KEYS_END] = count, keys_end
                return index
            storage_id = word(table[entry_table.STORAGE_ID, index])
            major, minor = table[entry_table.MAJOR, index], table[entry_table.MINOR, index]
            tag = _tag(data, key_at, size, storage_id, word(state[SEED]))
            slot = tag & mask
            row = -1
            while True:
                found = word(slots[slot])
                if found == 0:
                    break
                if found >> 32 == tag:
                    other = signed(found & TAG) - 1
                    if (
                        rows[other, STORAGE_ID] == storage_id
                        and signed(rows[other, KEY_SIZE]) == size
                        and _is_same(data, key_at, key_data, signed(rows[other, KEY_AT]), size)
                    ):
                        row = other
                        break
                slot = (slot + 1) & mask
            if kind == 10:
                end = signed(table[entry_table.END, index])
                for blob in range(signed(table[entry_table.BLOB_COUNT, index])):
                    blob_id = little64(data, end - 8 * (blob + 1))
                    if blob_id > state[MAX_BLOB]:
                        state[MAX_BLOB] = blob_id
            if row < 0:
                row = count
                slots[slot] = tag << 32 | word(row + 1)
                rows[row, STORAGE_ID] = storage_id
                rows[row, KEY_AT] = keys_end
                rows[row, KEY_SIZE] = size
                keys_end = copy(key_data, keys_end, data, key_at, size)
                count += 1
            elif rows[row, ORIGIN] >> 8 != 0 and (
                rows[row, MAJOR] > major or (rows[row, MAJOR] == major and rows[row, MINOR] > minor)
            ):
                continue
            rows[row, MAJOR] = major
            rows[row, MINOR] = minor
            rows[row, AT] = word(base) + table[entry_table.AT, index]
            rows[row, SIZE] = table[entry_table.END, index] - table[entry_table.AT, index]
            rows[row, ORIGIN] = word(origin) << 8 | word(kind)
        state[COUNT], state[KEYS_END] = count, keys_end
    return -1


def refill(old: Slots, new: Slots) -> None:
    """Copy the content of a slot table into a larger one."""
    mask = word(new.shape[0] - 1)
    with cython.nogil:
        for index in range(old.shape[0]):
            found = word(old[index])
            if found != 0:
                slot = (found >> 32) & mask
                while new[slot] != 0:
                    slot = (slot + 1) & mask
                new[slot] = found


def prefixes(rows: Rows, keys: Bytes, words: Words) -> None:
    """Fill `words` with sort prefixes, which decide most comparisons: storage id as on disk, then 16 key bytes.

    The first eight bytes of `keys` are scratch space."""
    data = target(keys)
    with cython.nogil:
        for row in range(rows.shape[0]):
            poke64(data, 0, word(rows[row, STORAGE_ID]))
            words[0, row] = big64(data, 0)
            at, size = signed(rows[row, KEY_AT]), signed(rows[row, KEY_SIZE])
            for part in range(2):
                left = size - 8 * part
                value = word(0)
                if left >= 8:
                    value = big64(data, at + 8 * part)
                else:
                    for index in range(max(left, 0)):
                        value |= word(byte(data, at + 8 * part + index)) << (56 - 8 * index)
                words[1 + part, row] = value


def order_by(words: Words, order: Order, other: Order, counts: Order) -> bool:
    """Sort the order stably by one word per row; return True if the result is in `other`.

    A radix sort from the least significant byte on. Bytes that all words have in common are skipped."""
    is_swapped = False
    with cython.nogil:
        for shift in range(0, 64, 8):
            for value in range(256):
                counts[value] = 0
            for row in range(words.shape[0]):
                counts[words[row] >> shift & 0xFF] += 1
            if words.shape[0] == 0 or counts[words[0] >> shift & 0xFF] == words.shape[0]:
                continue
            place = 0
            for value in range(256):
                count = counts[value]
                counts[value] = place
                place += count
            if is_swapped:
                _distribute(words, shift, other, order, counts)
            else:
                _distribute(words, shift, order, other, counts)
            is_swapped = not is_swapped
    return is_swapped


def _distribute(words: Words, shift: int, order: Order, out: Order, places: Order) -> None:
    """Move each row to the place of its byte, and advance that place."""
    for index in range(words.shape[0]):
        row = order[index]
        value = words[row] >> shift & 0xFF
        out[places[value]] = row
        places[value] += 1


def _is_after(rows: Rows, data: Bytes, row: int, other: int) -> bool:
    """Return True if the key of `row` sorts after the key of `other`, in the same storage."""
    at, size = signed(rows[row, KEY_AT]), signed(rows[row, KEY_SIZE])
    other_at, other_size = signed(rows[other, KEY_AT]), signed(rows[other, KEY_SIZE])
    shared = min(size, other_size)
    done = 0
    while done + 8 <= shared and little64(data, at + done) == little64(data, other_at + done):
        done += 8
    while done < shared:
        mine, theirs = byte(data, at + done), byte(data, other_at + done)
        if mine != theirs:
            return mine > theirs
        done += 1
    return size > other_size


def _sift(rows: Rows, data: Bytes, order: Order, first: int, root: int, end: int) -> None:
    """Sift `first + root` down in the heap that ends before `first + end`."""
    while 2 * root + 1 < end:
        child = 2 * root + 1
        if child + 1 < end and _is_after(rows, data, order[first + child + 1], order[first + child]):
            child += 1
        if not _is_after(rows, data, order[first + child], order[first + root]):
            return
        moved = order[first + root]
        order[first + root] = order[first + child]
        order[first + child] = moved
        root = child


def order_ties(rows: Rows, keys: Bytes, words: Words, order: Order) -> None:
    """Sort rows with equal prefixes by their whole keys."""
    data = source(keys)
    count = order.shape[0]
    first = 0
    with cython.nogil:
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
                _sift(rows, data, order, first, root, size)
            for end in range(size - 1, 0, -1):
                moved = order[first]
                order[first] = order[first + end]
                order[first + end] = moved
                _sift(rows, data, order, first, 0, end)
            first = last


def copy_spans(buf: Bytes, starts: Order, sizes: Order, out: Bytes, targets: Order) -> None:
    """Copy spans of a buffer to their targets."""
    data, written = source(buf), target(out)
    with cython.nogil:
        for index in range(starts.shape[0]):
            copy(written, targets[index], data, starts[index], sizes[index])


def zero_versions(out: Bytes, targets: Order, key_sizes: Order) -> None:
    """Set the write versions of puts to (0, 0)."""
    written = target(out)
    with cython.nogil:
        for index in range(targets.shape[0]):
            at = targets[index] + 17 + key_sizes[index]
            poke64(written, at, 0)
            poke64(written, at + 8, 0)
