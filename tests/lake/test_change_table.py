"""Change tables: rows with both images, commits that happen once, and columns whose types change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from flowstone.box.definitions import FieldDefinition, SpaceDefinition
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.msgpack import pack
from flowstone.lake.change_table import ChangeTable, TableMarker
from flowstone.lake.row_changes import NO_STATES
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_schema import LakeError, LakeSchema
from flowstone.replication.vclock import VClock
from tests.spark.change_rows import ORDERS, UUID

Change = tuple[int, Any, Any]
"""The LSN of a change, and the tuple before and after it."""


def opened(directory: Path) -> ChangeTable:
    return ChangeTable.open(str(directory / "orders"), "orders", {}, 168)


def append(
    table: ChangeTable, *changes: Change, space: SpaceDefinition = ORDERS, at: int | None = None, **how: Any
) -> bool:
    """Append changes; `at` is the position, by default the last LSN."""
    before, after = (
        pa.array([None if each[place] is None else pack(each[place]) for each in changes], pa.binary())
        for place in (1, 2)
    )
    columns: dict[str, Any] = {
        "sort_key": sort_keys(space, pa.array([pack(each[2] or each[1]) for each in changes], pa.binary())),
        "tuple": after,
        "operation": ["replace"] * len(changes),
        "commit_version": [each[0] for each in changes],
        "commit_timestamp": [each[0] * 1_000_000 for each in changes],
        "replica_id": [1] * len(changes),
        "lsn": [each[0] for each in changes],
    }
    states = pa.table({each.name: pa.array(columns[each.name], each.type) for each in NO_STATES.schema})
    rows = table.rows(LakeSchema(space, (UUID,)), UUID, states, before, **how)
    return table.append(rows, UUID, VClock({1: changes[-1][0] if at is None else at}))


def rows_in(directory: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(str(directory / "orders")).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["_lsn"] or 0)


def test_row_has_the_images_of_its_change(tmp_path: Path) -> None:
    append(opened(tmp_path), (1, None, (1, "a")), (2, (1, "a"), (1, "b")), (3, (1, "b"), None), (4, None, (2,)))
    rows = rows_in(tmp_path)
    assert [row["_change_type"] for row in rows] == ["insert", "update", "delete", "insert"]
    image = {"id": 1, "name": "b", "_extra": None, "_tuple": pack((1, "b"))}
    assert (rows[1]["after"], rows[2]["before"], rows[2]["after"]) == (image, image, None)


def test_batch_is_appended_once(tmp_path: Path) -> None:
    table = opened(tmp_path)
    assert append(table, (1, None, (1, "a")), (2, (1, "a"), (1, "b")))
    for each in (table, opened(tmp_path)):
        assert each.position(UUID) == VClock({1: 2})
        assert not append(each, (2, (1, "a"), (1, "b")))
        assert not append(each, (1, None, (1, "a")))
    assert len(rows_in(tmp_path)) == 2


def test_later_of_two_writers_fails(tmp_path: Path) -> None:
    append(opened(tmp_path), (1, None, (1, "a")))
    early, late = opened(tmp_path), opened(tmp_path)
    append(early, (2, (1, "a"), (1, "b")))
    with pytest.raises(AnotherWriter, match="changed by another writer"):
        append(late, (2, (1, "a"), (1, "b")))
    assert len(rows_in(tmp_path)) == 2


def test_column_with_another_type_continues_in_another_field(tmp_path: Path) -> None:
    table = opened(tmp_path)
    append(table, (1, None, (1, "a")))
    fields = (*ORDERS.fields[:1], FieldDefinition("name", "unsigned"), FieldDefinition("name_2", "double"))
    space = msgspec.structs.replace(ORDERS, fields=fields)
    append(table, (2, None, (2, 7, 0.5)), space=space)
    append(opened(tmp_path), (3, None, (3, 8, 1.5)), space=space)
    append(table := opened(tmp_path), (4, None, (4, "d")))
    images = [row["after"] for row in rows_in(tmp_path)]
    names = ("id", "name", "name_2", "name_3")
    assert [tuple(image[name] for name in names) for image in images] == [
        (1, "a", None, None),
        (2, None, 0.5, 7),
        (3, None, 1.5, 8),
        (4, "d", None, None),
    ]


def test_misfit_is_null_or_an_error(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="space 'orders'"):
        append(opened(tmp_path), (1, None, (2**64 - 1, "a")))
    assert not opened(tmp_path).exists


def test_marker_of_a_transaction_precedes_its_changes(tmp_path: Path) -> None:
    table = opened(tmp_path)
    assert not table.mark([TableMarker("drop", 1)], UUID, VClock({1: 1}))  # there is nothing to mark
    append(
        table,
        (2, None, (1, "a")),
        (3, None, (2, "b")),
        markers=[TableMarker("truncate", 3, None, 1, 2), TableMarker("drop", 2)],
    )
    assert table.mark([TableMarker("rename", 4, detail="sales")], UUID, VClock({1: 4}))
    rows = DeltaTable(table.path).to_pyarrow_table().to_pylist()
    kinds = sorted((row["_commit_version"], row["_lsn"] or 0, row["_change_type"], row["_detail"]) for row in rows)
    assert kinds == [
        (2, 0, "drop", None),
        (2, 2, "insert", None),
        (3, 2, "truncate", None),
        (3, 3, "insert", None),
        (4, 0, "rename", "sales"),
    ]


def test_compaction_and_vacuum_keep_rows_and_position(tmp_path: Path) -> None:
    table = opened(tmp_path)
    for lsn in range(1, 6):
        append(table, (lsn, None, (lsn, "a")))
    table.compact()
    table.vacuum(0)
    assert len(DeltaTable(table.path).file_uris()) == len(list((tmp_path / "orders").glob("*.parquet"))) == 1
    assert len(rows_in(tmp_path)) == 5
    assert append(table, (6, None, (6, "a")))
    assert opened(tmp_path).position(UUID) == VClock({1: 6})
