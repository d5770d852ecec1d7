"""Directories: the files that cover a position, and all kinds of missing or wrong files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.outside import production
from flowstone.xlog.directory import LogDirectory, scan_directory
from flowstone.xlog.errors import DamagedLog, ForeignFile, LogGap
from flowstone.xlog.meta import FileType, Meta, encode, file_name

DISK = production().disk
UUID = "11111111-0000-4000-8000-000000000001"
OTHER = "11111111-0000-4000-8000-000000000002"
Vclock = dict[int, int]


def put(
    directory: Path,
    vclock: Vclock,
    prev_vclock: Vclock | None = None,
    file_type: FileType = FileType.XLOG,
    uuid: str = UUID,
) -> Path:
    path = directory / file_name(vclock, file_type)
    path.write_bytes(encode(Meta(file_type, uuid, vclock, prev_vclock)))
    return path


def scan(directory: Path) -> LogDirectory:
    return scan_directory(DISK, str(directory))


def names(directory: Path, vclock: Vclock, **options: bool) -> list[int]:
    return [log.signature for log in scan(directory).files_from(vclock, **options)]


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Create a snapshot at {1: 10} and logs from {}, {1: 10}, {1: 15, 2: 5}, {1: 30, 2: 5}."""
    put(tmp_path, {1: 10}, file_type=FileType.SNAP)
    put(tmp_path, {})
    put(tmp_path, {1: 10}, {})
    put(tmp_path, {1: 15, 2: 5}, {1: 10})
    put(tmp_path, {1: 30, 2: 5}, {1: 15, 2: 5})
    return tmp_path


def test_files_are_listed_in_the_order_of_their_signatures(chain: Path) -> None:
    put(chain, {1: 30}, file_type=FileType.SNAP)
    found = scan(chain)
    assert [log.signature for log in found.logs] == [0, 10, 20, 35]
    assert [snap.signature for snap in found.snapshots] == [10, 30]
    newest = found.newest_snapshot()
    assert newest is not None
    assert newest.meta.vclock == {1: 30}
    assert found.instance_uuid == UUID


def test_scan_ignores_foreign_names_lists_leftovers_and_counts_vinyl_files(chain: Path) -> None:
    before = scan(chain)
    foreign = ["notes.txt", "1.xlog", "00000000000000000010.xlog.bak", "x00000000000000000010.xlog"]
    for name in foreign:
        (chain / name).write_text("whatever")
    for name in ("00000000000000000000.vylog", "00000000000000000002.run", "00000000000000000002.index"):
        (chain / name).write_text("whatever")
    (chain / "00000000000000000040.snap.inprogress").write_text("SNA")
    (chain / "512").mkdir()
    found = scan(chain)
    assert (found.logs, found.snapshots) == (before.logs, before.snapshots)
    assert found.leftovers == (str(chain / "00000000000000000040.snap.inprogress"),)
    assert found.vinyl_count == 3
    assert set(found.others) == {
        "notes.txt",
        "1.xlog",
        "00000000000000000010.xlog.bak",
        "x00000000000000000010.xlog",
        "512",
    }


def test_empty_directory_has_no_files(tmp_path: Path) -> None:
    found = scan(tmp_path)
    assert found.newest_snapshot() is None
    assert found.instance_uuid is None
    assert found.files_from({1: 5}) == []


@pytest.mark.parametrize(
    ("vclock", "expected"),
    [
        ({}, [0, 10, 20, 35]),
        ({1: 9}, [0, 10, 20, 35]),
        ({1: 10}, [10, 20, 35]),
        ({1: 29, 2: 4}, [10, 20, 35]),
        ({1: 29, 2: 5}, [20, 35]),
        ({1: 30, 2: 5}, [35]),
        ({1: 99, 2: 99, 3: 1}, [35]),
    ],
)
def test_selected_logs_start_with_the_one_that_covers_the_position(
    chain: Path, vclock: Vclock, expected: list[int]
) -> None:
    assert names(chain, vclock) == expected


def test_position_before_the_oldest_log_raises_a_gap_with_the_missing_rows(chain: Path) -> None:
    (chain / "00000000000000000000.xlog").unlink()
    with pytest.raises(LogGap, match=r"between \{1: 4\} and \{1: 10\}: LSN 5..10 of replica 1 missing") as caught:
        names(chain, {1: 4})
    assert caught.value.missing == ((1, 5, 10),)
    assert (caught.value.have, caught.value.need) == ({1: 4}, {1: 10})
    assert names(chain, {1: 4}, force=True) == [10, 20, 35]


def test_log_missing_in_the_middle_raises_a_gap_with_the_missing_rows(chain: Path) -> None:
    (chain / "00000000000000000020.xlog").unlink()
    with pytest.raises(LogGap) as caught:
        names(chain, {1: 10})
    # The missing file started at {1: 15, 2: 5}, where the previous one ends.
    assert caught.value.missing == ((1, 16, 30),)
    assert caught.value.path.endswith("00000000000000000035.xlog")
    assert names(chain, {1: 10}, force=True) == [10, 35]
    assert names(chain, {1: 30, 2: 5}) == [35]


def test_logs_without_a_prevvclock_are_accepted_in_order(tmp_path: Path) -> None:
    put(tmp_path, {1: 10})
    put(tmp_path, {1: 20})
    assert names(tmp_path, {1: 10}) == [10, 20]


def test_local_rows_are_ignored_for_a_position_of_another_instance(tmp_path: Path) -> None:
    put(tmp_path, {1: 10})
    put(tmp_path, {0: 3, 1: 15}, {1: 10})
    assert names(tmp_path, {1: 15}) == [10, 18]
    assert names(tmp_path, {1: 15}, ignore_local=True) == [18]
    (tmp_path / "00000000000000000010.xlog").unlink()
    with pytest.raises(LogGap) as caught:
        names(tmp_path, {1: 14}, ignore_local=True)
    assert caught.value.missing == ((1, 15, 15),)


def test_log_of_another_instance_is_rejected_or_skipped(chain: Path) -> None:
    put(chain, {1: 40, 2: 5}, {1: 30, 2: 5}, uuid=OTHER)
    with pytest.raises(ForeignFile, match=f"written by instance {OTHER}, but the directory belongs to {UUID}"):
        names(chain, {1: 10})
    assert names(chain, {1: 10}, force=True) == [10, 20, 35]


def test_name_that_contradicts_the_header_is_rejected_or_skipped(chain: Path) -> None:
    (chain / "00000000000000000035.xlog").rename(chain / "00000000000000000036.xlog")
    with pytest.raises(DamagedLog, match="file name says signature 36, vclock 35"):
        names(chain, {1: 10})
    assert names(chain, {1: 10}, force=True) == [10, 20]
    (chain / "00000000000000000010.snap").rename(chain / "00000000000000000010.xlog")
    with pytest.raises(DamagedLog, match="file name says XLOG, header SNAP"):
        _ = scan(chain).logs[1].meta


def test_unreadable_header_after_the_position_is_rejected_or_skipped(chain: Path) -> None:
    (chain / "00000000000000000036.xlog").write_bytes(b"XLOG\n0.13\nVer")
    with pytest.raises(DamagedLog, match="ends inside its text header"):
        names(chain, {1: 10})
    assert names(chain, {1: 10}, force=True) == [10, 20, 35]


def test_headers_before_the_position_are_not_read(chain: Path) -> None:
    (chain / "00000000000000000000.xlog").write_bytes(b"")
    assert names(chain, {1: 10}) == [10, 20, 35]
