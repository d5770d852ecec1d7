"""Merges on Spark: their input, and, at full scale, the tests of tables again with Delta's jars."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flowstone.lake.row_changes import RowChanges, RowStates
from flowstone.lake.table_schema import LakeSchema
from flowstone.spark.mirror.spark_table import history_source, state_source
from tests.places import ROOT
from tests.spark.lake_rows_given import ORDERS, UUID, folded, key_of, packed, states


def test_deleted_keys_are_rows_without_a_tuple() -> None:
    source = state_source(LakeSchema(ORDERS, (UUID,)), RowChanges.of(folded({1: packed(1, "x", 2), 2: None}), b""))
    assert [(row["_key"], row["id"], row["_tuple"]) for row in source.to_pylist()] == [
        (key_of(1), 1, packed(1, "x", 2)),
        (key_of(2), None, None),
    ]
    assert all(each.nullable for each in source.schema)


def test_history_merges_ends_by_key_and_inserts_new_states() -> None:
    given = states((1, packed(1, "a"), 5), (1, packed(1, "b"), 6), (2, None, 7))
    rows = history_source(LakeSchema(ORDERS, (UUID,), history=True), RowStates(given, b"")).to_pylist()
    ends = [(row["_source_key"], row["_end_version"]) for row in rows if row["_tuple"] is None]
    assert ends == [(key_of(1), 5), (key_of(2), 7)]
    added = [row for row in rows if row["_tuple"] is not None]
    assert [(row["name"], row["_is_current"], row["_to_version"]) for row in added] == [
        ("b", True, None),
        ("a", False, 6),
    ]
    assert all(row["_source_key"] is None for row in added)


@pytest.mark.full_scale(reason="needs Delta's jars, which FLOWSTONE_SCALE=full resolves with Maven")
@pytest.mark.timeout(1800)
def test_tables_behave_the_same_with_the_jars_of_delta(java: None) -> None:
    module = ROOT / "tests/lake/test_embedded_table.py"
    environment = os.environ | {"FLOWSTONE_LAKE_ENGINE": "spark"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600", str(module)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
