"""Backups: copied in their order they are an intact directory despite concurrent writes, and can be restored."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, epoch_file, lineage, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import WriteVersion, remove
from flowstone.limestone.format.epoch_file import EpochWriter
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import backup, blobs
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.backup import BackupEntry, OpenBackups
from flowstone.limestone.store.recovery import recover
from flowstone.outside import Disk, production
from tests.limestone import original, recorded
from tests.limestone.crashes import DIRECTORY, crashed, fresh
from tests.limestone.store.test_compaction import MS, Row, session, set_key
from tests.limestone.world import outside_on

OUTSIDE = production()
DISK = OUTSIDE.disk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded.HERE / "dirs-master/before", tmp_path / "data"))


def shown(directory: Path) -> list[Row]:
    rows = recover(DISK, str(directory), repairs=False).snapshot.rows()
    return [(row.storage_id, row.key, row.value) for row in rows]


def rotate_logs(directory: Path) -> None:
    for path in directory.glob("pwal_????"):
        path.rename(directory / names.rotated(path.name, MS, 0))


async def taken(directory: Path, opened: OpenBackups, *, rotates: bool) -> backup.Backup:
    async def rotate() -> None:
        backup.rotate_epoch_file(DISK, str(directory), MS, 6)
        rotate_logs(directory)

    return await backup.begin(OUTSIDE, str(directory), opened, nullcontext(), lambda: 6, rotate if rotates else None)


async def test_rotated_backup_lists_only_final_files(directory: Path) -> None:
    compacted = directory / names.COMPACTED
    compacted.write_bytes(session(0)[:9])
    (directory / "pwal_0003").write_bytes(b"")
    catalog.write(DISK, str(directory), Catalog(((names.COMPACTED, 1),), ("pwal_0007.01794772615522.0",), 0, 0))
    (directory / "pwal_0007.01794772615522.0").write_bytes(b"")
    (directory / "strange").write_bytes(b"")
    opened = OpenBackups()
    found = await taken(directory, opened, rotates=True)
    listed = [(entry.destination, entry.is_mutable, entry.is_detached) for entry in found.entries]
    ms = f"{MS:014d}"
    assert listed == [
        (f"epoch.{ms}.6", False, False),
        (names.CATALOG, False, False),
        (names.COMPACTED, False, False),
        (f"pwal_0000.{ms}.0", False, False),
        (f"pwal_0001.{ms}.0", False, False),
        (f"pwal_0003.{ms}.0", False, False),
        ("pwal_0007.01794772615522.0", False, True),
        ("0000000000000001.blob", False, False),
        ("0000000000000002.blob", False, False),
        ("0000000000000003.blob", False, False),
        (names.MANIFEST, True, False),
    ]
    assert found.log_finish == 6
    assert opened
    found.notify_end_backup()
    found.notify_end_backup()
    assert not opened


async def test_backup_without_rotation_lists_all_files(directory: Path) -> None:
    opened = OpenBackups()
    with await taken(directory, opened, rotates=False) as found:
        assert opened.count == 1
        destinations = [entry.destination for entry in found.entries]
        assert destinations[:4] == [names.EPOCH, names.CATALOG, "pwal_0000", "pwal_0001"]
        assert destinations[-1] == names.MANIFEST
    assert opened.count == 0


async def test_failed_begin_leaves_no_open_backup(directory: Path) -> None:
    async def rotate() -> None:
        raise OSError(28, "No space left on device")

    opened = OpenBackups()
    with pytest.raises(OSError, match="No space"):
        await backup.begin(OUTSIDE, str(directory), opened, nullcontext(), lambda: 6, rotate)
    assert not opened


@pytest.mark.parametrize("rotates", [True, False])
async def test_restored_backup_has_the_same_rows(directory: Path, tmp_path: Path, rotates: bool) -> None:
    rows = shown(directory)
    flat = tmp_path / "flat"
    flat.mkdir()
    with await taken(directory, OpenBackups(), rotates=rotates) as found:
        for entry in found.entries:
            shutil.copyfile(entry.source, flat / entry.destination)
    target = tmp_path / "restored"
    shutil.copytree(recorded.HERE / "tail/dir", target)
    (target / "pwal_0009").write_bytes(b"stale")
    (target / "blob/dir_09").mkdir()
    (target / names.blob(9)).write_bytes(b"stale")
    with pytest.raises(LimestoneError, match="pwal_0000 contains entries"):
        backup.restore(OUTSIDE, str(flat), str(target))
    backup.restore(OUTSIDE, str(flat), str(target), replaces=True)
    assert shown(target) == rows != []
    assert blobs.stored_ids(DISK, str(target)) == [1, 2, 3]
    assert recover(DISK, str(target)).durable_epoch == 5
    assert not (target / "pwal_0009").exists()
    backup.restore(OUTSIDE, str(flat), str(tmp_path / "again"), keeps_source=False)
    assert shown(tmp_path / "again") == rows
    assert list(flat.iterdir()) == []


async def test_sessions_that_end_during_the_copy_are_omitted(directory: Path, tmp_path: Path) -> None:
    """The backup is made without a rotation, with sessions at any moment between two copies."""
    rows = shown(directory)
    for moment in range(1, 9):
        store = Path(shutil.copytree(directory, tmp_path / f"store{moment}"))
        flat = tmp_path / f"flat{moment}"
        flat.mkdir()
        for number, entry in enumerate((await taken(store, OpenBackups(), rotates=False)).entries):
            if number == moment:
                late = session(6, remove(1, b"k1", WriteVersion(6, 1)), set_key(b"z", b"", 6, 2))
                (store / "pwal_0000").write_bytes((store / "pwal_0000").read_bytes() + late)
                EpochWriter.open(DISK, str(store)).write(6)
            shutil.copyfile(entry.source, flat / entry.destination)
        backup.restore(OUTSIDE, str(flat), str(tmp_path / f"restored{moment}"))
        assert shown(tmp_path / f"restored{moment}") == rows


def test_named_entries_are_restored_to_their_names(directory: Path, tmp_path: Path) -> None:
    (directory / "pwal_0000").rename(tmp_path / "elsewhere")
    entries = [
        BackupEntry(str(tmp_path / "elsewhere"), "pwal_0000"),
        BackupEntry(names.MANIFEST, names.MANIFEST),
        BackupEntry("pwal_0001", "pwal_0001"),
        BackupEntry(names.EPOCH, names.EPOCH),
        BackupEntry(names.blob(1), "0000000000000001.blob"),
    ]
    target = tmp_path / "restored"
    backup.restore(OUTSIDE, str(directory), str(target), entries=entries)
    assert len(shown(target)) == 7
    assert blobs.stored_ids(DISK, str(target)) == [1]
    for name in ("../outside", "a/b", "", ".."):
        with pytest.raises(LimestoneError, match="a backup is flat"):
            backup.restore(OUTSIDE, str(directory), str(target), entries=[BackupEntry("epoch", name), *entries])
    with pytest.raises(LimestoneError, match="nosuch does not exist"):
        backup.restore(OUTSIDE, str(directory), str(target), entries=[BackupEntry("nosuch", "pwal_0002"), *entries])
    assert len(shown(target)) == 7


def test_invalid_backup_changes_nothing(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, word in ((tmp_path / "empty", "is not a backup"), (tmp_path / "nosuch", "no such directory")):
        with pytest.raises(LimestoneError, match=word):
            backup.restore(OUTSIDE, str(source), str(directory))
    (tmp_path / "empty" / names.MANIFEST).write_bytes(b"{")
    with pytest.raises(DamagedFile):
        backup.restore(OUTSIDE, str(tmp_path / "empty"), str(directory))
    assert len(shown(directory)) == 7


def test_restored_directory_is_a_new_instance(directory: Path, tmp_path: Path) -> None:
    """A replica of the original instance may have newer data, which the restored instance must not resume."""
    found = []
    for number in range(2):
        (directory / "flowstone-replica.json").write_bytes(b"follows somebody")
        backup.restore(OUTSIDE, str(directory), str(tmp_path / f"restored{number}"))
        assert not (tmp_path / f"restored{number}" / "flowstone-replica.json").exists()
        found.append(manifest.read(DISK, str(tmp_path / f"restored{number}")))
    before = manifest.read(DISK, str(directory))
    assert before is not None
    uuids = {each.instance_uuid for each in (before, *found) if each is not None}
    assert len(uuids) == 3
    assert lineage.read(DISK, str(tmp_path / "restored0")) == (before.instance_uuid,)
    backup.restore(OUTSIDE, str(tmp_path / "restored0"), str(tmp_path / "restored1"), replaces=True)
    assert {*lineage.read(DISK, str(tmp_path / "restored1"))} == uuids
    assert [replace(each, instance_uuid=None) for each in found if each] == [replace(before, instance_uuid=None)] * 2
    (directory / names.MANIFEST).write_bytes(b'{"format_version":"1.0","persistent_format_version":4}')
    backup.restore(OUTSIDE, str(directory), str(tmp_path / "older"))
    assert manifest.read(DISK, str(tmp_path / "older")) == Manifest(None, 4, "1.0")


def test_directory_is_not_restored_from_itself(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory)
    (tmp_path / "flat").mkdir()
    shutil.copyfile(directory / names.MANIFEST, tmp_path / "flat" / names.MANIFEST)
    rows = shown(directory)
    entries = [BackupEntry(names.MANIFEST, names.MANIFEST), BackupEntry(str(directory / "pwal_0000"), "pwal_0000")]
    for source, chosen in ((directory, None), (tmp_path / "link", None), (tmp_path / "flat", entries)):
        for target in (directory, tmp_path / "link"):
            with pytest.raises(LimestoneError, match="is inside it and would be deleted"):
                backup.restore(OUTSIDE, str(source), str(target), replaces=True, entries=chosen)
    assert shown(directory) == rows


def test_restore_rejects_a_directory_with_data_of_an_unfinished_seeding(directory: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(directory, tmp_path / "replica"))
    replica_seeding.put_aside(DISK, str(target))
    with pytest.raises(LimestoneError, match="its data is in put_aside"):
        backup.restore(OUTSIDE, str(directory), str(target))
    backup.restore(OUTSIDE, str(directory), str(target), replaces=True)
    assert shown(target) == shown(directory) != []
    assert [path for path in (target / replica_seeding.ASIDE).rglob("*") if path.is_file()] == []
    assert replica_seeding.read(DISK, str(target)) == replica_seeding.SeedingState()


def test_crash_during_a_restore_leaves_the_old_directory_the_new_one_or_none() -> None:
    uuids = [f"{number * 11111111}-1111-4111-8111-111111111111" for number in (1, 2)]

    def prepare(disk: Disk) -> None:
        for path, uuid, value in ((DIRECTORY, uuids[0], b"old"), ("/backup", uuids[1], b"new")):
            disk.make_directory(path)
            manifest.create(disk, path, uuid)
            EpochWriter.open(disk, path).write(1)
            with disk.create(f"{path}/pwal_0000") as file:
                file.append(session(1, set_key(b"k", value, 1)))
                file.sync()
            disk.sync_directory(path)

    def work(disk: Disk) -> None:
        backup.restore(outside_on(disk), "/backup", DIRECTORY, replaces=True)

    for disk, is_done in crashed(prepare, work):
        try:
            found = manifest.read(disk, DIRECTORY)
        except DamagedFile:
            found = None
        assert found is not None or not is_done
        if found is not None:
            value = b"old" if found.instance_uuid == uuids[0] else b"new"
            assert [row.value for row in recover(disk, DIRECTORY, repairs=False).snapshot.rows()] == [value]
        work(disk)
        assert [row.value for row in recover(disk, DIRECTORY, repairs=False).snapshot.rows()] == [b"new"]


def test_epoch_files_renamed_in_one_millisecond_do_not_replace_each_other() -> None:
    _, disk = fresh()
    EpochWriter.open(disk, DIRECTORY).write(7)
    found = [backup.rotate_epoch_file(disk, DIRECTORY, MS, 8) for _ in range(3)]
    assert len(set(found)) == 3
    assert epoch_file.read(disk, DIRECTORY).durable == 7


def test_backup_without_the_main_catalog_is_restored_with_it(directory: Path, tmp_path: Path) -> None:
    """The backup was copied from a directory that the original left between its rename and its write."""
    full = Catalog(((names.COMPACTED, 1),), ("pwal_0000.01794772615522.0",), 3, 4)
    catalog.write(DISK, str(directory), full)
    (directory / names.CATALOG).rename(directory / names.CATALOG_BACK)
    backup.restore(OUTSIDE, str(directory), str(tmp_path / "restored"))
    assert original.listed(DISK, str(tmp_path / "restored")) == full


def test_crash_during_a_rotation_of_the_epoch_file_loses_no_epoch() -> None:
    def prepare(disk: Disk) -> None:
        EpochWriter.open(disk, DIRECTORY).write(7)

    def work(disk: Disk) -> None:
        backup.rotate_epoch_file(disk, DIRECTORY, MS, 8)

    for disk, is_done in crashed(prepare, work):
        assert epoch_file.read(disk, DIRECTORY).durable == 7
        writer = EpochWriter.open(disk, DIRECTORY)
        writer.write(9)
        assert epoch_file.read(disk, DIRECTORY).durable == 9
        if is_done:
            assert disk.list_directory(DIRECTORY) == ["epoch", f"epoch.{MS:014d}.8"]
