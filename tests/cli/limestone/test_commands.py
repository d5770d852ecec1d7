"""The Limestone commands: help, exit codes of tglogutil, one-line errors."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from flowstone.limestone.format import names
from flowstone.limestone.store import offline_directory as offline
from flowstone.outside import production
from tests.cli.conftest import Command
from tests.limestone import damage, recorded

COMMANDS = ("inspect", "repair", "compact", "cat", "replica")
TOOLS = COMMANDS[:3]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_the_exit_codes(flowstone: Command, command: str) -> None:
    shown = flowstone("limestone", command, "--help")
    text = " ".join(shown.text.split())
    assert shown.code == 0
    assert re.search(rf"Example: flowstone limestone {command} ", text)
    assert "Exit codes" in text


def test_help_is_shown_without_a_command(flowstone: Command) -> None:
    shown = flowstone("limestone")
    assert shown.code == 2
    assert "inspect" in shown.text + "".join(shown.errors)


@pytest.mark.parametrize("command", TOOLS)
def test_usage_error_is_exit_code_64_and_one_line(flowstone: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    damaged = damage.write(tmp_path / "damaged", b"")
    (damaged / names.MANIFEST).write_bytes(b"{")
    newer = damage.write(tmp_path / "newer", b"")
    text = (newer / names.MANIFEST).read_text()
    (newer / names.MANIFEST).write_text(text.replace(":7", ":8"))
    for arguments, word in (
        (["--nosuch", tmp_path], "--nosuch"),
        ([], "Missing argument"),
        ([tmp_path, tmp_path], "unexpected extra argument"),
        (["--epoch", "x", tmp_path], "--epoch"),
        ([tmp_path / "nosuch"], "nosuch: no such directory"),
        ([newer / names.MANIFEST], "is a file; specify its data directory"),
        ([tmp_path / "empty"], "limestone-manifest.json is missing"),
        ([damaged], "content is not JSON"),
        ([newer], "persistent_format_version 8 is not supported"),
    ):
        refused = flowstone("limestone", command, *arguments)
        assert (refused.code, len(refused.errors)) == (64, 1), refused
        assert word in refused.errors[0]


@pytest.mark.parametrize("command", TOOLS)
def test_directory_in_use_is_exit_code_64(flowstone: Command, tmp_path: Path, command: str) -> None:
    directory = damage.write(tmp_path / "data", b"")
    with offline.held(production().disk, str(directory)):
        refused = flowstone("limestone", command, directory)
    assert refused.code == 64
    assert "it is in use" in refused.errors[0]


def test_output_equals_the_recorded_output_of_the_tool(flowstone: Command, tmp_path: Path) -> None:
    real = recorded.HERE / "dirs-master"
    directory = Path(shutil.copytree(real / "before", tmp_path / "data"))
    lines = flowstone("limestone", "inspect", directory).text.splitlines()
    expected = (real / "inspect.out").read_text().splitlines()
    assert lines == [f'dblogdir: "{directory}"', *expected[1:-1]]
    lines = flowstone("limestone", "compact", "--force", directory).text.splitlines()
    expected = (real / "compaction.out").read_text().splitlines()
    assert lines[:2] == [f'dblogdir: "{directory}"', expected[1]]
    assert lines[2] == f'working-directory: "{directory}/compaction_temp"'
    assert lines[-1] == f'compaction was successfully completed: "{directory}"'
