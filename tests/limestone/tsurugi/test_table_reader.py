"""Tables out of directories: recorded ones, as of an epoch, damaged, of other programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import flowstone.limestone
from flowstone.errors import FlowstoneError
from flowstone.limestone import Datastore, LimestoneError, NoSuchTable, read_table, tables
from flowstone.limestone.tsurugi import table_reader
from flowstone.limestone.tsurugi.definitions import METADATA_STORAGE
from flowstone.limestone.tsurugi.row_reader import Date, LobId, Time, Timestamp
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec, key_of, metadata_key, table_metadata, value_of
from tests.limestone.tsurugi.recorded import DATABASES, ROW_ID, in_order, log_of, selected
from tests.limestone.tsurugi.test_row_columns import as_arrow, stored

FIRST = TableSpec("t", (ColumnSpec("id", "int4", nullable=False), ColumnSpec("v", "character")), ("id",))
SECOND = TableSpec("t", (ColumnSpec("k", "character", nullable=False), ColumnSpec("n", "int8")), ("k",))
STORAGE = 1 << 32


def in_arrow(value: Any) -> Any:
    """Return a recorded value in the form of `stored`."""
    if isinstance(value, tuple) and value[0] == "float":
        number = float.fromhex(value[1])
        return "nan" if number != number else number
    return as_arrow(value) if isinstance(value, Date | LobId | Time | Timestamp) else value


@pytest.mark.parametrize("database", DATABASES)
def test_recorded_tables_have_exactly_the_selected_rows(database: str) -> None:
    wanted = selected(database)
    assert list(tables(str(log_of(database)))) == sorted(wanted)
    for name, rows in wanted.items():
        found = read_table(str(log_of(database)), name)
        names = [each for each in found.column_names if not each.startswith(ROW_ID)]
        columns = [stored(found[each].combine_chunks()) for each in names]
        ours = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        theirs = [{column: in_arrow(value) for column, value in row.items()} for row in rows]
        assert in_order(ours) == in_order(theirs), name


@pytest.fixture
def changing(tmp_path: Path) -> str:
    """Return a log in which a table is created, filled, dropped and created again under the same storage id."""
    path = str(tmp_path / "log")
    with Datastore(path) as store:
        channel = store.create_channel()
        store.ready()

        def session(epoch: int, *changes: tuple[str, Any]) -> None:
            store.switch_epoch(epoch)
            channel.begin_session()
            for number, (what, arguments) in enumerate(changes):
                getattr(channel, what)(*arguments, (epoch, number))
            channel.end_session()

        def define(spec: TableSpec) -> tuple[str, Any]:
            return "add_entry", (METADATA_STORAGE, metadata_key(1), table_metadata(spec, STORAGE, 1))

        def row(spec: TableSpec, **values: Any) -> tuple[str, Any]:
            return "add_entry", (STORAGE, key_of(spec, values), value_of(spec, values))

        session(1, define(FIRST), ("add_storage", (STORAGE,)))
        session(2, row(FIRST, id=2, v="two"), row(FIRST, id=1, v=None))
        session(3, row(FIRST, id=2, v="zwei"), ("remove_entry", (STORAGE, key_of(FIRST, {"id": 1}))))
        session(4, ("remove_entry", (METADATA_STORAGE, metadata_key(1))), ("remove_storage", (STORAGE,)))
        session(5, define(SECOND), ("add_storage", (STORAGE,)), row(SECOND, k="x", n=7))
        store.switch_epoch(6)
    return path


def test_table_is_read_as_of_each_epoch(changing: str) -> None:
    assert read_table(changing, "t", epoch=1).num_rows == 0
    assert read_table(changing, "t", epoch=2).to_pylist() == [{"id": 1, "v": None}, {"id": 2, "v": "two"}]
    assert read_table(changing, "t", epoch=3).to_pylist() == [{"id": 2, "v": "zwei"}]
    assert read_table(changing, "t").to_pylist() == [{"k": "x", "n": 7}]
    assert [list(tables(changing, epoch=epoch)) for epoch in range(6)] == [[], ["t"], ["t"], ["t"], [], ["t"]]
    with pytest.raises(NoSuchTable, match="no table 't'"):
        read_table(changing, "t", epoch=4)


def test_epoch_that_is_not_durable_is_rejected(changing: str) -> None:
    with pytest.raises(LimestoneError, match="epoch 99 is not durable"):
        tables(changing, epoch=99)


def test_epoch_before_compaction_is_rejected() -> None:
    log = str(log_of("reopened-compacted"))
    with pytest.raises(LimestoneError, match="state at epoch 3 was removed by compaction"):
        tables(log, epoch=3)
    assert "t_all" in tables(log)


def test_columns_are_chosen_by_name(changing: str) -> None:
    assert read_table(changing, "t", columns=["n"]).to_pylist() == [{"n": 7}]
    with pytest.raises(FlowstoneError, match="table 't' has no column 'z'") as caught:
        read_table(changing, "t", columns=["z"])
    assert caught.value.hint == "its columns: k, n"


def test_unreadable_definition_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "log")
    with Datastore(path) as store:
        channel = store.create_channel()
        store.ready()
        store.switch_epoch(1)
        channel.begin_session()
        channel.add_entry(METADATA_STORAGE, metadata_key(1), table_metadata(FIRST, STORAGE, 1, version=99), (1, 1))
        channel.end_session()
        store.switch_epoch(2)
    with caplog.at_level(logging.WARNING, "flowstone"):
        assert tables(path) == {}
    assert f"storage {STORAGE} has no table: metadata version 99 is not supported" in caplog.text


def test_directory_without_a_manifest_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(LimestoneError, match="is not a data directory"):
        tables(str(tmp_path))
    with pytest.raises(LimestoneError, match="is not a data directory"):
        read_table(str(tmp_path / "none"), "t")


def test_rows_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_reader, "BATCH_ROWS", 2)
    found = read_table(str(log_of("basic")), "t_all")
    assert found.num_rows == len(selected("basic")["t_all"])
    assert found["id"].num_chunks > 1
    assert isinstance(found, pa.Table)


def test_calls_are_public() -> None:
    assert {"read_table", "tables"} <= {*flowstone.limestone.__all__}
