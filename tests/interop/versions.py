"""The available real servers, and the tests that support them.

`@fits("2.6")` means that series, `@fits(">=2.11")` that and all later ones, `@fits("<2.11")` all earlier ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

ANY = ">=2.6"
_VERSION = re.compile(r"Tarantool (?:Enterprise )?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class Binary:
    """A `tarantool` binary and its version."""

    path: str
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def dialect(self) -> str:
        """The dialect of nodes in a set with it."""
        return "2.6" if self.version < (2, 6, 1) else "2.11"


@lru_cache
def binaries() -> tuple[Binary, ...]:
    """Return the binaries of FLOWSTONE_TARANTOOL, or the one on PATH."""
    given = os.environ.get("FLOWSTONE_TARANTOOL", "")
    found = shutil.which("tarantool")
    paths = [path for path in given.split(os.pathsep) if path] or ([found] if found else [])
    return tuple(Binary(path, _version_of(path)) for path in paths)


def _version_of(path: str) -> tuple[int, int, int]:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    match = _VERSION.search(text)
    assert match is not None, f"{path} --version says {text[:100]!r}"
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch)


def fits(specification: str) -> Callable[[Test], Test]:
    """Name the supported versions of a test; it gets one as `binary`, through `cluster`."""

    def mark(test: Test) -> Test:
        test.fits = specification  # type: ignore[attr-defined]
        return test

    return mark


def is_fit(version: tuple[int, ...], specification: str) -> bool:
    operator, series = re.fullmatch(r"(>=|<|)(\d+\.\d+)", specification).groups()  # type: ignore[union-attr]
    wanted = tuple(map(int, series.split(".")))
    own = version[: len(wanted)]
    return {"": own == wanted, ">=": own >= wanted, "<": own < wanted}[operator]


def parameters(specification: str) -> list[Any]:
    """Return the parameters of a test with that specification. Without a matching server it is left out
    (`tests/conftest.py`).

    Without any server at all it is skipped, or fails with CI=true.
    """
    fitting = [pytest.param(binary, id=str(binary)) for binary in binaries() if is_fit(binary.version, specification)]
    if fitting:
        return fitting
    if binaries():
        return [pytest.param(None, id="none", marks=pytest.mark.unfit)]
    message = f"no Tarantool {specification} on PATH or in FLOWSTONE_TARANTOOL"
    marks = () if os.environ.get("CI") == "true" else pytest.mark.skip(reason=message)
    return [pytest.param(None, id="none", marks=marks)]
