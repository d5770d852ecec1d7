"""`serve --procedures`: which functions of a module become procedures, mistakes, and a CALL of one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flowstone.cli.console import UsageError
from flowstone.cli.node.procedure_module import load_procedures
from tests.cli.conftest import Command
from tests.cli.node.test_serve import Serve, connected, serve

__all__ = ["serve"]

MODULE = """
from os.path import join

import flowstone


def add(call: flowstone.ProcedureCall, left: int, right: int) -> int:
    return left + right


async def who(call):
    return call.user


def _private(call):
    pass


def nothing():
    pass


VALUE = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current directory."""
    name = f"procedures_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_public_functions_of_the_module_are_procedures(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(MODULE.replace("def nothing():", "def _nothing():"))
    assert [procedure.name for procedure in load_procedures(module)] == ["add", "who"]


def test_names_and_all_choose_the_procedures(module: str, tmp_path: Path) -> None:
    assert [procedure.name for procedure in load_procedures(f"{module}:who, add")] == ["who", "add"]
    (tmp_path / f"{module}_all.py").write_text(MODULE + "__all__ = ['who', 'VALUE']\n")
    assert [procedure.name for procedure in load_procedures(f"{module}_all")] == ["who"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (":gone", "has no function gone"),
        (":VALUE", "has no function VALUE"),
        (":nothing", "procedure nothing of module .* has no parameters"),
        ("_gone", "cannot import .*_gone: ModuleNotFoundError"),
    ],
)
def test_mistake_is_a_usage_error(module: str, names: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        load_procedures(module + names)


def test_check_lists_the_procedures_and_reports_a_missing_module(flowstone: Command, module: str) -> None:
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", f"--procedures={module}:add")
    assert (answer.code, answer.errors) == (0, [])
    assert "# procedures: add" in answer.text
    answer = flowstone("serve", "--check", "--listen=127.0.0.1:0", "--procedures=gone_module")
    assert answer.code == 2
    assert "cannot import gone_module" in answer.errors[0]


def test_client_calls_a_procedure_of_the_module(serve: Serve, module: str) -> None:
    served = serve(f"--procedures={module}:add,who", "--user=app:secret")
    served.wait_for("ready")
    with connected(served) as connection:
        assert list(connection.call("add", 2, 3)) == [5]
        assert list(connection.call("who")) == ["app"]
    assert served.end() == 0
