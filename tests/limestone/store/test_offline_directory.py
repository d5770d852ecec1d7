"""A directory opened by a tool: exclusively, with a backup of its previous content next to it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import manifest, names
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store.recovery import recover
from flowstone.outside import AlreadyLocked, Disk, Outside, production
from tests.limestone import recorded
from tests.limestone.crashes import DIRECTORY, crashed

OUTSIDE = production()
DISK = OUTSIDE.disk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded.HERE / "basic/master-dir", tmp_path / "data"))


def test_directory_in_use_cannot_be_opened(directory: Path) -> None:
    with offline.held(DISK, str(directory)) as found:
        assert found.persistent_format_version == 7
        with pytest.raises(AlreadyLocked), offline.held(DISK, str(directory), only_looks=True):
            pass
    with offline.held(DISK, str(directory)):
        pass


def test_invalid_data_directory_is_rejected(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "nothing", "no such directory"), (tmp_path, "is not a data directory")):
        with pytest.raises(LimestoneError, match=word), offline.held(DISK, str(path)):
            pass
    (tmp_path / names.MANIFEST).write_bytes(b"{")
    with pytest.raises(DamagedFile), offline.held(DISK, str(tmp_path)):
        pass


def test_interrupted_migration_is_completed_only_when_opened_for_writing(
    directory: Path,
) -> None:
    (directory / names.MANIFEST).rename(directory / names.MANIFEST_BACK)
    with offline.held(DISK, str(directory), only_looks=True):
        assert not (directory / names.MANIFEST).exists()
    with offline.held(DISK, str(directory)):
        assert not (directory / names.MANIFEST_BACK).exists()


class ReadOnly:
    """The real disk, mounted read-only."""

    def lock_file(self, path: str) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", path)

    def __getattr__(self, name: str) -> Any:
        return getattr(DISK, name)


def test_directory_on_a_read_only_file_system_can_be_inspected(directory: Path) -> None:
    disk: Any = ReadOnly()
    with offline.held(disk, str(directory), only_looks=True) as found:
        assert found.is_current
    with pytest.raises(OSError, match="Read-only"), offline.held(disk, str(directory)):
        pass


def test_manifest_of_an_older_format_is_migrated(directory: Path) -> None:
    old = Manifest(None, 1, "1.0")
    (directory / names.MANIFEST).write_bytes(manifest.encode(old))
    offline.migrate(OUTSIDE, str(directory), old)
    found = manifest.read(DISK, str(directory))
    assert found is not None
    assert found.is_current
    offline.migrate(OUTSIDE, str(directory), found)
    assert manifest.read(DISK, str(directory)) == found


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_backup_is_a_complete_directory(directory: Path) -> None:
    (directory / "pwal_0002").write_bytes(b"")
    before = content(directory)
    told: list[str] = []
    aside = Path(offline.put_aside(OUTSIDE, str(directory), {"pwal_0000"}, lambda size, name: told.append(name)))
    assert aside.parent == directory.parent
    assert aside.name.startswith("data.backup_")
    for name in ("pwal_0000", "pwal_0002", "epoch", names.CATALOG):
        (directory / name).write_bytes(b"changed")
    (directory / "pwal_0001").unlink()
    (directory / names.blob(1)).unlink()
    expected = {name: data for name, data in before.items() if name != names.SNAPSHOT}
    assert content(aside) == expected
    assert told[-1] == names.MANIFEST
    assert recover(DISK, str(aside), repairs=False).snapshot.rows()


def test_interrupted_backup_is_not_accepted_as_a_directory() -> None:
    def prepare(disk: Disk) -> None:
        manifest.create(disk, DIRECTORY, "11111111-1111-4111-8111-111111111111")
        for name in ("pwal_0000", "pwal_0001"):
            with disk.create(f"{DIRECTORY}/{name}") as file:
                file.append(name.encode())
                file.sync()
        disk.sync_directory(DIRECTORY)

    def work(disk: Disk) -> None:
        outside = Outside(disk, OUTSIDE.clock, OUTSIDE.random, OUTSIDE.blocking, OUTSIDE.network)
        offline.put_aside(outside, DIRECTORY, {"pwal_0000"})

    for disk, is_done in crashed(prepare, work):
        for name in disk.list_directory("/"):
            if not name.startswith("data.backup_"):
                continue
            is_whole = disk.kind(f"/{name}/{names.MANIFEST}") == "file" and manifest_is_sound(disk, f"/{name}")
            assert is_whole or not is_done
            if is_whole:
                for each in ("pwal_0000", "pwal_0001"):
                    with disk.open(f"/{name}/{each}") as file:
                        assert file.read_at(0, 100) == each.encode()


def manifest_is_sound(disk: Disk, directory: str) -> bool:
    try:
        return manifest.read(disk, directory) is not None
    except DamagedFile:
        return False
