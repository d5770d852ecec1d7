"""Read views: all spaces as they were at one moment, while writing goes on.

A view is the live index plus what it held before: the first overwrite of a key since the view was opened leaves the
old tuple here. Opening costs nothing, reading a little, and memory grows with what is written while the view is open.
Checkpoints, joins, interactive transactions and confirmed reads all stand on this one mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Final, Protocol, Self

from flowstone.box.index import WHOLE, Index, behind
from flowstone.box.keys import Key, Span
from flowstone.box.space import Space
from flowstone.errors import FlowstoneError

Changes = dict[Key, bytes | None]
_MISSING: Final = b"\xc1"  # begins no MessagePack value, so it is no tuple


class ReadViewClosed(FlowstoneError):
    """A view was read that has been closed, and no longer knows what there was."""

    def __init__(self) -> None:
        super().__init__("the read view is closed", hint="read from it before it is closed, or open another one")


class Source(Protocol):
    """What entries can be read from: an index, or a layer over one."""

    def get(self, key: Key) -> bytes | None: ...

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]: ...


class Layer:
    """A source with `changes` laid over it; None there means that the key is absent."""

    __slots__ = ("_base", "_changes", "_is_ordered")

    def __init__(self, base: Source, changes: Changes, is_ordered: bool) -> None:
        self._base = base
        self._changes = changes
        self._is_ordered = is_ordered

    def get(self, key: Key) -> bytes | None:
        found = self._changes.get(key, _MISSING)
        return self._base.get(key) if found is _MISSING else found

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        if not self._is_ordered:
            yield from behind(span, chain(*self._merge(WHOLE)))
            return
        present, added = self._merge(span)
        added.sort(key=lambda entry: entry[0], reverse=not span.reverse)  # the next one last
        for entry in present:
            while added and (added[-1][0] < entry[0]) is not span.reverse:  # type: ignore[operator]
                yield added.pop()
            yield entry
        yield from reversed(added)

    def _merge(self, span: Span) -> tuple[Iterator[tuple[Key, bytes]], list[tuple[Key, bytes]]]:
        """What there is of `span` in the base, as it is now, and what is new."""
        changes, base = self._changes, self._base
        added = [
            (key, value)
            for key, value in changes.items()
            if value is not None and contains(span, key) and base.get(key) is None
        ]
        kept = (
            (key, value if (changed := changes.get(key, _MISSING)) is _MISSING else changed)
            for key, value in base.scan(span)
        )
        return ((key, value) for key, value in kept if value is not None), added


def contains(span: Span, key: Key) -> bool:
    """True if `key` lies in `span`; keys of one index are all of one type."""
    return (span.low is None or key >= span.low) and (  # type: ignore[operator]
        span.high is None or key < span.high  # type: ignore[operator]
    )


class ReadView:
    """Made by `Box.open_view`; `close` it, or use it in a `with` statement."""

    def __init__(self, spaces: dict[int, Space], views: list[ReadView], sequence_rows: Sequence[bytes] = ()) -> None:
        self.spaces = spaces
        self.sequence_rows = sequence_rows
        """The values of all sequences, as tuples of `_sequence_data`."""
        self.changes: dict[Index, Changes] = {}
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
        return index if changes is None else Layer(index, changes, index.is_ordered)

    def get(self, index: Index, key: Key) -> bytes | None:
        return self.source(index).get(key)

    def scan(self, index: Index, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """The entries of `span`, in order; not to be held over a write."""
        return self.source(index).scan(span)

    def slices(self, index: Index, count: int) -> Iterator[list[bytes]]:
        """All tuples of `index`, in order, in lists of about `count`; between two of them anything may be written.

        Each list costs what it holds and what was written since the last one, however much was written before; keys
        that are appended while it is read make it no longer.
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
            for key, value in islice(index.scan(span), count):
                while gone and gone[0] < key:  # type: ignore[operator]
                    piece += _old(changes, heappop(gone))
                if gone and gone[0] == key:
                    heappop(gone)
                piece += _old(changes, key) if key in changes else (value,)
                last = key
                taken += 1
            is_end = taken < count
            while is_end and gone:
                piece += _old(changes, heappop(gone))
            if piece:
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
