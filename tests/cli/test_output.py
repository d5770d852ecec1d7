"""Output files: only regular files are ever replaced, and errors name the file at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flowstone.cli.console import UsageError
from flowstone.cli.output import check_output, destination

COMMAND = (sys.executable, "-m", "flowstone.cli")


def write(path: Path | str, data: bytes = b"new") -> None:
    with destination(str(path)) as sink:
        sink.write(data)


def test_output_file_gets_its_name_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    target.chmod(0o600)
    with destination(str(target)) as sink:
        sink.write(b"new")
        sink.flush()
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["out"]


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), destination(str(target)):
        raise ZeroDivisionError
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("exists", [True, False])
def test_symbolic_link_is_kept(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("target")
    check_output(str(link))
    write(link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_output_is_written_into_a_fifo(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_output(str(fifo))
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write(fifo)
    reader.join(60)
    assert read == [b"new"]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.fixture
def null(tmp_path: Path) -> Path:
    """Return a link in the test directory to a device, which a bug would replace."""
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    return link


def test_output_is_written_to_a_device(null: Path) -> None:
    check_output(str(null))
    write(null)
    assert null.is_symlink()
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize(
    ("path", "says"),
    [("", "is a directory"), ("missing/out", "no such directory: "), ("file/out", "no such directory: ")],
)
def test_error_for_an_unwritable_file_has_the_name_given_by_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"^./{path}: {says}"):
        check_output(f"./{path}")


def test_unwritable_directory_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may do everything
    with pytest.raises(UsageError, match=r"out: directory .* is not writable"):
        check_output(str(tmp_path / "out"))


@pytest.mark.parametrize("form", ["json", "yaml", "csv"])
def test_full_device_is_one_line(shop: Path, tmp_path: Path, form: str) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    by_option = subprocess.run(
        [*COMMAND, "cat", "--format", form, "-o", link, shop], capture_output=True, timeout=120, check=False
    )
    with open("/dev/full", "wb") as full:
        by_shell = subprocess.run(
            [*COMMAND, "cat", "--format", form, shop], stdout=full, stderr=subprocess.PIPE, timeout=120, check=False
        )
    for done, name in ((by_option, str(link)), (by_shell, "stdout")):
        assert done.stderr.decode().splitlines() == [f"flowstone: {name}: No space left on device"]
        assert done.returncode == 1
