"""The systemd units and the example configuration: the real command accepts them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from flowstone.node.configuration import OPTIONS
from tests.packaging.commands import options_of
from tests.places import ROOT
from tests.real_tarantool import free_port

PACKAGING: Final = ROOT / "packaging"
UNIT: Final = PACKAGING / "flowstone@.service"
INSTALLED: Final = "/usr/local/bin/flowstone"
INSTANCE: Final = "orders"
PORT, HTTP_PORT = 3301, 8080


def commands(kind: str) -> list[str]:
    """Return the command lines of the unit for one instance."""
    lines = re.findall(rf"^{kind}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return [line.replace("%i", INSTANCE) for line in lines]


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLOWSTONE_")}
    return subprocess.run(
        command, cwd=directory, env=inherited, capture_output=True, text=True, timeout=120, check=False
    )


def copied_example(directory: Path) -> Path:
    """Return the example with unused addresses: the check includes that they are free."""
    text = (PACKAGING / "node.toml").read_text()
    for port in (PORT, HTTP_PORT):
        assert f'127.0.0.1:{port}"' in text
        text = text.replace(f'127.0.0.1:{port}"', f'127.0.0.1:{free_port()}"')
    path = directory / "node.toml"
    path.write_text(text)
    return path


def check(arguments: list[str], directory: Path) -> None:
    done = run([sys.executable, "-m", "flowstone.cli", *arguments], directory)
    assert (done.returncode, done.stderr) == (0, "")


def test_example_configuration_is_accepted_by_the_check(tmp_path: Path) -> None:
    example = copied_example(tmp_path)
    check(["serve", "--check", "--config", str(example)], tmp_path)
    assert list(tmp_path.iterdir()) == [example]


def test_commented_out_options_are_valid(tmp_path: Path) -> None:
    example = copied_example(tmp_path)
    text, count = re.subn(r"^# (\w+ = )", r"\1", example.read_text(), flags=re.MULTILINE)
    assert count
    example.write_text(text)
    check(["serve", "--check", "--config", str(example)], tmp_path)


def test_reload_check_of_the_unit_has_the_options_of_its_start(tmp_path: Path) -> None:
    (start,) = commands("ExecStart")
    before, hang_up = commands("ExecReload")
    assert hang_up == "kill -HUP $MAINPID"
    assert before.replace(" --check", "") == start
    program, *arguments = shlex.split(before)
    assert program == INSTALLED
    example = str(copied_example(tmp_path))
    check([example if each == f"/etc/flowstone/{INSTANCE}.toml" else each for each in arguments], tmp_path)


def test_settings_of_the_unit_are_options() -> None:
    (environment,) = commands("Environment")
    variables = {each.partition("=")[0] for each in environment.split()}
    assert variables == {OPTIONS["work_dir"].variable}


@pytest.mark.parametrize("name", ["flowstone@", "flowstone-archive@", "flowstone-mirror@"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str) -> None:
    """Without systemd, check that every line has the form of a unit."""
    text = (PACKAGING / f"{name}.service").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"\[(Unit|Service|Install)\]|[A-Z]\w+=.*", line) for line in lines)
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        unit = tmp_path / f"{name}.service"
        unit.write_text(text.replace(INSTALLED, sys.executable))
        done = run([analyze, "verify", str(unit)], tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        rated = run([analyze, "security", "--offline=yes", "--threshold=20", "--no-pager", str(unit)], tmp_path)
        assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize("command", ["archive", "mirror"])
def test_units_beside_the_node_run_commands_with_known_options(command: str) -> None:
    text = (PACKAGING / f"flowstone-{command}@.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, named, *arguments = shlex.split(start)
    assert (program, named) == (INSTALLED, command)
    known = options_of(command)
    assert {each for each in arguments if each.startswith("--")} <= known
    variables = set(re.findall(r"\$\{(\w+)\}", start)) | {"TT_CLI_USERNAME", "TT_CLI_PASSWORD"}
    assert all(variable in text.partition("[Unit]")[0] for variable in variables)
    # What the command writes is in the directory that systemd creates for it.
    assert re.search(rf"^StateDirectory=flowstone-{command}/%i$", text, re.MULTILINE)
    assert "MemoryDenyWriteExecute=yes" in text or command == "mirror"
