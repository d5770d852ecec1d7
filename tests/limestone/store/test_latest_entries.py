"""The winning entries: the kernels agree with the plain state, compiled and interpreted."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format import entry_table
from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion, decode, encode, put
from flowstone.limestone.format.entry_table import TABLE_ROWS
from flowstone.limestone.format.entry_table_kernels import walk_table
from flowstone.limestone.store import latest_entries
from flowstone.limestone.store import winner_table as columns
from flowstone.limestone.store.latest_entries import Sorted, Winners
from flowstone.limestone.store.winner_kernels import copy_spans, zero_versions
from flowstone.limestone.store.winner_table import COMPACTED
from tests.limestone.plain_state import Snapshot
from tests.native.twins import twin

KERNELS = ("settle", "refill", "prefixes", "order_by", "order_ties")

versions = st.builds(WriteVersion, st.integers(0, 3), st.sampled_from([0, 1, 1 << 63]))
storages = st.sampled_from([0, 1, 2, 256, (1 << 64) - 1])
stems = st.sampled_from([b"", b"a" * 7, b"b" * 8, b"c" * 16, b"\0" * 17, b"\xff" * 25])
keys = st.builds(lambda stem, rest: stem + rest, stems, st.binary(max_size=2))
entries = st.one_of(
    st.tuples(st.just(EntryType.NORMAL), storages, versions, keys, st.binary(max_size=2)),
    st.tuples(st.just(EntryType.REMOVE), storages, versions, keys),
    st.tuples(st.sampled_from([EntryType(7), EntryType(8), EntryType(9)]), storages, versions),
    st.tuples(
        st.just(EntryType.NORMAL_WITH_BLOB), storages, versions, keys, st.just(b"v"), st.tuples(st.integers(0, 1 << 40))
    ),
).map(lambda fields: Entry(*fields))


@pytest.fixture(params=["compiled", "interpreted"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels raise when they access memory outside a buffer of bytes. Arrays grow often."""
    monkeypatch.setattr(latest_entries, "_ROWS_FIRST", 2)
    monkeypatch.setattr(latest_entries, "_KEYS_FIRST", 9)
    if request.param == "interpreted":
        for name in KERNELS:
            monkeypatch.setattr(latest_entries, name, twin(getattr(latest_entries, name)))


def add(winners: Winners, found: list[Entry], origin: int, base: int = 0) -> bytes:
    data = b"".join(map(encode, found))
    buf = np.frombuffer(data, np.uint8)
    table = np.zeros((TABLE_ROWS, len(found)), np.uint64)
    count, _, _ = walk_table(buf, 0, table, 0)
    assert count == len(found)
    winners.add(buf, base, origin, table, np.ones(count, np.uint8))
    return data


def won(found: Sorted, files: list[bytes]) -> list[Entry]:
    """Return the entries that the rows point to."""
    entries: list[Entry] = []
    for row, origin in zip(found.rows.tolist(), found.origins.tolist(), strict=True):
        entry, end = decode(files[origin], row[columns.AT])
        assert isinstance(entry, Entry)
        assert end == row[columns.AT] + row[columns.SIZE]
        assert (entry.storage_id, *entry.version) == (row[0], row[columns.MAJOR], row[columns.MINOR])
        assert row[columns.ORIGIN] & 0xFF == entry.type
        entries.append(entry)
    assert [found.key(place) for place in range(len(entries))] == [entry.key for entry in entries]
    return entries


@pytest.mark.usefixtures("_both_ways")
@given(st.lists(entries, max_size=12), st.lists(entries, max_size=12), st.lists(entries, max_size=20))
def test_winners_equal_those_of_the_plain_state(
    compacted: list[Entry], first: list[Entry], second: list[Entry]
) -> None:
    compacted = [entry for entry in compacted if entry.type in (1, 10)]
    plain, winners = Snapshot(), Winners()
    plain.add_compacted(compacted)
    plain.add(first + second)
    files = [add(winners, compacted, COMPACTED), add(winners, first, 1), add(winners, second, 2)]
    assert winners.max_blob_id == plain.max_blob_id
    assert winners.cleared == plain.cleared
    found = winners.sorted()
    assert won(found.only(found.is_put), files) == plain.rows()
    changes = found.only(found.origins != COMPACTED)
    assert won(changes, files) == plain.changes(with_removes=True)
    assert won(changes.only(changes.is_put), files) == plain.changes(with_removes=False)


@pytest.mark.usefixtures("_both_ways")
@given(st.lists(st.tuples(storages, keys), min_size=1, max_size=60))
def test_keys_of_any_length_are_sorted_by_their_bytes(found: list[tuple[int, bytes]]) -> None:
    winners = Winners()
    add(winners, [put(storage_id, key, b"", WriteVersion(1, 1)) for storage_id, key in found], 1)
    rows = winners.sorted()
    got = [(int(row[columns.STORAGE_ID]), rows.key(place)) for place, row in enumerate(rows.rows)]
    assert got == sorted(set(found), key=lambda each: each[0].to_bytes(8, "little") + each[1])


