"""The tables of a log at an epoch, and the recorded databases: every row as SELECT returned it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.limestone.errors import BadMetadata, NoSuchTable
from flowstone.limestone.format import epoch_file
from flowstone.limestone.store.recovery import recover_live
from flowstone.limestone.tsurugi.definitions import METADATA_STORAGE, SEQUENCE_STORAGE
from flowstone.limestone.tsurugi.row_reader import read_row
from flowstone.limestone.tsurugi.sql_schema import SqlSchema, read_schema
from flowstone.outside import production
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec, index_metadata, table_metadata
from tests.limestone.tsurugi.recorded import DATABASES, in_order, log_of, selected, shown

TABLE = TableSpec("t", (ColumnSpec("a", "int4", nullable=False), ColumnSpec("b", "int4")), ("a",))


def entries(database: Path) -> dict[int, list[tuple[bytes, bytes]]]:
    """Return the keys and values of the current entries by storage."""
    disk, found = production().disk, dict[int, list[tuple[bytes, bytes]]]()
    snapshot = recover_live(disk, str(database), epoch_file.read(disk, str(database)).durable, dict).snapshot
    for entry in snapshot.cursor():
        found.setdefault(entry.storage_id, []).append((entry.key, entry.value))
    snapshot.close()
    return found


@pytest.mark.parametrize("database", DATABASES)
def test_recorded_database_has_exactly_the_selected_rows(database: str) -> None:
    found = entries(log_of(database))
    schema = read_schema(value for _, value in found[METADATA_STORAGE])
    wanted = selected(database)
    assert sorted(schema.tables) == sorted(wanted)
    assert not schema.unreadable
    for name, table in schema.tables.items():
        rows = [shown(table, read_row(table, key, value)) for key, value in found.get(table.storage_id, [])]
        assert in_order(rows) == in_order(wanted[name]), name
    known = schema.hidden | {each.storage_id for each in schema.tables.values()}
    assert known >= found.keys(), "no storage is left over"


def test_indexes_and_system_storages_are_hidden() -> None:
    schema = read_schema([table_metadata(TABLE, 1 << 32, 1), index_metadata("ix", "t", [("b", False)], 2 << 32, 2)])
    assert list(schema.tables) == ["t"]
    assert [each.name for each in schema.indexes] == ["ix"]
    assert schema.hidden == {2 << 32, METADATA_STORAGE, SEQUENCE_STORAGE}
    assert schema.tables["t"].storage_id == 1 << 32


def test_table_being_dropped_is_hidden_beside_its_successor() -> None:
    schema = read_schema([table_metadata(TABLE, 1 << 32, 1, reserved=True), table_metadata(TABLE, 2 << 32, 2)])
    assert schema.tables["t"].storage_id == 2 << 32
    assert 1 << 32 in schema.hidden


def test_unreadable_definition_leaves_the_others() -> None:
    odd = table_metadata(TABLE, 3 << 32, 3, version=99)
    schema = read_schema([table_metadata(TABLE, 1 << 32, 1), odd, b"xx"])
    assert list(schema.tables) == ["t"]
    assert isinstance(schema.unreadable[3 << 32], BadMetadata)
    assert "metadata version 99" in str(schema.unreadable[3 << 32])


def test_log_of_another_program_has_an_empty_schema() -> None:
    assert read_schema([]).is_empty
    assert read_schema([]) == SqlSchema()
    assert not read_schema([b"xx"]).is_empty


def test_table_is_found_in_other_case_unless_two_match() -> None:
    upper = TableSpec("T", TABLE.columns, TABLE.keys)
    assert read_schema([table_metadata(TABLE, 1 << 32, 1)]).table("T").name == "t"
    both = read_schema([table_metadata(TABLE, 1 << 32, 1), table_metadata(upper, 2 << 32, 2)])
    assert both.table("T").storage_id == 2 << 32
    with pytest.raises(NoSuchTable, match="no table 'x'") as caught:
        both.table("x")
    assert caught.value.hint == "tables of the log: T, t"
