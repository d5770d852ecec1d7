"""The wheel: reproducible anywhere and at any time, and complete."""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path

from tests.packaging.building import built, copied

ELSEWHERE = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
LATER = 1_900_000_000
EPOCH = {"SOURCE_DATE_EPOCH": str(LATER)}


def made_unlike(directory: Path) -> None:
    """Change everything in a tree that may differ between two machines: times, modes, and temporary files."""
    left = directory / "src" / "flowstone" / "__pycache__" / "left.cpython-311.pyc"
    left.parent.mkdir()
    left.write_bytes(b"over")
    for path in directory.rglob("*"):
        os.utime(path, (LATER, LATER))
        path.chmod(0o700 if path.is_dir() else 0o600)


def test_builds_are_reproducible_for_any_directory_time_modes_umask_and_locale(
    tree: Path, wheel: Path, tmp_path: Path
) -> None:
    elsewhere = copied(tmp_path / "a place" / "of another name", tree)
    made_unlike(elsewhere)
    again = built(elsewhere, "wheel", tmp_path / "out", umask=0o077, environment=ELSEWHERE)
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_wheel_has_the_requested_timestamps(tree: Path, tmp_path: Path) -> None:
    first = built(tree, "wheel", tmp_path / "1", environment=EPOCH)
    second = built(tree, "wheel", tmp_path / "2", environment=EPOCH | ELSEWHERE)
    with zipfile.ZipFile(first) as archive:
        assert {member.date_time for member in archive.infolist()} == {(2030, 3, 17, 17, 46, 40)}
    assert second.read_bytes() == first.read_bytes()


def test_wheel_contains_exactly_the_files_of_the_package(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in files(tree / "src") if not name.endswith(".c")}
    assert any(name.startswith("flowstone/iproto/scan_kernels.") and name.endswith(".so") for name in names)
    assert {
        "flowstone/py.typed",
        "flowstone/box/bootstrap-2.6.json",
        "flowstone/box/bootstrap-2.11.json",
        "flowstone/web/page/index.html",
        "flowstone/web/page/dashboard.css",
        "flowstone/web/page/dashboard.js",
    } <= names


def test_source_distribution_is_complete_and_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    source = built(tree, "sdist", tmp_path / "out")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert files(unpacked) == {name for name in files(tree) if not is_built(name)} | {"PKG-INFO"}
    assert built(unpacked, "wheel", tmp_path / "again").read_bytes() == wheel.read_bytes()


def files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def is_built(name: str) -> bool:
    return name.endswith((".c", ".so", ".pyc")) or name.startswith("build/")
