"""Builds wheels and source distributions with hatchling, which is a tool of ours: no network, no new environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tests.places import ROOT


def copied(to: Path, source: Path = ROOT) -> Path:
    """What is packed, and what says so, in a directory of its own: nothing that changes meanwhile is seen there."""
    to.mkdir(parents=True)
    targets = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    left_out = [Path(line).name for line in (source / ".gitignore").read_text().split()]
    for path in (source / name for name in (".gitignore", *targets["sdist"]["include"])):
        if path.is_dir():
            shutil.copytree(path, to / path.name, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy(path, to)
    return to


def built(
    directory: Path,
    target: Literal["wheel", "sdist"],
    out: Path,
    *,
    environment: Mapping[str, str] | None = None,
    umask: int = 0o022,
) -> Path:
    """What hatchling makes of `directory`, put into `out`. Of the environment it sees what is given and little else."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", out],
        cwd=directory,
        env=inherited | dict(environment or {}),
        umask=umask,
        capture_output=True,
        timeout=120,
        check=True,
    )
    (path,) = out.iterdir()
    return path
