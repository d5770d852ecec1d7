"""The session index agrees with a slow scan of files of any size, up to the first unreadable byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowstone.limestone.format import entry_walk
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode, put, walk
from flowstone.limestone.format.snippets import Snippet, snippets
from flowstone.outside import production
from tests.limestone import recorded

DISK = production().disk
BEGINS = (EntryType.MARKER_BEGIN, EntryType.MARKER_INVALIDATED_BEGIN)


def model(data: bytes) -> list[Snippet]:
    found: list[Snippet] = []
    begin: tuple[int, Marker] | None = None
    blobs: list[Entry] = []
    readable = 0

    def close(end: int) -> None:
        if begin is not None:
            is_marked = begin[1].type is EntryType.MARKER_INVALIDATED_BEGIN
            found.append(Snippet(begin[0], end, begin[1].epoch, is_marked, tuple(blobs)))

    for offset, token in walk(lambda at, size: data[at : at + size], len(data)):
        readable = offset
        if isinstance(token, Marker) and token.type in BEGINS:
            close(offset)
            begin, blobs = (offset, token), []
        elif isinstance(token, Entry) and token.type is EntryType.NORMAL_WITH_BLOB:
            blobs.append(token)
        if isinstance(token, Marker | Entry):
            readable += len(encode(token))
    close(readable)
    return found


@pytest.mark.parametrize("path", recorded.log_files(), ids=lambda path: "-".join(path.parts[-3:]))
def test_recorded_files_equal_the_model(path: Path) -> None:
    assert list(snippets(DISK, str(path))) == model(path.read_bytes())


@given(st.lists(recorded.tokens, max_size=12), st.integers(0, 40), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_file_torn_or_damaged_anywhere_equals_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: list[Entry | Marker], cut: int, is_damaged: bool
) -> None:
    monkeypatch.setattr(entry_walk, "WINDOW_SIZE", 64)
    data = b"".join(map(encode, tokens))
    data = data[: len(data) - cut] + (b"\x55" if is_damaged else b"")
    path = tmp_path / "pwal_0000"
    path.write_bytes(data)
    assert list(snippets(DISK, str(path))) == model(data)


def test_file_with_more_entries_than_one_table_equals_the_model(tmp_path: Path) -> None:
    puts = b"".join(encode(put(1, b"%d" % number, b"", WriteVersion(1, number))) for number in range(20_000))
    blob = encode(put(1, b"blob", b"", WriteVersion(2, 1), (7,)))
    first, second = (encode(Marker(EntryType.MARKER_BEGIN, epoch)) for epoch in (1, 2))
    data = first + puts + first + puts + second + blob
    path = tmp_path / "pwal_0000"
    path.write_bytes(data)
    assert list(snippets(DISK, str(path))) == model(data)
