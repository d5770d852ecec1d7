"""Directories of the repository that tests read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VECTORS: Final = ROOT / "tests" / "vectors"
TRANSCRIPTS: Final = ROOT / "tests" / "transcripts"
