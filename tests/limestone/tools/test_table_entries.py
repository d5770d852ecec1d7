"""The tables of entries: by storage, as of the epoch of the entry."""

from __future__ import annotations

from pathlib import Path

from flowstone.limestone.errors import BadMetadata
from flowstone.limestone.format import epoch_file
from flowstone.limestone.format.entries import Entry
from flowstone.limestone.tools import listing
from flowstone.limestone.tools.table_entries import TableEntries
from flowstone.limestone.tsurugi.definitions import SqlTable
from flowstone.outside import production
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec
from tests.limestone.tsurugi.generator import GeneratedDatabase
from tests.limestone.tsurugi.recorded import log_of, selected

FIRST = TableSpec("a", (ColumnSpec("id", "int4", nullable=False),), ("id",))
SECOND = TableSpec("b", (ColumnSpec("id", "int8", nullable=False),), ("id",))


def tables_of(path: str) -> list[tuple[int, str]]:
    """Return epoch and table of each entry that has one."""
    disk = production().disk
    durable = epoch_file.read(disk, path).durable
    tables = TableEntries(disk, path, durable)
    found = []
    for name in listing.files(disk, path):
        for listed in listing.listing(disk, path, name, durable):
            table = tables.table_of(listed)
            if isinstance(table, SqlTable) and isinstance(listed.token, Entry) and listed.token.key:
                found.append((listed.epoch or 0, table.name))
            elif isinstance(table, BadMetadata):
                found.append((listed.epoch or 0, table.message))
    return found


def test_entries_have_the_table_of_their_epoch(tmp_path: Path) -> None:
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(FIRST, 2)
    database.create_index("ix", "a", "id", 3)
    database.upsert("a", [{"id": 1}])
    database.commit()
    database.remove("a")
    database.commit()
    database.create(SECOND, 2)
    database.upsert("b", [{"id": 1}])
    database.commit()
    database.create(TableSpec("c", FIRST.columns, FIRST.keys), 4, version=77)
    database.upsert("c", [{"id": 1}])
    database.commit()
    problem = "metadata version 77 is not supported"
    assert tables_of(database.path) == [(4, problem), (1, "a"), (3, "b"), (4, problem)]


def test_recorded_entries_belong_to_user_tables() -> None:
    names = {name for _, name in tables_of(str(log_of("basic")))}
    assert names >= selected("basic").keys()
    assert "__system_sequences" not in names
