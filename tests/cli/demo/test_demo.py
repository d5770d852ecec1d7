"""`flowstone demo --tour` runs to its end, shows working commands, and cleans up."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.cli.conftest import Command


def test_demo_shows_commands_and_their_output(flowstone: Command) -> None:
    shown = flowstone("demo", "--tour")
    assert shown.code == 0
    commands = re.findall(r"^\$ flowstone (.*)$", shown.text, re.MULTILINE)
    assert len(commands) == 11
    assert all(command.startswith("cat ") for command in commands)
    assert "orders.parquet: 1 rows, read back with pyarrow" in shown.text
    assert any("torn at byte" in line for line in shown.errors)
    assert "Duplicate key exists in unique index 'primary' in space 'orders'" in shown.text
    assert "2 orders, the log ends at {1: 5}" in shown.text
    assert "The files are deleted; --keep keeps them." in shown.text


def test_kept_files_can_be_read_again(flowstone: Command) -> None:
    shown = flowstone("demo", "--tour", "--keep")
    found = re.search(r"The files are in (\S+)\.", shown.text)
    assert found is not None
    directory = Path(found[1])
    try:
        assert flowstone("cat", "--settled", directory / "shop").code == 0
    finally:
        shutil.rmtree(directory)
