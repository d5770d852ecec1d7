"""The tables of a directory at an epoch: typed, raw, hidden, unreadable."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from flowstone.outside import production
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_log import LimestoneLog
from flowstone.spark.index.limestone_spaces import position_of, space_id_of
from flowstone.spark.index.limestone_tables import LimestoneTables, tables_at
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec
from tests.limestone.tsurugi.generator import GeneratedDatabase
from tests.limestone.tsurugi.recorded import DATABASES, log_of, selected
from tests.spark.limestone_directories import random_directory

TABLE = TableSpec("t", (ColumnSpec("id", "int4", nullable=False), ColumnSpec("v", "decimal", precision=5)), ("id",))


@pytest.fixture
def database(tmp_path: Path) -> GeneratedDatabase:
    database = GeneratedDatabase(str(tmp_path / "log"))
    database.create(TABLE, 2)
    database.create_index("ix", "t", "v", 3)
    database.upsert("t", [{"id": 1, "v": "2"}])
    database.commit()
    return database


def opened(database: GeneratedDatabase) -> LimestoneIndex:
    return LimestoneIndex.open(production().disk, database.path)


@pytest.mark.parametrize("database", DATABASES)
def test_recorded_databases_have_the_selected_tables(database: str) -> None:
    index = LimestoneIndex.open(production().disk, str(log_of(database)))
    found = tables_at(index, index.durable)
    assert [each.name for each in found.tables] == sorted(selected(database))
    assert (found.storages, found.notes) == ((), ())


def test_tables_are_spaces_with_fields_and_keys(database: GeneratedDatabase) -> None:
    tables = tables_at(opened(database), 1)
    space = tables.tracker.schema.space("t")
    assert space.id == space_id_of(2 << 32)
    assert [(each.name, each.type) for each in space.fields] == [("id", "integer"), ("v", "decimal(5,0)")]
    assert space.primary_key is not None
    assert [part.field for part in space.primary_key.parts] == [0]
    assert tables.spaces == {space.id}


def test_tables_of_a_log_can_be_raw(database: GeneratedDatabase) -> None:
    raw, typed = (tables_at(opened(database), 1, is_raw=is_raw) for is_raw in (True, False))
    assert (raw.storages, raw.tables) == ((2 << 32,), ())
    assert raw.spaces == typed.spaces


def test_unreadable_table_is_raw_with_a_note(database: GeneratedDatabase) -> None:
    database.create(TableSpec("u", TABLE.columns, TABLE.keys), 4, version=15)
    database.upsert("u", [{"id": 1, "v": "2"}])
    database.commit()
    found = tables_at(opened(database), 2)
    assert (found.storages, [each.name for each in found.tables]) == ((4 << 32,), ["t"])
    assert found.notes == (
        f"storage {4 << 32} is shown with raw keys and values: metadata version 15 is not supported",
    )


def test_tables_change_with_epochs(database: GeneratedDatabase) -> None:
    database.upsert("t", [{"id": 2, "v": None}])
    database.commit()
    database.reserve("t")
    database.commit()
    database.remove("t")
    database.commit(durable=False)
    index = opened(database)
    assert [[each.name for each in tables_at(index, epoch).tables] for epoch in range(4)] == [[], ["t"], ["t"], []]
    assert [index.definition_epoch(epoch) for epoch in range(4)] == [1, 3, 3, None]
    assert tables_at(index, 3).storages == ()


def test_batches_end_where_definitions_change(database: GeneratedDatabase) -> None:
    for number in range(2, 5):
        database.upsert("t", [{"id": number, "v": None}])
        database.commit()
    database.reserve("t")
    database.commit()
    database.create(TABLE, 5)
    database.commit()
    ends = []
    for log in (LimestoneLog(opened(database)), LimestoneLog(opened(database), is_raw=True)):
        at, found = 0, []
        while at < 6:
            at = log.plan(position_of(at), max_rows=1000, max_bytes=1 << 20).end.get(1)
            found.append(at)
        ends.append(found)
    assert ends == [[1, 4, 5, 6], [6]]


def test_definition_that_is_not_durable_does_not_count_until_it_is(database: GeneratedDatabase) -> None:
    index = opened(database)
    database.create(TableSpec("u", TABLE.columns, TABLE.keys), 4)
    database.commit(durable=False)
    index.refresh()
    assert [each.name for each in tables_at(index, index.durable).tables] == ["t"]
    database.commit()
    index.refresh()
    assert [each.name for each in tables_at(index, index.durable).tables] == ["t", "u"]


def test_log_of_another_program_has_all_its_storages(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 7, 5)
    index = LimestoneIndex.open(production().disk, directory.path)
    found = tables_at(index, 5)
    assert found == LimestoneTables(tuple(index.storages(5)))
    assert found.typed == {}


def test_copy_of_tables_leaves_out_caches(database: GeneratedDatabase) -> None:
    tables = tables_at(opened(database), 1)
    assert tables.typed.keys() == {2 << 32}
    assert copy.copy(tables) == tables
    assert len(pickle.dumps(tables)) < 2000
