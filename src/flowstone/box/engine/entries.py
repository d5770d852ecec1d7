"""The entries of one index in order: the interpreted form of entries.pyx, which also has methods for compiled callers.

A dictionary has the tuples, and sorted lists of up to a few hundred keys have the order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Final

from flowstone.box.engine.keys import Key

PIECE_MAX: Final = 500
"""A longer list of keys is cut in two."""

_END: Final = 1 << 64


class Entries:
    """Distinct keys in order, each with its tuple. Keys are bytes if `is_text`, else numbers from -2^63 to 2^64 - 1."""

    __slots__ = ("_firsts", "_pieces", "_tuples", "_version", "is_text")

    def __init__(self, is_text: bool) -> None:
        self.is_text = is_text
        self._tuples: dict[Key, bytes] = {}
        self._pieces: list[list[Key]] = [[]]
        # A lower bound of the keys in each piece; that of the first one is never used.
        self._firsts: list[Key] = [b"" if is_text else 0]
        self._version = 0

    def __len__(self) -> int:
        return len(self._tuples)

    def __contains__(self, key: Key) -> bool:
        self._check_type(key)
        return key in self._tuples

    def get(self, key: Key) -> bytes | None:
        """Return the tuple at `key`; None if there is none."""
        self._check_type(key)
        return self._tuples.get(key)

    def put(self, key: Key, raw: bytes) -> bytes | None:
        """Store the tuple `raw` at `key`; return the old tuple."""
        self._check_type(key)
        if type(raw) is not bytes:
            raise TypeError(f"a tuple is bytes, not {type(raw).__name__}")
        if isinstance(key, int) and not -_END // 2 <= key < _END:
            raise OverflowError(f"key {key} is not in the range of -2^63 to 2^64 - 1")
        old = self._tuples.get(key)
        if old is None:
            self._add(key)
        self._tuples[key] = raw
        return old

    def pop(self, key: Key) -> bytes | None:
        """Remove the entry at `key`; return its tuple."""
        self._check_type(key)
        old = self._tuples.pop(key, None)
        if old is not None:
            number = self._piece_of(key)
            piece = self._pieces[number]
            del piece[bisect_left(piece, key)]
            if not piece and len(self._pieces) > 1:
                del self._pieces[number], self._firsts[number]
            self._version += 1
        return old

    def span(
        self, low: Key | None = None, high: Key | None = None, reverse: bool = False
    ) -> Iterator[tuple[Key, bytes]]:
        """Iterate over the entries from `low` (inclusive) to `high` (exclusive), as pairs of key and tuple.

        After a change the iterator continues after the last key that it returned.
        """
        while True:
            version = self._version
            for key in self._keys(low, high, reverse):
                yield key, self._tuples[key]
                if version != self._version:
                    break
            else:
                return
            if reverse:
                high = key
            else:
                low = key + 1 if isinstance(key, int) else key + b"\x00"

    def collect(
        self,
        low: Key | None = None,
        high: Key | None = None,
        reverse: bool = False,
        offset: int = 0,
        limit: int | None = None,
    ) -> list[bytes]:
        """Return up to `limit` tuples of the range as a list, without the first `offset` ones."""
        end = None if limit is None else offset + limit
        return [self._tuples[key] for key in islice(self._keys(low, high, reverse), offset, end)]

    def count(self, low: Key | None = None, high: Key | None = None) -> int:
        """Return the number of entries from `low` (inclusive) to `high` (exclusive)."""
        end = len(self) if high is None else self.rank(high)
        return max(end - (0 if low is None else self.rank(low)), 0)

    def rank(self, key: Key) -> int:
        """Return the number of keys less than `key`, which may be missing."""
        self._check_type(key)
        number = self._piece_of(key)
        return sum(map(len, self._pieces[:number])) + bisect_left(self._pieces[number], key)

    def at(self, number: int) -> tuple[Key, bytes]:
        """Return the key and the tuple of the entry with this number, counted from the smallest key."""
        rest = number
        for piece in self._pieces:
            if rest < len(piece):
                return piece[rest], self._tuples[piece[rest]]
            rest -= len(piece)
        raise IndexError(f"there are {len(self)} entries, none has the number {number}")

    def _add(self, key: Key) -> None:
        number = self._piece_of(key)
        piece = self._pieces[number]
        piece.insert(bisect_left(piece, key), key)
        if len(piece) > PIECE_MAX:
            self._pieces.insert(number + 1, piece[PIECE_MAX // 2 :])
            self._firsts.insert(number + 1, piece[PIECE_MAX // 2])
            del piece[PIECE_MAX // 2 :]
        self._version += 1

    def _piece_of(self, key: Key) -> int:
        return bisect_right(self._firsts, key, 1) - 1

    def _keys(self, low: Key | None, high: Key | None, reverse: bool) -> Iterator[Key]:
        """Return the keys of a range. A change of the keys invalidates the iterator."""
        first = 0 if low is None else self._piece_of(low)
        last = len(self._pieces) - 1 if high is None else self._piece_of(high)
        for number in range(last, first - 1, -1) if reverse else range(first, last + 1):
            piece = self._pieces[number]
            start = 0 if low is None or number > first else bisect_left(piece, low)
            end = len(piece) if high is None or number < last else bisect_left(piece, high)
            part = piece[start:end]
            yield from reversed(part) if reverse else part

    def _check_type(self, key: Key) -> None:
        if not isinstance(key, bytes if self.is_text else int):
            kind = "bytes" if self.is_text else "numbers"
            raise TypeError(f"keys of this index are {kind}, not {type(key).__name__}")
