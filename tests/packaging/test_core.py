"""`pip install flowstone` without extras: its dependencies; everything except Spark and the web works.

The wheel is installed into a separate environment, with links to the installed copies of its required libraries, and no
others.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

CORE: Final = frozenset(
    "crc32c msgpack msgspec numpy rich typer uvloop zstandard "  # requested
    "annotated-doc markdown-it-py mdurl pygments shellingham".split()  # their requirements
)

IMPORT_EVERYTHING: Final = """
import importlib, pkgutil, flowstone
for module in pkgutil.walk_packages(flowstone.__path__, "flowstone."):
    extras = ("flowstone.columns.", "flowstone.spark.", "flowstone.lake.", "flowstone.web.")
    extras += ("flowstone.limestone.tsurugi.row_columns",)
    needs_an_extra = module.name.startswith(extras)
    if not needs_an_extra and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


SHOW_EVERY_HELP: Final = """
import contextlib, io, typer
from flowstone.cli import app, run
from flowstone.cli.node import serve
def show(command, *path):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert run([*path, "--help"]) == 0
    assert f"Usage: flowstone {' '.join(path)}".rstrip() in shown.getvalue()
    print(*path)
    for name, inner in getattr(command, "commands", {}).items():
        show(inner, *path, name)
serve.declare_options(every=False)
show(typer.main.get_command(app))
"""


def asked_for(name: str, extra: str = "") -> Iterator[str]:
    """Return the distributions that `name` requires on this machine, transitively."""
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement.name.lower()
            yield from asked_for(requirement.name)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], timeout=120, check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    for name in CORE:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(distribution.locate_file(top)))
    pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", wheel], timeout=120, check=True)
    return directory


def run(environment: Path, *command: str) -> subprocess.CompletedProcess[str]:
    program = environment / "bin" / command[0]
    return subprocess.run(
        [program, *command[1:]], cwd=environment, env={}, capture_output=True, text=True, timeout=120, check=False
    )


def test_core_requires_exactly_these_libraries() -> None:
    assert set(asked_for("flowstone")) == CORE


def test_extras_add_the_libraries_of_spark_and_the_web() -> None:
    assert {"pyspark", "pandas", "deltalake"} <= set(asked_for("flowstone", "spark"))
    assert {"starlette", "uvicorn", "prometheus-client"} <= set(asked_for("flowstone", "web"))


def test_version_is_printed(environment: Path) -> None:
    done = run(environment, "flowstone", "--version")
    assert (done.stdout, done.stderr) == (f"flowstone {importlib.metadata.version('flowstone')}\n", "")


def test_modules_except_columns_spark_lake_and_web_can_be_imported(environment: Path) -> None:
    done = run(environment, "python", "-c", IMPORT_EVERYTHING)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_of_every_command_needs_no_extra(environment: Path) -> None:
    done = run(environment, "python", "-c", SHOW_EVERY_HELP)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"cat", "serve", "archive", "mirror", "dashboard", "limestone inspect"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("extra", "missing", "command"),
    [
        ("spark", "pyspark", ("mirror", "--once", "log", "lake")),
        ("web", "starlette", ("dashboard", "127.0.0.1:3301")),
    ],
    ids=["mirror", "dashboard"],
)
def test_error_names_the_extra_that_a_command_needs(
    environment: Path, extra: str, missing: str, command: tuple[str, ...]
) -> None:
    done = run(environment, "flowstone", *command)
    hint = f"which is not installed; pip install 'flowstone[{extra}]'"
    assert done.stderr == f"flowstone: flowstone {command[0]} needs {missing}, {hint}\n"
    assert done.returncode == 2


def test_error_names_the_extra_that_typed_columns_need(environment: Path) -> None:
    done = run(environment, "flowstone", "cat", "--format", "csv", "log")
    hint = "which is not installed; pip install 'flowstone[arrow]'"
    assert (done.returncode, done.stderr) == (2, f"flowstone: --format csv needs pyarrow, {hint}\n")
    done = run(environment, "python", "-c", "import flowstone; flowstone.read_log('log')")
    assert "FlowstoneError: read_log needs pyarrow, which is not installed" in done.stderr


def test_core_is_small(environment: Path) -> None:
    """Without extras: a limit of 150 MB, for what lies in site-packages."""
    (packages,) = environment.glob("lib/python*/site-packages")
    walk = os.walk(packages, followlinks=True)
    size = sum(Path(folder, name).stat().st_size for folder, _, names in walk for name in names)
    assert size < 150 * 1024**2


@pytest.mark.parametrize("extra", ["arrow", "spark", "web"])
def test_advised_installation_needs_no_published_release(environment: Path, extra: str) -> None:
    """Without any index, pip lacks a library of the extra, but not the package itself."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    command = [*pip, "install", "--no-index", "--dry-run", f"flowstone[{extra}]"]
    nothing_set = {"PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, env=nothing_set, capture_output=True, text=True, timeout=120, check=False)
    assert f"Requirement already satisfied: flowstone[{extra}]" in done.stdout
    [missing] = re.findall(r"No matching distribution found for ([\w-]+)", done.stderr)
    assert missing in set(asked_for("flowstone", extra)) - CORE
