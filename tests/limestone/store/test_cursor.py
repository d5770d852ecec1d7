"""The rows of a directory: in order, in parts, by key and by range, from log files or from `data/snapshot`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode, put, remove
from flowstone.limestone.format.epoch_file import record
from flowstone.limestone.store import cursor
from flowstone.limestone.store.cursor import StoreSnapshot, sort_key
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Disk
from tests.limestone.crashes import DIRECTORY, fresh
from tests.limestone.plain_state import Snapshot, encode_compacted, encode_snapshot
from tests.limestone.store.test_latest_entries import entries

ROWS = [put(2, b"k%03d" % number, b"v%d" % number, WriteVersion(1, number)) for number in range(300)]


def file_of(found: list[Entry]) -> bytes:
    markers = [encode(Marker(kind, 1)) for kind in (EntryType.MARKER_BEGIN, EntryType.MARKER_END)]
    return b"".join((markers[0], *map(encode, found), markers[1]))


def snapshot_of(*files: list[Entry], compacted: list[Entry] | None = None) -> tuple[Disk, StoreSnapshot]:
    written = {names.pwal(number): file_of(found) for number, found in enumerate(files)} | {names.EPOCH: record(1)}
    if compacted is not None:
        written[names.COMPACTED] = encode_compacted(compacted)
    _, disk = fresh()
    for name, data in written.items():
        with disk.create(f"{DIRECTORY}/{name}") as file:
            file.append(data)
    return disk, recover(disk, DIRECTORY).snapshot


def content(disk: Disk, name: str) -> bytes:
    with disk.open(f"{DIRECTORY}/{name}") as file:
        return file.read_at(0, file.size())


@pytest.fixture(params=[1, 50, 1 << 20], ids=lambda size: f"windows of {size}")
def _windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "GATHER_SIZE", request.param)
    monkeypatch.setattr(cursor, "READ_SIZE", request.param)


@pytest.mark.usefixtures("_windows")
@given(st.lists(entries, max_size=9), st.lists(entries, max_size=9), st.lists(entries, max_size=9), st.booleans())
def test_rows_equal_the_plain_state_before_and_after_they_are_stored(
    old: list[Entry], first: list[Entry], second: list[Entry], with_removes: bool
) -> None:
    compacted = [entry._replace(version=WriteVersion(0, 0)) for entry in old if entry.type in (1, 10)]
    plain = Snapshot()
    plain.add_compacted(compacted)
    plain.add(first + second)
    disk, found = snapshot_of(first, second, compacted=compacted)
    stored = found.stored(disk, DIRECTORY, with_removes=with_removes)
    assert content(disk, names.SNAPSHOT) == encode_snapshot(plain.changes(with_removes=with_removes))
    for name in (names.pwal(0), names.pwal(1)):
        disk.unlink(f"{DIRECTORY}/{name}")
    with disk.create(f"{DIRECTORY}/new") as file:
        assert stored.write_compacted(file) == len(stored) == len(found)
    assert content(disk, "new") == encode_compacted(plain.rows())
    assert stored.rows() == plain.rows()
    assert [row for part in stored.partitioned_cursors(3) for row in part] == plain.rows()
    assert stored.blob_ids() == {blob_id for row in plain.rows() for blob_id in row.blob_ids}
    assert (stored.max_blob_id, stored.cleared) == (plain.max_blob_id, plain.cleared)
    stored.close()


@pytest.mark.usefixtures("_windows")
def test_rows_are_found_by_key_and_by_range() -> None:
    _, found = snapshot_of(
        ROWS[::2], [*ROWS[1::2], put(1, b"k", b"", WriteVersion(1, 1)), remove(3, b"k", WriteVersion(1, 1))]
    )
    assert found.find(2, b"k007") == ROWS[7]
    assert [found.find(*wanted) for wanted in ((2, b"k"), (3, b"k"), (2, b"k0070"), (1, b""), (4, b"k"))] == [None] * 5
    assert list(found.scan(2)) == ROWS
    assert list(found.scan(2, b"k010", b"k020")) == ROWS[10:20]
    assert list(found.scan(2, b"k0101", b"k0111")) == ROWS[11:12]
    assert list(found.scan(2, b"k290")) == ROWS[290:]
    assert list(found.scan(2, b"z")) == list(found.scan(3)) == list(found.scan(2, b"k020", b"k010")) == []
    assert [row.storage_id for row in found.scan(1)] == [1]


def test_parts_are_about_equal_and_cover_everything() -> None:
    _, found = snapshot_of(ROWS)
    parts = [list(part) for part in found.partitioned_cursors(7)]
    assert [row for part in parts for row in part] == ROWS
    assert {len(part) for part in parts} <= {42, 43}
    assert [list(part) for part in snapshot_of()[1].partitioned_cursors(2)] == [[], []]


def test_cursor_is_valid_after_renames_and_a_replaced_compacted_file() -> None:
    disk, found = snapshot_of(ROWS[:10], compacted=ROWS[5:20])
    stored = found.stored(disk, DIRECTORY, with_removes=True)
    rows = stored.rows()
    disk.rename(f"{DIRECTORY}/{names.COMPACTED}", f"{DIRECTORY}/{names.COMPACTED_PREVIOUS}")
    disk.unlink(f"{DIRECTORY}/{names.COMPACTED_PREVIOUS}")
    assert stored.rows() == rows


def test_file_that_became_shorter_is_reported_with_its_name() -> None:
    disk, found = snapshot_of(ROWS)
    with disk.append_to(f"{DIRECTORY}/pwal_0000") as file:
        file.truncate(100)
    with pytest.raises(DamagedFile, match="pwal_0000 is damaged at byte 100: file has become shorter"):
        found.rows()


def test_rows_are_ordered_by_their_bytes_on_disk() -> None:
    assert sort_key(256, b"z") < sort_key(1, b"a") < sort_key(1, b"aa")
