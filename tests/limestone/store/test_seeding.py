"""Old and new data during a seeding: a crash at any moment leaves one of them complete, never a mixture."""

from __future__ import annotations

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import catalog, files, lineage, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.files import write_whole
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.blobs import make_directory
from flowstone.limestone.store.seeding import ASIDE, FILE, Phase, SeedingState
from flowstone.outside import Disk
from tests.limestone.crashes import DIRECTORY, crashed, fresh

OLD, NEW = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
OLD_DATA = {
    names.EPOCH: b"old epoch",
    names.CATALOG: catalog.encode(Catalog(max_epoch_id=2)),
    names.CATALOG_BACK: catalog.encode(Catalog(max_epoch_id=1)),
    "pwal_0000": b"old log",
    "pwal_0000.compacted": b"old rows",
    names.blob(7): b"old blob",
    names.blob(107): b"old blob, too",
}
NEW_DATA = {names.EPOCH: b"new epoch", "pwal_0000": b"new log", "pwal_0003": b"other", names.blob(7): b"new blob"}


def fill(disk: Disk, data: dict[str, bytes]) -> None:
    for name, content in data.items():
        if name.startswith("blob/"):
            parent = make_directory(disk, DIRECTORY, 7)
            files.replace(disk, parent, name.rpartition("/")[2], "tmp", content)
        else:
            files.replace(disk, DIRECTORY, name, "tmp", content)


def born(disk: Disk) -> None:
    write_whole(disk, f"{DIRECTORY}/{names.MANIFEST}", b"manifest")
    disk.sync_directory(DIRECTORY)
    fill(disk, OLD_DATA)
    replica_seeding.write(disk, DIRECTORY, SeedingState(OLD))


def seed(disk: Disk) -> None:
    replica_seeding.put_aside(disk, DIRECTORY)
    fill(disk, NEW_DATA)


def found(disk: Disk) -> dict[str, bytes]:
    """Return data by name, limited to the names that distinguish old from new data."""
    every = [*OLD_DATA, *NEW_DATA]
    contents = {name: files.read_whole(disk, f"{DIRECTORY}/{name}") for name in every}
    return {name: content for name, content in contents.items() if content is not None}


def test_new_directory_follows_no_master() -> None:
    _, disk = fresh()
    assert replica_seeding.read(disk, DIRECTORY) == SeedingState(None, Phase.SETTLED)
    assert replica_seeding.bring_back(disk, DIRECTORY) == (SeedingState(), False)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"follows":1,"phase":"settled"}', b'{"follows":null,"phase":"?"}']
)
def test_damaged_file_is_reported_with_its_name(text: bytes) -> None:
    _, disk = fresh()
    write_whole(disk, f"{DIRECTORY}/{FILE}", text)
    with pytest.raises(DamagedFile, match=FILE):
        replica_seeding.read(disk, DIRECTORY)


def test_bring_back_restores_the_old_data() -> None:
    _, disk = fresh()
    born(disk)
    seed(disk)
    assert {name: found(disk)[name] for name in NEW_DATA} == NEW_DATA
    assert replica_seeding.bring_back(disk, DIRECTORY) == (SeedingState(OLD), True)
    assert found(disk) == OLD_DATA
    assert files.read_whole(disk, f"{DIRECTORY}/{names.MANIFEST}") == b"manifest"


def test_bring_back_ignores_files_of_an_earlier_seeding() -> None:
    """The state file may be missing because a user removed it or restored the directory."""
    _, disk = fresh()
    born(disk)
    disk.make_directory(f"{DIRECTORY}/{ASIDE}")
    write_whole(disk, f"{DIRECTORY}/{ASIDE}/pwal_0003", b"of another time")
    seed(disk)
    assert replica_seeding.has_data_aside(disk, DIRECTORY)
    replica_seeding.bring_back(disk, DIRECTORY)
    assert not replica_seeding.has_data_aside(disk, DIRECTORY)
    assert found(disk) == OLD_DATA


def test_kept_new_data_survives_bring_back() -> None:
    _, disk = fresh()
    born(disk)
    seed(disk)
    state = replica_seeding.keep(disk, DIRECTORY, NEW)
    assert state.phase is Phase.DISCARDING
    assert replica_seeding.bring_back(disk, DIRECTORY) == (SeedingState(NEW), False)
    assert {name: found(disk)[name] for name in NEW_DATA} == NEW_DATA
    assert [name for name in disk.list_directory(f"{DIRECTORY}/{ASIDE}") if name != "blob"] == []
    assert disk.list_directory(f"{DIRECTORY}/{ASIDE}/blob/dir_07") == []


def test_crash_during_a_seeding_leaves_the_old_or_the_new_data() -> None:
    is_kept: list[bool] = []

    def work(disk: Disk) -> None:
        is_kept.clear()
        seed(disk)
        state = replica_seeding.keep(disk, DIRECTORY, NEW)
        is_kept.append(True)
        replica_seeding.discard(disk, DIRECTORY, state)

    for disk, _ in crashed(born, work):
        catalog.read(disk, DIRECTORY)  # bring_back runs before any repair
        state, _ = replica_seeding.bring_back(disk, DIRECTORY)
        assert state.phase is Phase.SETTLED
        if state.follows == NEW:
            assert {name: found(disk)[name] for name in NEW_DATA} == NEW_DATA
        else:
            assert not is_kept
            assert found(disk) == OLD_DATA


def test_bring_back_can_be_repeated_after_a_crash_at_any_moment() -> None:
    def prepare(disk: Disk) -> None:
        born(disk)
        seed(disk)

    for disk, _ in crashed(prepare, lambda disk: void(replica_seeding.bring_back(disk, DIRECTORY))):
        catalog.read(disk, DIRECTORY)
        assert replica_seeding.bring_back(disk, DIRECTORY)[0] == SeedingState(OLD)
        assert found(disk) == OLD_DATA


def void(_: object) -> None:
    pass


def test_promotion_can_be_repeated_after_a_crash_at_any_moment() -> None:
    def prepare(disk: Disk) -> None:
        born(disk)
        seed(disk)

    for disk, is_done in crashed(prepare, lambda disk: void(replica_seeding.promote(disk, DIRECTORY))):
        assert is_done or replica_seeding.read(disk, DIRECTORY).follows in (OLD, None)
        replica_seeding.promote(disk, DIRECTORY)
        assert replica_seeding.read(disk, DIRECTORY) == SeedingState(None)
        assert lineage.read(disk, DIRECTORY) == (OLD,)
        assert not replica_seeding.promote(disk, DIRECTORY)
        assert found(disk) == OLD_DATA
