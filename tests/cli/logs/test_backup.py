"""`flowstone backup`: a real server starts from it, and the exit codes say whether there is a backup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.node.archived_server import RealServer


@pytest.mark.real
def test_real_server_starts_from_a_backup_of_a_real_server(
    flowstone: Command, tarantool: object, tmp_path: Path
) -> None:
    with RealServer(tmp_path / "master") as server:
        server.eval("fill(1, 100)")
        (uuid,) = server.eval("return box.info.uuid")
        (rows,) = server.eval("return box.info.lsn")
        made = flowstone("backup", "--json", server.uri, tmp_path / "backup")
        assert made.code == 0
        assert json.loads(made.text)["position"] == {"1": rows}
        again = flowstone("backup", server.uri, tmp_path / "backup")
        assert again.code == 2
        assert "overwrites nothing" in again.errors[0]
    checked = flowstone("backup", "--check", tmp_path / "backup")
    assert (checked.code, " is unchanged: " in checked.text) == (0, True)
    copied = flowstone("backup", tmp_path / "backup", tmp_path / "second")
    assert copied.code == 0, copied.errors
    shutil.copytree(tmp_path / "second", tmp_path / "restored")
    with RealServer(tmp_path / "restored", setup="") as restored:
        assert restored.eval("return box.info.uuid, box.info.lsn") == [uuid, rows]


def test_backup_needs_a_directory(flowstone: Command, tmp_path: Path) -> None:
    assert flowstone("backup", "db1:3301").code == 2
    assert flowstone("backup", tmp_path, tmp_path / "copy").code == 2
    assert flowstone("backup", "--check", tmp_path, tmp_path / "copy").code == 2
    assert flowstone("backup", "--check", tmp_path).code == 1
    assert list(tmp_path.iterdir()) == []
