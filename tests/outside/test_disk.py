"""The disk: complete reads and appends, exclusive names, locks between processes, errors that name a file."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flowstone.errors import FlowstoneError
from flowstone.outside import AlreadyLocked, Disk
from flowstone.outside import disk as disk_module
from flowstone.outside.disk import SystemDisk

HOLD_LOCK = """
import sys
from flowstone.outside.disk import SystemDisk
with SystemDisk().lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def disk() -> Disk:
    return SystemDisk()


def test_a_created_file_is_appended_to_and_read(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "a.xlog")
    with disk.create(path) as file:
        file.append(b"XLOG\n", bytearray(b"0.13"), memoryview(b"\n"))
        file.append()
        file.append(b"")
        file.sync()
        assert file.path == path
        assert file.size() == disk.size(path) == 10
        assert file.read_at(0, 10) == b"XLOG\n0.13\n"
        assert file.read_at(5, 4) == b"0.13"


def test_new_directories_and_files_are_readable_by_their_owner_only(disk: Disk, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        disk.make_directory(str(tmp_path / "data" / "wal" / ""))
        disk.create(str(tmp_path / "data" / "wal" / "a.xlog")).close()
    finally:
        os.umask(before)
    modes = [(tmp_path / path).stat().st_mode & 0o777 for path in ("data", "data/wal", "data/wal/a.xlog")]
    assert modes == [0o700, 0o700, 0o600]


def test_existing_directory_and_file_keep_their_modes(disk: Disk, tmp_path: Path) -> None:
    directory, file = tmp_path / "data", tmp_path / "data" / "a.xlog"
    directory.mkdir()
    file.write_bytes(b"")
    directory.chmod(0o750)
    file.chmod(0o640)
    disk.make_directory(str(directory))
    disk.append_to(str(file)).close()
    disk.overwrite(str(file), b"", 0)
    assert (directory.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o750, 0o640)


def test_a_read_is_short_only_at_the_end(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    with disk.open(str(path)) as file:
        assert file.read_at(6, 100) == b"6789"
        assert file.read_at(10, 1) == b""
        assert file.read_at(1000, 1) == b""
        assert file.read_at(3, 0) == b""


def test_short_read_is_continued(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 3), offset))
    with disk.open(str(path)) as file:
        assert file.read_at(1, 8) == b"12345678"
        assert file.read_at(5, 80) == b"56789"


