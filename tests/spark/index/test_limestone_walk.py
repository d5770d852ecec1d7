"""Chunks of entries: for any window, each entry with its session, and the place and reason where a walk stops."""

from __future__ import annotations

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format.entries import Entry, EntryType, Marker, encode, put, remove
from flowstone.limestone.format.entries import walk as plain_walk
from flowstone.limestone.format.entry_table import AT, NEED, OTHER, TYPE
from flowstone.spark.index.limestone_walk import OUTSIDE, VALID, VOID, EntrySession, walk
from tests.spark.limestone_directories import random_sessions, snippet, version

BEFORE = EntrySession()
DATA = b"".join(snippet(epoch, *entries, is_void=epoch % 5 == 0) for _, epoch, entries in random_sessions(1, 40))


def walked(
    data: bytes, *, window: int = 1 << 20, start: int = 0, session: EntrySession = BEFORE
) -> list[tuple[int, ...]]:
    """Return offset, type, epoch and state of each entry."""
    found: list[tuple[int, ...]] = []
    for chunk in walk(lambda at, size: data[at : at + size], start, len(data), session, "pwal", window=window):
        assert chunk.start == (chunk.base + int(chunk.table[AT, 0]) if chunk.table.shape[1] else chunk.end)
        places = (chunk.table[AT] + chunk.base).tolist()
        found += zip(places, chunk.table[TYPE].tolist(), chunk.epochs.tolist(), chunk.states.tolist(), strict=True)
    return found


def expected(data: bytes) -> list[tuple[int, ...]]:
    epoch, state = 0, OUTSIDE
    found: list[tuple[int, ...]] = []
    for at, token in plain_walk(lambda at, size: data[at : at + size], len(data)):
        assert isinstance(token, Entry | Marker)
        if isinstance(token, Marker):
            epoch, state = token.epoch, {2: VALID, 6: VOID, 3: OUTSIDE}[int(token.type)]
        found.append((at, int(token.type), epoch, state))
    return found


@pytest.mark.parametrize("window", [64, 1000, 1 << 20])
def test_each_entry_has_its_session_for_any_window(window: int) -> None:
    assert walked(DATA, window=window) == expected(DATA)


def test_walk_resumes_in_the_middle_of_a_session() -> None:
    whole = expected(DATA)
    for place in (3, 50, 200):
        at, _, epoch, state = whole[place]
        before = whole[place - 1]
        assert walked(DATA, start=at, session=EntrySession(before[2], before[3])) == whole[place:], (epoch, state)


@pytest.mark.parametrize(
    ("tail", "why"),
    [(encode(put(1, b"k", b"v" * 50, version(1)))[:-9], NEED), (b"\x55" * 40, OTHER), (b"\0" * 9, OTHER)],
    ids=["torn", "unknown", "zeros"],
)
def test_walk_stops_at_an_incomplete_or_unknown_entry(tail: bytes, why: int) -> None:
    data = DATA + encode(Marker(EntryType.MARKER_BEGIN, 99)) + tail
    chunks = list(walk(lambda at, size: data[at : at + size], 0, len(data), EntrySession(), "pwal", window=128))
    assert [chunk.stopped for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].stopped, chunks[-1].end) == (why, len(data) - len(tail))
    assert chunks[-1].session == EntrySession(99, VALID)


def test_length_beyond_the_end_of_the_file_is_not_read() -> None:
    sizes: list[int] = []
    data = DATA + encode(Marker(EntryType.MARKER_BEGIN, 99)) + b"\x01" + b"\xff" * 40

    def read_at(at: int, size: int) -> bytes:
        sizes.append(size)
        return data[at : at + size]

    list(walk(read_at, 0, len(data), EntrySession(), "pwal", window=256))
    assert max(sizes) <= 4096


@pytest.mark.parametrize(
    "entry",
    [
        put(1, b"k", b"v", version(1)),
        remove(1, b"k", version(1)),
        Marker(EntryType.MARKER_END, 1),
        Marker(EntryType.MARKER_DURABLE, 1),
    ],
)
def test_entry_outside_of_a_session_is_damage(entry: Entry | Marker) -> None:
    with pytest.raises(DamagedFile, match="outside of a session"):
        walked(DATA + encode(entry))


def test_chunk_can_be_cut_to_its_first_entries() -> None:
    (chunk,) = walk(lambda at, size: DATA[at : at + size], 0, len(DATA), EntrySession(), "pwal")
    count = chunk.table.shape[1]
    assert chunk.cut(count) is chunk
    assert chunk.cut(0).session == EntrySession()
    part = chunk.cut(5)
    assert (part.table.shape[1], part.end) == (5, int(chunk.table[AT, 5]))
    assert part.session == EntrySession(int(chunk.epochs[4]), int(chunk.states[4]))
