"""Builds wheels and source distributions with hatchling: no network, no new environment."""

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

COMPILED = ("*.c", "*.so")
BUILD_SECONDS = 280
"""Limit on a build, which compiles for half a minute on an idle machine."""


def copied(to: Path, source: Path = ROOT, *, compiled: bool = False) -> Path:
    """Copy the packaged files to a separate directory, unaffected by concurrent changes.

    With `compiled`, the copy includes the compiled modules, so that a wheel of it needs no compiler.
    """
    to.mkdir(parents=True)
    targets = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    left_out = {Path(line).name for line in (source / ".gitignore").read_text().split()}
    if compiled:
        left_out -= set(COMPILED)
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
    """Run hatchling on `directory`; put the result into `out`.

    It gets few environment variables besides the given ones.
    """
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", out],
        cwd=directory,
        env=inherited | dict(environment or {}),
        umask=umask,
        capture_output=True,
        timeout=BUILD_SECONDS,
        check=True,
    )
    (path,) = out.iterdir()
    return path
