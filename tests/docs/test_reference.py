"""Pages generated from the code match the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.places import ROOT


def test_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "reference.py", tmp_path], check=True)
    generated = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    pages = {path.as_posix() for path in generated if path.suffix == ".md"}
    assert pages == {"reference/commands.md", "reference/errors.md", "reference/library.md", "spec/states.md"}
    images = (ROOT / "docs" / "images").glob("states-*.svg")
    assert {path.name for path in generated if path.suffix == ".svg"} == {path.name for path in images}
    for name, page in generated.items():
        kept = ROOT / "docs" / name
        assert kept.read_text() == page.read_text(), f"{name} is not up to date; run scripts/reference.py"
