"""The manifest: the original's bytes, all historical formats, and a migration that survives crashes."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowstone.limestone.errors import DamagedFile, LimestoneError, UnsupportedFormat
from flowstone.limestone.format import copying, lineage, manifest, names
from flowstone.limestone.format.manifest import Manifest, encode, parse
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store.directory import DataDirectory
from flowstone.outside import AlreadyLocked, Disk, Lock, production
from flowstone.outside.disk import SystemDisk, _SystemFile
from tests.limestone import original, recorded
from tests.limestone.crashes import DIRECTORY, crashed

UUID = "7036c76f-ef9c-4258-9711-665964110f2a"
OLD = Manifest(None, 4, "1.0")


def test_recorded_manifests_are_read_and_written_byte_for_byte() -> None:
    found = sorted(recorded.HERE.rglob(names.MANIFEST))
    assert len(found) > 10
    for path in found:
        read = parse(path.read_bytes(), str(path))
        assert (read.is_current, read.has_end_markers) == (True, True)
        assert encode(read) == path.read_bytes()


@pytest.mark.parametrize("version", range(1, 8))
def test_every_persistent_format_is_read_and_migrated_to_the_newest(version: int) -> None:
    found = parse(encode(Manifest(None, version, "1.0")), "x")
    assert (found.persistent_format_version, found.has_end_markers, found.is_current) == (version, version >= 6, False)
    assert found.migrated(UUID) == Manifest(UUID)
    assert Manifest("kept").migrated(UUID).instance_uuid == "kept"


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        ({"persistent_format_version": 8}, UnsupportedFormat, "persistent_format_version 8"),
        ({"persistent_format_version": 0}, UnsupportedFormat, "persistent_format_version 0"),
        ({"persistent_format_version": True}, UnsupportedFormat, "True"),
        ({"format_version": "2.0"}, UnsupportedFormat, "format_version '2.0'"),
        ({"instance_uuid": "x"}, DamagedFile, "is not a UUID"),
        ({"instance_uuid": None}, DamagedFile, "is not a UUID"),
    ],
)
def test_unknown_values_are_rejected(change: dict[str, object], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        parse(json.dumps(json.loads(encode(Manifest(UUID))) | change).encode(), "x")


@given(st.integers(0, len(encode(Manifest(UUID))) - 1), st.integers(0, 255))
def test_every_truncated_or_damaged_manifest_is_rejected_or_read(at: int, byte: int) -> None:
    data = bytearray(encode(Manifest(UUID)))
    with pytest.raises(DamagedFile):
        parse(bytes(data[:at]), "x")
    data[at] = byte
    with suppress(LimestoneError):
        parse(bytes(data), "x")


def test_deep_nesting_is_rejected() -> None:
    with pytest.raises(DamagedFile):
        parse(b"[" * 100_000, "x")


def test_new_directory_gets_a_manifest_and_an_initialized_one_is_rejected(tmp_path: Path) -> None:
    disk, directory = production().disk, str(tmp_path)
    (tmp_path / "blob").mkdir()
    assert manifest.read(disk, directory) is None
    created = manifest.create(disk, directory, UUID)
    assert manifest.read(disk, directory) == created == Manifest(UUID)
    with pytest.raises(LimestoneError, match="contains limestone-manifest"):
        manifest.create(disk, directory, UUID)


def test_migration_keeps_the_lock(tmp_path: Path) -> None:
    disk, path = production().disk, tmp_path / names.MANIFEST
    path.write_bytes(encode(OLD))
    with disk.lock_file(str(path)):
        manifest.migrate(disk, str(tmp_path), OLD.migrated(UUID))
        with pytest.raises(AlreadyLocked):
            disk.lock_file(str(path))
    assert [each.name for each in tmp_path.iterdir()] == [names.MANIFEST]


def test_directory_is_locked_while_its_manifest_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, directory = production(), str(tmp_path)
    manifest.create(outside.disk, directory, UUID)
    append, refused = _SystemFile.append, []

    def meddle(self: _SystemFile, *parts: bytes) -> None:
        if self.path.endswith(names.MANIFEST):
            with pytest.raises(AlreadyLocked), offline.held(outside.disk, directory):
                pass
            with pytest.raises(AlreadyLocked):
                asyncio.run(DataDirectory.open(outside, directory))
            refused.append((tmp_path / names.MANIFEST).read_bytes())
        append(self, *parts)

    monkeypatch.setattr(_SystemFile, "append", meddle)
    with offline.held(outside.disk, directory):
        offline.rename_instance(outside, directory)
    assert refused == [b""]
    assert sorted(each.name for each in tmp_path.iterdir()) == [lineage.FILE, names.MANIFEST]


@pytest.mark.parametrize("left", ["copy", "both", "torn"])
def test_manifest_is_locked_after_an_interrupted_migration(tmp_path: Path, left: str) -> None:
    disk, directory = production().disk, str(tmp_path)
    (tmp_path / names.MANIFEST_BACK).write_bytes(encode(Manifest(UUID)))
    if left != "copy":
        (tmp_path / names.MANIFEST).write_bytes(encode(OLD) if left == "both" else b"{")
    with manifest.lock(disk, directory) as held:
        manifest.settle(disk, directory)
        assert held.is_at(f"{directory}/{names.MANIFEST}")
        with pytest.raises(AlreadyLocked):
            manifest.lock(disk, directory)
    assert [each.name for each in tmp_path.iterdir()] == [names.MANIFEST]
    assert manifest.read(disk, directory) == (OLD if left == "both" else Manifest(UUID))


def test_manifest_is_reopened_if_replaced_before_its_lock(tmp_path: Path) -> None:
    disk, directory = production().disk, str(tmp_path)
    back, main = tmp_path / names.MANIFEST_BACK, tmp_path / names.MANIFEST
    back.write_bytes(encode(Manifest(UUID)))

    class Overtaken(SystemDisk):
        def lock_file(self, path: str) -> Lock:
            found = super().lock_file(path)
            if back.exists():
                back.rename(main)
            return found

    with manifest.lock(Overtaken(), directory) as held:
        assert held.is_at(str(main))
        with pytest.raises(AlreadyLocked):
            manifest.lock(disk, directory)
    main.unlink()
    with pytest.raises(FileNotFoundError):
        manifest.lock(disk, directory)


def test_migration_interrupted_at_any_point_is_completed() -> None:
    def prepare(disk: Disk) -> None:
        with disk.create(f"{DIRECTORY}/{names.MANIFEST}") as file:
            file.append(encode(OLD))
            file.sync()
        disk.sync_directory(DIRECTORY)

    for disk, is_done in crashed(prepare, lambda disk: manifest.migrate(disk, DIRECTORY, Manifest(UUID))):
        found = manifest.read(disk, DIRECTORY)
        assert found in ((Manifest(UUID),) if is_done else (OLD, Manifest(UUID)))
        assert original.instance(disk, DIRECTORY) == found
        manifest.settle(disk, DIRECTORY)
        assert disk.list_directory(DIRECTORY) == [names.MANIFEST]
        assert manifest.read(disk, DIRECTORY) == found


@pytest.mark.parametrize("main", [b"", b"{", encode(OLD)], ids=["empty", "torn", "old"])
def test_crash_during_a_migration_leaves_a_readable_manifest(main: bytes) -> None:
    def prepare(disk: Disk) -> None:
        copying.write(disk, f"{DIRECTORY}/{names.MANIFEST}", main)
        copying.write(disk, f"{DIRECTORY}/{names.MANIFEST_BACK}", encode(Manifest(UUID)))
        disk.sync_directory(DIRECTORY)

    for disk, _ in crashed(prepare, lambda disk: manifest.settle(disk, DIRECTORY)):
        found = original.instance(disk, DIRECTORY)
        assert found == manifest.read(disk, DIRECTORY)
        assert found == (OLD if main == encode(OLD) else Manifest(UUID))


def test_unreadable_manifest_without_a_copy_is_an_error(tmp_path: Path) -> None:
    (tmp_path / names.MANIFEST).write_bytes(b"{")
    with pytest.raises(DamagedFile):
        manifest.read(production().disk, str(tmp_path))
