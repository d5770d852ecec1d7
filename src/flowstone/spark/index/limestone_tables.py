"""The tables of a Limestone directory at an epoch: Tsurugi's tables by name and type, or storages with raw entries.

A log that Tsurugi wrote has its tables. A storage whose definition cannot be read stays raw, with a note. All storages
are raw in logs of other programs, and on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from flowstone.box.schema import SchemaTracker
from flowstone.limestone.tsurugi.definitions import SYSTEM_STORAGES, SqlTable
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_spaces import space_id_of, tracker_of
from flowstone.spark.index.tsurugi_tuples import TableTuples


@dataclass(frozen=True)
class LimestoneTables:
    """The tables of a directory: ids of raw storages, and typed tables. Picklable.

    `notes` say why a storage of Tsurugi's is raw.
    """

    storages: tuple[int, ...] = ()
    tables: tuple[SqlTable, ...] = ()
    notes: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return LimestoneTables, (self.storages, self.tables, self.notes)

    @property
    def tracker(self) -> SchemaTracker:
        """The definitions of the tables as spaces. Do not modify them."""
        return tracker_of(self.storages, self.tables)

    @property
    def spaces(self) -> frozenset[int]:
        """The ids of the spaces."""
        return frozenset(map(space_id_of, (*self.storages, *(each.storage_id for each in self.tables))))

    @cached_property
    def typed(self) -> dict[int, TableTuples]:
        """What encodes the entries of typed tables, by storage id."""
        return dict(_typed(self.storages, self.tables))


@lru_cache(maxsize=8)
def _typed(storages: tuple[int, ...], tables: tuple[SqlTable, ...]) -> tuple[tuple[int, TableTuples], ...]:
    schema = tracker_of(storages, tables).schema
    return tuple((each.storage_id, TableTuples(each, schema.space(space_id_of(each.storage_id)))) for each in tables)


def tables_at(index: LimestoneIndex, epoch: int, *, is_raw: bool = False) -> LimestoneTables:
    """Return the tables at an epoch; with `is_raw`, no typed ones."""
    schema = index.sql_schema(epoch)
    storages = tuple(index.storages(epoch))
    if schema.is_empty:
        return LimestoneTables(storages)
    if is_raw:
        return LimestoneTables(tuple(each for each in storages if each not in SYSTEM_STORAGES))
    notes = tuple(
        f"storage {storage_id} is shown with raw keys and values: {error.message}"
        for storage_id, error in sorted(schema.unreadable.items())
    )
    unreadable = tuple(each for each in storages if each in schema.unreadable)
    return LimestoneTables(unreadable, tuple(schema.tables.values()), notes)
