"""`flowstone mirror` and `flowstone verify` of Tsurugi's logs: one typed table per SQL table, schema changes, kills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
from pyspark.sql import SparkSession

from flowstone.lake.quarantine import Quarantine
from flowstone.spark.lake import Lake
from flowstone.spark.mirror import tables as mirror_tables
from flowstone.spark.mirror.mirror_run import LakePlace, MirrorOptions, MirrorRun
from flowstone.spark.mirror.progress import MirrorEvent, SourceStatus
from flowstone.spark.mirror.start_checks import OtherSettings
from flowstone.spark.verification.verify import verify
from tests.conftest import FULL
from tests.limestone.tsurugi.encoder import ColumnSpec, TableSpec, value_of
from tests.limestone.tsurugi.generator import GeneratedDatabase
from tests.spark.mirror_process import MirrorProcess

EPOCHS = 10
"""Epochs of the long test; the mirror is killed after each."""

ORDERS = TableSpec(
    "orders",
    (
        ColumnSpec("id", "int8", nullable=False),
        ColumnSpec("price", "decimal", precision=10, scale=2),
        ColumnSpec("day", "date"),
        ColumnSpec("at", "timestamptz"),
        ColumnSpec("note", "character", length=20),
    ),
    ("id",),
)
NOTES = TableSpec("notes", (ColumnSpec("name", "character", nullable=False), ColumnSpec("n", "int4")), ("name",))
OTHER_NOTES = TableSpec(
    "remarks", (ColumnSpec("n", "int4", nullable=False, descending=True), ColumnSpec("ok", "boolean")), ("n",)
)


class Mirrored:
    """A generated database and its lake."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark = spark
        self.database = GeneratedDatabase(str(path / "log"))
        self.lake = str(path / "lake")

    def run(self, **options: Any) -> list[MirrorEvent]:
        told: list[MirrorEvent] = []
        given = {"once": True, "compact_every": None, "vacuum_after": None, **options}
        place = LakePlace(self.lake)
        MirrorRun(self.spark, [self.database.path], place, MirrorOptions(**given), on_event=told.append).run()
        return told

    def rows(self, name: str) -> list[dict[str, Any]]:
        table = Lake.open(self.lake).tables()[name]._delta.to_pyarrow_table()
        return table.drop_columns(["_extra", "_key", "_tuple"]).to_pylist()

    def assert_equal(self, *, raw: bool = False) -> None:
        report = verify(self.database.path, self.lake, spark=self.spark, raw=raw)
        assert report.is_equal, report


@pytest.fixture
def mirrored(spark: SparkSession, tmp_path: Path) -> Mirrored:
    return Mirrored(spark, tmp_path)


def order(number: int) -> dict[str, Any]:
    return {"id": number, "price": f"{number}.25", "day": 19782, "at": (1709177696, 500), "note": f"note {number}"}


def shown(number: int) -> tuple[int, str, str, str]:
    return number, f"{number}.25", "2024-02-29", f"note {number}"


def shown_orders(mirrored: Mirrored) -> list[tuple[int, str, str, str]]:
    rows = mirrored.rows("orders")
    return sorted((row["id"], str(row["price"]), str(row["day"]), row["note"]) for row in rows)


