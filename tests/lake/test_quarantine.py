"""The quarantine as a table: additions, positions, rows of commits that did not happen, and healing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.misfits import MisfitRows
from flowstone.lake.quarantine import QUARANTINE_SCHEMA, Quarantine, Quarantined
from flowstone.lake.table import AnotherWriter
from flowstone.lake.table_schema import LakeSchema
from tests.spark.lake_rows_given import ORDERS, UUID, at, folded, packed, space

SCHEMA = LakeSchema(ORDERS, (UUID,))


def misfits(*keys: int, rebuilt: bool = False, schema: LakeSchema = SCHEMA) -> MisfitRows:
    """Return misfits of field `name`, one in the row of each key."""
    found = MisfitRows()
    raw = pa.array([b"%d" % key for key in keys], pa.binary())
    schema.rows(raw, pa.array([packed(key, key) for key in keys]), misfits=found, origins=None if rebuilt else {})
    return found


def keys_of(quarantine: Quarantine) -> list[str]:
    return sorted(quarantine.rows()["key"].to_pylist())


@pytest.fixture
def quarantine(tmp_path: Path) -> Quarantine:
    return Quarantine(str(tmp_path), {})


def test_quarantine_is_empty_and_without_a_table_before_the_first_misfit(quarantine: Quarantine) -> None:
    quarantine.add(MisfitRows(), {UUID: at(5)}, {})
    quarantine.roll_back({}, list)
    quarantine.maintain(1)
    assert quarantine.rows().schema == QUARANTINE_SCHEMA
    assert quarantine.open_count() == 0
    assert not Path(quarantine.path).exists()


def test_added_rows_have_the_position_of_their_commit(tmp_path: Path) -> None:
    told: list[list[Quarantined]] = []
    quarantine = Quarantine(str(tmp_path), {}, told.append)
    quarantine.add(misfits(1, 2), {UUID: at(5)}, {UUID: at(3)})
    rows = quarantine.rows().to_pylist()
    assert {(row["position"], row["version"], row["healed_at"]) for row in rows} == {('{"1": 5}', 5, None)}
    assert told == [[Quarantined("orders", "name", "wrong_type", 2, "[1]")]]
    assert quarantine.open_count() == 2
    assert DeltaTable(quarantine.path).version() == 0


def test_rebuilt_rows_are_added_once_and_keep_the_known_position(quarantine: Quarantine) -> None:
    quarantine.add(misfits(1), {UUID: at(3)}, {})
    for _ in range(2):
        quarantine.add(misfits(1, 2, rebuilt=True), {UUID: at(5)}, {UUID: at(4)})
    assert [(row["key"], row["version"]) for row in quarantine.rows().to_pylist()] == [("[2]", 4), ("[1]", 3)]


def test_roll_back_removes_rows_ahead_of_their_table(quarantine: Quarantine, tmp_path: Path) -> None:
    table = EmbeddedTable.create(f"{tmp_path}/orders", SCHEMA, {UUID: at(3)}, {})
    for key in (3, 5, 7):
        quarantine.add(misfits(key), {UUID: at(key)}, {})
    asked: list[int] = []

    def tables() -> list[EmbeddedTable]:
        asked.append(1)
        return [table]

    quarantine.roll_back({UUID: at(7)}, tables)
    assert (keys_of(quarantine), asked) == (["[3]", "[5]", "[7]"], [])
    table.merge(folded({1: packed(1, "x")}), ORDERS, at(5), UUID)
    quarantine.roll_back({UUID: at(3)}, tables)
    assert (keys_of(quarantine), asked) == (["[3]", "[5]"], [1])
    quarantine.roll_back({}, list)  # the first load did not get as far as a table
    assert keys_of(quarantine) == []


def test_rewrite_heals_rows_that_fit_and_keeps_the_others(quarantine: Quarantine, tmp_path: Path) -> None:
    table = EmbeddedTable.create(f"{tmp_path}/orders", SCHEMA, {UUID: at(1)}, {})
    table.quarantine = quarantine
    rows = {1: packed(1, "x"), 2: packed(2, 5), 3: packed(3, b"\xff".decode("latin1"), "y"), 4: packed(4, True)}
    table.merge(folded(rows), ORDERS, at(2), UUID)
    assert keys_of(quarantine) == ["[2]", "[3]", "[4]"]
    table.rewrite(space(("id", "unsigned"), ("name", "unsigned"), ("amount", "number")), at(3), UUID)
    names = [row for row in quarantine.rows().to_pylist() if row["field"] == "name"]
    healed = {row["key"]: row["healed_at"] is not None for row in names}
    assert healed == {"[1]": False, "[2]": True, "[3]": False, "[4]": False}
    assert quarantine.open_count() == 4
    assert quarantine.heal(table) == 0, "everything was checked under the current types"


def test_heal_makes_up_for_an_interrupted_rewrite(
    quarantine: Quarantine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = EmbeddedTable.create(f"{tmp_path}/orders", SCHEMA, {UUID: at(1)}, {})
    table.quarantine = quarantine
    table.merge(folded({1: packed(1, 5), 2: packed(2, 6)}), ORDERS, at(2), UUID)
    with monkeypatch.context() as patched:
        patched.setattr(Quarantine, "heal", lambda self, table: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            table.rewrite(space(("id", "unsigned"), ("name", "any"), ("amount", "number")), at(3), UUID)
    assert quarantine.open_count() == 2
    table.refresh()
    assert quarantine.heal(table) == 2
    assert quarantine.open_count() == 0


def test_commit_after_another_writer_is_an_error(quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalake.exceptions import CommitFailedError

    def fail(*args: Any, **how: Any) -> None:
        raise CommitFailedError("concurrent")

    monkeypatch.setattr("flowstone.lake.quarantine.write_deltalake", fail)
    with pytest.raises(AnotherWriter, match="_quarantine was changed by another writer: concurrent"):
        quarantine.add(misfits(1), {UUID: at(5)}, {})


def test_maintenance_joins_files_and_keeps_all_rows(quarantine: Quarantine) -> None:
    for key in range(4):
        quarantine.add(misfits(key), {UUID: at(key)}, {})
    quarantine.maintain(0)
    assert keys_of(quarantine) == ["[0]", "[1]", "[2]", "[3]"]
    assert len(DeltaTable(quarantine.path).file_uris()) == 1
