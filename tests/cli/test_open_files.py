"""The limit of open files of commands."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from flowstone.cli import open_files


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """Return the hard limit of this process; the soft limit is lowered during the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_soft_limit_is_raised_to_the_hard_limit(hard_limit: int) -> None:
    open_files.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard_limit, hard_limit)


def test_soft_limit_stays_when_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    open_files.raise_limit()
