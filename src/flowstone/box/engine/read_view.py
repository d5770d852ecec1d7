"""Read views: all spaces as of one moment, while writes continue.

A view reads the live indexes and overlays the old tuples: the first change of a key after the view was opened stores
the old tuple here. Opening is cheap, reading costs a little more than without a view, and memory grows with the writes
made while the view is open. Checkpoints, joins, interactive transactions and confirmed reads all use it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Final, Protocol, Self

from flowstone.box.engine.index import WHOLE, EngineIndex
from flowstone.box.engine.keys import Key, Span
from flowstone.box.engine.space import EngineSpace
from flowstone.errors import FlowstoneError

Changes = dict[Key, bytes | None]

_PASSED_OVER: Final = 8
"""A slice scans at most this many times its size: skipping keys newer than the view is cheap, but must be bounded."""

_FEW: Final = 8
"""Up to this many new keys are inserted one by one; for more, sorting the whole list is cheaper."""


class ReadViewClosed(FlowstoneError):
    """A closed view was read; its old tuples are gone."""

    def __init__(self) -> None:
        super().__init__("the read view is closed", hint="read from it before it is closed, or open another one")


class ViewSource(Protocol):
    """A readable set of entries: an index, or a layer over one."""

    def get(self, key: Key) -> bytes | None: ...

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]: ...


class KeyOrder:
    """The keys of `changes` in order, updated lazily and incrementally so that short scans stay cheap."""

    __slots__ = ("_changes", "_keys")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        # The oldest keys of `changes`, sorted. Newer keys are at the end of `changes`: dictionaries keep their order.
        self._keys: list[Any] = []

    def within(self, span: Span) -> Iterator[Key]:
        """Return the keys within `span`, in its direction. A change invalidates the iterator."""
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
        """Forget `key`, which was removed from the changes."""
        place = bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            del self._keys[place]


class Layer:
    """A source overlaid with `changes`, where None marks an absent key. `order` is the order of their keys."""

    __slots__ = ("_base", "_changes", "_order")

    def __init__(self, base: ViewSource, changes: Changes, order: KeyOrder) -> None:
        self._base = base
        self._changes = changes
        self._order = order

    def get(self, key: Key) -> bytes | None:
        return self._changes[key] if key in self._changes else self._base.get(key)

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        return self._merged(span, self._order.within(span))

    def _merged(self, span: Span, changed: Iterator[Key]) -> Iterator[tuple[Key, bytes]]:
        """Merge the entries of `span` in the base with the changed keys."""
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


def contains(span: Span, key: Key) -> bool:
    """Return True if `key` lies within `span`; all keys of an index have the same type."""
    return (span.low is None or key >= span.low) and (  # type: ignore[operator]
        span.high is None or key < span.high  # type: ignore[operator]
    )


class Spans:
    """Union of many spans of one index, with fast membership tests."""

    __slots__ = ("_highs", "_lows", "_rest")

    def __init__(self, spans: Sequence[Span]) -> None:
        # All spans without a lower bound merge into one, and so do all spans without an upper bound.
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
    """Return the greatest upper bound; None means unbounded."""
    return None if None in ends else max(ends)


class ReadView:
    """The state of all spaces when `Box.open_view` was called. Close it, or use it in a `with` statement."""

    def __init__(
        self, spaces: dict[int, EngineSpace], views: list[ReadView], sequence_rows: Sequence[bytes] = ()
    ) -> None:
        self.spaces = spaces
        self.sequence_rows = sequence_rows
        """The values of all sequences, as raw tuples of `_sequence_data`."""
        self.changes: dict[EngineIndex, Changes] = {}
        self._orders: dict[EngineIndex, KeyOrder] = {}
        self.is_closed = False
        self._views = views
        views.append(self)

    def keep(self, index: EngineIndex, key: Key, old: bytes | None) -> None:
        """Keep the tuple at `key` before a change; indexes call this for every change, only the first one counts."""
        changes = self.changes.get(index)
        if changes is None:
            changes = self.changes[index] = {}
        if key not in changes:
            changes[key] = old

    def check(self) -> None:
        """Raise ReadViewClosed if the view is closed."""
        if self.is_closed:
            raise ReadViewClosed

    def source(self, index: EngineIndex) -> ViewSource:
        """Return the entries of `index` as of the view."""
        self.check()
        changes = self.changes.get(index)
        if changes is None:
            return index
        order = self._orders.get(index)
        if order is None:
            order = self._orders[index] = KeyOrder(changes)
        return Layer(index, changes, order)

    def get(self, index: EngineIndex, key: Key) -> bytes | None:
        return self.source(index).get(key)

    def scan(self, index: EngineIndex, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """Return the entries of `span` in order. A write invalidates the iterator."""
        return self.source(index).scan(span)

    def slices(self, index: EngineIndex, count: int) -> Iterator[list[bytes]]:
        """Yield all tuples of `index`, in order, in lists of about `count`. Writes are allowed between two lists.

        The cost of a list depends on its size and on the writes since the previous list, not on earlier writes. The
        number of keys scanned per list is bounded, so a list may be empty if many keys are newer than the view; the
        scan ends at the key that was the greatest at its start.
        """
        gone: list[Key] = []
        seen = 0
        last: Key | None = None
        greatest = next(index.scan(Span(None, None, True)), None)
        end = None if greatest is None else successor(greatest[0])
        is_end = False
        while not is_end:
            self.check()
            changes = self.changes.get(index, {})
            # `changes` is in insertion order, so the new ones are at its end.
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

    def close(self) -> None:
        """Release the old tuples; closing twice is harmless."""
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
    """Return the old tuple of a changed key as a sequence of one, or an empty one if the key was absent."""
    old = changes.get(key)
    return () if old is None else (old,)


def successor(key: Key) -> Key:
    """Return the smallest key greater than `key`."""
    return key + 1 if isinstance(key, int) else key + b"\0"
