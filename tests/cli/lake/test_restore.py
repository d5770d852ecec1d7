"""The restore command without Spark: errors before its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.outside.disk import SystemDisk
from tests.cli.conftest import Command
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import insert, whole
from tests.spark.limestone_directories import random_directory


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    made = WrittenArchive(SystemDisk(), str(tmp_path / "archive"))
    made.define_orders()
    made.write(whole(insert(3, 1, "a"), insert(4, 2, "b")), whole(insert(5, 3, "c")))
    made.save()
    return tmp_path / "archive"


def test_help_has_an_example_and_the_exit_codes(flowstone: Command) -> None:
    text = flowstone("restore", "--help").text
    assert "Example:" in text
    assert "Exit codes:" in text


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("{1: 3}", "the nearest: {1: 2} and {1: 4}"),
        ("3", "the nearest: {1: 2} and {1: 4}"),
        ("99", "the nearest: {1: 5}"),
        ("{1: 99}", "{1: 5}"),
        ("1970-01-01T00:00:00Z", "{}"),
        ("1970-01-01T00:01:46Z", "ends at 1970-01-01T00:01:45+00:00, before 1970-01-01T00:01:46+00:00; use that time"),
        ("2126-05-01T12:00:00Z", "--to newest for the newest state"),
        ("yesterday", "use a time with a time zone"),
        ("latest", "or newest"),
    ],
)
def test_invalid_moment_is_rejected_with_the_nearest_one(
    flowstone: Command, archive: Path, tmp_path: Path, to: str, message: str
) -> None:
    done = flowstone("restore", archive, "--to", to, "--out", tmp_path / "out")
    assert done.code == 2
    assert message in done.errors[-1]
    assert len(done.errors) == 1
    assert not (tmp_path / "out").exists()


def test_output_directory_must_be_empty(flowstone: Command, archive: Path) -> None:
    done = flowstone("restore", archive, "--to", "5", "--out", archive)
    assert done.code == 2
    assert "is not empty" in done.errors[-1]


def test_unknown_format_is_rejected(flowstone: Command, archive: Path, tmp_path: Path) -> None:
    done = flowstone("restore", archive, "--to", "5", "--out", tmp_path / "out", "--format", "csv")
    assert done.code == 2
    assert "snap, delta, parquet" in done.errors[-1]


def test_directory_without_logs_is_rejected(flowstone: Command, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    done = flowstone("restore", tmp_path / "nothing", "--to", "5", "--out", tmp_path / "out")
    assert done.code in (1, 2)
    assert len(done.errors) == 1


def test_missing_directory_is_a_usage_error(flowstone: Command, tmp_path: Path) -> None:
    done = flowstone("restore", tmp_path / "nosuch", "--to", "5", "--out", tmp_path / "out")
    assert done.code == 2
    assert "no such directory; specify an archive" in done.errors[-1]


def test_an_archive_needs_a_moment(flowstone: Command, archive: Path, tmp_path: Path) -> None:
    done = flowstone("restore", archive, "--out", tmp_path / "out")
    assert done.code == 2
    assert "--to is missing" in done.errors[-1]
    assert "newest" in done.errors[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "now"), "specify an epoch (a whole number)"),
        (("--to", "7"), "epoch 7 is not durable; the durable epoch is 6"),
        (("--format", "snap"), "limestone, delta, parquet"),
    ],
)
def test_options_rejected_for_a_limestone(
    flowstone: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    directory = random_directory(tmp_path / "log", 83, 6)
    done = flowstone("restore", directory.path, "--out", tmp_path / "out", *arguments)
    assert done.code == 2
    assert message in done.errors[-1]
    assert not (tmp_path / "out").exists()
