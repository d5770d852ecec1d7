"""Commands with missing libraries report them in one line, before anything else."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from flowstone.cli import extras
from tests.cli.conftest import Command

NOWHERE = ("flowstone_without_a_library",)


def test_extras_equal_those_declared_by_the_package() -> None:
    declared: dict[str, set[str]] = {}
    for line in importlib.metadata.requires("flowstone") or ():
        if match := re.fullmatch(r"([\w-]+).*extra == '(arrow|spark|web)'", line):
            declared.setdefault(match[2], set()).add(match[1].replace("-", "_"))
    assert declared == {extra: set(modules) for extra, modules in extras.MODULES.items()}


def test_installed_extra_is_accepted() -> None:
    extras.need("arrow", "--format csv")
    extras.need("spark", "flowstone mirror")
    extras.need("web", "flowstone dashboard")


@pytest.mark.parametrize(
    "arguments",
    [
        ("mirror", "--once", "nothing", "lake"),
        ("restore", "nothing", "--to", "1", "--out", "restored", "--format", "delta"),
        ("verify", "nothing", "lake"),
        ("demo",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_pipeline_command_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, flowstone: Command, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(extras.MODULES, "spark", NOWHERE)
    refused = flowstone(*arguments)
    hint = "which is not installed; pip install 'flowstone[spark]'"
    assert refused.errors == [f"flowstone: flowstone {arguments[0]} needs {NOWHERE[0]}, {hint}"]
    assert refused.code == 2
    assert list(tmp_path.iterdir()) == []


def test_sort_of_a_limestone_on_spark_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, flowstone: Command, tmp_path: Path
) -> None:
    monkeypatch.setitem(extras.MODULES, "spark", NOWHERE)
    refused = flowstone("limestone", "compact", "--force", "--spark", str(tmp_path))
    assert refused.errors == [
        f"flowstone: --spark needs {NOWHERE[0]}, which is not installed; pip install 'flowstone[spark]'"
    ]
    assert refused.code == 64
