"""Skip the tests against the real Limestone if it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.limestone.interop import real_limestone, real_master

HERE = Path(__file__).parent
WITH_LIBRARY = ("test_cut_compaction.py", "test_independent_reader.py", "test_kill_rounds.py")
"""Modules that need the original's library, not only its programs."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip all tests here without the programs that `FLOWSTONE_LIMESTONE` names."""
    unfit = {item for item in items if HERE in item.path.parents and not _is_possible(item.path.name)}
    if unfit:
        config.hook.pytest_deselected(items=[*unfit])
        items[:] = [item for item in items if item not in unfit]


def _is_possible(module: str) -> bool:
    return real_limestone.available() and (module not in WITH_LIBRARY or real_master.available())
