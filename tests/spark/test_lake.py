"""Lakes: first loads by executors, tables created, renamed and found again, and the progress of replica sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from flowstone.box.definitions import SpaceDefinition
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_schema import LakeError
from flowstone.spark import lake as lake_module
from flowstone.spark.lake import Lake, LakeProgress, directory_of, lake_uri
from tests.spark.lake_rows_given import (
    ORDERS,
    OTHER_UUID,
    UUID,
    at,
    folded,
    key_of,
    moment,
    packed,
    space,
    states,
    tuples_in,
)

USERS = space(("id", "unsigned"), ("email", "string"), name="users", number=513)


def frame_of(spark: SparkSession, *rows: tuple[SpaceDefinition, int, bytes]) -> DataFrame:
    """Return space ids, sort keys and tuples, as in a snapshot."""
    given = [
        (definition.id, bytearray(key_of(number, definition)), bytearray(each)) for definition, number, each in rows
    ]
    return spark.createDataFrame(given, "a INT, b BINARY, c BINARY").repartition(2)


def orders(*numbers: int) -> list[tuple[SpaceDefinition, int, bytes]]:
    return [(ORDERS, number, packed(number, "x", 0.5)) for number in numbers]


def test_first_load_fills_all_tables_in_one_pass(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path / "lake"))
    rows = [*orders(*range(500)), (USERS, 1, packed(1, "a@b")), (space(name="hidden", number=600), 1, packed(1))]
    done = lake.load(frame_of(spark, *rows), [ORDERS, USERS, space(name="empty", number=514)], UUID, at(9))
    assert {number: each.upserts for number, each in done.items()} == {512: 500, 513: 1, 514: 0}
    tables = lake.tables()
    assert sorted(tables) == ["empty", "orders", "users"]
    assert all(table.positions == {UUID: at(9)} and table.version == 0 for table in tables.values())
    assert tuples_in(tables["orders"]) == {key_of(number): each for _, number, each in orders(*range(500))}
    assert DeltaTable(tables["users"].path).to_pyarrow_table(columns=["id", "email"]).to_pylist() == [
        {"id": 1, "email": "a@b"}
    ]


class DyingFrame:
    """A frame whose JVM dies: PySpark's `collect` takes partial results for complete, `toArrow` does not."""

    def mapInArrow(self, func: Any, schema: Any) -> Any:  # noqa: N802
        return self

    def collect(self) -> list[Any]:
        return []

    def toArrow(self) -> Any:  # noqa: N802
        raise EOFError


def test_jvm_that_dies_while_reporting_written_files_leaves_no_table(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path / "lake"))
    with pytest.raises(EOFError):
        lake.load(DyingFrame(), [ORDERS], UUID, at(5))
    assert lake.tables() == {}


def test_load_killed_between_commits_resumes_with_the_other_tables(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))
    frame = frame_of(spark, *orders(1, 2), (USERS, 1, packed(1, "a@b")))
    lake.load(frame, [ORDERS], UUID, at(9))
    assert list(lake.load(frame, [ORDERS, USERS], UUID, at(9))) == [USERS.id]
    assert lake.load(frame, [ORDERS, USERS], UUID, at(9)) == {}
    again = lake.load(frame_of(spark, *orders(2, 3)), [ORDERS], UUID, at(20))
    assert (again[ORDERS.id].version, again[ORDERS.id].upserts) == (1, 2)
    table = lake.table("orders")
    assert table is not None
    assert sorted(tuples_in(table)) == [key_of(2), key_of(3)]


def test_histories_of_several_replica_sets_are_loaded(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path), several_sets=True)
    first = lake.load(frame_of(spark, *orders(1, 2)), [ORDERS], UUID, at(9), history=True, moment=moment(9))
    second = lake.load(frame_of(spark, *orders(2)), [ORDERS], OTHER_UUID, at(7), history=True, moment=moment(7))
    assert (first[ORDERS.id].upserts, second[ORDERS.id].upserts) == (2, 1)
    table = lake.table("orders")
    assert table is not None
    assert table.positions == {UUID: at(9), OTHER_UUID: at(7)}
    table.append_history(states((2, None, 11)), ORDERS, at(11), UUID)
    rows = DeltaTable(table.path).to_pyarrow_table().sort_by("_key").to_pylist()
    shown = [(row["id"], row["_replicaset_uuid"], row["_from_version"], row["_to_version"]) for row in rows]
    assert shown == [(1, UUID, 9, None), (2, UUID, 9, 11), (2, OTHER_UUID, 7, None)]
    # A new snapshot of one replica set ends only the rows of that set.
    lake.load(frame_of(spark, *orders(5)), [ORDERS], UUID, at(30), history=True, moment=moment(30))
    table.refresh()
    assert (sorted(tuples_in(table)), sorted(tuples_in(table, OTHER_UUID))) == ([key_of(5)], [key_of(2)])
    assert DeltaTable(table.path).to_pyarrow_table(filters=[("id", "=", 1)])["_to_version"].to_pylist() == [30]


