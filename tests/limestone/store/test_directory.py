"""Data directories: created, locked, migrated, and recreated after a crash at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType, Marker, WriteVersion, encode, put
from flowstone.limestone.format.epoch_file import record
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store.directory import DataDirectory, free_name
from flowstone.outside import AlreadyLocked, Disk, production
from tests.limestone import original, recorded
from tests.limestone.crashes import DIRECTORY, crashed
from tests.limestone.world import outside_on

OUTSIDE = production()
UUID = "6a1d2d4f-52f2-4b8e-a6ab-3c5ec0f64c5d"


def session(epoch: int, key: bytes, *, has_end: bool = True) -> bytes:
    begin, end = (encode(Marker(kind, epoch)) for kind in (EntryType.MARKER_BEGIN, EntryType.MARKER_END))
    return begin + encode(put(1, key, b"v", WriteVersion(epoch, 1))) + (end if has_end else b"")


async def test_new_directory_equals_that_of_the_original(tmp_path: Path) -> None:
    directory = await DataDirectory.open(OUTSIDE, str(tmp_path / "a" / "b/"))
    path = tmp_path / "a" / "b"
    assert directory.path == str(path)
    assert sorted(each.name for each in path.iterdir()) == [names.CATALOG, names.EPOCH, names.MANIFEST]
    real = recorded.HERE / "basic" / "master-dir"
    assert (path / names.CATALOG).read_bytes() == (real / names.CATALOG).read_bytes()
    theirs = (real / names.MANIFEST).read_text()
    uuid = manifest.parse(theirs.encode(), "").instance_uuid
    assert uuid is not None
    assert (path / names.MANIFEST).read_text() == theirs.replace(uuid, directory.instance_uuid)
    found = await directory.recover()
    assert (found.last_epoch, found.files) == (0, ())
    directory.release()


async def test_directory_can_be_opened_only_once_at_a_time(tmp_path: Path) -> None:
    first = await DataDirectory.open(OUTSIDE, str(tmp_path))
    with pytest.raises(AlreadyLocked):
        await DataDirectory.open(OUTSIDE, str(tmp_path))
    first.release()
    first.release()
    again = await DataDirectory.open(OUTSIDE, str(tmp_path))
    assert again.instance_uuid == first.instance_uuid
    again.release()


async def test_invalid_directory_is_not_initialized(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "is not a directory"), (tmp_path, "is not a data directory")):
        with pytest.raises(LimestoneError, match=message):
            await DataDirectory.open(OUTSIDE, str(path), create=False)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(LimestoneError, match="contains notes"):
        await DataDirectory.open(OUTSIDE, str(tmp_path))
    (tmp_path / names.MANIFEST).write_text("{")
    with pytest.raises(DamagedFile):
        await DataDirectory.open(OUTSIDE, str(tmp_path))


async def test_damaged_directory_is_not_locked(tmp_path: Path) -> None:
    (await DataDirectory.open(OUTSIDE, str(tmp_path))).release()
    (tmp_path / names.EPOCH).write_bytes(b"\x55" * 9)
    for _ in range(2):
        with pytest.raises(DamagedFile):
            await DataDirectory.open(OUTSIDE, str(tmp_path))
    (tmp_path / names.EPOCH).write_bytes(b"")
    (tmp_path / "pwal_0000").write_bytes(b"")
    (tmp_path / names.CATALOG).write_bytes(b"")
    with pytest.raises(DamagedFile):
        await DataDirectory.open(OUTSIDE, str(tmp_path))


async def test_opening_restores_the_catalog_from_its_copy(tmp_path: Path) -> None:
    """The original takes a missing catalog for an empty one, which restores removed keys."""
    (await DataDirectory.open(OUTSIDE, str(tmp_path))).release()
    full = Catalog(((names.COMPACTED, 1),), ("pwal_0000.01794772615522.0",), 3, 4)
    catalog.write(OUTSIDE.disk, str(tmp_path), full)
    (tmp_path / names.CATALOG).rename(tmp_path / names.CATALOG_BACK)
    (await DataDirectory.open(OUTSIDE, str(tmp_path))).release()
    assert original.listed(OUTSIDE.disk, str(tmp_path)) == catalog.read(OUTSIDE.disk, str(tmp_path)) == full


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
async def test_old_formats_are_migrated(tmp_path: Path, version: int) -> None:
    """Sessions of formats up to 5 have no end marker, so our sessions are not appended to them."""
    old = Manifest(UUID if version >= 5 else None, version, "1.1" if version >= 5 else "1.0")
    (tmp_path / names.MANIFEST).write_bytes(manifest.encode(old))
    (tmp_path / names.EPOCH).write_bytes(record(4))
    (tmp_path / "pwal_0000").write_bytes(session(3, b"a", has_end=False) + session(4, b"b", has_end=False))
    (tmp_path / "pwal_0001").write_bytes(b"")
    directory = await DataDirectory.open(OUTSIDE, str(tmp_path))
    assert directory.manifest.is_current
    assert version < 5 or directory.instance_uuid == UUID
    assert catalog.read(OUTSIDE.disk, str(tmp_path)) == Catalog()
    logs = [name for name in OUTSIDE.disk.list_directory(str(tmp_path)) if names.is_pwal(name)]
    assert [names.is_detached(name) for name in logs] == [version < 6, False]
    found = await directory.recover()
    assert [row.key for row in found.snapshot.rows()] == [b"a", b"b"]
    directory.release()


def test_free_name_skips_existing_files(tmp_path: Path) -> None:
    (tmp_path / "pwal_0000.00000000000007.0").touch()
    assert free_name(OUTSIDE.disk, str(tmp_path), "pwal_0000", 7) == "pwal_0000.00000000000007.1"


def opened(disk: Disk) -> DataDirectory:
    return asyncio.run(DataDirectory.open(outside_on(disk), DIRECTORY))


@pytest.mark.parametrize("version", [None, 1, 5])
def test_crash_during_creation_or_migration_leaves_a_directory_that_opens(version: int | None) -> None:
    def prepare(disk: Disk) -> None:
        if version is None:
            return
        old = Manifest(UUID if version == 5 else None, version, "1.1" if version == 5 else "1.0")
        files = {names.MANIFEST: manifest.encode(old), "pwal_0000": session(1, b"a", has_end=False), "epoch": record(1)}
        for name, data in files.items():
            with disk.create(f"{DIRECTORY}/{name}") as file:
                file.append(data)
                file.sync()
        disk.sync_directory(DIRECTORY)

    for disk, _ in crashed(prepare, lambda disk: opened(disk).release()):
        directory = opened(disk)
        assert directory.manifest.is_current
        found = asyncio.run(directory.recover())
        assert [row.key for row in found.snapshot.rows()] == ([] if version is None else [b"a"])
