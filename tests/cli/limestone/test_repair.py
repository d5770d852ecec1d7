"""The limestone repair command: statuses and exit codes of the real tool, dry runs, backups, epoch files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowstone.limestone.format import epoch_file, names
from tests.cli.conftest import Command
from tests.limestone import damage
from tests.limestone.damage import CLEAN, MATRIX, SIX, Damage


@pytest.mark.parametrize("cut", [False, True], ids=["mark", "cut"])
@pytest.mark.parametrize("case", MATRIX, ids=[case.name for case in MATRIX])
def test_status_and_exit_code_equal_those_of_the_real_tool(
    flowstone: Command, tmp_path: Path, case: Damage, cut: bool
) -> None:
    directory = damage.write(tmp_path / "data", case.appended)
    status = case.cut if cut else case.repair
    done = flowstone("limestone", "repair", *(["--cut"] if cut else []), directory)
    lines = done.text.splitlines()
    assert done.code == (16 if status == "unrepairable" else 0)
    assert lines[:2] == [f'dblogdir: "{directory}"', "durable-epoch: 5"]
    assert lines[-1] == f"status: {status}"
    if done.code:
        assert [path.name for path in tmp_path.iterdir()] == ["data"]
        return
    backup = next(path for path in tmp_path.iterdir() if path.name != "data")
    assert lines[2] == f'backup: "{backup}"'
    assert (backup / "pwal_0000").read_bytes() == CLEAN + case.appended
    assert flowstone("limestone", "inspect", directory).code == 0


def test_dry_run_lists_the_repairs_and_changes_nothing(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", SIX + b"\x55")
    (directory / names.EPOCH).write_bytes(epoch_file.record(5) + b"\x04")
    done = flowstone("limestone", "repair", "--dry-run", "--cut", directory)
    lines = done.text.splitlines()
    assert done.code == 0
    assert lines[2].startswith("would rename: pwal_0000 to pwal_0000.0")
    assert lines[3:] == [
        f"would mark: pwal_0000 at byte {len(CLEAN)}",
        f"would cut: pwal_0000 at byte {len(CLEAN + SIX)}",
        "would write: epoch with the record 5",
        "status: repaired (dry-run mode)",
    ]
    assert (directory / "pwal_0000").read_bytes() == CLEAN + SIX + b"\x55"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    lost = damage.write(tmp_path / "lost", damage.ENTRY)
    done = flowstone("limestone", "repair", "--dry-run", lost)
    assert (done.code, done.text.splitlines()[2:]) == (16, ["status: unrepairable (dry-run mode)"])


def test_a_torn_epoch_file_is_repaired(flowstone: Command, tmp_path: Path) -> None:
    """tglogutil cannot do this: it exits with 64."""
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.EPOCH).write_bytes(epoch_file.record(5) + b"\x04\x01")
    assert flowstone("limestone", "inspect", directory).code == 1
    done = flowstone("limestone", "repair", "--no-backup", directory)
    assert (done.code, done.text.splitlines()[-1]) == (0, "status: repaired")
    assert (directory / names.EPOCH).read_bytes() == epoch_file.record(5)
    assert flowstone("limestone", "inspect", directory).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_unreadable_epoch_file_requires_an_epoch(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.EPOCH).write_bytes(b"garbage!!")
    done = flowstone("limestone", "repair", directory)
    assert (done.code, done.text.splitlines()[1:]) == (16, ["durable-epoch: unknown", "status: unrepairable"])
    assert "durable epoch unknown; give it with --epoch (the largest epoch of any session is 5)" in done.errors[1]
    done = flowstone("limestone", "repair", "--epoch", "5", "--no-backup", directory)
    assert (done.code, done.text.splitlines()[1:]) == (0, ["status: repaired"])
    assert flowstone("limestone", "inspect", directory).code == 0


def test_json_is_complete(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", SIX[:-1])
    done = flowstone("limestone", "repair", "--json", "--cut", directory)
    found = json.loads(done.text)
    assert Path(found.pop("backup")).is_dir()
    file = found.pop("files")[0]
    assert (directory / file["renamed"]).read_bytes() == CLEAN
    assert (file["name"], file["changes"]) == ("pwal_0000", {"marks": [], "cut": len(CLEAN)})
    assert found == {
        "directory": str(directory),
        "status": "repaired",
        "dry_run": False,
        "durable_epoch": 5,
        "epoch_file": {"problem": None},
    }


def test_unreadable_catalog_prevents_a_repair(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.CATALOG).write_bytes(b"?")
    done = flowstone("limestone", "repair", directory)
    assert done.code == 64
    assert len(done.errors) == 1
