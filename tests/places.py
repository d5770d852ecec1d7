"""Directories of the repository that tests read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VECTORS: Final = ROOT / "tests" / "vectors"
TRANSCRIPTS: Final = ROOT / "tests" / "transcripts"
SOURCES: Final = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
"""The value of PYTHONPATH with which a process imports this tree, whatever is installed."""
