"""The limestone inspect command: lines and exit codes of the real tool, a table, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowstone.limestone.format import names
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.outside import production
from tests.cli.conftest import Command
from tests.limestone import damage, recorded
from tests.limestone.damage import MATRIX, Damage

STATUS = ["OK", "auto-repairable", "unrepairable"]


@pytest.mark.parametrize("case", MATRIX, ids=[case.name for case in MATRIX])
def test_exit_code_equals_that_of_the_real_tool(flowstone: Command, tmp_path: Path, case: Damage) -> None:
    directory = damage.write(tmp_path / "data", case.appended)
    shown = flowstone("limestone", "inspect", directory)
    assert shown.code == case.inspect
    lines = shown.text.splitlines()
    assert (lines[2], lines[-1]) == ("durable-epoch: 5", f"status: {STATUS[case.inspect]}")
    assert bool(shown.errors) == (case.inspect > 0)


def test_problems_are_listed_with_their_places(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.SIX + b"\x55")
    (directory / names.EPOCH).write_bytes((directory / names.EPOCH).read_bytes() + b"\x04")
    shown = flowstone("limestone", "inspect", directory)
    assert shown.code == 1
    assert shown.errors == [
        "epoch: the last 1 bytes are not a record",
        f"pwal_0000: at byte {len(damage.CLEAN)}: session of epoch 6 is not durable: durable epoch is 5",
        f"pwal_0000: at byte {len(damage.CLEAN + damage.SIX)}: invalid entry type 0x55",
    ]


def test_table_of_files_is_shown_on_request(flowstone: Command) -> None:
    shown = flowstone("limestone", "inspect", "--files", recorded.HERE / "dirs-master/before")
    rows = [line.split() for line in shown.text.splitlines() if line.strip().startswith("pwal_")]
    assert rows == [["pwal_0000", "511", "4", "5", "10", "ok"], ["pwal_0001", "277", "3", "5", "6", "ok"]]
    assert "2 normal_with_blob; blobs: 3" in shown.text


def test_json_is_complete(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.SIX)
    shown = flowstone("limestone", "inspect", "--json", directory)
    assert shown.code == 1
    found = json.loads(shown.text)
    assert found.pop("files") == [
        {
            "name": "pwal_0000",
            "bytes": len(damage.CLEAN + damage.SIX),
            "verdict": "nondurable",
            "max_epoch": 6,
            "sessions": 3,
            "entries": {"normal_entry": 2},
            "is_detached": False,
            "is_superfluous": False,
            "findings": [
                {
                    "verdict": "nondurable",
                    "offset": len(damage.CLEAN),
                    "what": "session of epoch 6 is not durable: durable epoch is 5",
                }
            ],
        }
    ]
    assert found == {
        "directory": str(directory),
        "status": "auto-repairable",
        "format_version": "1.1",
        "persistent_format_version": 7,
        "instance_uuid": damage.UUID,
        "durable_epoch": 5,
        "max_appeared_epoch": 6,
        "entries": {"normal_entry": 2},
        "epoch_file": {"problem": None},
        "catalog": {"problem": None, "compacted": [], "detached": [], "max_epoch_id": 0, "max_blob_id": 0},
        "blobs": {"stored": 0, "missing": []},
    }


def test_epoch_can_be_chosen(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.SIX)
    shown = flowstone("limestone", "inspect", "--epoch", "6", f"{directory}/")
    assert shown.code == 0
    assert "count-durable-wal-entries: 3" in shown.text


def test_an_epoch_file_without_records_is_unrepairable(flowstone: Command, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.EPOCH).write_bytes(b"garbage!!")
    (directory / names.CATALOG).write_bytes(b"?")
    shown = flowstone("limestone", "inspect", directory)
    assert shown.code == 2
    assert "durable-epoch: unknown" in shown.text
    assert "catalog header is missing" in shown.errors[1]


@pytest.mark.parametrize("tool", ["inspect", "repair", "compact"])
def test_directory_with_replaced_data_is_left_unchanged(flowstone: Command, tmp_path: Path, tool: str) -> None:
    """A master was reseeding a replica; the current directory does not have the replica's data."""
    directory = damage.write(tmp_path / "data", b"")
    replica_seeding.put_aside(production().disk, str(directory))
    shown = flowstone("limestone", tool, directory, *(["--force"] if tool == "compact" else []))
    assert shown.code == 64
    assert "put_aside: a seeding did not complete" in " ".join(shown.errors)
    assert (directory / "put_aside/pwal_0000").read_bytes() == damage.CLEAN
