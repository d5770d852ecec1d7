"""Sorted keys, stored in pieces so that large batches can be added and removed in short steps.

An `OrderedKeys` is a list of sorted lists of about a thousand keys each. Keys are added and removed in sorted batches.
It does not check for duplicates or missing keys: the caller has the dictionary of all keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import numpy as np

from flowstone.box.engine.keys import Key

PIECE: Final = 1000
"""Number of keys in a new piece. A piece of more than twice this size is split; a piece of less than half is joined
with the next piece."""

_FEW: Final = 20
"""A piece at least this many times larger than the batch is changed key by key; else one pass over it is cheaper."""

_BY_COLUMN: Final = 1000
"""More integers than this are sorted with NumPy, which is many times faster."""


def in_order(keys: list[Key]) -> list[Key]:
    """Return `keys` sorted; this may be the same list if it is already in order."""
    if len(keys) > _BY_COLUMN and isinstance(keys[0], int):
        try:
            column = np.array(keys, np.int64)
        except OverflowError:  # unsigned keys above 2^63 - 1
            return sorted(keys)
        if (column[1:] > column[:-1]).all():  # usual for keys from snapshots and sequences
            return keys
        return list(map(keys.__getitem__, column.argsort().tolist()))
    return sorted(keys)


class OrderedKeys:
    """Distinct keys of one type, in order."""

    __slots__ = ("_firsts", "_pieces")

    def __init__(self, keys: list[Key]) -> None:
        """Store `keys`, which must be sorted."""
        self._pieces = [keys[at : at + PIECE] for at in range(0, len(keys), PIECE)] or [[]]
        # Lower bound of the keys in each piece. The bound of the first piece is never used.
        self._firsts: list[Key] = [piece[0] for piece in self._pieces] if keys else [b""]

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self._pieces)

    def __getitem__(self, number: int) -> Key:
        for piece in self._pieces:
            if number < len(piece):
                return piece[number]
            number -= len(piece)
        raise IndexError(number)

    def add(self, keys: list[Key]) -> None:
        """Add sorted `keys`, all of which must be missing."""
        for number, batch in self._by_piece(keys):
            piece = self._pieces[number]
            if len(batch) * _FEW < len(piece):
                for key in batch:
                    insort(piece, key)
            else:
                piece += batch
                piece.sort()
            if len(piece) > 2 * PIECE:
                parts = [piece[at : at + PIECE] for at in range(0, len(piece), PIECE)]
                self._pieces[number : number + 1] = parts
                self._firsts[number : number + 1] = [part[0] for part in parts]

    def remove(self, keys: list[Key]) -> None:
        """Remove sorted `keys`, all of which must be present."""
        for number, batch in self._by_piece(keys):
            piece = self._pieces[number]
            if len(batch) * _FEW < len(piece):
                for key in batch:
                    del piece[bisect_left(piece, key)]
            else:
                gone = dict.fromkeys(batch)
                piece = self._pieces[number] = [key for key in piece if key not in gone]
            if len(piece) < PIECE // 2 and number + 1 < len(self._pieces):
                # Batches are handled from the last piece to the first, so the next piece is already done.
                piece += self._pieces.pop(number + 1)
                del self._firsts[number + 1]
                if len(piece) > 2 * PIECE:
                    half = len(piece) // 2
                    self._pieces[number : number + 1] = [piece[:half], piece[half:]]
                    self._firsts.insert(number + 1, piece[half])

    def span(self, low: Key | None, high: Key | None, reverse: bool) -> Iterator[Key]:
        """Return the keys in the half-open range from `low` to `high`. A change invalidates the iterator."""
        return chain.from_iterable(self._backwards(low, high) if reverse else self._forwards(low, high))

    def rank(self, key: Key) -> int:
        """Return the number of keys less than `key`."""
        number = self._piece_of(key)
        return sum(map(len, self._pieces[:number])) + bisect_left(self._pieces[number], key)

    def _piece_of(self, key: Key) -> int:
        return bisect_right(self._firsts, key, 1) - 1

    def _by_piece(self, keys: list[Key]) -> Iterator[tuple[int, list[Key]]]:
        """Yield the `keys` that belong to each piece, last piece first: splitting a piece then moves no later batch."""
        end = len(keys)
        while end:
            number = self._piece_of(keys[end - 1])
            start = bisect_left(keys, self._firsts[number], 0, end) if number else 0
            yield number, keys[start:end]
            end = start

    def _forwards(self, low: Key | None, high: Key | None) -> Iterator[Iterable[Key]]:
        number = 0 if low is None else self._piece_of(low)
        start = 0 if low is None else bisect_left(self._pieces[number], low)
        last = len(self._pieces) - 1 if high is None else self._piece_of(high)
        while number <= last:
            piece = self._pieces[number]
            end = None if high is None or number < last else bisect_left(piece, high)
            yield piece[start:end]
            start = 0
            number += 1

    def _backwards(self, low: Key | None, high: Key | None) -> Iterator[Iterable[Key]]:
        first = 0 if low is None else self._piece_of(low)
        number = len(self._pieces) - 1 if high is None else self._piece_of(high)
        while number >= first:
            piece = self._pieces[number]
            start = 0 if low is None or number > first else bisect_left(piece, low)
            yield reversed(piece[start : None if high is None else bisect_left(piece, high)])
            high = None
            number -= 1