def test_short_append_is_continued(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_five(descriptor: int, parts: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(parts)[:5])

    monkeypatch.setattr(os, "writev", write_five)
    with disk.create(str(tmp_path / "a")) as file:
        file.append(b"012", b"3456", b"", b"789", b"abcdefghijk")
        assert file.read_at(0, 100) == b"0123456789abcdefghijk"


def test_append_accepts_more_parts_than_writev(disk: Disk, tmp_path: Path) -> None:
    parts = [b"%06d" % number for number in range(2 * disk_module.WRITEV_PARTS_MAX + 7)]
    with disk.create(str(tmp_path / "a")) as file:
        file.append(*parts)
        assert file.read_at(0, file.size()) == b"".join(parts)


def test_append_starts_at_the_end_of_the_file_even_after_a_truncation(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"whole|torn")
    with disk.append_to(str(path)) as file:
        file.truncate(6)
        file.append(b"next")
    assert path.read_bytes() == b"whole|next"


def test_create_over_an_existing_file_is_rejected(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError) as caught:
        disk.create(str(path))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"precious"


def test_error_names_a_missing_file(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "missing")
    for call in (disk.open, disk.append_to, disk.size, disk.unlink, disk.list_directory, disk.sync_directory):
        with pytest.raises(FileNotFoundError) as caught:
            call(path)
        assert caught.value.filename == path


def test_a_directory_is_not_opened_as_a_file(disk: Disk, tmp_path: Path) -> None:
    for call in (disk.open, disk.append_to):
        with pytest.raises(IsADirectoryError) as caught:
            call(str(tmp_path))
        assert caught.value.filename == str(tmp_path)


def test_write_to_a_file_opened_for_reading_is_rejected_with_its_name(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    with disk.open(str(path)) as file, pytest.raises(OSError, match="Bad file descriptor") as caught:
        file.append(b"y")
    assert caught.value.filename == str(path)


def test_error_on_a_full_disk_names_the_file(disk: Disk) -> None:
    with disk.append_to("/dev/full") as file, pytest.raises(OSError, match="No space left") as caught:
        file.append(b"x")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")


def test_file_can_be_closed_twice_and_not_used_after_close(disk: Disk, tmp_path: Path) -> None:
    file = disk.create(str(tmp_path / "a"))
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.size()


def test_rename_replaces_a_file_and_unlink_removes_it(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "a.inprogress").write_bytes(b"new")
    (tmp_path / "a").write_bytes(b"old")
    disk.rename(str(tmp_path / "a.inprogress"), str(tmp_path / "a"))
    disk.sync_directory(str(tmp_path))
    assert (tmp_path / "a").read_bytes() == b"new"
    disk.unlink(str(tmp_path / "a"))
    assert disk.list_directory(str(tmp_path)) == []


def test_directories_are_created_with_parents_and_listed_in_order(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "er")
    disk.make_directory(path)
    disk.make_directory(path)
    for name in ("b", "a", "c"):
        disk.create(f"{path}/{name}").close()
    assert disk.list_directory(path) == ["a", "b", "c"]


def test_kind_distinguishes_files_directories_and_absence(disk: Disk, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(file)
    assert disk.kind(str(file)) == "file"
    assert disk.kind(str(tmp_path / "link")) == "file"
    assert disk.kind(str(tmp_path)) == "directory"
    for nothing in ("missing", "pipe", "a/below-a-file"):
        assert disk.kind(str(tmp_path / nothing)) is None


def test_lock_is_exclusive_and_can_be_acquired_again_after_release(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path)
    with disk.lock(path) as lock:
        with pytest.raises(AlreadyLocked, match="cannot lock"):
            disk.lock(path)
        lock.release()
        disk.lock(path).release()
        lock.release()


def test_lock_held_by_another_process_is_rejected_until_its_death(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AlreadyLocked) as caught:
            disk.lock(path)
        holder.kill()
        holder.wait(timeout=30)
    assert isinstance(caught.value, FlowstoneError)
    assert path in str(caught.value)
    assert caught.value.hint
    disk.lock(path).release()


def test_lock_leaves_no_file_and_works_for_directories(disk: Disk, tmp_path: Path) -> None:
    disk.lock(str(tmp_path)).release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        disk.lock(str(tmp_path / "file"))


def test_free_space_equals_that_of_the_file_system(disk: Disk, tmp_path: Path) -> None:
    assert 0 < disk.free_space(str(tmp_path)) < 2**63


@pytest.mark.parametrize(("soft", "expected"), [(1024, 1024), (resource.RLIM_INFINITY, None)])
def test_limit_of_open_files_is_the_soft_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, soft: int, expected: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    assert disk.open_files_max() == expected


def test_link_is_distinguished_from_its_target(tmp_path: Path) -> None:
    disk = SystemDisk()
    (tmp_path / "link").symlink_to(tmp_path)
    assert disk.is_link(str(tmp_path / "link"))
    assert disk.kind(str(tmp_path / "link")) == "directory"
    assert not disk.is_link(str(tmp_path))
    assert disk.real_path(f"{tmp_path}/none/../link/./below") == disk.real_path(f"{tmp_path}/link") + "/below"
    assert disk.real_path(f"{tmp_path}/link") != f"{tmp_path}/link"


def test_file_lock_is_exclusive_and_does_not_change_the_file(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "limestone-manifest.json"
    path.write_bytes(b"{}")
    with disk.lock_file(str(path)):
        with pytest.raises(AlreadyLocked, match="cannot lock"):
            disk.lock_file(str(path))
        with path.open("r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    disk.lock_file(str(path)).release()
    assert path.read_bytes() == b"{}"