def test_columns_can_be_chosen(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))
    lake.load(frame_of(spark, *orders(1)), [ORDERS], UUID, at(9), columns={"orders": ["amount"]})
    table = lake.table("orders")
    assert table is not None
    table.merge(folded({2: packed(2, "y", 1.5, 6)}), ORDERS, at(10), UUID)
    rows = DeltaTable(table.path).to_pyarrow_table().to_pylist()
    assert [set(row) for row in rows] == [{"amount", "_extra", "_key", "_tuple"}] * 2
    assert [row["_extra"] for row in rows] == [None, "[6]"]


def test_recreated_space_overwrites_the_table_of_its_name(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))
    table = lake.create(ORDERS, UUID, at(1))
    table.merge(folded({1: packed(1, "x", 1)}), ORDERS, at(2), UUID)
    assert lake.create(ORDERS, UUID, at(1)).version == table.version
    table.drop(at(3), UUID, moment(3))
    assert (list(lake.tables()), lake.table("orders") is None) == ([], False)
    other = space(("key", "string"), number=700)
    again = lake.create(other, UUID, at(5))
    assert (again.row_count, again.schema.space, again.positions) == (0, other, {UUID: at(5)})
    assert list(lake.tables()) == ["orders"]
    assert DeltaTable(again.path, version=table.version).count() == 1


def test_rename_continues_under_the_new_name_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.open(str(tmp_path))
    old = lake.create(ORDERS, UUID, at(1))
    old.merge(folded({1: packed(1, "x", 1)}), ORDERS, at(2), UUID)
    named = space(*((each.name, each.type) for each in ORDERS.fields), name="purchases")
    with monkeypatch.context() as patched:
        patched.setattr(EmbeddedTable, "mark", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            lake.rename("orders", named, UUID, at(3))
    new = lake.rename("orders", named, UUID, at(3))
    assert (list(lake.tables()), tuples_in(new)) == (["purchases"], {key_of(1): packed(1, "x", 1)})
    assert (new.schema.space, new.positions) == (named, {UUID: at(3)})
    marked = lake.table("orders")
    assert marked is not None
    assert (marked.schema.renamed_to, marked.positions, marked.row_count) == ("purchases", {UUID: at(2)}, 1)
    new.merge(folded({1: None}), named, at(4), UUID)
    assert (new.row_count, marked.row_count) == (0, 1)
    # Another space may then get the old name, or the renamed space may get it back.
    back = lake.rename("purchases", ORDERS, UUID, at(5))
    assert (back.row_count, back.positions, list(lake.tables())) == (0, {UUID: at(5)}, ["orders"])


SALES = space(*((each.name, each.type) for each in ORDERS.fields), name="sales")


def of_both(lake: Lake) -> list[dict[str, list[bytes]]]:
    """Return, for each replica set, the tuples of each current table that has its space."""
    return [
        {name: sorted(tuples_in(each, uuid).values()) for name, each in lake.tables().items() if is_in(each, uuid)}
        for uuid in (UUID, OTHER_UUID)
    ]


def is_in(table: EmbeddedTable, uuid: str) -> bool:
    return uuid in table.schema.sets and uuid not in table.schema.dropped


def test_each_replica_set_renames_its_space_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.open(str(tmp_path), several_sets=True)
    for uuid in (UUID, OTHER_UUID):
        lake.create(ORDERS, uuid, at(1)).merge(folded({1: packed(1, "x", 1), 2: packed(2)}), ORDERS, at(2), uuid)
    with monkeypatch.context() as patched:
        patched.setattr(EmbeddedTable, "mark", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            lake.rename("orders", SALES, UUID, at(3))
    sales = lake.rename("orders", SALES, UUID, at(3))
    assert (sales.positions, sales.row_count) == ({UUID: at(3)}, 2)
    sales.merge(folded({1: None}), SALES, at(4), UUID)
    # The other set continues under the old name, with the rows that it wrote there in the meantime.
    orders_table = lake.table("orders")
    assert orders_table is not None
    orders_table.merge(folded({3: packed(3)}), ORDERS, at(20), OTHER_UUID)
    assert of_both(lake) == [
        {"sales": [packed(2)]},
        {"orders": sorted([packed(1, "x", 1), packed(2), packed(3)])},
    ]
    sales = lake.rename("orders", SALES, OTHER_UUID, at(21))
    assert sales.positions == {UUID: at(4), OTHER_UUID: at(21)}
    assert of_both(lake) == [{"sales": [packed(2)]}, {"sales": sorted([packed(1, "x", 1), packed(2), packed(3)])}]
    orders_table.refresh()
    assert (orders_table.schema.renamed_to, list(lake.tables())) == ("sales", ["sales"])
    # The sets rename the space back, one after another.
    for uuid, position in ((UUID, at(30)), (OTHER_UUID, at(31))):
        lake.rename("sales", ORDERS, uuid, position)
    assert of_both(lake) == [{"orders": [packed(2)]}, {"orders": sorted([packed(1, "x", 1), packed(2), packed(3)])}]


def test_history_moves_to_a_table_that_the_replica_set_had_before(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path), several_sets=True)
    for uuid in (UUID, OTHER_UUID):
        table = lake.create(ORDERS, uuid, at(1), history=True)
        table.append_history(states((1, packed(1, "x"), 2), (1, packed(1, "y"), 3)), ORDERS, at(3), uuid)
    lake.rename("orders", SALES, UUID, at(4))
    lake.rename("sales", ORDERS, UUID, at(5))
    rows = DeltaTable(lake.tables()["orders"].path).to_pyarrow_table().to_pylist()
    found = sorted((row["_replicaset_uuid"], row["name"], row["_to_version"], row["_is_current"]) for row in rows)
    assert found == [(uuid, *each) for uuid in (UUID, OTHER_UUID) for each in (("x", 3, False), ("y", None, True))]


def test_table_of_another_space_is_not_renamed(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))
    lake.create(USERS, UUID, at(1))
    with pytest.raises(LakeError, match="belongs to space 513, but 'sales' is now space 512"):
        lake.rename("users", SALES, UUID, at(2))


