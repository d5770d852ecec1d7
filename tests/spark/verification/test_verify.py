"""`flowstone.spark.verify` in a program: sides as texts, options as keywords, and errors before Spark starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import flowstone
import flowstone.spark
from flowstone.outside import production
from flowstone.spark import verify
from tests.real_tarantool import free_port
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import insert, whole


@pytest.fixture
def archives(tmp_path: Path) -> tuple[Path, Path]:
    """Return two archives that are equal up to LSN 3, and differ at LSN 4."""
    for name, value in (("a", "one"), ("b", "two")):
        written = WrittenArchive(production().disk, str(tmp_path / name))
        written.define_orders()
        written.write(whole(insert(3, 1, "same")), whole(insert(4, 2, value)))
        written.save()
    return tmp_path / "a", tmp_path / "b"


def test_report_names_the_keys_that_differ(spark: SparkSession, archives: tuple[Path, Path]) -> None:
    steps: list[str] = []
    report = verify(*archives, spark=spark, space="orders", on_step=steps.append)
    assert not report.is_equal
    (difference,) = report.differences
    assert (difference.space, difference.key, [each.path for each in difference.fields]) == ("orders", "[2]", ["name"])
    assert (report.a.name, report.a.position) == (str(archives[0]), {1: 4})
    assert steps[0] == f"reading {archives[0]}"


def test_position_may_be_a_value(spark: SparkSession, archives: tuple[Path, Path]) -> None:
    report = verify(*archives, at=flowstone.VClock({1: 3}))  # uses the running session
    assert report.is_equal
    assert report.b.position == {1: 3}


@pytest.mark.parametrize(
    ("sides", "options", "error", "message"),
    [
        (["/none/a", "/none/b"], {}, flowstone.spark.SideError, "no such directory"),
        (["ADDRESS", "ADDRESS"], {"wait": 0}, flowstone.FlowstoneError, "cannot connect to"),
        (["ADDRESS", "ADDRESS"], {"at": "noon"}, flowstone.spark.WrongOption, "invalid position: 'noon'"),
        (["ADDRESS", "ADDRESS"], {"password": "x"}, flowstone.spark.SideError, "password given without a user"),
    ],
)
def test_errors_come_before_spark_starts(
    sides: list[str],
    options: Any,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowstone.spark.spark_session.session", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(error, match=message):
        verify(*(address if side == "ADDRESS" else side for side in sides), **options)
    assert os.listdir(tmp_path) == [], "no side is left open"
