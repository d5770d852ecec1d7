"""An index: where each tuple of a space is found by its key, and in which order keys follow each other.

A dictionary from key to tuple, and for TREE the same keys in order. Writes only note that a key came or went; the
order is brought up to date by the first read that needs it, so that a load of writes pays for sorting once. `set` is
the only way to change an index: it tells every open read view what stood there before. What a key is, `keys.py` says;
which tuples may be written, the statements decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Final

from sortedcontainers import SortedList

from flowstone.box.collation import Collation
from flowstone.box.definitions import IndexDefinition, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.keys import Key, KeyDefinition, Span

if TYPE_CHECKING:
    from flowstone.box.read_view import ReadView

SERVED_TYPES: Final = frozenset(("tree", "hash"))
"""RTREE and BITSET are kept as definitions, for whoever replicates from us, and never read."""

WHOLE: Final = Span(None, None, False)


class Index:
    """The entries of one index. `views` is the box's list of open read views, shared by all its indexes."""

    __slots__ = ("_fresh", "_gone", "_order", "definition", "is_ordered", "is_served", "key", "map", "views")

    def __init__(
        self,
        definition: IndexDefinition,
        space: SpaceDefinition,
        collations: Mapping[int, Collation],
        views: list[ReadView],
        dialect: Dialect,
    ) -> None:
        self.definition = definition
        primary = space.primary_key if definition.id else None
        self.key = KeyDefinition(definition, primary, collations, space, dialect)
        self.is_served = definition.type in SERVED_TYPES and not definition.is_functional
        self.is_ordered = definition.type == "tree"
        self.map: dict[Key, bytes] = {}
        self.views = views
        # Every key of the map is in `_order` or in `_fresh`, once; beyond those only what `_gone` names.
        self._order: SortedList = SortedList()
        self._fresh: list[Key] = []
        self._gone: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self.map)

    def get(self, key: Key) -> bytes | None:
        return self.map.get(key)

    def set(self, key: Key, tuple_: bytes | None) -> bytes | None:
        """Puts `tuple_` at `key`, or takes away what is there (None); gives what was there before."""
        entries = self.map
        old = entries.get(key)
        for view in self.views:
            view.keep(self, key, old)
        if tuple_ is not None:
            entries[key] = tuple_
            if old is None and self.is_ordered:
                if key in self._gone:
                    del self._gone[key]
                else:
                    self._fresh.append(key)
        elif old is not None:
            del entries[key]
            if self.is_ordered:
                self._gone[key] = None
        return old

    def add_fresh(self, keys: list[Key]) -> None:
        """Says that `keys` were put into the map by somebody who writes many at once (see `bulk.py`)."""
        if not self.is_ordered:
            return
        if self._gone:
            gone = self._gone
            keys = [key for key in keys if key not in gone or gone.pop(key)]
        self._fresh += keys

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """The entries of `span`, in order; of an unordered index see `behind`. Not to be held over a write."""
        entries = self.map
        if not self.is_ordered:
            return behind(span, iter(entries.items()))
        self.settle()
        keys = self._order.irange(span.low, span.high, (True, False), span.reverse)
        return ((key, entries[key]) for key in keys)

    def count(self, span: Span) -> int:
        """How many entries `span` has."""
        if span.low is None and span.high is None:
            return len(self.map)
        if not self.is_ordered:
            return sum(1 for _ in self.scan(span))
        self.settle()
        order = self._order
        low = 0 if span.low is None else order.bisect_left(span.low)
        high = len(order) if span.high is None else order.bisect_left(span.high)
        return max(0, high - low)

    def settle(self) -> None:
        """Brings the order up to date with what came and went."""
        if self._gone:
            self._forget_gone()
        if self._fresh:
            self._order.update(self._fresh)
            self._fresh = []

    def settle_partly(self, limit: int) -> bool:
        """As `settle`, for at most `limit` keys; True when nothing is left to do. Nobody waits long for that."""
        fresh, gone, order = self._fresh, self._gone, self._order
        batch = fresh[-limit:]
        if batch:
            del fresh[-limit:]
            order.update([key for key in batch if key not in gone or gone.pop(key)])
        elif gone:
            for key in list(islice(gone, limit)):
                order.remove(key)
                del gone[key]
        return not fresh and not gone

    def _forget_gone(self) -> None:
        gone, self._gone = self._gone, {}
        before = len(self._fresh)
        if before:
            kept = [key for key in self._fresh if key not in gone]
            if len(kept) < before:
                for key in self._fresh:
                    gone.pop(key, None)
                self._fresh = kept
        if len(gone) * 4 < len(self._order):
            for key in gone:
                self._order.remove(key)
        else:
            self._order = SortedList(key for key in self._order if key not in gone)

    def random(self, number: int) -> bytes | None:
        """The tuple at position `number`, modulo their count."""
        if not self.map:
            return None
        number %= len(self.map)
        if self.is_ordered:
            self.settle()
            return self.map[self._order[number]]
        return next(islice(self.map.values(), number, None))


def behind(span: Span, entries: Iterator[tuple[Key, bytes]]) -> Iterator[tuple[Key, bytes]]:
    """Of an unordered index: all `entries`, or with the iterator GT those that follow its key, if that is there."""
    if span.low is not None:
        # The span begins right above the key.
        key = span.low - 1 if isinstance(span.low, int) else span.low[:-1]
        any(found == key for found, _ in entries)
    return entries
