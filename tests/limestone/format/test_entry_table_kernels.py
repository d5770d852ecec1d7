"""The walk that fills tables of entries agrees with the plain decoder, compiled and interpreted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format import entry_table as rows
from flowstone.limestone.format.entries import Entry, Marker, Torn, Unknown, decode, encode, walk
from flowstone.limestone.format.entry_table import FULL, NEED, OTHER, TABLE_ROWS, Table
from flowstone.limestone.format.entry_table_kernels import walk_table
from tests.limestone import recorded
from tests.native.twins import twin


def tabled(data: bytes, room: int = 200, *, plain: bool = False) -> tuple[Table, int, int]:
    table = np.zeros((TABLE_ROWS, room), np.uint64)
    call = twin(walk_table) if plain else walk_table
    count, at, status = call(np.frombuffer(data, np.uint8), 0, table, 0)
    return table[:, :count], at, status


def check(data: bytes, *, plain: bool = False) -> None:
    table, at, status = tabled(data, len(data) // 9 + 1, plain=plain)
    found = list(walk(lambda start, size: data[start : start + size], len(data)))
    last = found.pop()[1] if found and isinstance(found[-1][1], Torn | Unknown) else None
    assert table.shape[1] == len(found)
    assert status == (OTHER if isinstance(last, Unknown) else NEED)
    for column, (offset, token) in zip(table.T.tolist(), found, strict=True):
        assert column[rows.AT] == offset
        assert decode(data[: column[rows.END]], offset) == (token, column[rows.END])
        assert column[rows.TYPE] == data[offset]
        if isinstance(token, Marker):
            assert column[rows.MAJOR] == token.epoch
        elif isinstance(token, Entry):
            assert data[column[rows.KEY_AT] : column[rows.KEY_END]] == token.key
            assert data[column[rows.VALUE_AT] : column[rows.VALUE_END]] == token.value
            assert (column[rows.MAJOR], column[rows.MINOR]) == token.version
            assert (column[rows.STORAGE_ID], column[rows.BLOB_COUNT]) == (token.storage_id, len(token.blob_ids))
    assert at == (int(table[rows.END, -1]) if found else 0)


@pytest.mark.parametrize("path", recorded.log_files(), ids=lambda path: path.relative_to(recorded.HERE).as_posix())
def test_files_of_the_real_program(path: Path) -> None:
    check(path.read_bytes())


@given(st.lists(recorded.tokens, max_size=6), st.integers(0, 60), st.data())
def test_torn_and_damaged_buffers_end_where_the_plain_decoder_ends(
    found: list[Entry | Marker], cut: int, choice: st.DataObject
) -> None:
    data = bytearray(b"".join(map(encode, found)))
    if data and choice.draw(st.booleans()):
        data[choice.draw(st.integers(0, len(data) - 1))] = choice.draw(st.integers(0, 255))
    for plain in (False, True):  # interpreted, a read outside the buffer raises
        check(bytes(data[: max(len(data) - cut, 0)]), plain=plain)


def test_scan_resumes_after_a_full_table() -> None:
    data = (recorded.HERE / "basic" / "master-dir" / "pwal_0000").read_bytes()
    whole, _, _ = tabled(data)
    first, at, status = tabled(data, 3)
    assert (first.shape[1], status) == (3, FULL)
    table = np.zeros((TABLE_ROWS, 200), np.uint64)
    table[:, :3] = first
    count, end, status = walk_table(np.frombuffer(data, np.uint8), at, table, 3)
    assert (count, end, status) == (whole.shape[1], len(data), NEED)
    assert (table[:, :count] == whole).all()
