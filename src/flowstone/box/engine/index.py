"""An index: its entries in order, and the definition that says which keys a tuple has.

Every change passes the old tuple to the open read views. `keys.py` defines what a key is; the statements decide which
tuples may be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from flowstone.box.definitions import IndexDefinition, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation
from flowstone.box.engine.entries import Entries
from flowstone.box.engine.keys import Key, KeyDefinition, KeyKind, Span

if TYPE_CHECKING:
    from flowstone.box.engine.read_view import ReadView

SERVED_TYPES: Final = frozenset(("tree", "hash"))
"""RTREE and BITSET indexes are kept as definitions for downstream servers; requests cannot read them."""

WHOLE: Final = Span(None, None, False)


class EngineIndex:
    """The entries of one index. `views` is the box's list of open read views, shared by all its indexes.

    A HASH index has its entries in order, too, but its clients are not promised one (`is_ordered`).
    """

    __slots__ = ("definition", "entries", "get", "is_ordered", "is_served", "key", "views")

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
        self.entries = Entries(self.key.kind is not KeyKind.INTEGER)
        self.get: Callable[[Key], bytes | None] = self.entries.get
        self.views = views

    def __len__(self) -> int:
        return len(self.entries)

    def set(self, key: Key, tuple_: bytes | None) -> bytes | None:
        """Store `tuple_` at `key`, or delete the entry if it is None; return the old tuple."""
        old = self.entries.pop(key) if tuple_ is None else self.entries.put(key, tuple_)
        for view in self.views:
            view.keep(self, key, old)
        return old

    def scan(self, span: Span = WHOLE) -> Iterator[tuple[Key, bytes]]:
        """Return the entries of `span` in order. After a write the iterator continues after its last key."""
        return self.entries.span(*span)

    def count(self, span: Span) -> int:
        """Return the number of entries in `span`."""
        return self.entries.count(span.low, span.high)

    def random(self, number: int) -> bytes | None:
        """Return the tuple at position `number` modulo the number of tuples; None if there are none."""
        return self.entries.at(number % len(self.entries))[1] if self.entries else None
