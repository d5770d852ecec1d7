"""Pieces of a log file: the final ones, the ones that are read again, and their properties."""

from __future__ import annotations

import pytest

from flowstone.limestone.format.entries import put
from flowstone.spark.index import limestone_pieces
from flowstone.spark.index.limestone_pieces import Clear, EntryPiece, PieceFile, Walk
from tests.spark.limestone_directories import clear, random_sessions, snippet, version


def walked(data: bytes, durable: int, file: PieceFile | None = None) -> PieceFile:
    file = file or PieceFile((0, 0), "pwal_0000")
    Walk(file, durable, "pwal_0000").run(lambda at, size: data[at : at + size], len(data))
    return file


def covers(file: PieceFile) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for piece in file.pieces]


def test_only_durable_entries_are_kept() -> None:
    first, second = snippet(1, put(1, b"a", b"", version(1))), snippet(2, put(2, b"b", b"", version(2)))
    file = walked(first + second, 1)
    assert [(piece.start, piece.end) for piece in file.sound] == [(0, len(first))]
    assert [(piece.start, piece.end) for piece in file.tail] == [(len(first), len(first + second))]
    assert (file.storages, file.newest, file.oldest) == ({1: 1}, 1, 1)
    walked(first + second, 2, file)
    assert (file.tail, file.storages, file.newest) == ([], {1: 1, 2: 2}, 2)
    assert covers(file) == [(0, len(first + second))]


def test_piece_has_epochs_counts_and_version_bounds() -> None:
    entries = [put(1, b"%d" % minor, b"", version(major, minor)) for major, minor in ((3, 5), (1, 9), (3, 1 << 63))]
    data = snippet(4, *entries) + snippet(5, clear(1, 2, 7)) + snippet(7, *entries[:1], is_void=True)
    (piece,) = walked(data + snippet(9, *entries), 9).pieces
    assert piece.epochs.tolist() == [4, 5, 9]
    assert piece.counts.tolist() == [3, 1, 3]
    assert piece.least_between(0, 9) == (1, 9)
    assert piece.least_between(4, 5) == (2, 7)
    assert piece.least_between(5, 8) is None
    assert piece.reaches((3, 1 << 63), 4)
    assert not piece.reaches((3, (1 << 63) + 1), 9)
    assert (piece.count_between(3, 5), piece.is_between(5, 8), piece.is_between(9, 12)) == (4, True, False)


def test_clears_are_kept_once_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Counted(Clear):
        __hash__ = Clear.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

    monkeypatch.setattr(limestone_pieces, "Clear", Counted)
    count = 1000
    data = b"".join(snippet(epoch, clear(epoch % 3, epoch)) for epoch in range(1, count + 1))
    file = walked(data, count)
    walked(data + snippet(count + 1, clear(7, 7)), count + 1, file)
    assert [each.epoch for each in file.clears] == [*range(1, count + 2)]
    assert compared < 10 * count


def test_sessions_of_one_epoch_are_merged() -> None:
    data, expected = b"", dict[int, list[tuple[int, ...]]]()
    for channel, epoch, entries in [*random_sessions(52, 9, is_late=True), *random_sessions(53, 9, is_late=True)]:
        data += snippet(epoch, *entries)
        expected.setdefault(epoch, []).extend(tuple(entry.version) for entry in entries)
        assert channel < 2
    (piece,) = walked(data, 9).pieces
    assert piece.epochs.tolist() == sorted(expected)
    assert piece.counts.tolist() == [len(expected[epoch]) for epoch in sorted(expected)]
    assert [tuple(each) for each in piece.least.T.tolist()] == [min(expected[epoch]) for epoch in sorted(expected)]
    assert [tuple(each) for each in piece.greatest.T.tolist()] == [max(expected[epoch]) for epoch in sorted(expected)]


def test_growing_file_is_walked_incrementally() -> None:
    data, file = b"", PieceFile((0, 0), "pwal_0000")
    for channel, epoch, entries in random_sessions(51, 20):
        if not channel:
            data += snippet(epoch, *entries)
            walked(data, epoch, file)
    whole = walked(data, 20)

    def total(pieces: list[EntryPiece]) -> int:
        return sum(int(piece.counts.sum()) for piece in pieces)

    assert total(file.pieces) == total(whole.pieces)
    assert sorted(file.clears) == sorted(whole.clears)
    assert file.storages == whole.storages
    assert covers(file)[-1][1] == len(data)
