"""The list of tables: a row for each table and replica set, with its state, and since when."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.table import AnotherWriter, Moment
from flowstone.lake.table_list import TableList
from flowstone.lake.table_schema import LakeSchema
from flowstone.replication.vclock import VClock
from tests.spark.change_rows import ORDERS, UUID

OTHER_UUID = "bbbbbbbb-0000-4000-8000-000000000002"


def when(day: int) -> datetime:
    return datetime(2026, 1, day, tzinfo=UTC)


def table(directory: Path, schema: LakeSchema, lsn: int) -> EmbeddedTable:
    positions = {uuid: VClock({1: lsn}) for uuid in schema.sets}
    return EmbeddedTable.create(str(directory / schema.space.name), schema, positions, {})


def rows_in(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(str(directory / "_tables")).to_pyarrow_table().to_pylist()
    return rows


def test_row_changes_with_the_state_of_its_table(tmp_path: Path) -> None:
    orders = table(tmp_path, LakeSchema(ORDERS, (UUID,)), 3)
    TableList(str(tmp_path), {}).update([orders], when(1), "_changes")
    (live,) = rows_in(tmp_path)
    assert live == {
        "name": "orders",
        "space_id": 512,
        "replicaset_uuid": UUID,
        "state": "live",
        "renamed_to": None,
        "since": when(1),
        "position": '{"1": 3}',
        "directory": "orders",
        "changes": "_changes/orders",
    }
    listed = TableList(str(tmp_path), {})
    listed.update([orders], when(2), "_changes")
    assert DeltaTable(listed.path).version() == 0  # nothing has changed
    orders.drop(VClock({1: 5}), UUID, Moment(5, when(3)))
    listed.update([orders], when(3), "_changes")
    changed = {"state": "dropped", "since": when(3), "position": '{"1": 5}'}
    assert rows_in(tmp_path) == [live | changed]
    orders.mark(replace(orders.schema, dropped=(), renamed_to="sales"))
    listed.update([orders], when(4), None)
    assert [(row["state"], row["renamed_to"], row["changes"]) for row in rows_in(tmp_path)] == [
        ("renamed", "sales", None)
    ]


def test_replica_sets_have_rows_of_their_own(tmp_path: Path) -> None:
    schema = LakeSchema(ORDERS, (UUID, OTHER_UUID), several_sets=True, dropped=(OTHER_UUID,))
    TableList(str(tmp_path), {}).update([table(tmp_path, schema, 3)], when(1), None)
    assert [(row["replicaset_uuid"], row["state"]) for row in rows_in(tmp_path)] == [
        (UUID, "live"),
        (OTHER_UUID, "dropped"),
    ]


def test_lake_without_tables_has_no_list(tmp_path: Path) -> None:
    TableList(str(tmp_path), {}).update([], when(1), None)
    assert not (tmp_path / "_tables").exists()


def test_overtaken_writer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalake.exceptions import CommitFailedError

    def overtaken(*args: Any, **how: Any) -> None:
        raise CommitFailedError("conflict")

    monkeypatch.setattr("flowstone.lake.table_list.write_deltalake", overtaken)
    with pytest.raises(AnotherWriter, match="_tables was changed by another writer: conflict"):
        TableList(str(tmp_path), {}).update([table(tmp_path, LakeSchema(ORDERS, (UUID,)), 3)], when(1), None)
