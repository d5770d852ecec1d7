"""The limestone compact command: its confirmation, output and remaining files."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from flowstone.limestone.format import names
from flowstone.limestone.store.recovery import recover
from flowstone.outside import production
from tests.cli.conftest import Command
from tests.limestone import damage, recorded


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded.HERE / "dirs-master/before", tmp_path / "data"))


def is_compacted(directory: Path) -> bool:
    found = [path.name for path in directory.glob("pwal_*")]
    assert len(recover(production().disk, str(directory), repairs=False).snapshot) == 7
    return found == [names.COMPACTED]


@pytest.mark.parametrize(("answer", "is_done"), [("y\n", True), ("Yes\n", True), ("n\n", False), ("", False)])
def test_compact_asks_for_confirmation(
    flowstone: Command, directory: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_done: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    done = flowstone("limestone", "compact", directory)
    assert done.code == 0
    assert done.text.splitlines()[3:5] == [
        "removes: 2 log files, replaced by one file with their rows up to epoch 5; unreferenced blobs",
        f'keeps: a backup of the directory, in "{directory}.backup_XXXXXX"',
    ]
    assert "execute? (y/N) " in done.text
    assert is_compacted(directory) is is_done
    assert done.errors == ([] if is_done else ["flowstone: aborted"])


def test_compact_reports_an_empty_result(flowstone: Command, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert "keeps: no backup" in flowstone("limestone", "compact", "--no-backup", directory).text.splitlines()


@pytest.mark.parametrize("options", [[], ["--force"], ["--dry-run"], ["--force", "--spark"], ["--force", "--json"]])
def test_compacted_directory_is_unchanged(flowstone: Command, directory: Path, options: list[str]) -> None:
    assert flowstone("limestone", "compact", "--force", "--no-backup", directory).code == 0
    before = {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()}
    done = flowstone("limestone", "compact", *options, directory)
    assert (done.code, done.errors) == (0, [])
    if "--json" in options:
        found = json.loads(done.text)
        assert (found["rows"], found["inputs"], found["backup"]) == (7, [], None)
    else:
        assert done.text.splitlines()[-1] == "nothing to do: already compacted to 7 rows, 353 bytes"
    assert {path: path.read_bytes() for path in directory.parent.rglob("*") if path.is_file()} == before


def test_backup_is_kept_unless_disabled(flowstone: Command, directory: Path) -> None:
    again = Path(shutil.copytree(directory, directory.parent / "again"))
    done = flowstone("limestone", "compact", "--force", directory)
    backup = next(path for path in directory.parent.iterdir() if path.name.startswith("data.backup_"))
    assert f'backup: "{backup}"' in done.text.splitlines()
    assert not is_compacted(backup)
    assert is_compacted(directory)
    done = flowstone("limestone", "compact", "--force", "--no-backup", again)
    assert "backup: " not in done.text
    assert len(list(directory.parent.iterdir())) == 3


def test_a_dry_run_changes_nothing(flowstone: Command, directory: Path) -> None:
    before = sorted(directory.parent.rglob("*"))
    done = flowstone("limestone", "compact", "--dry-run", directory)
    assert done.code == 0
    assert done.text.splitlines()[-2:] == [
        "would compact: 2 log files of 788 bytes to 7 rows",
        "compaction will be successfully completed (dry-run mode)",
    ]
    assert sorted(directory.parent.rglob("*")) == before


def test_json_is_complete_and_asks_no_confirmation(flowstone: Command, directory: Path) -> None:
    refused = flowstone("limestone", "compact", "--json", directory)
    assert refused.code == 64
    assert "--force" in refused.errors[0]
    planned = json.loads(flowstone("limestone", "compact", "--json", "--dry-run", directory).text)
    assert planned == {
        "directory": str(directory),
        "durable_epoch": 5,
        "inputs": ["pwal_0000", "pwal_0001"],
        "superfluous": [],
        "bytes_before": 788,
        "rows": 7,
        "dry_run": True,
    }
    done = json.loads(flowstone("limestone", "compact", "--json", "--force", directory).text)
    assert Path(done.pop("backup")).is_dir()
    more = {"dry_run": False, "bytes_after": 353, "removed_blobs": [], "max_blob_id": 3}
    assert done == planned | more


def test_working_directory_and_epoch_can_be_chosen(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.SIX)
    (tmp_path / "work").mkdir()
    done = flowstone(
        "limestone", "compact", "--force", "--epoch", "6", "--working-dir", tmp_path / "work", f"{directory}/"
    )
    assert done.code == 0
    assert done.text.splitlines()[1] == f'working-directory: "{tmp_path}/work"'
    assert len(recover(production().disk, str(directory), repairs=False).snapshot) == 3


def test_missing_working_directory_is_not_created(flowstone: Command, directory: Path) -> None:
    before = sorted(directory.parent.rglob("*"))
    for place in (directory.parent / "nosuch", directory / names.EPOCH):
        refused = flowstone("limestone", "compact", "--force", "--working-dir", place, directory)
        assert refused.code == 64
        assert f"--working-dir {place}: no such directory" in refused.errors[0]
    assert sorted(directory.parent.rglob("*")) == before


def test_links_and_damage_are_rejected(flowstone: Command, directory: Path) -> None:
    link = directory.parent / "link"
    link.symlink_to(directory)
    refused = flowstone("limestone", "compact", "--force", link)
    assert refused.code == 64
    assert "symbolic link" in refused.errors[0]
    (directory / "pwal_0000").write_bytes(damage.ENTRY)
    for option in ("--force", "--dry-run"):
        refused = flowstone("limestone", "compact", option, directory)
        assert refused.code == 64
        assert "pwal_0000 is damaged at byte 0" in refused.errors[0]
    assert sorted(path.name for path in directory.parent.iterdir()) == ["data", "link"]