def test_mirror_follows_tables_that_are_created_dropped_and_replaced_through_a_kill(
    mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = mirrored.database
    database.create(ORDERS, 2)
    database.create(NOTES, 3)
    database.create_index("ix", "orders", "day", 4)
    database.upsert("orders", map(order, range(5)))
    database.upsert("notes", [{"name": "a", "n": 1}])
    database.commit()
    mirrored.run()
    assert shown_orders(mirrored) == [shown(number) for number in range(5)]
    database.upsert("notes", [{"name": "b", "n": 2}])
    database.reserve("notes")
    database.upsert("orders", [order(7)])
    database.commit()
    database.remove("notes")
    database.delete("orders", [{"id": 0}])
    database.commit()
    database.create(OTHER_NOTES, 3)  # a restarted server uses the storage id again
    database.upsert("remarks", [{"n": -1, "ok": True}, {"n": 5, "ok": None}])
    database.upsert("orders", [order(8)])
    database.commit()
    commit, calls = mirror_tables.MirrorTables.create, []

    def dying(self: Any, *args: Any, **options: Any) -> Any:
        found = commit(self, *args, **options)
        calls.append(args)
        if any(space.name == "remarks" for space in args[0]):
            raise KeyboardInterrupt  # after the table exists, before the others and the progress are committed
        return found

    with monkeypatch.context() as patched:
        patched.setattr(mirror_tables.MirrorTables, "create", dying)
        with pytest.raises(KeyboardInterrupt):
            mirrored.run()
    mirrored.run()
    assert calls
    assert sorted(Lake.open(mirrored.lake).tables()) == ["orders", "remarks"]
    assert shown_orders(mirrored) == [shown(number) for number in (1, 2, 3, 4, 7, 8)]
    assert sorted(mirrored.rows("remarks"), key=str) == [{"n": -1, "ok": True}, {"n": 5, "ok": None}]
    mirrored.assert_equal()


def test_rows_that_do_not_fit_are_quarantined_and_unreadable_tables_are_raw(mirrored: Mirrored) -> None:
    database = mirrored.database
    database.create(NOTES, 2)
    database.create(TableSpec("future", NOTES.columns, NOTES.keys), 3, version=99)
    database.upsert("future", [{"name": "x", "n": 1}])
    database.upsert("notes", [{"name": "a", "n": 1}])
    database.damage("notes", b"b\0\0\0\0", b"\0")
    database.commit()
    told = mirrored.run()
    statuses = [each.message for each in told if isinstance(each, SourceStatus)]
    assert statuses == [f"storage {3 << 32} is shown with raw keys and values: metadata version 99 is not supported"]
    assert mirrored.rows(f"storage_{3 << 32}")[0]["value"] == value_of(NOTES, {"name": "x", "n": 1})
    assert sorted(mirrored.rows("notes"), key=str) == [{"name": "a", "n": 1}, {"name": "b", "n": None}]
    lake = Lake.open(mirrored.lake)
    assert Quarantine(lake.path, lake.storage_options, print, print).open_count() == 1
    mirrored.assert_equal()


def test_raw_mirror_has_storages_and_stays_raw(mirrored: Mirrored) -> None:
    database = mirrored.database
    database.create(NOTES, 2)
    database.upsert("notes", [{"name": "a", "n": 1}])
    database.commit()
    mirrored.run(raw=True)
    assert [row["value"] for row in mirrored.rows(f"storage_{2 << 32}")] == [value_of(NOTES, {"n": 1})]
    mirrored.assert_equal(raw=True)
    with pytest.raises(OtherSettings, match="was created with different --raw"):
        mirrored.run()


def fill(database: GeneratedDatabase, tables: Sequence[str], rows: int, epoch: int) -> None:
    """Write an epoch: new orders, changed ones, and deleted ones."""
    for place, name in enumerate(tables):
        first, had_rows = epoch * rows, bool(database.rows[name])
        database.upsert(name, map(order, range(first, first + rows)))
        if had_rows and place:
            database.upsert(name, ({**order(number), "note": None} for number in range(first - rows, first, 3)))
            database.delete(name, ({"id": number} for number in range(first - rows + 1, first, 7)))


@pytest.mark.full_scale(reason="kills ten processes of a mirror of two million rows")
@pytest.mark.timeout(6000)
def test_mirror_killed_at_random_moments_has_every_row_of_five_changing_tables(
    spark: SparkSession, tmp_path: Path
) -> None:
    mirrored, rng = Mirrored(spark, tmp_path), Random(22)
    database, names = mirrored.database, [f"orders_{number}" for number in range(5)]
    rows = 2_000_000 // len(names) // EPOCHS if FULL else 40
    for number, name in enumerate(names[:4], 2):
        database.create(TableSpec(name, ORDERS.columns, ORDERS.keys), number)
    for epoch in range(EPOCHS):
        if epoch == EPOCHS // 2:
            database.remove(names[0])
            database.commit()
            database.create(TableSpec(names[4], ORDERS.columns, ORDERS.keys), 2)
        living = names[:4] if epoch < EPOCHS // 2 else names[1:]
        fill(database, living, rows, epoch)
        database.commit()
        process = MirrorProcess([database.path, mirrored.lake, "--trigger-seconds=0", f"--max-rows={rows}"], tmp_path)
        try:
            process.wait_for("start", lambda event: event["event"] in ("opened", "progress"))
            Event().wait(rng.random() * 4)  # a random moment, not a condition
        finally:
            process.kill()
    mirrored.run()
    assert sorted(Lake.open(mirrored.lake).tables()) == names[1:]
    for name in names[1:]:
        found = {row["id"]: (str(row["price"]), row["note"]) for row in mirrored.rows(name)}
        wanted = {row["id"]: (str(row["price"]), row["note"]) for row in database.rows[name].values()}
        assert found == wanted, name
    mirrored.assert_equal()
