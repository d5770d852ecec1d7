"""Read views: all spaces as they were at one moment, while writing goes on.

A view is the live index plus what it held before: the first overwrite of a key since the view was opened leaves the
old tuple here. Opening costs nothing, reading a little, and memory grows with what is written while the view is open.
Checkpoints, joins, interactive transactions and confirmed reads all stand on this one mechanism.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Final, Protocol, Self

from flowstone.box.index import WHOLE, Index, behind
from flowstone.box.keys import Key, Span
from flowstone.box.space import Space
from flowstone.errors import FlowstoneError

Changes = dict[Key, bytes | None]

_PASSED_OVER: Final = 8
"""How many times the keys of a slice are passed over if they are new: that costs little, and new ones keep coming."""

_FEW: Final = 8
"""New keys that are put in their places one by one; sorting all again costs less for more."""


class ReadViewClosed(FlowstoneError):
    """A view was read that has been closed, and no longer knows what there was."""

    def __init__(self) -> None:
        super().__init__("the read view is closed", hint="read from it before it is closed, or open another one")


class Source(Protocol):
    """What entries can be read from: an index, or a layer over one."""

    def get(self, key: Key) -> bytes | None: ...

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]: ...


class KeyOrder:
    """The keys of `changes` in order, brought up to date when they are asked for: a short scan then costs little."""

    __slots__ = ("_changes", "_keys")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        # The oldest keys of the changes. New ones are the last there, as dictionaries keep the order.
        self._keys: list[Any] = []

    def within(self, span: Span) -> Iterator[Key]:
        """Those of `span`, in its direction; not to be held over a change."""
        keys = self._keys
        new = list(islice(reversed(self._changes), len(self._changes) - len(keys)))
        if len(new) <= _FEW:
            for key in new:
                insort(keys, key)
        else:
            keys += new
            keys.sort()
        low = 0 if span.low is None else bisect_left(keys, span.low)
        high = len(keys) if span.high is None else bisect_left(keys, span.high)
        return map(keys.__getitem__, range(high - 1, low - 1, -1) if span.reverse else range(low, high))

    def remove(self, key: Key) -> None:
        """Says that `key` is no longer one of the changes."""
        place = bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            del self._keys[place]


class Layer:
    """A source with `changes` laid over it; None there means that the key is absent. No order: an unordered index."""

    __slots__ = ("_base", "_changes", "_order")

    def __init__(self, base: Source, changes: Changes, order: KeyOrder | None) -> None:
        self._base = base
        self._changes = changes
        self._order = order

    def get(self, key: Key) -> bytes | None:
        return self._changes[key] if key in self._changes else self._base.get(key)

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        if self._order is None:
            return behind(span, self._unordered())
        return self._merged(span, self._order.within(span))

    def _merged(self, span: Span, changed: Iterator[Key]) -> Iterator[tuple[Key, bytes]]:
        """What there is of `span` in the base, with each changed key in its place."""
        changes, reverse = self._changes, span.reverse
        next_changed = next(changed, None)
        for entry in self._base.scan(span):
            key = entry[0]
            while next_changed is not None and next_changed != key and (next_changed < key) is not reverse:  # type: ignore[operator]
                if (value := changes[next_changed]) is not None:
                    yield next_changed, value
                next_changed = next(changed, None)
            if next_changed != key:
                yield entry
                continue
            if (value := changes[key]) is not None:
                yield key, value
            next_changed = next(changed, None)
        while next_changed is not None:
            if (value := changes[next_changed]) is not None:
                yield next_changed, value
            next_changed = next(changed, None)

    def _unordered(self) -> Iterator[tuple[Key, bytes]]:
        changes, base = self._changes, self._base
        for key, value in base.scan():
            now = changes.get(key) if key in changes else value
            if now is not None:
                yield key, now
        for key, added in changes.items():
            if added is not None and base.get(key) is None:
                yield key, added


def contains(span: Span, key: Key) -> bool:
    """True if `key` lies in `span`; keys of one index are all of one type."""
    return (span.low is None or key >= span.low) and (  # type: ignore[operator]
        span.high is None or key < span.high  # type: ignore[operator]
    )


class Spans:
    """Many spans of one index: whether a key lies in one of them is known at once."""

    __slots__ = ("_highs", "_lows", "_rest")

    def __init__(self, spans: Sequence[Span]) -> None:
        # What has no lower or no upper end comes down to one each.
        below = [span.high for span in spans if span.low is None]
        above: list[Any] = [span.low for span in spans if span.low is not None and span.high is None]
        self._rest = [Span(None, _highest(below), False)] if below else []
        self._rest += [Span(min(above), None, False)] if above else []
        self._lows: list[Any] = []
        self._highs: list[Any] = []
        closed: list[Any] = [(span.low, span.high) for span in spans if span.low is not None and span.high is not None]
        for low, high in sorted(closed):
            if self._highs and low <= self._highs[-1]:
                self._highs[-1] = max(self._highs[-1], high)
            elif low < high:
                self._lows.append(low)
                self._highs.append(high)

    def __contains__(self, key: Key) -> bool:
        place = bisect_right(self._lows, key) - 1
        return (place >= 0 and key < self._highs[place]) or any(contains(span, key) for span in self._rest)


def _highest(ends: list[Any]) -> Any:
    """Of upper ends, None being beyond all."""
    return None if None in ends else max(ends)


class ReadView:
    """Made by `Box.open_view`; `close` it, or use it in a `with` statement."""

    def __init__(self, spaces: dict[int, Space], views: list[ReadView], sequence_rows: Sequence[bytes] = ()) -> None:
        self.spaces = spaces
        self.sequence_rows = sequence_rows
        """The values of all sequences, as tuples of `_sequence_data`."""
        self.changes: dict[Index, Changes] = {}
        self._orders: dict[Index, KeyOrder] = {}
        self.is_closed = False
        self._views = views
        views.append(self)

    def keep(self, index: Index, key: Key, old: bytes | None) -> None:
        """Told by the index, before each change, what stood at `key`: the first time counts."""
        changes = self.changes.get(index)
        if changes is None:
            changes = self.changes[index] = {}
        if key not in changes:
            changes[key] = old

    def check(self) -> None:
        """Raises ReadViewClosed if it is."""
        if self.is_closed:
            raise ReadViewClosed

    def source(self, index: Index) -> Source:
        """The entries of `index` at the view's moment."""
        self.check()
        changes = self.changes.get(index)
        if changes is None:
            return index
        if not index.is_ordered:
            return Layer(index, changes, None)
        order = self._orders.get(index)
        if order is None:
            order = self._orders[index] = KeyOrder(changes)
        return Layer(index, changes, order)

    def get(self, index: Index, key: Key) -> bytes | None:
        return self.source(index).get(key)

    def scan(self, index: Index, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """The entries of `span`, in order; not to be held over a write."""
        return self.source(index).scan(span)

    def slices(self, index: Index, count: int) -> Iterator[list[bytes]]:
        """All tuples of `index`, in order, in lists of about `count`; between two of them anything may be written.

        Each list costs what it holds and what was written since the last one, however much was written before. New
        keys are passed over many at a time, and lists may be empty, so this ends although many come.
        """
        if not index.is_ordered:
            yield from self._unordered_slices(index, count)
            return
        gone: list[Key] = []
        seen = 0
        last: Key | None = None
        greatest = next(index.scan(Span(None, None, True)), None)
        end = None if greatest is None else successor(greatest[0])
        is_end = False
        while not is_end:
            self.check()
            changes = self.changes.get(index, {})
            # Changes are noted in order, so the new ones are the last.
            for key, old in islice(reversed(changes.items()), len(changes) - seen):
                if old is not None and (last is None or key > last):  # type: ignore[operator]
                    heappush(gone, key)
            seen = len(changes)
            piece: list[bytes] = []
            taken = 0
            span = Span(None if last is None else successor(last), end, False)
            for key, value in islice(index.scan(span), count * _PASSED_OVER):
                while gone and gone[0] < key:  # type: ignore[operator]
                    piece += _old(changes, heappop(gone))
                if gone and gone[0] == key:
                    heappop(gone)
                piece += _old(changes, key) if key in changes else (value,)
                last = key
                taken += 1
                if len(piece) >= count:
                    break
            is_end = taken < count * _PASSED_OVER and len(piece) < count
            while is_end and gone:
                piece += _old(changes, heappop(gone))
            yield piece

    def _unordered_slices(self, index: Index, count: int) -> Iterator[list[bytes]]:
        changes = self.changes.get(index, {})
        keys = list(index.map)
        keys += [key for key, old in changes.items() if old is not None and key not in index.map]
        for at in range(0, len(keys), count):
            found = (self.get(index, key) for key in keys[at : at + count])
            piece = [value for value in found if value is not None]
            if piece:
                yield piece

    def close(self) -> None:
        """Gives back what it holds; closing twice is harmless."""
        if not self.is_closed:
            self.is_closed = True
            self._views.remove(self)
            self.changes = {}
            self._orders = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _old(changes: Changes, key: Key) -> tuple[bytes, ...]:
    """What a view has in the place of a changed key: its old tuple, or nothing."""
    old = changes.get(key)
    return () if old is None else (old,)


def successor(key: Key) -> Key:
    """The smallest key that is greater."""
    return key + 1 if isinstance(key, int) else key + b"\0"
