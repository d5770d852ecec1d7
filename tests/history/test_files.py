"""Resolves paths to log files, with clear errors for missing ones."""

from pathlib import Path

import pytest

from flowstone.history.files import NoSuchLog, find_logs
from flowstone.outside import production
from tests.history.logs import Log


def test_directory_is_read_as_its_logs_in_order(tmp_path: Path) -> None:
    for start in (20, 3):
        with Log(tmp_path, start=start) as log:
            log.insert(512, 1)
    (tmp_path / "notes.txt").write_text("foreign")
    (tmp_path / "00000000000000000009.xlog.inprogress").write_text("half")
    names = [Path(path).name for path in find_logs(production().disk, [str(tmp_path)])]
    assert names == ["00000000000000000003.xlog", "00000000000000000020.xlog"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["0.snap", "0.xlog", "22.snap", "22.xlog"], ["0.snap", "0.xlog", "22.xlog"]),
        (["0.snap", "22.snap", "22.xlog"], ["22.snap", "22.xlog"]),  # the older logs are gone
        (["0.xlog", "22.snap", "22.xlog"], ["0.xlog", "22.xlog"]),  # the logs reach further back
        (["0.snap", "22.snap"], ["22.snap"]),
    ],
)
def test_only_the_snapshot_before_the_logs_is_read(tmp_path: Path, files: list[str], expected: list[str]) -> None:
    def full(name: str) -> str:
        return name.rjust(len("00000000000000000000.snap"), "0")

    for name in files:
        (tmp_path / full(name)).write_text("")
    found = [Path(path).name for path in find_logs(production().disk, [str(tmp_path)])]
    assert found == [full(name) for name in expected]


def test_links_to_directories_are_not_followed(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.insert(512, 1)
    (tmp_path / "again").symlink_to(tmp_path)
    assert find_logs(production().disk, [str(tmp_path)], recursive=True) == [log.path]


def test_subdirectories_are_searched_only_on_request(tmp_path: Path) -> None:
    with Log(tmp_path / "a" / "b") as log:
        log.insert(512, 1)
    disk = production().disk
    with pytest.raises(NoSuchLog, match="--recursive"):
        find_logs(disk, [str(tmp_path)])
    assert find_logs(disk, [str(tmp_path)], recursive=True) == [log.path]


@pytest.mark.parametrize(("name", "message"), [("absent.xlog", "no such file"), ("notes.txt", "not a log file")])
def test_error_names_a_path_that_is_not_a_log(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(NoSuchLog, match=message) as caught:
        find_logs(production().disk, [str(tmp_path / name)])
    assert str(tmp_path / name) in str(caught.value)
