"""Copies of files: complete, durable, and independent of a file that had the name before."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from flowstone.limestone.format import copying
from flowstone.outside import Disk, production
from tests.limestone.crashes import DIRECTORY, crashed

DISK = production().disk


class WithoutLinks:
    """The real disk without hard links, as if every name were on a separate file system."""

    def link(self, old: str, new: str) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", old)

    rename = link

    def __getattr__(self, name: str) -> Any:
        return getattr(DISK, name)


def test_copy_has_all_bytes_and_an_inode_of_its_own(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    (tmp_path / "old").write_bytes(data)
    copying.copy(DISK, str(tmp_path / "old"), str(tmp_path / "new"))
    (tmp_path / "old").write_bytes(b"")
    assert (tmp_path / "new").read_bytes() == data


def test_second_name_is_a_hard_link_or_a_copy(tmp_path: Path) -> None:
    disk: Any = WithoutLinks()
    (tmp_path / "old").write_bytes(b"data")
    (tmp_path / "linked").write_bytes(b"in the way")
    copying.link_or_copy(DISK, str(tmp_path / "old"), str(tmp_path / "linked"))
    copying.link_or_copy(disk, str(tmp_path / "old"), str(tmp_path / "copied"))
    assert [(tmp_path / name).read_bytes() for name in ("linked", "copied")] == [b"data"] * 2
    assert (tmp_path / "old").stat().st_nlink == 2


def test_file_is_copied_to_another_file_system(tmp_path: Path) -> None:
    disk: Any = WithoutLinks()
    for number, mover in enumerate((DISK, disk)):
        (tmp_path / "old").write_bytes(b"data")
        copying.move(mover, str(tmp_path / "old"), str(tmp_path / str(number)))
        assert (tmp_path / str(number)).read_bytes() == b"data"
        assert not (tmp_path / "old").exists()


def test_overwriting_a_file_leaves_its_other_names_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    copying.write(DISK, str(tmp_path / "a"), b"new")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"new", b"old")
    copying.remove(DISK, str(tmp_path / "nothing"))


def test_range_ends_at_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"0123456789")
    with DISK.open(str(tmp_path / "old")) as source, DISK.create(str(tmp_path / "new")) as target:
        copying.copy_range(source, target, 7, 100)
        copying.copy_range(source, target, 2, 4)
    assert (tmp_path / "new").read_bytes() == b"78923"


def test_copy_with_a_synced_name_is_complete_after_a_crash() -> None:
    def prepare(disk: Disk) -> None:
        copying.write(disk, f"{DIRECTORY}/old", b"data" * 100)
        disk.sync_directory(DIRECTORY)

    def work(disk: Disk) -> None:
        copying.copy(disk, f"{DIRECTORY}/old", f"{DIRECTORY}/new")
        disk.sync_directory(DIRECTORY)

    for disk, is_done in crashed(prepare, work):
        if is_done:
            with disk.open(f"{DIRECTORY}/new") as file:
                assert file.read_at(0, 1000) == b"data" * 100
