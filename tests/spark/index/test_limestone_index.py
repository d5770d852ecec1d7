"""The epochs of a directory that grows, is rotated, compacted, marked and truncated."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format.entries import put
from flowstone.outside import production
from flowstone.spark.index import limestone_pieces
from flowstone.spark.index.limestone_index import EpochLost, LimestoneIndex, NotALimestone, NotDurable
from flowstone.spark.index.limestone_pieces import PieceFile
from flowstone.spark.sources.limestone.entry_reader import chunks_of, counted
from tests.spark.limestone_directories import (
    WrittenDirectory,
    clear,
    random_directory,
    random_sessions,
    snippet,
    version,
)


def opened(directory: WrittenDirectory) -> LimestoneIndex:
    return LimestoneIndex.open(production().disk, directory.path)


def epochs_read(index: LimestoneIndex, start: int, end: int) -> list[int]:
    """Return the epoch of each entry read according to the plan."""
    found: list[int] = []
    for part in index.slices(start, end, size=1000):
        for chunk in chunks_of(index.disk, part):
            found += chunk.epochs[counted(chunk, start, min(end, part.limit))].tolist()
    return sorted(found)


def expected(directory: WrittenDirectory, start: int, end: int) -> list[int]:
    return sorted(epoch for epoch, entries in directory.sessions for _ in entries if start < epoch <= end)


def test_durable_epochs_are_read_and_later_ones_are_not(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 3, 30)
    index = opened(directory)
    assert (index.durable, index.earliest, index.horizon, index.has_compacted) == (30, 0, 0, False)
    assert index.storages(30) == [1, 2, 256, 1 << 33]
    for start, end in ((0, 30), (4, 9), (29, 30), (30, 30)):
        assert epochs_read(index, start, end) == expected(directory, start, end)
        assert index.row_count(start, end) == len(expected(directory, start, end))


def test_growing_directory_is_followed_by_refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limestone_pieces, "SMALL_PIECE", 300)
    directory = WrittenDirectory(tmp_path / "d")
    index = opened(directory)
    assert (index.durable, index.storages(9)) == (0, [])
    for channel, epoch, entries in random_sessions(4, 25):
        directory.session(channel, epoch, *entries)
        if channel:
            index.refresh()
            assert index.durable == epoch - 1, "the session exists but is not durable"
            directory.durable(epoch)
            index.refresh()
            assert index.durable == epoch
            assert epochs_read(index, epoch - 3, epoch) == expected(directory, epoch - 3, epoch)
    assert epochs_read(index, 0, 25) == expected(directory, 0, 25)
    assert index.clears(25) == opened(directory).clears(25)


def test_session_voided_after_a_crash_does_not_count_when_its_epoch_is_durable(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 1, put(1, b"a", b"1", version(1)))
    directory.durable(1)
    size = os.path.getsize(f"{directory.path}/pwal_0000")
    directory.append("pwal_0000", snippet(2, put(1, b"b", b"2", version(2))))
    index = opened(directory)
    assert index.row_count(0, 9) == 1
    with open(f"{directory.path}/pwal_0000", "r+b") as file:
        file.seek(size)
        file.write(b"\x06")
    directory.durable(2)
    index.refresh()
    assert (index.durable, index.row_count(0, 2)) == (2, 1)
    assert epochs_read(index, 0, 2) == [1]


def test_truncated_session_is_not_read(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 1, put(1, b"a", b"1", version(1)))
    directory.durable(1)
    size = os.path.getsize(f"{directory.path}/pwal_0000")
    directory.append("pwal_0000", snippet(2, put(1, b"b", b"2", version(2)), is_ended=False))
    index = opened(directory)
    os.truncate(f"{directory.path}/pwal_0000", size)
    directory.session(0, 2, put(1, b"c", b"3", version(2)), put(1, b"d", b"3", version(2)))
    directory.durable(2)
    index.refresh()
    assert epochs_read(index, 0, 2) == [1, 2, 2]


def test_rotation_does_not_change_what_is_read(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 5, 12, has_tail=False)
    index = opened(directory)
    planned = index.slices(0, 12, size=1000)
    directory.rotate(0)
    directory.session(0, 13, put(7, b"new", b"file", version(13)))
    found = sorted(
        epoch
        for part in planned
        for chunk in chunks_of(index.disk, part)
        for epoch in chunk.epochs[counted(chunk, 0, 12)]
    )
    assert found == expected(directory, 0, 12), "the planned piece is found under the new name"
    directory.durable(13)
    index.refresh()
    assert epochs_read(index, 0, 13) == expected(directory, 0, 13)
    assert index.storages(13) == [1, 2, 7, 256, 1 << 33]


def test_file_rotated_while_it_is_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = random_directory(tmp_path / "d", 5, 12, has_tail=False)
    index = LimestoneIndex(production().disk, directory.path)
    walked = LimestoneIndex._walked

    def rotated(self: LimestoneIndex, name: str, durable: int) -> PieceFile:
        if name == "pwal_0000" and len(os.listdir(directory.path)) == 4:
            directory.rotate(0)
            directory.session(0, 13, put(7, b"new", b"file", version(13)))
        return walked(self, name, durable)

    monkeypatch.setattr(LimestoneIndex, "_walked", rotated)
    index.refresh()
    assert index.row_count(0, 12) == len(expected(directory, 0, 12))


def test_replaced_file_is_an_error(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 5, 12)
    index = opened(directory)
    planned = index.slices(0, 12)
    os.unlink(f"{directory.path}/pwal_0000")
    directory.append("pwal_0000", Path(directory.path, "pwal_0001").read_bytes()[:50] + b"x" * 100_000)
    with pytest.raises(EpochLost, match="has changed since the query was planned"):
        [list(chunks_of(index.disk, part)) for part in planned]


def test_compaction_keeps_changes_while_its_input_files_exist(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 6, 20, has_tail=False)
    index = opened(directory)
    files = [directory.rotate(0), directory.rotate(1)]
    directory.compact(*files, epoch=20)
    directory.session(0, 21, put(1, b"behind", b"", version(21)))
    directory.durable(21)
    index.refresh()
    assert (index.horizon, index.earliest, index.has_compacted) == (20, 0, True)
    assert epochs_read(index, 3, 21) == expected(directory, 3, 21)
    index.check_changes(3, 21)
    index.check_state(5)
    os.unlink(f"{directory.path}/{files[0]}")
    index.refresh()
    assert (index.horizon, index.earliest) == (20, 20)
    with pytest.raises(EpochLost, match="after epoch 3 were removed by compaction"):
        index.check_changes(3, 21)
    with pytest.raises(EpochLost, match="state at epoch 5 was removed by compaction"):
        index.check_state(5)
    assert (index.can_show(19), index.can_show(20), index.can_show(21), index.can_show(22)) == (
        False,
        True,
        True,
        False,
    )
    index.check_changes(20, 21)
    assert epochs_read(index, 20, 21) == [21]


def test_sessions_copied_by_compaction_count_once(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    for epoch in range(1, 6):
        directory.session(0, epoch, *(put(1, b"%d" % key, b"v", version(epoch, key)) for key in range(epoch)))
    directory.durable(5)
    whole = directory.rotate(0)
    later = b"".join(snippet(epoch, *entries) for epoch, entries in directory.sessions if epoch > 3)
    index = opened(directory)
    kept = directory.rotate_as(later)
    index.refresh()
    assert epochs_read(index, 0, 5) == expected(directory, 0, 5), "both exist, and the catalog does not list it yet"
    assert index.row_count(0, 5) == len(expected(directory, 0, 5))
    directory.compact(whole, epoch=3)
    for each in (index, opened(directory)):
        each.refresh()
        assert (each.horizon, each.earliest) == (3, 0)
        assert epochs_read(each, 2, 5) == expected(directory, 2, 5)
    # Read again; now the file of the first read is entirely after the compacted range.
    again = directory.rotate_as(later, 2)
    directory.compact(whole, kept, epoch=3)
    index.refresh()
    assert epochs_read(index, 0, 5) == expected(directory, 0, 5)
    assert again > kept > whole


def test_void_session_counts_once_it_is_valid(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 2, put(1, b"a", b"1", version(1)))
    directory.durable(2)
    size = os.path.getsize(f"{directory.path}/pwal_0000")
    directory.append("pwal_0000", snippet(2, put(1, b"b", b"2", version(2)), is_void=True))
    index = opened(directory)
    assert index.row_count(0, 2) == 1
    with open(f"{directory.path}/pwal_0000", "r+b") as file:
        file.seek(size)
        file.write(b"\x02")
    index.refresh()
    assert epochs_read(index, 0, 2) == [2, 2]


def test_second_compaction_after_deleted_files_is_found(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 1, put(1, b"a", b"1", version(1)))
    first = directory.rotate(0)
    directory.durable(1)
    directory.compact(first, epoch=1)
    os.unlink(f"{directory.path}/{first}")
    directory.session(0, 5, put(1, b"b", b"1", version(5)))
    directory.durable(5)
    second = directory.rotate(0, 1)
    directory.compact(second, epoch=5)
    index = opened(directory)
    assert (index.horizon, index.earliest) == (5, 4)
    with pytest.raises(EpochLost):
        index.check_changes(0, 5)
    index.check_changes(4, 5)


def test_batches_end_at_epoch_boundaries(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    for epoch in (1, 2, 3, 7):
        directory.session(epoch % 2, epoch, *(put(1, b"%d" % number, b"", version(epoch)) for number in range(10)))
    directory.durable(8)
    index = opened(directory)
    assert [index.cut(0, max_rows=rows) for rows in (1, 10, 19, 20, 35, 40, 99)] == [1, 1, 1, 2, 3, 8, 8]
    assert index.cut(0) == index.cut(7) == index.cut(8, max_rows=1) == 8
    assert index.cut(3, max_rows=1) == 7
    assert index.cut(0, max_bytes=1) == 1
    assert index.cut(0, max_bytes=1 << 20) == 8


def test_late_entries_name_the_files_of_their_rivals(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 1, put(1, b"a", b"1", version(1)))
    directory.session(1, 2, put(1, b"a", b"2", version(4)))
    directory.session(0, 3, put(1, b"a", b"3", version(3)))
    directory.session(0, 5, put(1, b"a", b"3", version(5)))
    directory.durable(5)
    index = opened(directory)
    assert [part.name for part in index.rivals(2, 3)] == ["pwal_0001"]
    assert index.rivals(4, 5) == index.rivals(5, 5) == []


def test_clears_count_from_their_epoch(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 1, clear(1, 5, 7), clear(2, 1))
    directory.session(0, 3, clear(1, 6), clear(1, 5, 9))
    directory.durable(3)
    index = opened(directory)
    assert index.clears(2) == {1: (5, 7), 2: (1, 0)}
    assert index.clears(3) == {1: (6, 0), 2: (1, 0)}
    assert index.clears(3, after=1) == {1: (6, 0)}


def test_damage_is_distinguished_from_a_torn_tail(tmp_path: Path) -> None:
    directory = random_directory(tmp_path / "d", 7, 5)
    opened(directory)
    directory.durable(6)
    with pytest.raises(DamagedFile, match="session of durable epoch 6"):
        opened(directory)
    other = random_directory(tmp_path / "e", 7, 5)
    other.append("pwal_0000", b"\x55 nonsense")
    with pytest.raises(DamagedFile, match="invalid entry"):
        opened(other)
    zeros = random_directory(tmp_path / "f", 7, 5)
    zeros.append("pwal_0000", b"\0" * 100)
    assert opened(zeros).durable == 5


def test_incomplete_catalog_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = random_directory(tmp_path / "d", 9, 4, has_tail=False)
    path = Path(directory.path, "compaction_catalog")
    path.write_bytes(b"COMPACTION_CATALOG_HEADER\nMAX_EPO")

    def ended(seconds: float) -> None:
        path.unlink()
        directory.compact(directory.rotate(0), directory.rotate(1), epoch=4)

    with monkeypatch.context() as patched:
        # Patch the module's `time`, not `time.sleep` itself, which threads of py4j also call.
        patched.setattr("flowstone.spark.index.limestone_index.time", SimpleNamespace(sleep=ended))
        assert opened(directory).horizon == 4
    path.write_bytes(b"nonsense")
    Path(directory.path, "compaction_catalog.back").unlink(missing_ok=True)
    with pytest.raises(DamagedFile, match="catalog header is missing"):
        opened(directory)


def test_other_directories_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotALimestone, match="not a Limestone data directory"):
            LimestoneIndex.open(production().disk, str(path))


def test_undurable_epochs_are_refused(tmp_path: Path) -> None:
    index = opened(random_directory(tmp_path / "d", 1, 3))
    with pytest.raises(NotDurable, match="epoch 4 is not durable; the durable epoch is 3"):
        index.check_changes(1, 4)
    with pytest.raises(NotDurable, match="epoch 4 is not durable; the durable epoch is 3"):
        index.check_state(4)


def test_file_with_a_session_without_an_epoch_is_named(tmp_path: Path) -> None:
    directory = WrittenDirectory(tmp_path / "d")
    directory.session(0, 0, put(1, b"a", b"1", version(1)))
    directory.durable(3)
    assert opened(directory).has_unnumbered == "pwal_0000"
