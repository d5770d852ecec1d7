"""Tables of a lake on the dashboard: read without Spark, and compared with the position of the replica set."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.lake.quarantine import Quarantine
from flowstone.spark.lake import Lake, LakeProgress
from flowstone.web.feed_state import PipelineTable
from flowstone.web.pipeline import FRESH_SECONDS, Pipeline
from tests.spark.lake_rows_given import ORDERS, UUID, at, folded, packed, space

NOW = 2000.0


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(str(tmp_path / "lake"), engine="deltalake")


def look(lake: Lake, lsn: int, now: float = NOW) -> dict[str, PipelineTable]:
    return {table.table: table for table in Pipeline([lake.path]).look(now, {UUID: {1: lsn}})}


def test_table_is_current_when_it_has_all_rows(lake: Lake) -> None:
    table = lake.create(ORDERS, UUID, at(5))
    table.merge(folded({1: packed(1, "x", 0.5), 2: packed(2, "y", 1.5)}), ORDERS, at(7), UUID)
    lake.save(LakeProgress(UUID, at(9), stamp=int((NOW - 100) * 1e6)))
    shown = look(lake, 9)["orders"]
    assert (shown.space, shown.rows, shown.version, shown.status) == ("orders", 2, 1, "current")
    assert shown.position == {UUID: {1: 9}}
    assert (shown.settled_at, shown.age_seconds) == (NOW - 100, 0.0)


def test_table_lags_when_rows_are_missing_for_long(lake: Lake) -> None:
    lake.create(ORDERS, UUID, at(5))
    lake.save(LakeProgress(UUID, at(5), stamp=int((NOW - 100) * 1e6)))
    assert (look(lake, 6)["orders"].status, look(lake, 6)["orders"].age_seconds) == ("behind", 100.0)
    assert look(lake, 6, NOW - 100 + FRESH_SECONDS / 2)["orders"].status == "current"


def test_lag_of_an_unwatched_set_is_unknown(lake: Lake) -> None:
    lake.create(ORDERS, UUID, at(5))
    shown = Pipeline([lake.path]).look(NOW, {})[0]
    assert (shown.status, shown.age_seconds) == ("unknown", None)


def test_pipeline_sees_later_commits_at_the_next_poll(lake: Lake) -> None:
    pipeline = Pipeline([lake.path])
    assert pipeline.look(NOW, {}) == ()
    table = lake.create(ORDERS, UUID, at(5))
    assert [one.rows for one in pipeline.look(NOW, {})] == [0]
    table.merge(folded({1: packed(1, "x", 0.5)}), ORDERS, at(6), UUID)
    lake.create(space(("id", "unsigned"), name="users", number=513), UUID, at(6))
    assert [(one.table, one.rows) for one in pipeline.look(NOW, {})] == [("orders", 1), ("users", 0)]


def test_foreign_directory_is_ignored_and_a_broken_table_is_reported(lake: Lake) -> None:
    lake.create(ORDERS, UUID, at(5))
    (Path(lake.path) / "notes").mkdir()
    log = Path(lake.path) / "orders" / "_delta_log" / "00000000000000000000.json"
    log.write_text("no JSON")
    assert {name: table.status for name, table in look(lake, 5).items()} == {"orders": "damaged"}


def test_misfits_in_the_quarantine_are_findings(lake: Lake) -> None:
    pipeline, quarantine = Pipeline([lake.path]), Quarantine(lake.path, {})
    lake.quarantine = quarantine
    table = lake.create(ORDERS, UUID, at(5))
    pipeline.look(NOW, {})
    assert not pipeline.findings
    table.merge(folded({1: packed(1, 5)}), ORDERS, at(6), UUID)
    pipeline.look(NOW, {})
    assert [each.what for each in pipeline.findings] == [
        f"1 value of orders.name does not fit the column in {lake.path}"
    ]
    table.rewrite(space(("id", "unsigned"), ("name", "unsigned")), at(7), UUID)
    pipeline.look(NOW, {})
    assert not pipeline.findings
