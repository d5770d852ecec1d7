"""The wheel, built once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.building import built, copied


@pytest.fixture(scope="package")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of all packaged files in their current state."""
    return copied(tmp_path_factory.mktemp("tree") / "flowstone", compiled=True)


@pytest.fixture(scope="package")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tree, "wheel", tmp_path_factory.mktemp("wheel"))
