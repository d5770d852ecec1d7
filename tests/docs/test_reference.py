"""Pages that are made from the code are what the code says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.places import ROOT


def test_the_pages_that_are_made_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "reference.py", tmp_path], check=True)
    made = sorted(tmp_path.iterdir())
    assert [page.name for page in made] == ["commands.md", "errors.md", "library.md"]
    for page in made:
        kept = ROOT / "docs" / "reference" / page.name
        assert kept.read_text() == page.read_text(), f"{kept.name} is not up to date; `make docs` writes it"
