"""Examples on pages of the documentation with Spark run as shown; the pages share one session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import needs_of, page_at, paths
from tests.docs.running import interpreter, run_page
from tests.places import ROOT

PATHS = [path for path in paths() if "spark" in needs_of((ROOT / path).read_text())]


@pytest.fixture(scope="module")
def python(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with interpreter(tmp_path_factory.mktemp("spark"), spark=True) as socket:
        yield socket


@pytest.mark.parametrize("path", PATHS)
def test_spark_page_runs_as_shown(path: str, tmp_path: Path, tarantool: object, python: Path) -> None:
    run_page(page_at(path), tmp_path, python)
