"""Read views: all spaces as they were at one moment, while writing goes on.

A view is the live index plus what it held before: the first overwrite of a key since the view was opened leaves the
old tuple here. Opening costs nothing, reading a little, and memory grows with what is written while the view is open.
Checkpoints, joins, interactive transactions and confirmed reads all stand on this one mechanism.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol, Self

from flowstone.box.index import WHOLE, Index
from flowstone.box.keys import Key, Span
from flowstone.box.space import Space

Changes = dict[Key, bytes | None]
_MISSING: Final = b"\xc1"  # begins no MessagePack value, so it is no tuple


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
        present = ((key, value) for key, value in kept if value is not None)
        if not self._is_ordered:
            yield from present
            yield from added
            return
        added.sort(key=lambda entry: entry[0], reverse=not span.reverse)  # the next one last
        for entry in present:
            while added and (added[-1][0] < entry[0]) is not span.reverse:  # type: ignore[operator]
                yield added.pop()
            yield entry
        yield from reversed(added)


def contains(span: Span, key: Key) -> bool:
    """True if `key` lies in `span`; keys of one index are all of one type."""
    return (span.low is None or key >= span.low) and (  # type: ignore[operator]
        span.high is None or key < span.high  # type: ignore[operator]
    )


class ReadView:
    """Made by `Box.open_view`; `close` it, or use it in a `with` statement."""

    def __init__(self, spaces: dict[int, Space], views: list[ReadView]) -> None:
        self.spaces = spaces
        self.changes: dict[Index, Changes] = {}
        self._views = views
        views.append(self)

    def keep(self, index: Index, key: Key, old: bytes | None) -> None:
        """Told by the index, before each change, what stood at `key`: the first time counts."""
        changes = self.changes.get(index)
        if changes is None:
            changes = self.changes[index] = {}
        if key not in changes:
            changes[key] = old

    def source(self, index: Index) -> Source:
        """The entries of `index` at the view's moment."""
        changes = self.changes.get(index)
        return index if changes is None else Layer(index, changes, index.is_ordered)

    def get(self, index: Index, key: Key) -> bytes | None:
        return self.source(index).get(key)

    def scan(self, index: Index, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """The entries of `span`, in order; not to be held over a write."""
        return self.source(index).scan(span)

    def slices(self, index: Index, count: int) -> Iterator[list[bytes]]:
        """All tuples of `index` as lists of up to `count`; between two of them anything may be written."""
        if not index.is_ordered:
            keys = [key for key, _ in self.scan(index)]
            for at in range(0, len(keys), count):
                found = (self.get(index, key) for key in keys[at : at + count])
                yield [value for value in found if value is not None]
            return
        span = WHOLE
        while True:
            piece: list[bytes] = []
            last: Key | None = None
            for last, value in self.scan(index, span):  # noqa: B007
                piece.append(value)
                if len(piece) == count:
                    break
            if piece:
                yield piece
            if len(piece) < count or last is None:
                return
            span = Span(successor(last), None, False)

    def close(self) -> None:
        """Gives back what it holds; closing twice is harmless."""
        if self in self._views:
            self._views.remove(self)
        self.changes = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def successor(key: Key) -> Key:
    """The smallest key that is greater."""
    return key + 1 if isinstance(key, int) else key + b"\0"
