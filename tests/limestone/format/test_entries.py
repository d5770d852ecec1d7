"""Entries of log files: decoded and encoded byte for byte.

Every torn end is found, and a length in the file is never trusted.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.errors import LocalProtocolError
from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import entries
from flowstone.limestone.format.entries import (
    Entry,
    EntryType,
    Marker,
    Token,
    Torn,
    Unknown,
    WriteVersion,
    decode,
    decode_all,
    encode,
    extent,
    put,
    remove,
    walk,
)
from tests.limestone import recorded

GOLDEN: list[tuple[str, Entry | Marker]] = [
    ("020100000000000000", Marker(EntryType.MARKER_BEGIN, 1)),
    ("08010000000000000001000000000000000000000000000000", Entry(EntryType.ADD_STORAGE, 1, WriteVersion(1, 0))),
    (
        "01020000000200000001000000000000006b31010000000000000001000000000000007631",
        put(1, b"k1", b"v1", WriteVersion(1, 1)),
    ),
    ("03010000000000000001", Marker(EntryType.MARKER_END, 1)),
    ("050200000001000000000000006b3202000000000000000200000000000000", remove(1, b"k2", WriteVersion(2, 2))),
    (
        "0a010000000100000003000000000000006103000000000000000100000000000000620200000001000000000000000200000000000000",
        put(3, b"a", b"b", WriteVersion(3, 1), (1, 2)),
    ),
]


def walked(data: bytes) -> list[tuple[int, Token]]:
    return list(walk(lambda at, size: data[at : at + size], len(data)))


@pytest.mark.parametrize(("text", "token"), GOLDEN)
def test_golden_bytes(text: str, token: Entry | Marker) -> None:
    assert encode(token).hex() == text
    assert decode(bytes.fromhex(text)) == (token, len(text) // 2)


@pytest.mark.parametrize("path", recorded.log_files(), ids=lambda path: path.relative_to(recorded.HERE).as_posix())
def test_files_of_the_real_program_are_read_and_written_byte_for_byte(path: Path) -> None:
    data = path.read_bytes()
    assert b"".join(encode(token) for token in decode_all(data, str(path))) == data


def test_recorded_files_contain_every_type_except_markers_of_epoch_files() -> None:
    found = [token.type for path in recorded.log_files() for token in decode_all(path.read_bytes(), str(path))]
    assert set(found) == set(EntryType)


@given(recorded.tokens)
def test_entries_round_trip(token: Entry | Marker) -> None:
    data = encode(token)
    assert extent(data, 0) == len(data)
    assert decode(b"xx" + data + b"\x01", 2) == (token, len(data) + 2)


@given(recorded.tokens)
def test_truncated_entry_is_torn_and_its_extent_stays_within_the_entry(token: Entry | Marker) -> None:
    data = encode(token)
    for size in range(1, len(data)):
        assert decode(data[:size]) == (Torn(token.type), 0)
        assert size < extent(data[:size], 0) <= len(data)


@given(st.lists(recorded.tokens, max_size=5), st.data())
def test_damaged_byte_is_read_without_unexpected_errors(found: list[Entry | Marker], choice: st.DataObject) -> None:
    data = bytearray(b"".join(map(encode, found)))
    if data:
        data[choice.draw(st.integers(0, len(data) - 1))] = choice.draw(st.integers(0, 255))
    tokens = walked(bytes(data))
    assert all(isinstance(token, Entry | Marker) for _, token in tokens[:-1])
    offsets = [offset for offset, _ in tokens]
    assert offsets == sorted(set(offsets))


@pytest.mark.parametrize("window", [1, 2, 9, 10, 40])
@given(found=st.lists(recorded.tokens, max_size=8), cut=st.integers(0, 30))
def test_window_size_does_not_affect_the_result(window: int, found: list[Entry | Marker], cut: int) -> None:
    data = b"".join(map(encode, found))
    data = data[: max(0, len(data) - cut)]
    whole = walked(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "WINDOW_SIZE", window)
        assert walked(data) == whole
    if not cut:
        assert [token for _, token in whole] == found


def test_length_beyond_the_end_of_the_file_is_not_read() -> None:
    data = encode(put(1, b"k", b"v", WriteVersion(1, 1)))
    damaged = data[:1] + b"\xff\xff\xff\xff" + data[5:]
    asked: list[int] = []

    def read_at(at: int, size: int) -> bytes:
        asked.append(size)
        return damaged[at : at + size]

    tracemalloc.start()
    try:
        assert list(walk(read_at, len(damaged))) == [(0, Torn(EntryType.NORMAL))]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert max(asked) <= len(damaged)


def test_file_truncated_during_a_read_ends_at_the_cut() -> None:
    data = encode(put(1, b"k", b"v" * 100, WriteVersion(1, 1)))
    assert list(walk(lambda at, size: data[at : min(at + size, 50)], len(data))) == [(0, Torn(EntryType.NORMAL))]


def test_walk_can_start_at_any_entry() -> None:
    data = b"".join(encode(token) for _, token in GOLDEN)
    offset = len(encode(GOLDEN[0][1]))
    assert list(walk(lambda at, size: data[at : at + size], len(data), start=offset)) == walked(data)[1:]


def test_trailing_zeros_are_distinguished_from_other_bytes() -> None:
    assert walked(bytes(20)) == [(0, Unknown(0, zeros=True))]
    assert walked(bytes(20) + b"\x01") == [(0, Unknown(0))]
    assert walked(b"\x55") == [(0, Unknown(0x55))]


def test_numbers_out_of_range_are_rejected() -> None:
    with pytest.raises(LocalProtocolError, match="NORMAL"):
        encode(put(2**64, b"", b"", WriteVersion(0, 0)))
    with pytest.raises(LocalProtocolError, match="MARKER_BEGIN"):
        encode(Marker(EntryType.MARKER_BEGIN, -1))
    with pytest.raises(LocalProtocolError, match="cannot encode NORMAL as a marker"):
        encode(Marker(EntryType.NORMAL, 1))
    with pytest.raises(LocalProtocolError, match="is a marker"):
        encode(Entry(EntryType.MARKER_END, 1, WriteVersion(0, 0)))


@pytest.mark.parametrize(("data", "word"), [(b"\x02\x01", "ends inside an entry MARKER_BEGIN"), (b"\x63", "0x63")])
def test_error_names_the_offset_of_damage_in_a_complete_file(data: bytes, word: str) -> None:
    with pytest.raises(DamagedFile, match=word) as caught:
        decode_all(encode(Marker(EntryType.MARKER_BEGIN, 0)) + data, "pwal_0000.compacted")
    assert caught.value.offset == 9
