"""The examples run unchanged, and show their documented output."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.places import ROOT

EXAMPLES = ROOT / "examples"

SHOWN = {
    "mirror_to_delta.py": ("orders: 1000 rows in version", "Nairobi"),
    "time_travel.py": ("then: 300 orders", "now:  400 orders", "|difference|", '[["=","price",'),
    "streaming_aggregation.py": ("batch 0:", "|revenue|"),
}


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def test_every_example_is_tested() -> None:
    helpers = {"shop_node.py", "pipeline.ipynb", "order_service.py"}  # the last one has a test of its own
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == SHOWN.keys() | helpers


@pytest.mark.parametrize("name", SHOWN)
def test_script_prints_its_documented_output(name: str, spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capfd.readouterr().out
    for part in SHOWN[name]:
        assert part in shown


def test_notebook_runs_from_its_first_cell_to_its_last(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "pipeline.ipynb").read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "outputs are kept out of the repository"
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    shown = capfd.readouterr().out
    assert names["report"].is_equal
    assert {space.name: space.rows_a for space in names["report"].spaces}["orders"] == 500
    assert "|    update|" in shown
