"""Tables of whole files, and entries one at a time, agree with the plain decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format import entry_walk
from flowstone.limestone.format.entries import Entry, Marker, Torn, decode, encode, walk
from flowstone.limestone.format.entry_table import AT
from flowstone.limestone.format.entry_walk import EntryTail, entries_of, tables
from tests.limestone import recorded


@pytest.mark.parametrize(("window", "columns"), [(1, 1), (40, 2), (1 << 20, 1 << 10)])
@given(st.lists(recorded.tokens, max_size=6), st.binary(max_size=3), st.integers(0, 60))
def test_tables_of_a_file_equal_the_plain_walk(
    window: int, columns: int, found: list[Entry | Marker], behind: bytes, cut: int
) -> None:
    data = b"".join(map(encode, found)) + behind
    data = data[: max(len(data) - cut, 0)]

    def read_at(at: int, size: int) -> bytes:
        return data[at : at + size]

    said: list[tuple[int, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_walk, "WINDOW_SIZE", window)
        patch.setattr(entry_walk, "COLUMNS", columns)
        for part in tables(read_at, len(data)):
            if isinstance(part, EntryTail):
                said.append(part)
            else:
                offsets = (part.table[AT] + np.uint64(part.base)).tolist()
                said += [(offset, decode(data, offset)[0]) for offset in offsets]
    assert said == list(walk(read_at, len(data)))


def test_file_truncated_during_a_scan_ends_at_the_cut() -> None:
    data = (recorded.HERE / "basic" / "master-dir" / "pwal_0000").read_bytes()
    parts = list(tables(lambda at, size: data[at : min(at + size, 30)], len(data)))
    assert isinstance(parts[-1], EntryTail)
    assert isinstance(parts[-1].token, Torn)
    assert len(parts) == 2


@given(st.lists(recorded.entries, max_size=6))
def test_bytes_of_entries_are_read_one_entry_at_a_time(found: list[Entry]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry_walk, "COLUMNS", 2)
        assert list(entries_of(b"".join(map(encode, found)))) == found
