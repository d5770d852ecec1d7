"""Online compaction: the same rows before, after and at every crash, for us and for the original.

Sessions and blobs in use remain.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, copying, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Entry, EntryType, Marker, WriteVersion, encode, put, remove
from flowstone.limestone.format.epoch_file import EpochWriter
from flowstone.limestone.store import blobs, compaction
from flowstone.limestone.store.compaction import Collection, compact_online, detached_inputs
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Disk, production
from tests.limestone import original, recorded
from tests.limestone.crashes import DIRECTORY, crashed, fresh

DISK = production().disk
MS = 1_794_772_615_522
ROTATED = "pwal_0000.01794772615000.0"
OTHER = "pwal_0001.01794772615000.0"

Row = tuple[int, bytes, bytes]


def session(epoch: int, *entries: Entry) -> bytes:
    begin, end = (Marker(kind, epoch) for kind in (EntryType.MARKER_BEGIN, EntryType.MARKER_END))
    return b"".join((encode(begin), *map(encode, entries), encode(end)))


def set_key(key: bytes, value: bytes, epoch: int, minor: int = 1, *blob_ids: int, storage: int = 1) -> Entry:
    return put(storage, key, value, WriteVersion(epoch, minor), blob_ids)


def clear(epoch: int, minor: int, storage: int = 1) -> Entry:
    return Entry(EntryType.CLEAR_STORAGE, storage, WriteVersion(epoch, minor))


def write(disk: Disk, name: str, data: bytes, directory: str = DIRECTORY) -> None:
    copying.write(disk, f"{directory}/{name}", data)
    disk.sync_directory(directory)


def durable(disk: Disk, epoch: int, directory: str = DIRECTORY) -> None:
    EpochWriter.open(disk, directory).write(epoch)


def ours(disk: Disk, directory: str = DIRECTORY) -> list[Row]:
    return [(row.storage_id, row.key, row.value) for row in recover(disk, directory, repairs=False).snapshot.rows()]


def real(disk: Disk, directory: str = DIRECTORY) -> list[Row]:
    return [(row.storage_id, row.key, row.value) for row in original.rows(disk, directory)]


def both(disk: Disk, directory: str = DIRECTORY) -> list[Row]:
    found = ours(disk, directory)
    assert real(disk, directory) == found
    return found


def two_files(disk: Disk) -> None:
    """Write epochs 1 to 3 to a rotated file, with a remove and a clear, and epoch 4 to an active file."""
    write(disk, ROTATED, session(1, set_key(b"a", b"1", 1), set_key(b"b", b"1", 1, 2), set_key(b"c", b"1", 1, 3)))
    write(disk, OTHER, session(2, remove(1, b"b", WriteVersion(2, 1))) + session(3, set_key(b"c", b"3", 3)))
    write(disk, "pwal_0000", session(4, set_key(b"a", b"4", 4), remove(1, b"c", WriteVersion(4, 2))))
    catalog.write(disk, DIRECTORY, Catalog())
    durable(disk, 4)


def test_compacted_file_and_catalog_match_the_reference() -> None:
    _, disk = fresh()
    two_files(disk)
    before = both(disk)
    done = compact_online(disk, DIRECTORY, 3, MS)
    assert done.catalog == catalog.read(disk, DIRECTORY) == Catalog(((names.COMPACTED, 1),), (ROTATED, OTHER), 3, 0)
    assert (done.inputs, done.kept, done.rows) == ((ROTATED, OTHER), (), 2)
    assert both(disk) == before == [(1, b"a", b"4")]
    with disk.open(f"{DIRECTORY}/{names.COMPACTED}") as file:
        zero = WriteVersion(0, 0)
        expected = [put(1, b"a", b"1", zero), put(1, b"c", b"3", zero)]
        assert file.read_at(0, 1000) == session(0, *expected)[:-10]
    assert compact_online(disk, DIRECTORY, 3, MS) == compaction.Compacted(done.catalog)
    assert compaction.remove_detached(disk, DIRECTORY, done.catalog).detached == ()
    assert both(disk) == before


def test_second_compaction_includes_the_first() -> None:
    _, disk = fresh()
    two_files(disk)
    compact_online(disk, DIRECTORY, 3, MS)
    third = "pwal_0000.01794772615999.0"
    disk.rename(f"{DIRECTORY}/pwal_0000", f"{DIRECTORY}/{third}")
    disk.unlink(f"{DIRECTORY}/{OTHER}")
    done = compact_online(disk, DIRECTORY, 4, MS)
    assert done.catalog.detached == (ROTATED, third)
    assert both(disk) == [(1, b"a", b"4")]


def test_recorded_logs_compact_to_the_file_of_the_real_program(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(recorded.HERE / "dirs-master/before", tmp_path / "copy"))
    for name in ("pwal_0000", "pwal_0001"):
        (directory / name).rename(directory / f"{name}.01794772615000.0")
    done = compact_online(DISK, str(directory), 5, MS)
    real_file = recorded.HERE / "dirs-master/after-offline-compaction" / names.COMPACTED
    assert (directory / names.COMPACTED).read_bytes() == real_file.read_bytes()
    assert (done.catalog.max_epoch_id, done.catalog.max_blob_id) == (5, 3)


def test_sessions_of_later_epochs_in_a_rotated_file_are_unchanged() -> None:
    """In the original these sessions are lost: their epoch is not durable yet, so they are marked, and their file is
    rotated.
    """
    _, disk = fresh()
    later = session(4, set_key(b"a", b"4", 4), set_key(b"big", bytes(100), 4, 2)) + session(5, clear(5, 1, 7))
    write(disk, ROTATED, session(3, set_key(b"a", b"3", 3)) + later)
    write(disk, OTHER, session(2, set_key(b"b", b"2", 2)) + b"\x06" + session(9)[1:])
    durable(disk, 3)
    done = compact_online(disk, DIRECTORY, 3, MS)
    assert done.kept == (f"pwal_0000.{MS:014d}.0",)
    with disk.open(f"{DIRECTORY}/{done.kept[0]}") as file:
        assert file.read_at(0, 1000) == later
    assert ours(disk) == [(1, b"a", b"3"), (1, b"b", b"2")]
    durable(disk, 5)
    assert both(disk) == [(1, b"a", b"4"), (1, b"b", b"2"), (1, b"big", bytes(100))]


@pytest.mark.parametrize("before", [b"", b"\x06" + session(9)[1:]], ids=["first", "after a void session"])
def test_active_file_with_a_session_to_compact_is_rejected(before: bytes) -> None:
    """The older entries of the file would override the compacted ones."""
    _, disk = fresh()
    write(disk, ROTATED, session(3, set_key(b"a", b"3", 3)))
    write(disk, "pwal_0001", before + session(2, set_key(b"a", b"2", 2)))
    durable(disk, 3)
    with pytest.raises(LimestoneError, match="pwal_0001 contains a session of epoch 2; rotate every log file first"):
        compact_online(disk, DIRECTORY, 3, MS)
    assert both(disk) == [(1, b"a", b"3")]
    assert not detached_inputs(disk, DIRECTORY, Catalog(detached=(ROTATED,)))


def test_truncated_file_stops_the_compaction_before_any_change() -> None:
    _, disk = fresh()
    write(disk, ROTATED, session(3, set_key(b"a", b"3", 3))[:-12])
    durable(disk, 3)
    before = disk.list_directory(DIRECTORY)
    with pytest.raises(DamagedFile):
        compact_online(disk, DIRECTORY, 3, MS)
    assert disk.list_directory(DIRECTORY) in (before, sorted([*before, compaction.TEMPORARY]))


def test_interrupted_compaction_of_the_original_is_completed() -> None:
    _, disk = fresh()
    two_files(disk)
    compact_online(disk, DIRECTORY, 3, MS)
    disk.rename(f"{DIRECTORY}/{names.COMPACTED}", f"{DIRECTORY}/{names.COMPACTED_PREVIOUS}")
    write(disk, f"{compaction.TEMPORARY}/{names.COMPACTED}", b"half")
    compaction.settle(disk, DIRECTORY)
    assert both(disk) == [(1, b"a", b"4")]
    assert disk.list_directory(f"{DIRECTORY}/{compaction.TEMPORARY}") == []
    write(disk, names.COMPACTED_PREVIOUS, b"superseded")
    compaction.settle(disk, DIRECTORY)
    assert disk.kind(f"{DIRECTORY}/{names.COMPACTED_PREVIOUS}") is None


def test_crash_at_any_moment_keeps_the_rows() -> None:
    def prepare(disk: Disk) -> None:
        two_files(disk)
        compact_online(disk, DIRECTORY, 3, MS)
        write(disk, "pwal_0001.01794772615999.0", session(5, set_key(b"d", b"5", 5)) + session(6, clear(6, 1)))
        disk.rename(f"{DIRECTORY}/pwal_0000", f"{DIRECTORY}/pwal_0000.01794772615999.0")
        write(disk, "pwal_0000", session(6, remove(1, b"a", WriteVersion(6, 2)), set_key(b"e", b"6", 6, 3)))
        durable(disk, 6)

    def work(disk: Disk) -> None:
        done = compact_online(disk, DIRECTORY, 5, MS + 1)
        compaction.remove_detached(disk, DIRECTORY, done.catalog)

    for number, (disk, _) in enumerate(crashed(prepare, work)):
        assert both(disk) == [(1, b"e", b"6")]
        if number % 5 == 0:  # only every fifth time, because this is slow
            compact_online(disk, DIRECTORY, 5, MS + 2)
            assert both(disk) == [(1, b"e", b"6")]


def test_crash_in_the_first_compaction_restores_no_removed_key() -> None:
    def work(disk: Disk) -> None:
        compact_online(disk, DIRECTORY, 3, MS)

    for disk, _ in crashed(two_files, work):
        assert both(disk) == [(1, b"a", b"4")]


entry_lists = st.lists(
    st.one_of(
        st.builds(lambda key, minor: ("put", key, minor), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 3)),
        st.builds(lambda key, minor: ("remove", key, minor), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 3)),
        st.builds(lambda minor: ("clear", b"", minor), st.integers(0, 3)),
    ),
    max_size=4,
)
histories = st.lists(st.tuples(st.integers(0, 1), entry_lists), min_size=1, max_size=8)


@given(histories, st.lists(st.integers(0, 7), max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_has_the_same_rows_after_compactions_at_any_epochs(
    history: list[tuple[int, list[tuple[str, bytes, int]]]], boundaries: list[int]
) -> None:
    """Each epoch is written on two channels; at a boundary both files are rotated and compacted up to it."""
    _, plain = fresh()
    _, compacted = fresh()
    for epoch, (channel, entries) in enumerate(history, 1):
        data = session(epoch, *(_entry(kind, key, epoch, minor) for kind, key, minor in entries))
        for disk in (plain, compacted):
            name = f"{DIRECTORY}/{names.pwal(channel)}"
            with disk.append_to(name) if disk.kind(name) else disk.create(name) as file:
                file.append(data)
            durable(disk, epoch)
        if epoch in boundaries:
            for number in (0, 1):
                if compacted.kind(f"{DIRECTORY}/{names.pwal(number)}"):
                    rotated = names.rotated(names.pwal(number), MS + epoch, 0)
                    compacted.rename(f"{DIRECTORY}/{names.pwal(number)}", f"{DIRECTORY}/{rotated}")
            compact_online(compacted, DIRECTORY, epoch, MS)
        assert both(compacted) == both(plain)


def _entry(kind: str, key: bytes, epoch: int, minor: int) -> Entry:
    if kind == "put":
        return set_key(key, b"%d.%d" % (epoch, minor), epoch, minor)
    return remove(1, key, WriteVersion(epoch, minor)) if kind == "remove" else clear(epoch, minor)


def with_blobs(directory: Path) -> None:
    """Write entries with blobs 1 to 9.

    Blob 1 was replaced by 2 in epoch 2, and 3 was removed in epoch 3; 5 belongs to a session of epoch 4; 9 was never
    named.
    """
    first = session(1, set_key(b"a", b"", 1, 1, 1), set_key(b"b", b"", 1, 2, 3), set_key(b"c", b"", 1, 3, 4))
    second = session(2, set_key(b"a", b"", 2, 1, 2)) + session(3, remove(1, b"b", WriteVersion(3, 1)))
    later = session(4, set_key(b"d", b"", 4, 1, 5), set_key(b"e", b"", 4, 2, 6, 7))
    write(DISK, ROTATED, first + second + later, str(directory))
    for blob_id in range(1, 10):
        blobs.make_directory(DISK, str(directory), blob_id)
        (directory / names.blob(blob_id)).write_bytes(b"%d" % blob_id)
    durable(DISK, 4, str(directory))


@pytest.mark.parametrize(
    ("boundary", "held", "gone"),
    [
        ((1, 0), {8, 9}, []),  # a reader may still see the first version of a
        ((2, 0), {8, 9}, []),  # the newest version before the boundary
        ((2, 2), {8, 9}, [1]),
        ((9, 0), {8, 9}, [1]),  # the removal of b is ignored, as in the original
    ],
)
def test_blobs_are_deleted_when_no_reader_can_see_them(
    tmp_path: Path, boundary: tuple[int, int], held: set[int], gone: list[int]
) -> None:
    with_blobs(tmp_path)
    done = compact_online(DISK, str(tmp_path), 3, MS, collection=Collection(WriteVersion(*boundary), lambda: held))
    assert list(done.collected) == gone
    assert blobs.stored_ids(DISK, str(tmp_path)) == [each for each in range(1, 10) if each not in gone]
    assert done.catalog.max_blob_id == 4


def test_next_collection_deletes_blobs_of_removed_keys(tmp_path: Path) -> None:
    with_blobs(tmp_path)
    compact_online(DISK, str(tmp_path), 3, MS, collection=Collection(WriteVersion(9, 0), lambda: {8, 9}))
    done = compact_online(DISK, str(tmp_path), 4, MS, collection=Collection(WriteVersion(9, 0), lambda: {9}))
    assert done.collected == (3,)
    assert blobs.stored_ids(DISK, str(tmp_path)) == [2, 4, 5, 6, 7, 8, 9]
    rows = recover(DISK, str(tmp_path), repairs=False).snapshot.rows()
    assert sorted(each for row in rows for each in row.blob_ids) == [2, 4, 5, 6, 7]


def test_blobs_are_deleted_only_on_request(tmp_path: Path) -> None:
    with_blobs(tmp_path)
    assert compact_online(DISK, str(tmp_path), 3, MS).collected == ()
    assert len(blobs.stored_ids(DISK, str(tmp_path))) == 9
