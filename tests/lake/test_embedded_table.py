"""Merges, histories, rewrites and positions of tables, read back with deltalake and Parquet."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from flowstone.lake import embedded_table as lake_table_embedded
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_files import TableFiles
from flowstone.lake.table_schema import LakeError, LakeSchema
from flowstone.replication.vclock import VClock
from flowstone.spark.mirror.spark_table import SparkTable
from tests.spark.delta_session import session_with_delta
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

ON_SPARK = os.environ.get("FLOWSTONE_LAKE_ENGINE") == "spark"
"""True in the second run of this module, by `test_lake_table_spark.py` in a separate process."""

of_our_files = pytest.mark.skipif(ON_SPARK, reason="Spark chooses the files itself")


def new_table(path: Path, **how: Any) -> EmbeddedTable:
    schema = LakeSchema(how.pop("definition", ORDERS), (UUID, *how.pop("others", ())), **how)
    return reopened(EmbeddedTable.create(str(path / "orders"), schema, {UUID: at(1)}, {}))


def reopened(table: EmbeddedTable) -> EmbeddedTable:
    if ON_SPARK:
        found: EmbeddedTable | None = SparkTable.open_with(session_with_delta(), table.path, {})
    else:
        found = EmbeddedTable.open(table.path, {})
    assert found is not None
    return found


def rows_of(table: EmbeddedTable, version: int | None = None) -> list[dict[str, Any]]:
    """Return the rows as a reader of Delta sees them, in key order."""
    return DeltaTable(table.path, version=version).to_pyarrow_table().sort_by("_key").to_pylist()


def order(number: int, name: str = "x") -> bytes:
    return packed(number, name, number / 2)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit files to a few dozen rows, so that small tables have many files."""
    plain = TableFiles.write_split
    monkeypatch.setattr(TableFiles, "write_split", lambda self, rows, current=None: plain(self, rows, current, 2000))
    monkeypatch.setattr(lake_table_embedded, "COMPACT_SIZE", 8000)
    monkeypatch.setattr(lake_table_embedded, "ROWS_AT_ONCE", 30)


