"""A space: its definition, the format of its tuples, and its indexes. The primary index holds the tuples.

Altering creates another `EngineSpace` that shares the unchanged indexes, so a rollback only has to restore the old
object. This module knows nothing about transactions, users or logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from flowstone.box.definitions import IndexDefinition, SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.collation import Collation
from flowstone.box.engine.format import TupleFormat
from flowstone.box.engine.index import EngineIndex
from flowstone.box.engine.keys import Key
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack

if TYPE_CHECKING:
    from flowstone.box.engine.foreign_keys import Guards
    from flowstone.box.engine.read_view import ReadView
    from flowstone.box.engine.sequence import SpaceSequence

Values = tuple[Any, ...]

NOT_KNOWN: Final = object()


FORMATS_KEPT: Final = 1024
"""Size of the cache of formats. Each row of `_space` or `_index` needs a format, nearly always one seen before."""


@lru_cache(maxsize=FORMATS_KEPT)
def _format_of(definition: SpaceDefinition, dialect: Dialect) -> TupleFormat:
    return TupleFormat(definition, dialect)


class EngineSpace:
    """One version of a space. Spaces compare by identity: altering creates another one."""

    __slots__ = (
        "_dialect",
        "definition",
        "format",
        "guards",
        "indexes",
        "primary",
        "sequence",
        "served",
        "table",
        "views",
    )

    def __init__(
        self,
        definition: SpaceDefinition,
        collations: Mapping[int, Collation],
        views: list[ReadView],
        dialect: Dialect = Dialect.V2_6,
    ) -> None:
        self.definition = definition
        self.format = _format_of(definition, dialect)
        self.views = views
        self._dialect = dialect
        self.table: Any = NOT_KNOWN  # cache of `lane.table.table_of`
        self.guards: Guards | None = None
        """Constraints of this space and of spaces that refer to it; set by the box."""
        self.sequence: SpaceSequence | None = None
        self.indexes: dict[int, EngineIndex] = {}
        self._set_indexes(
            {index.id: EngineIndex(index, definition, collations, views, dialect) for index in definition.indexes}
        )

    def _set_indexes(self, indexes: dict[int, EngineIndex]) -> None:
        self.indexes = indexes
        self.primary = indexes.get(0)
        self.served = tuple(index for index in indexes.values() if index.is_served)

    def claim_indexes(self) -> None:
        """Give shared indexes the definitions, such as names, of this space, which becomes the current one."""
        for definition in self.definition.indexes:
            self.indexes[definition.id].definition = definition

    @property
    def id(self) -> int:
        return self.definition.id

    @property
    def name(self) -> str:
        return self.definition.name

    def __len__(self) -> int:
        return len(self.primary) if self.primary is not None else 0

    def __repr__(self) -> str:
        return f"<Space {self.name!r} of {len(self)} tuples>"

    def index(self, index: int | str) -> EngineIndex:
        """Return the index with this id or name; raise NoSuchIndexId or NoSuchIndexName if it does not exist."""
        if isinstance(index, int):
            found = self.indexes.get(index)
            if found is None:
                raise errors.NoSuchIndexId(f"No index #{index} is defined in space '{self.name}'")
            return found
        for candidate in self.indexes.values():
            if candidate.definition.name == index:
                return candidate
        raise errors.NoSuchIndexName(f"No index '{index}' is defined in space '{self.name}'")

    def empty(self, collations: Mapping[int, Collation]) -> EngineSpace:
        """Return the same space without tuples, as after truncation."""
        emptied = EngineSpace(self.definition, collations, self.views, self._dialect)
        emptied.sequence = self.sequence
        return emptied

    def altered(self, definition: SpaceDefinition, collations: Mapping[int, Collation]) -> EngineSpace:
        """Return a space with the same tuples, defined by `definition`.

        Indexes that keep their definition are shared; others are built from the tuples. Raise the server's error if a
        tuple does not fit the new format or a unique index.
        """
        altered = EngineSpace(definition, collations, self.views, self._dialect)
        altered.sequence = self.sequence
        kept = self._kept_indexes(altered)
        altered._set_indexes({number: kept.get(number, index) for number, index in altered.indexes.items()})
        built = tuple(index for index in altered.served if index.definition.id not in kept)
        is_checked = definition.fields != self.definition.fields or definition.field_count != (
            self.definition.field_count
        )
        if built or is_checked:
            altered._build(self.tuples(), built)
        return altered

    def redefined(self, definition: SpaceDefinition, collations: Mapping[int, Collation]) -> EngineSpace:
        """Return a space defined by `definition`, with the same indexes; tuples are not checked."""
        redefined = EngineSpace(definition, collations, self.views, self._dialect)
        redefined.sequence = self.sequence
        redefined._set_indexes(self.indexes)
        return redefined

    def _kept_indexes(self, altered: EngineSpace) -> dict[int, EngineIndex]:
        old_primary, new_primary = self.definition.primary_key, altered.definition.primary_key
        if old_primary is None or new_primary is None or old_primary.parts != new_primary.parts:
            return {}  # entries of secondary indexes end in the primary key
        kept: dict[int, EngineIndex] = {}
        for number, index in self.indexes.items():
            other = altered.indexes.get(number)
            if other is None or not _places_alike(index.definition, other.definition):
                continue
            kept[number] = index
        return kept

    def _build(self, tuples: Iterator[bytes], indexes: tuple[EngineIndex, ...]) -> None:
        """Check `tuples` against the format and add them to `indexes`."""
        for raw in tuples:
            values = unpack(raw)
            self.format.check(raw, values)
            for index in indexes:
                for entry in index.key.entries(values):
                    if index.set(entry, raw) is not None:
                        raise self.duplicate(index)

    def tuples(self) -> Iterator[bytes]:
        """Return all tuples in the order of the primary key. A write invalidates the iterator."""
        if self.primary is None:
            return iter(())
        return (raw for _, raw in self.primary.scan())

    def duplicate(self, index: EngineIndex) -> errors.TarantoolError:
        """Return the error for a duplicate key in `index`."""
        return errors.TupleFound(
            f"Duplicate key exists in unique index '{index.definition.name}' in space '{self.name}'"
        )

    def entries(self, old: Values | None, new: Values | None) -> Iterator[tuple[EngineIndex, list[Key], list[Key]]]:
        """Yield for each served index the entries that only `old` has, and all entries of `new`."""
        for index in self.served:
            added = index.key.entries(new) if new is not None else []
            removed = index.key.entries(old) if old is not None else []
            if removed and added:
                removed = [entry for entry in removed if entry not in added]
            yield index, removed, added


def _places_alike(old: IndexDefinition, new: IndexDefinition) -> bool:
    """Return True if redefining `old` as `new` leaves all entries in place."""
    return (old.type, old.unique, old.parts) == (new.type, new.unique, new.parts)
