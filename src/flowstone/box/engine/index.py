"""An index: a map from key to tuple, and for TREE the order of the keys.

Theory of operation: a TREE index is a dictionary plus an `OrderedKeys` of its keys. A write only records that a key was
added or deleted. Added keys are sorted in batches ("runs") and merged into the order later, in steps (`settle_partly`),
when the node is idle. A read merges a small backlog at once and reads around a large one, so no request waits for a
full sort. `set` passes the old tuple to every open read view before it changes an entry. `keys.py` defines what a key
is; the statements decide which tuples may be written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from flowstone.box.definitions import IndexDefinition, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation
from flowstone.box.engine.keys import Key, KeyDefinition, Span
from flowstone.box.engine.order import OrderedKeys, in_order

if TYPE_CHECKING:
    from flowstone.box.engine.read_view import ReadView

SERVED_TYPES: Final = frozenset(("tree", "hash"))
"""RTREE and BITSET indexes are kept as definitions for downstream servers; requests cannot read them."""

WHOLE: Final = Span(None, None, False)

RUN: Final = 20_000
"""Number of new keys that are sorted into a run; sorting them takes about two milliseconds."""

SETTLED_BY_READ: Final = 1000
"""Largest backlog that an ordered read merges at once; it reads around a larger one."""

RUNS_MAX: Final = 100
DEBT_MAX: Final = 100_000
"""Above this many runs, or this many unsettled keys (or twice the index size, if that is more), writes also settle."""

_MOST: Final = 3
"""`settle` sorts all keys anew if more than one key in this many is in a run: merging would cost more."""


class EngineIndex:
    """The entries of one index. `views` is the box's list of open read views, shared by all its indexes."""

    __slots__ = ("_fresh", "_gone", "_order", "_runs", "definition", "is_ordered", "is_served", "key", "map", "views")

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
        # Each key of the map is in exactly one of `_order`, a run and `_fresh`. Deleted keys that are still in one of
        # them are in `_gone`.
        self._order = OrderedKeys([])
        self._runs: list[list[Key]] = []
        self._fresh: list[Key] = []
        self._gone: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self.map)

    def get(self, key: Key) -> bytes | None:
        return self.map.get(key)

    def set(self, key: Key, tuple_: bytes | None) -> bytes | None:
        """Store `tuple_` at `key`, or delete the entry if it is None; return the old tuple."""
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
                    fresh = self._fresh
                    fresh.append(key)
                    if len(fresh) >= RUN:
                        self._bound_debt()
        elif old is not None:
            del entries[key]
            if self.is_ordered:
                self._gone[key] = None
        return old

    def add_fresh(self, keys: list[Key]) -> None:
        """Record `keys` that a bulk write (`bulk.py`) has added to the map."""
        if not self.is_ordered:
            return
        if self._gone:
            gone = self._gone
            keys = [key for key in keys if key not in gone or gone.pop(key)]
        self._fresh += keys
        if len(self._fresh) >= RUN:
            self._bound_debt()

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """Return the entries of `span` in order; if the index is not ordered, use `unordered_span`. A write invalidates
        the iterator."""
        entries = self.map
        if not self.is_ordered:
            return unordered_span(span, iter(entries.items()))
        low, high, reverse = span
        if self._make_readable():
            return ((key, entries[key]) for key in self._order.span(low, high, reverse))
        keys = self._order.span(low, high, reverse)
        if self._runs:
            parts = ((run, _part(run, low, high)) for run in self._runs)
            others = (map(run.__getitem__, reversed(part) if reverse else part) for run, part in parts)
            keys = merge(keys, *others, reverse=reverse)
        return ((key, entries[key]) for key in keys if key in entries)

    def count(self, span: Span) -> int:
        """Return the number of entries in `span`."""
        if span.low is None and span.high is None:
            return len(self.map)
        if not self.is_ordered:
            return sum(1 for _ in self.scan(span))
        self._make_readable()
        low, high, _ = span
        if low is not None and high is not None and low >= high:  # type: ignore[operator]
            return 0
        order = self._order
        found = (len(order) if high is None else order.rank(high)) - (0 if low is None else order.rank(low))
        found += sum(len(_part(run, low, high)) for run in self._runs)
        return found - sum(1 for key in self._gone if _is_within(key, low, high))

    @property
    def debt(self) -> int:
        """Number of added and deleted keys that are not merged into the order yet."""
        return len(self._fresh) + len(self._gone) + sum(map(len, self._runs))

    def settle(self) -> None:
        """Merge all added and deleted keys into the order."""
        if self._fresh:
            self._runs.append(self._sorted_fresh())
        if sum(map(len, self._runs)) * _MOST > len(self.map):
            keys = list(chain(self._order, *self._runs))
            if self._gone:
                entries = self.map
                keys = [key for key in keys if key in entries]
            self._order = OrderedKeys(in_order(keys))
            self._runs, self._gone = [], {}
        else:
            self.settle_partly(self.debt)

    def settle_partly(self, limit: int) -> bool:
        """Merge about `limit` keys into the order; return True if none are left. Bounds the time of one step."""
        gone, order, runs = self._gone, self._order, self._runs
        if self._fresh and not runs:
            runs.append(self._sorted_fresh())
        while runs and limit > 0:
            batch = runs[-1][-limit:]
            del runs[-1][-limit:]
            if not runs[-1]:
                runs.pop()
            order.add([key for key in batch if key not in gone or gone.pop(key)] if gone else batch)
            limit -= len(batch)
        if gone and limit > 0 and not self._fresh:
            order.remove(in_order([gone.popitem()[0] for _ in range(min(limit, len(gone)))]))
        return not (runs or gone or self._fresh)

    def _sorted_fresh(self) -> list[Key]:
        """Empty `_fresh` and return its keys sorted, without keys that were deleted since."""
        fresh, self._fresh = self._fresh, []
        if gone := self._gone:
            fresh = [key for key in fresh if key not in gone or gone.pop(key)]
        return in_order(fresh)

    def _bound_debt(self) -> None:
        """Sort the new keys into a run, so that no read has to, and settle some keys if the backlog is too large."""
        size = len(self._fresh)
        if run := self._sorted_fresh():
            self._runs.append(run)
        if len(self._runs) > RUNS_MAX or self.debt > max(DEBT_MAX, 2 * len(self.map)):
            self.settle_partly(size + size // 4)

    def _make_readable(self) -> bool:
        """Merge a small backlog; return True if the order is complete, False if `_runs` and `_gone` count, too."""
        if len(self._fresh) > SETTLED_BY_READ:
            self._bound_debt()
        elif self._fresh:
            self._order.add(self._sorted_fresh())
        if not self._runs and 0 < len(self._gone) <= SETTLED_BY_READ:
            self.settle_partly(SETTLED_BY_READ)
        return not (self._runs or self._gone)

    def random(self, number: int) -> bytes | None:
        """Return the tuple at position `number` modulo the number of tuples; None if there are none."""
        if not self.map:
            return None
        number %= len(self.map)
        if self.is_ordered and self._make_readable():
            return self.map[self._order[number]]
        return next(islice(self.map.values(), number, None))


def _part(run: list[Key], low: Key | None, high: Key | None) -> range:
    """Return the positions of the keys from `low` (inclusive) to `high` (exclusive) in the sorted list `run`."""
    return range(0 if low is None else bisect_left(run, low), len(run) if high is None else bisect_left(run, high))


def unordered_span(span: Span, entries: Iterator[tuple[Key, bytes]]) -> Iterator[tuple[Key, bytes]]:
    """Return the `entries` of an unordered index that `span` selects.

    It selects all entries, or for the iterator GT the entries after its key; no entries if the key does not exist.
    """
    if span.low is not None:
        # The span of GT begins right above the key.
        key = span.low - 1 if isinstance(span.low, int) else span.low[:-1]
        any(found == key for found, _ in entries)
    return entries


def _is_within(key: Key, low: Key | None, high: Key | None) -> bool:
    return (low is None or key >= low) and (high is None or key < high)  # type: ignore[operator]
