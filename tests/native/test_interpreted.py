"""Modules run compiled unless FLOWSTONE_INTERPRETED is set."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest

from flowstone.iproto.scan_kernels import skip_value
from tests.native.twins import compiled_names, interpreted_module, twin
from tests.places import ROOT

WHERE = "import flowstone, sys; from importlib import import_module; print(import_module(sys.argv[1]).__file__)"


@pytest.mark.skipif(os.environ.get("FLOWSTONE_INTERPRETED") == "1", reason="interpreted on request")
@pytest.mark.parametrize("name", compiled_names())
def test_module_with_inner_loops_is_compiled(name: str) -> None:
    """Guard against a build that silently left a module out: the interpreted form would pass all other tests."""
    assert str(import_module(name).__file__).endswith(".so")


def test_environment_variable_selects_interpreted_modules() -> None:
    environment = os.environ | {"FLOWSTONE_INTERPRETED": "1", "PYTHONPATH": str(ROOT / "src")}
    for name in compiled_names()[:3]:
        found = subprocess.run(
            [sys.executable, "-c", WHERE, name], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip().endswith(".py")


def test_twin_is_interpreted_and_leaves_the_compiled_module_in_place() -> None:
    before = sys.modules[skip_value.__module__]
    assert str(interpreted_module(skip_value.__module__).__file__).endswith(".py")
    assert twin(skip_value) is not skip_value
    assert sys.modules[skip_value.__module__] is before
