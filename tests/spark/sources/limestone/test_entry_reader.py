"""The entries that executors read from planned pieces: those that count, those of keys, and those not cleared."""

from __future__ import annotations

from pathlib import Path

from flowstone.limestone.format.entries import EntryType, put, remove
from flowstone.limestone.format.entry_table import MINOR, TYPE
from flowstone.outside import production
from flowstone.spark.index.limestone_index import LimestoneIndex
from flowstone.spark.index.limestone_walk import EntryChunk
from flowstone.spark.sources.limestone.entry_reader import chunks_of, counted, points, surviving
from tests.spark.limestone_directories import WrittenDirectory, clear, snippet, version


def only_chunk(path: Path) -> EntryChunk:
    directory = WrittenDirectory(path)
    directory.session(0, 1, put(1, b"a", b"", version(1, 1)), clear(1, 1, 2), put(2, b"a", b"", version(1, 3)))
    directory.append("pwal_0000", snippet(1, put(1, b"void", b"", version(1, 4)), is_void=True))
    directory.session(0, 2, remove(1, b"a", version(2, 5)), put(1, b"b", b"", version(2, 6)))
    directory.durable(2)
    directory.append("pwal_0000", snippet(3, put(1, b"late", b"", version(3, 7))))
    index = LimestoneIndex.open(production().disk, directory.path)
    ((part,),) = [index.slices(0, 2)]
    (chunk,) = chunks_of(index.disk, part)
    return chunk


def test_only_durable_entries_between_two_epochs_count(tmp_path: Path) -> None:
    chunk = only_chunk(tmp_path / "d")

    def minors(start: int, end: int) -> list[int]:
        return chunk.table[MINOR, counted(chunk, start, end)].tolist()

    assert minors(-1, 2) == minors(0, 2) == [1, 2, 3, 5, 6]
    assert minors(1, 2) == [5, 6]
    assert minors(0, 1) == [1, 2, 3]


def test_entries_of_keys_are_selected(tmp_path: Path) -> None:
    chunk = only_chunk(tmp_path / "d")
    rows = counted(chunk, 0, 2)
    assert EntryType.CLEAR_STORAGE in chunk.table[TYPE, rows]
    assert chunk.table[MINOR, points(chunk, rows)].tolist() == [1, 3, 5, 6]


def test_clear_voids_lower_versions_of_its_storage(tmp_path: Path) -> None:
    chunk = only_chunk(tmp_path / "d")
    rows = points(chunk, counted(chunk, 0, 2))

    def left(clears: dict[int, tuple[int, int]], **options: bool) -> list[int]:
        return chunk.table[MINOR, surviving(chunk, rows, clears, **options)].tolist()

    assert left({}) == [1, 3, 5, 6]
    assert left({1: (1, 2)}) == [3, 5, 6]
    assert left({1: (2, 5)}) == [3, 5, 6]
    assert left({1: (2, 6), 2: (9, 0)}) == [6]
    assert left({1: (0, 1)}, is_compacted=True) == [3], "compacted entries have no version"
