"""The tests against the real Limestone are left out where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.limestone.interop import real_limestone

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the programs that `FLOWSTONE_LIMESTONE` names nothing here can be said."""
    if real_limestone.available():
        return
    unfit = [item for item in items if HERE in item.path.parents]
    config.hook.pytest_deselected(items=unfit)
    items[:] = [item for item in items if HERE not in item.path.parents]
