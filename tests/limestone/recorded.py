"""Directories and conversations of the original (tests/vectors/limestone), and strategies for entries."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion
from tests.places import VECTORS

HERE = VECTORS / "limestone"


def log_files() -> list[Path]:
    """Return every recorded file of entries, except the torn ones of a killed replica."""
    found = [path for pattern in ("pwal_*", "epoch", "snapshot") for path in HERE.rglob(pattern)]
    return sorted(path for path in found if path.is_file() and "replica_crash" not in path.parts)


def rows(text: str) -> list[tuple[int, bytes, bytes]]:
    """Return storage, key and value of each `row` line that the original printed from its cursor."""
    found = []
    for line in text.splitlines():
        if line.startswith("row "):
            fields = dict(word.split("=") for word in line.split()[1:])
            found.append((int(fields["storage"]), bytes.fromhex(fields["key"]), bytes.fromhex(fields["value"])))
    return found


ids = st.integers(0, 2**64 - 1)
versions = st.builds(WriteVersion, ids, ids)
texts = st.binary(max_size=20)
storage_types = st.sampled_from([EntryType.CLEAR_STORAGE, EntryType.ADD_STORAGE, EntryType.REMOVE_STORAGE])
blob_lists = st.lists(ids, max_size=3).map(tuple)
entries = st.one_of(
    st.tuples(st.just(EntryType.NORMAL), ids, versions, texts, texts),
    st.tuples(st.just(EntryType.REMOVE), ids, versions, texts),
    st.tuples(storage_types, ids, versions),
    st.tuples(st.just(EntryType.NORMAL_WITH_BLOB), ids, versions, texts, texts, blob_lists),
).map(lambda fields: Entry(*fields))
markers = st.builds(Marker, st.sampled_from([EntryType(2), EntryType(3), EntryType(4), EntryType(6)]), ids)
tokens = st.one_of(entries, markers)
