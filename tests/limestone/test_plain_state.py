"""Winning entries, compared with a simple model; files in the original's order and bytes."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion, decode_all, put, remove
from tests.limestone.plain_state import Snapshot, encode_compacted, encode_snapshot, sort_key

versions = st.builds(WriteVersion, st.integers(0, 3), st.integers(0, 3))
storages = st.sampled_from([1, 2, 256])
keys = st.sampled_from([b"", b"a", b"b", b"\xff"])
entries = st.one_of(
    st.tuples(st.just(EntryType.NORMAL), storages, versions, keys, st.binary(max_size=2)),
    st.tuples(st.just(EntryType.REMOVE), storages, versions, keys),
    st.tuples(st.sampled_from([EntryType(7), EntryType(8), EntryType(9)]), storages, versions),
).map(lambda fields: Entry(*fields))


def state(found: list[Entry]) -> list[Entry]:
    snapshot = Snapshot()
    snapshot.add(found)
    return snapshot.rows()


def model(found: list[Entry]) -> list[Entry]:
    """Apply the entries in version order; a clear comes before points of the same version."""
    rows: dict[tuple[int, bytes], Entry] = {}
    for entry in sorted(found, key=lambda entry: (entry.version, entry.type not in (7, 9))):
        if entry.type in (EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE):
            rows = {key: row for key, row in rows.items() if key[0] != entry.storage_id}
        elif entry.type is EntryType.NORMAL:
            rows[entry.storage_id, entry.key] = entry
        elif entry.type is EntryType.REMOVE:
            rows.pop((entry.storage_id, entry.key), None)
    return sorted(rows.values(), key=sort_key)


@given(st.lists(entries, max_size=30))
def test_state_equals_that_of_a_simple_model(found: list[Entry]) -> None:
    assert state(found) == model(found)


@given(st.lists(entries, max_size=30, unique_by=lambda entry: entry.version), st.randoms())
def test_order_of_entries_does_not_matter(found: list[Entry], rng: random.Random) -> None:
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert state(shuffled) == state(found)


@given(st.lists(entries, max_size=30), st.lists(entries, max_size=30))
def test_compaction_does_not_change_the_state(before: list[Entry], after: list[Entry]) -> None:
    """Versions grow with epochs, and a compacted file drops the versions of its rows."""
    after = [entry._replace(version=WriteVersion(entry.version.major + 10, entry.version.minor)) for entry in after]
    snapshot = Snapshot()
    compacted = decode_all(encode_compacted(state(before)), "x")
    snapshot.add_compacted(entry for entry in compacted if isinstance(entry, Entry))
    snapshot.add(after)
    found = [(row.storage_id, row.key, row.value) for row in snapshot.rows()]
    assert found == [(row.storage_id, row.key, row.value) for row in model(before + after)]


def test_remove_hides_a_compacted_row_and_is_kept_on_request() -> None:
    snapshot = Snapshot()
    snapshot.add_compacted([put(1, b"a", b"old", WriteVersion(0, 0)), put(1, b"b", b"old", WriteVersion(0, 0))])
    removed = remove(1, b"a", WriteVersion(2, 1))
    snapshot.add([removed])
    assert [row.key for row in snapshot.rows()] == [b"b"]
    assert snapshot.changes(with_removes=True) == [removed]
    assert snapshot.changes(with_removes=False) == []


def test_storage_256_sorts_before_storage_1_and_long_transactions_after_short_ones() -> None:
    found = [put(1, b"", b"", WriteVersion(1, 1)), put(256, b"z", b"", WriteVersion(1, 1))]
    assert [row.storage_id for row in state(found)] == [256, 1]
    short, long = put(1, b"k", b"short", WriteVersion(5, 9)), put(1, b"k", b"long", WriteVersion(5, 1 << 63))
    assert state([long, short]) == [long]


def test_max_blob_id_includes_overwritten_entries() -> None:
    snapshot = Snapshot()
    snapshot.add([put(1, b"k", b"", WriteVersion(1, 1), (9, 4)), put(1, b"k", b"", WriteVersion(2, 1), (5,))])
    assert snapshot.max_blob_id == 9
    assert [row.blob_ids for row in snapshot.rows()] == [(5,)]


def test_empty_snapshot_is_a_begin_marker() -> None:
    assert encode_snapshot([]).hex() == "020000000000000000"
