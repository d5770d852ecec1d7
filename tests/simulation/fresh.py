"""Seeds that change with each commit, for continuous integration: fixed seeds find only what they found before.

They are derived from the commit's hash, so that all tests of a commit run the same ones, or, in a tree without
git (an unpacked source distribution), from the contents of `src`.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.places import ROOT

LOWEST: Final = 10_000_000
"""The first fresh seed; seeds of the suite and of soak runs are smaller."""

SPREAD: Final = 1_000_000_000


@dataclass(frozen=True)
class Fresh:
    """`count` seeds from `first` on; `origin` names their source."""

    first: int
    count: int
    origin: str

    @property
    def seeds(self) -> range:
        return range(self.first, self.first + self.count)

    def __str__(self) -> str:
        return f"fresh seeds {self.first} to {self.first + self.count - 1}, derived from {self.origin}"


def fresh(count: int, root: Path = ROOT) -> Fresh:
    """Return `count` consecutive seeds for the code in `root`."""
    commit = _commit(root)
    name, origin = (commit, f"commit {commit}") if commit else (_contents(root), "the contents of src (no git here)")
    first = LOWEST + int(hashlib.sha256(name.encode()).hexdigest(), 16) % SPREAD
    return Fresh(first, count, origin)


def _commit(root: Path) -> str | None:
    """Return the hash of the commit checked out in `root`; None if `root` is not a work tree of its own."""
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    top, commit = done.stdout.split("\n")[:2]
    return commit if Path(top).resolve() == root.resolve() else None


def _contents(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((root / "src").rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