def test_skipped_entries_do_not_count() -> None:
    data = encode(put(1, b"a", b"", WriteVersion(1, 1))) + encode(Entry(EntryType(7), 1, WriteVersion(9, 9)))
    table = np.zeros((TABLE_ROWS, 2), np.uint64)
    walk_table(np.frombuffer(data, np.uint8), 0, table, 0)
    winners = Winners()
    winners.add(np.frombuffer(data, np.uint8), 0, 1, table, np.zeros(2, np.uint8))
    assert (winners.cleared, len(winners.sorted().rows)) == ({}, 0)


def keys_of_one_hash(state: int, count: int) -> list[bytes]:
    """Return keys with equal hashes if the hash has this state before them: the second word of each undoes
    its first.
    """

    def mixed(value: int, more: int) -> int:
        product = (value ^ more) * 0x9E3779B97F4A7C15
        return product & (1 << 64) - 1 ^ product >> 64

    state = mixed(state, 1)  # the storage
    return [struct.pack("<QQ", number, mixed(state, number)) for number in range(count)]


@pytest.mark.parametrize("seed", [None, 1, 1 << 63])
def test_hashes_of_chosen_keys_are_unpredictable(seed: int | None) -> None:
    """Each key with an equal hash is compared with all earlier ones: a quadratic number."""
    for state in (0x9E3779B97F4A7C15, 0):
        winners = Winners() if seed is None else Winners(seed)
        add(winners, [put(1, key, b"", WriteVersion(1, 1)) for key in keys_of_one_hash(state, 1000)], 1)
        assert len(np.unique(winners._slots >> np.uint64(32))) > 990


def test_hash_does_not_change_results() -> None:
    found = [put(number % 7, b"%d" % (number * 7919 % 1000), b"", WriteVersion(1, number)) for number in range(3000)]
    results = []
    for seed in (0, 1, None):
        winners = Winners(seed)
        add(winners, found, 1)
        rows = winners.sorted()
        results.append((rows.rows.tolist(), rows.keys[8:].tobytes()[: int(rows.rows[:, columns.KEY_SIZE].sum())]))
    assert results[0] == results[1] == results[2]


def test_hundred_thousand_keys_with_a_long_common_prefix_are_sorted() -> None:
    """The keys have equal prefixes, and make every array grow several times."""
    found = [put(1, b"common beginning of them all %06d" % (number * 7919 % 100_000), b"", WriteVersion(1, number))
             for number in range(100_000)]  # fmt: skip
    winners = Winners()
    add(winners, found, 3, base=1 << 40)
    rows = winners.sorted()
    assert [rows.key(place)[-6:] for place in range(0, 100_000, 999)] == [b"%06d" % n for n in range(0, 100_000, 999)]
    assert int(rows.rows[:, columns.AT].min()) == 1 << 40


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=5), st.data())
def test_copied_spans_are_at_their_targets(spans: list[bytes], choice: st.DataObject) -> None:
    data = b"".join(spans)
    sizes = np.array([len(span) for span in spans], np.int64)
    starts = np.cumsum(sizes) - sizes
    order = np.array(choice.draw(st.permutations(range(len(spans)))), np.int64)
    targets = np.zeros(len(spans), np.int64)
    targets[order] = np.cumsum(sizes[order]) - sizes[order]
    for call in (copy_spans, twin(copy_spans)):
        out = np.zeros(len(data), np.uint8)
        call(np.frombuffer(data, np.uint8), starts, sizes, out, targets)
        assert out.tobytes() == b"".join(spans[place] for place in order)


@given(st.lists(st.tuples(st.binary(max_size=9), versions, st.binary(max_size=9)), max_size=5))
def test_versions_of_puts_become_zero(found: list[tuple[bytes, WriteVersion, bytes]]) -> None:
    data = [encode(put(1, key, value, version)) for key, version, value in found]
    sizes = np.array([len(each) for each in data], np.int64)
    key_sizes = np.array([len(key) for key, _, _ in found], np.int64)
    for call in (zero_versions, twin(zero_versions)):
        out = np.array(list(b"".join(data)), np.uint8)
        call(out, np.cumsum(sizes) - sizes, key_sizes)
        assert out.tobytes() == b"".join(encode(put(1, key, value, WriteVersion(0, 0))) for key, _, value in found)


def test_row_fits_a_cache_line() -> None:
    assert columns.ROW_WORDS * 8 == 64
    assert entry_table.TABLE_ROWS == 11
