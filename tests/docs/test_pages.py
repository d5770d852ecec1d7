"""Examples on pages of the documentation without Spark run as shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import needs_of, page_at, paths
from tests.docs.running import interpreter, run_page
from tests.places import ROOT

PATHS = [path for path in paths() if "spark" not in needs_of((ROOT / path).read_text())]


@pytest.mark.parametrize("path", PATHS)
def test_page_runs_as_shown(path: str, tmp_path: Path, tarantool: object) -> None:
    (tmp_path / "page").mkdir()
    with interpreter(tmp_path) as python:
        run_page(page_at(path), tmp_path / "page", python)
