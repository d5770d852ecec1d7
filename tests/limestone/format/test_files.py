"""Small files: bounded, written in place or replaced, and complete after a crash where that is promised."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import files
from flowstone.outside import Disk, production
from flowstone.outside.disk import SystemDisk
from tests.limestone.crashes import DIRECTORY, crashed


def test_file_written_in_place_keeps_its_inode(tmp_path: Path) -> None:
    disk, path = production().disk, tmp_path / "file"
    files.write_whole(disk, str(path), b"first, and longer")
    inode = path.stat().st_ino
    files.write_whole(disk, str(path), b"second")
    assert (path.read_bytes(), path.stat().st_ino) == (b"second", inode)
    assert files.read_whole(disk, str(path)) == b"second"
    assert files.read_whole(disk, str(tmp_path)) is None


def test_file_deleted_during_a_read_counts_as_missing(tmp_path: Path) -> None:
    """A compaction replaces the copy of the catalog while a snapshot reads it."""

    class Deleting(SystemDisk):
        def kind(self, path: str) -> Literal["file", "directory"] | None:
            kind = super().kind(path)
            Path(path).unlink(missing_ok=True)
            return kind

    (tmp_path / "file").write_bytes(b"x")
    assert files.read_whole(Deleting(), str(tmp_path / "file")) is None


def test_oversized_small_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    with path.open("wb") as file:
        file.truncate(files.SMALL_FILE_MAX + 1)
    with pytest.raises(DamagedFile, match="far more"):
        files.read_whole(production().disk, str(path))


def test_replaced_file_is_the_old_or_the_new_one_after_any_crash() -> None:
    def prepare(disk: Disk) -> None:
        files.replace(disk, DIRECTORY, "file", "temporary", b"old")

    def work(disk: Disk) -> None:
        files.replace(disk, DIRECTORY, "file", "temporary", b"new")

    found = set()
    for disk, is_done in crashed(prepare, work):
        data = files.read_whole(disk, f"{DIRECTORY}/file")
        assert data in ((b"new",) if is_done else (b"old", b"new"))
        found.add(data)
    assert found == {b"old", b"new"}