def test_new_table_has_typed_columns_and_its_position(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({7: packed(7, "seven", 3.5, "more")}), ORDERS, at(5), UUID)
    assert rows_of(table) == [
        {
            "id": 7,
            "name": "seven",
            "amount": 3.5,
            "_extra": '["more"]',
            "_key": key_of(7),
            "_tuple": packed(7, "seven", 3.5, "more"),
        }
    ]
    assert reopened(table).positions == {UUID: at(5)}
    assert reopened(table).schema.space == ORDERS


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", range(1 if ON_SPARK else 3))
def test_random_merges_equal_a_dict_at_every_version(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    table = new_table(tmp_path)
    model: dict[bytes, bytes] = {}
    versions: dict[int, dict[bytes, bytes]] = {}
    for turn in range(2, 7 if ON_SPARK else 14):
        # Changes to random keys, to adjacent keys, and after the last key.
        span = chance.choice([range(2000), range(300, 340), range(2000 + 100 * turn, 2100 + 100 * turn)])
        changes = {number: chance.choice([order(number, str(turn)), None]) for number in chance.sample(span, 40)}
        if turn % 5 == 0:
            changes |= {number: order(number) for number in range(400, 1100)}
        table.merge(folded(changes), ORDERS, at(turn), UUID)
        model |= {key_of(number): value for number, value in changes.items() if value is not None}
        for number, value in changes.items():
            if value is None:
                model.pop(key_of(number), None)
        versions[table.version] = dict(model)
        assert tuples_in(table) == model
        if turn % 4 == 0:
            table.compact()
            assert tuples_in(reopened(table)) == model
    assert table.row_count == len(model)
    for version, rows in versions.items():
        assert {row["_key"]: row["_tuple"] for row in rows_of(table, version)} == rows


@of_our_files
@pytest.mark.usefixtures("small_files")
def test_merged_files_stay_few_and_do_not_overlap(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({number: order(number) for number in range(1000)}), ORDERS, at(2), UUID)
    before = len(table.files())
    assert before > 10
    for turn in range(3, 8):
        table.merge(
            folded({number: order(number, str(turn)) for number in range(turn, 1000, 7)}), ORDERS, at(turn), UUID
        )
    assert len(table.files()) <= before
    ranges = sorted((table.storage.range_of(path) for path in table.files()), key=lambda each: each.first)
    assert all(one.last is not None and one.last < two.first for one, two in pairwise(ranges))


@of_our_files
@pytest.mark.usefixtures("small_files")
def test_merge_of_adjacent_keys_leaves_other_files_unchanged(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({number: order(number) for number in range(1000)}), ORDERS, at(2), UUID)
    done = table.merge(folded({500: order(500, "y"), 501: None}), ORDERS, at(3), UUID)
    assert (done.upserts, done.deletes, done.files_added, done.files_removed) == (1, 1, 1, 1)
    assert table.merge(folded({-5 + 2**40: None}), ORDERS, at(4), UUID).files_removed == 0
    assert table.positions == {UUID: at(4)}


def test_replayed_batch_changes_nothing(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({1: order(1)}), ORDERS, at(5, r2=3), UUID)
    for position in (at(5, r2=3), at(5), at(4, r2=3), VClock()):
        done = reopened(table).merge(folded({2: order(2)}), ORDERS, position, UUID)
        assert done.is_replay
    assert reopened(table).version == table.version
    with pytest.raises(LakeError, match="neither before nor after"):
        table.merge(folded({2: order(2)}), ORDERS, at(6, r2=2), UUID)


def test_stale_writer_fails_and_changes_nothing(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    zombie = reopened(table)
    table.merge(folded({1: order(1)}), ORDERS, at(5), UUID)
    attempts: list[Callable[[], object]] = [
        lambda: zombie.merge(folded({1: order(1, "zombie")}), ORDERS, at(5), UUID),
        lambda: zombie.merge(folded({}), ORDERS, at(9), UUID),
        lambda: zombie.rewrite(space(("id", "unsigned")), at(9), UUID),
        lambda: zombie.drop(at(9), UUID, moment(9)),
        lambda: zombie.truncate(at(9), UUID, moment(9)),
    ]
    for attempt in attempts:
        with pytest.raises(AnotherWriter, match="another writer"):
            attempt()
    assert tuples_in(reopened(table)) == {key_of(1): order(1)}
    assert reopened(table).positions == {UUID: at(5)}


def test_replace_leaves_exactly_the_given_rows(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({1: order(1), 2: order(2)}), ORDERS, at(2), UUID)
    done = table.merge(folded({2: order(2, "y"), 3: order(3)}), ORDERS, at(3), UUID, replace=True)
    assert tuples_in(table) == {key_of(2): order(2, "y"), key_of(3): order(3)}
    assert (done.upserts, done.deletes) == (2, 1)
    table.truncate(at(4), UUID, moment(4))
    assert table.row_count == 0
    assert [row["id"] for row in rows_of(table, table.version - 1)] == [2, 3]


def test_several_replica_sets_share_a_table_independently(tmp_path: Path) -> None:
    table = new_table(tmp_path, several_sets=True, others=[OTHER_UUID])
    table.merge(folded({1: order(1), 2: order(2)}), ORDERS, at(2), UUID)
    table.merge(folded({1: order(1, "other"), 3: None}), ORDERS, at(90), OTHER_UUID)
    table.merge(folded({1: None}), ORDERS, at(3), UUID)
    assert tuples_in(table) == {key_of(2): order(2)}
    assert tuples_in(table, OTHER_UUID) == {key_of(1): order(1, "other")}
    assert [row["_replicaset_uuid"] for row in rows_of(table)] == [UUID, OTHER_UUID]
    assert reopened(table).positions == {UUID: at(3), OTHER_UUID: at(90)}
    assert table.pin(OTHER_UUID).lookup(pa.array([key_of(1), key_of(2)])).to_pylist() == [
        {"sort_key": key_of(1), "tuple": order(1, "other")}
    ]
    table.truncate(at(4), UUID, moment(4))
    assert (tuples_in(table), len(tuples_in(table, OTHER_UUID))) == ({}, 1)
    files = table.files()
    table.truncate(at(5), UUID, moment(5))
    assert (table.files() == files or ON_SPARK, table.positions[UUID]) == (True, at(5))


@of_our_files
@pytest.mark.usefixtures("small_files")
def test_new_keys_after_all_others_get_separate_files(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({number: order(number) for number in range(100)}), ORDERS, at(2), UUID)
    before = set(table.files())
    done = table.merge(folded({number: order(number) for number in range(100, 200)}), ORDERS, at(3), UUID)
    assert (done.files_removed, before <= set(table.files())) == (0, True)
    done = table.merge(folded({number: order(number, "y") for number in range(99, 200)}), ORDERS, at(4), UUID)
    assert (done.upserts, table.row_count) == (101, 200)
    done = table.merge(folded({number: order(number) for number in range(200, 210)}), ORDERS, at(5), UUID)
    assert (done.files_removed, sorted(tuples_in(table))) == (1, [key_of(number) for number in range(210)])


@pytest.mark.usefixtures("small_files")
def test_new_format_rewrites_all_rows_in_one_commit(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({number: packed(number, "x", 1.5, f"n{number}") for number in range(100)}), ORDERS, at(2), UUID)
    version = table.version
    wider = space(("id", "unsigned"), ("title", "string"), ("amount", "number"), ("note", "string"))
    table.rewrite(wider, at(3), UUID)
    assert table.version == version + 1
    assert rows_of(table)[7] == {
        "id": 7,
        "title": "x",
        "amount": 1.5,
        "note": "n7",
        "_extra": None,
        "_key": key_of(7),
        "_tuple": packed(7, "x", 1.5, "n7"),
    }
    assert rows_of(table, version)[7]["_extra"] == '["n7"]'
    assert reopened(table).schema.space == wider
    assert reopened(table).positions == {UUID: at(3)}


@pytest.mark.usefixtures("small_files")
def test_new_primary_key_gives_rows_new_keys(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({number: order(number, f"{99 - number:02}") for number in range(100)}), ORDERS, at(2), UUID)
    by_name = space(*((each.name, each.type) for each in ORDERS.fields), key=1)
    # The change in the transaction of the new key still has the old key.
    table.merge(folded({5: None, 100: order(100, "aa")}), by_name, at(3), UUID)
    rows = rows_of(table)
    assert [row["name"] for row in rows] == [f"{number:02}" for number in range(100) if number != 94] + ["aa"]
    assert rows[0]["_key"] < rows[-1]["_key"] != key_of(100)
    table.compact()
    assert rows_of(table) == rows


def test_alter_without_column_changes_writes_only_the_note(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({1: order(1)}), ORDERS, at(2), UUID)
    files = table.files()
    sync = type(ORDERS)(**{name: getattr(ORDERS, name) for name in ORDERS.__struct_fields__} | {"is_sync": True})
    table.rewrite(sync, at(3), UUID)
    assert (table.files(), table.schema.space, reopened(table).positions) == (files, sync, {UUID: at(3)})
    table.merge(folded({2: order(2)}), ORDERS, at(4), UUID)
    assert reopened(table).schema.space == ORDERS


def test_dropped_table_keeps_its_data_and_is_marked(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({1: order(1)}), ORDERS, at(2), UUID)
    table.drop(at(3), UUID, moment(3))
    assert (len(rows_of(table)), reopened(table).schema.dropped, table.positions) == (1, (UUID,), {UUID: at(3)})


# --- history ------------------------------------------------------------------------------------------------------


def periods(table: EmbeddedTable) -> list[tuple[Any, ...]]:
    """Return number, name, start, end, and whether it is current, of all states, in order."""
    names = ("id", "name", "_from_version", "_to_version", "_is_current")
    found = [tuple(row[name] for name in names) for row in rows_of(table)]
    return sorted(found, key=lambda row: (row[0], row[2], row[3] or 1 << 60))


def test_history_ends_current_states_and_adds_new_ones(tmp_path: Path) -> None:
    table = new_table(tmp_path, history=True)
    table.append_history(
        states((1, order(1, "a"), 2), (2, order(2, "a"), 3), (1, order(1, "b"), 4)), ORDERS, at(4), UUID
    )
    table.append_history(states((1, None, 6), (2, order(2, "b"), 7), (3, order(3, "a"), 8)), ORDERS, at(8), UUID)
    table.append_history(states((1, order(1, "c"), 9)), ORDERS, at(9), UUID)
    expected = [
        (1, "a", 2, 4, False),
        (1, "b", 4, 6, False),
        (1, "c", 9, None, True),
        (2, "a", 3, 7, False),
        (2, "b", 7, None, True),
        (3, "a", 8, None, True),
    ]
    assert periods(table) == expected
    row = next(row for row in rows_of(table) if row["name"] == "b" and row["id"] == 1)
    assert (row["_valid_from"], row["_valid_to"]) == (moment(4).timestamp, moment(6).timestamp)
    assert (row["_operation"], row["_replica_id"], row["_lsn"]) == ("replace", 1, 4)
    assert tuples_in(table) == {key_of(1): order(1, "c"), key_of(2): order(2, "b"), key_of(3): order(3, "a")}
    for _ in range(2):
        assert reopened(table).append_history(states((1, None, 9)), ORDERS, at(9), UUID).is_replay
    table.compact()
    assert periods(table) == expected
    assert len(table.files()) == 2 or ON_SPARK


@pytest.mark.usefixtures("small_files")
def test_random_histories_equal_a_simple_model(tmp_path: Path) -> None:
    chance = random.Random(5)
    table = new_table(tmp_path, history=True)
    expected: list[list[Any]] = []
    current: dict[int, list[Any]] = {}
    version = 1
    for _ in range(8):
        batch = []
        for number in chance.choices(range(300), k=60):
            version += 1
            value = chance.choice([order(number, str(version)), order(number, str(version)), None])
            if value is None and number not in current:
                continue
            batch.append((number, value, version))
            if number in current:
                current.pop(number)[3:] = [version, False]
            if value is not None:
                current[number] = [number, str(version), version, None, True]
                expected.append(current[number])
        chance.shuffle(batch)
        table.append_history(states(*batch), ORDERS, at(version), UUID)
        if chance.random() < 0.3:
            table.compact()
    assert periods(table) == sorted(
        (tuple(each) for each in expected), key=lambda row: (row[0], row[2], row[3] or 1 << 60)
    )


def test_truncated_history_ends_all_states_and_a_new_format_rewrites_former_states(tmp_path: Path) -> None:
    table = new_table(tmp_path, history=True)
    table.append_history(
        states((1, order(1, "a"), 2), (2, order(2, "a"), 3), (1, order(1, "b"), 4)), ORDERS, at(4), UUID
    )
    table.truncate(at(6), UUID, moment(6))
    assert periods(table) == [(1, "a", 2, 4, False), (1, "b", 4, 6, False), (2, "a", 3, 6, False)]
    shorter = space(("id", "unsigned"), ("name", "string"))
    table.append_history(states((1, packed(1, "c", 7), 8)), shorter, at(8), UUID)
    assert periods(table)[2] == (1, "c", 8, None, True)
    assert sorted(row["_extra"] for row in rows_of(table)) == ["[0.5]", "[0.5]", "[1.0]", "[7]"]


def test_state_table_and_history_table_reject_each_others_calls(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="has a history of its space"):
        new_table(tmp_path / "a", history=True).merge(folded({}), ORDERS, at(2), UUID)
    with pytest.raises(LakeError, match="has the state of its space"):
        new_table(tmp_path / "b").append_history(states(), ORDERS, at(2), UUID)


# --- files --------------------------------------------------------------------------------------------------------


@of_our_files
def test_vacuum_removes_unreferenced_files_and_orphans(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    for turn in range(2, 6):
        table.merge(folded({1: order(1, str(turn))}), ORDERS, at(turn), UUID)
    orphan = table.storage.write(table.schema.rows(pa.array([b"k"]), pa.array([packed(1)])))
    directory = tmp_path / "orders"
    assert len(list(directory.glob("*.parquet"))) == 5
    assert table.vacuum() == []
    removed = table.vacuum(0)
    assert orphan.entry.path in removed
    assert [path.name for path in directory.glob("*.parquet")] == table.files()
    # The checkpoint of the log contains all required entries, including the position.
    for commit in sorted((directory / "_delta_log").glob("0*.json"))[:-1]:
        commit.unlink()
    assert (tuples_in(reopened(table)), reopened(table).positions) == ({key_of(1): order(1, "5")}, {UUID: at(5)})
    table.merge(folded({2: order(2)}), ORDERS, at(9), UUID)
    assert table.row_count == 2


def test_foreign_tables_are_rejected(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    write_deltalake(str(tmp_path / "t"), pa.table({"a": [1]}))
    with pytest.raises(LakeError, match="not written by a mirror"):
        EmbeddedTable.open(str(tmp_path / "t"), {})
    assert EmbeddedTable.open(str(tmp_path / "nothing"), {}) is None


def test_error_names_the_key_of_a_value_that_fits_no_column(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    with pytest.raises(LakeError, match=r"'orders', tuple with _key x'.*': field 'id' is above") as raised:
        table.merge(folded({1: order(1), 2**64 - 1: order(2**64 - 1)}), ORDERS, at(2), UUID)
    assert "unsignedAs" in (raised.value.hint or "")
    assert reopened(table).version == 0


def test_files_of_other_writers_are_read_by_their_footers(tmp_path: Path) -> None:
    table = new_table(tmp_path)
    table.merge(folded({number: order(number) for number in range(50)}), ORDERS, at(2), UUID)
    DeltaTable(table.path).optimize.z_order(["id"])
    table.refresh()
    assert "c000" in table.files()[0]
    table.merge(folded({7: order(7, "y"), 70: order(70)}), ORDERS, at(3), UUID)
    assert [msgpack.unpackb(each)[1] for each in tuples_in(table).values()].count("y") == 1
    assert table.row_count == 51
