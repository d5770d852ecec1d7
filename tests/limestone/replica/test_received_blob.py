"""A blob that arrives in pieces: it is durable before it gets its name, and deleted if it never gets one."""

from __future__ import annotations

from pathlib import Path

from flowstone.limestone.format.files import read_whole
from flowstone.limestone.replica.received_blob import ReceivedBlob
from flowstone.outside import Disk, production
from tests.limestone.crashes import DIRECTORY, crashed


def test_received_blob_replaces_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"old")
    received = ReceivedBlob(production().disk, f"{tmp_path}/temporary")
    received.append(b"new ", is_last=False)
    received.append(b"content", is_last=True)
    received.move(f"{tmp_path}/name")
    received.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert (tmp_path / "name").read_bytes() == b"new content"


def test_discarded_blob_is_removed(tmp_path: Path) -> None:
    for is_last in (False, True):
        received = ReceivedBlob(production().disk, f"{tmp_path}/temporary")
        received.append(b"half", is_last=is_last)
        received.discard()
        assert not list(tmp_path.iterdir())


def test_crash_leaves_no_partial_blob() -> None:
    def work(disk: Disk) -> None:
        received = ReceivedBlob(disk, f"{DIRECTORY}/temporary")
        received.append(b"half, ", is_last=False)
        received.append(b"and half", is_last=True)
        received.move(f"{DIRECTORY}/name")

    for disk, is_done in crashed(lambda disk: None, work):
        found = read_whole(disk, f"{DIRECTORY}/name")
        assert found == b"half, and half" or (found is None and not is_done)