def test_progress_is_saved_per_replica_set(tmp_path: Path) -> None:
    lake = Lake.open(str(tmp_path))
    assert lake.progress == {}
    first = LakeProgress(UUID, at(5), 17, ((280, packed(512, 1, "orders")),), {512: "orders"}, {"history": "false"})
    other = LakeProgress(OTHER_UUID, at(3))
    for each in (first, other, LakeProgress(OTHER_UUID, at(4))):
        lake.save(each)
    (tmp_path / "begun").mkdir()  # as after a first load that was killed before its commit
    assert Lake.open(str(tmp_path)).progress == {UUID: first, OTHER_UUID: LakeProgress(OTHER_UUID, at(4))}
    assert lake.tables() == {}
    with pytest.raises(AnotherWriter, match="but this mirror is at"):
        lake.save(LakeProgress(UUID, at(4)))


def test_old_versions_of_the_progress_are_vacuumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.open(str(tmp_path))
    monkeypatch.setattr(lake_module, "SAVES_BETWEEN_VACUUMS", 2)
    vacuumed: list[Any] = []
    monkeypatch.setattr(DeltaTable, "vacuum", lambda self, **how: vacuumed.append(how))
    for number in range(1, 6):
        lake.save(LakeProgress(UUID, at(number)))
    assert len(vacuumed) == 2
    assert lake.progress[UUID].position == at(5)


def test_directory_names_are_safe_and_distinct() -> None:
    names = [
        "orders",
        "Orders",
        "a b",
        "a/b",
        "..",
        "_hidden",
        ".x",
        "naïve",
        "~",
        "a~20b",
        "x" * 300,
        "x" * 301,
        "%41",
    ]
    directories = [directory_of(name) for name in names]
    assert directories[:6] == ["orders", "Orders", "a~20b", "a~2fb", "~2e.", "~5fhidden"]
    assert len(set(directories)) == len(names)
    assert all(len(each) <= 200 and not each.startswith(("_", ".")) and each.isascii() for each in directories)


def test_addresses_are_written_in_the_form_of_deltalake(tmp_path: Path) -> None:
    assert lake_uri(f"file://{tmp_path}/a/") == f"{tmp_path}/a"
    assert lake_uri("s3a://bucket/lake/") == "s3://bucket/lake"
    assert lake_uri("abfss://c@a.dfs.example/lake") == "abfss://c@a.dfs.example/lake"
    assert Path(lake_uri("lake")).is_absolute()


def test_table_for_one_replica_set_is_refused_in_a_lake_for_several(tmp_path: Path) -> None:
    Lake.open(str(tmp_path)).create(ORDERS, UUID, at(1))
    with pytest.raises(LakeError, match="is a table for one replica set"):
        Lake.open(str(tmp_path), several_sets=True).table("orders")


def test_spark_engine_needs_its_jars(tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(LakeError, match="no Delta jars"):
        Lake.open(str(tmp_path), spark=spark, engine="spark")
    assert Lake.open(str(tmp_path), spark=spark).engine == "deltalake"
