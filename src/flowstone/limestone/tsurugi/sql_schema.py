"""The SQL tables of a log at one epoch, from the entries of the metadata storage that count then.

Pure. The newest entry of each key counts, as in any storage, so the state of the metadata storage at an epoch has all
tables that exist then: created tables have an entry, dropped ones have none, and altered ones the new definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flowstone.limestone.errors import BadMetadata, NoSuchTable
from flowstone.limestone.tsurugi.definitions import SYSTEM_STORAGES, SecondaryIndex, SqlTable
from flowstone.limestone.tsurugi.metadata import defined_storage, parse_metadata


@dataclass(frozen=True)
class SqlSchema:
    """Tables by name, and the other storages by id.

    `tables` are those that SQL shows. `unreadable` has the reason, by storage, why rows can only be read raw. `hidden`
    are storages without rows of users: secondary indexes, tables being dropped, Tsurugi's own tables.
    """

    tables: Mapping[str, SqlTable] = field(default_factory=dict)
    indexes: tuple[SecondaryIndex, ...] = ()
    hidden: frozenset[int] = frozenset()
    unreadable: Mapping[int, BadMetadata] = field(default_factory=dict)

    def table(self, name: str) -> SqlTable:
        """Return a table by its name, or by its name in other case if only one has it."""
        found = self.tables.get(name)
        alike = [each for each in self.tables.values() if each.name.lower() == name.lower()]
        if found is None and len(alike) == 1:
            found = alike[0]
        if found is None:
            known = ", ".join(sorted(self.tables)) or "none"
            raise NoSuchTable(f"no table {name!r}", hint=f"tables of the log: {known}")
        return found

    @property
    def is_empty(self) -> bool:
        """True if the log has no metadata: Tsurugi did not write it."""
        return not (self.tables or self.hidden or self.unreadable)


def read_schema(values: Iterable[bytes]) -> SqlSchema:
    """Return the schema that the values of the current entries of the metadata storage define."""
    found: list[SqlTable] = []
    indexes: list[SecondaryIndex] = []
    hidden: set[int] = set()
    unreadable: dict[int, BadMetadata] = {}
    for value in values:
        try:
            defined = parse_metadata(value)
        except BadMetadata as error:
            unreadable[_storage_of(value)] = error
            continue
        if isinstance(defined, SqlTable) and defined.is_visible:
            found.append(defined)
            continue
        hidden.add(defined_storage(value))
        if isinstance(defined, SecondaryIndex):
            indexes.append(defined)
    tables: dict[str, SqlTable] = {}
    for table in sorted(found, key=lambda each: each.storage_id):
        if table.name in tables:  # for a moment, while the former one is being dropped
            hidden.add(tables[table.name].storage_id)
        tables[table.name] = table
    if hidden or tables or unreadable:
        hidden |= SYSTEM_STORAGES
    indexes.sort(key=lambda index: index.storage_id)
    return SqlSchema(dict(sorted(tables.items())), tuple(indexes), frozenset(hidden), unreadable)


def _storage_of(value: bytes) -> int:
    """Return the storage that damaged metadata names, as far as they do."""
    try:
        return defined_storage(value)
    except BadMetadata:
        return 0
