"""Offline compaction: the original's file without its defects; blobs, ids and removed keys are correct."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, epoch_file, lineage, manifest, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType, Marker, WriteVersion, encode, remove
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store import blobs
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.recovery import recover
from flowstone.limestone.tools import offline_compaction, repair
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import AlreadyLocked, Disk, Outside, production
from tests.limestone import original, recorded
from tests.limestone.crashes import DIRECTORY, crashed
from tests.limestone.store.test_compaction import both, session, set_key, two_files

OUTSIDE = production()
DISK = OUTSIDE.disk
REAL = recorded.HERE / "dirs-master"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REAL / "before", tmp_path / "data"))


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def shown(directory: Path) -> list[tuple[int, bytes, bytes]]:
    return [(row.storage_id, row.key, row.value) for row in original.rows(DISK, str(directory))]


def test_compacted_file_equals_that_of_the_real_program_and_blobs_are_kept(directory: Path) -> None:
    done = compact_offline(OUTSIDE, str(directory))
    after = REAL / "after-offline-compaction"
    for name in (names.COMPACTED, names.EPOCH):
        assert (directory / name).read_bytes() == (after / name).read_bytes()
    assert shown(directory) == recorded.rows((REAL / "after-offline.rows.txt").read_text())
    assert catalog.read(DISK, str(directory)) == Catalog(((names.COMPACTED, 1),), (), 5, 3) == done.catalog
    assert blobs.stored_ids(DISK, str(directory)) == [1, 2, 3]
    assert [path.name for path in directory.glob("pwal_*")] == [names.COMPACTED]
    assert (done.rows, done.bytes_after, done.plan.bytes_before) == (7, 353, 788)
    found, before = (manifest.read(DISK, str(path)) for path in (directory, REAL / "before"))
    assert found is not None
    assert before is not None
    assert found.is_current
    assert found.instance_uuid != before.instance_uuid  # as in the original: no replica may resume now


def test_backup_is_the_directory_before_the_compaction(directory: Path) -> None:
    done = compact_offline(OUTSIDE, str(directory))
    assert done.backup is not None
    for path in (REAL / "before").rglob("*"):
        if path.is_file() and path.name != "snapshot":
            assert (Path(done.backup) / path.relative_to(REAL / "before")).read_bytes() == path.read_bytes()
    assert compact_offline(OUTSIDE, str(directory), keeps_backup=False).backup is None
    assert len(list(directory.parent.iterdir())) == 2


def test_key_removed_after_compaction_stays_removed_when_the_original_starts(directory: Path) -> None:
    """After the original's own compaction the key returns."""
    compact_offline(OUTSIDE, str(directory), keeps_backup=False)
    (directory / "pwal_0000").write_bytes(session(6, remove(1, b"k1", WriteVersion(6, 1))))
    (directory / names.EPOCH).write_bytes(epoch_file.record(6))
    assert (1, b"k1") not in [(storage, key) for storage, key, _ in shown(directory)]
    quirk = Path(shutil.copytree(recorded.HERE / "quirk-offline-remove/dir", directory.parent / "quirk"))
    rows = recover(DISK, str(quirk), repairs=False).snapshot.rows()
    assert len(shown(quirk)) == len(rows) + 1  # the original's rules above therefore show the defect
    compact_offline(OUTSIDE, str(quirk))
    assert len(shown(quirk)) == len(rows)


def test_unreferenced_blobs_are_deleted_except_those_of_larger_ids(directory: Path) -> None:
    append(directory / "pwal_0001", session(6, remove(3, b"kb", WriteVersion(6, 1))))
    append(directory / names.EPOCH, epoch_file.record(6))
    (directory / "blob/dir_09").mkdir()
    (directory / names.blob(9)).write_bytes(b"")
    done = compact_offline(OUTSIDE, str(directory))
    assert done.collected == (1,)
    assert blobs.stored_ids(DISK, str(directory)) == [2, 3, 9]
    assert done.backup is not None
    assert blobs.stored_ids(DISK, done.backup) == [1, 2, 3, 9]


def test_undurable_sessions_are_omitted_unless_the_epoch_is_overridden(directory: Path) -> None:
    append(directory / "pwal_0000", session(6, set_key(b"new", b"6", 6)))
    other = Path(shutil.copytree(directory, directory.parent / "other"))
    older = Path(shutil.copytree(directory, directory.parent / "older"))
    compact_offline(OUTSIDE, str(directory))
    compact_offline(OUTSIDE, str(other), epoch=6)
    compact_offline(OUTSIDE, str(older), epoch=1)
    assert (1, b"new", b"6") not in shown(directory)
    assert (1, b"new", b"6") in shown(other)
    assert shown(older) == [(1, b"k1", b"v1"), (1, b"k2", b"v2")]
    durable = [epoch_file.read(DISK, str(path)).durable for path in (directory, other, older)]
    assert durable == [5, 6, 1]


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_compacted_directory_is_left_unchanged(directory: Path) -> None:
    first = compact_offline(OUTSIDE, str(directory), keeps_backup=False)
    (directory / "pwal_0000").write_bytes(b"")  # as after a datastore was opened later and wrote nothing
    append(directory / names.EPOCH, epoch_file.record(8))
    before = files(directory)
    for epoch in (None, 8):
        done = compact_offline(OUTSIDE, str(directory), epoch=epoch)
        assert not done.plan.has_work
        assert (done.rows, done.bytes_after, done.catalog) == (first.rows, first.bytes_after, first.catalog)
        assert (done.collected, done.backup) == ((), None)
    assert files(directory) == before
    assert [path.name for path in directory.parent.iterdir()] == ["data"]


@pytest.mark.parametrize("what", ["a session", "another epoch", "a damaged epoch file", "one put aside", "no catalog"])
def test_compacted_directory_with_other_changes_is_compacted_again(directory: Path, what: str) -> None:
    compact_offline(OUTSIDE, str(directory), keeps_backup=False)
    epoch = None
    if what == "a session":
        (directory / "pwal_0000").write_bytes(session(6, set_key(b"new", b"6", 6)))
    elif what == "another epoch":
        epoch = 4
    elif what == "a damaged epoch file":
        epoch = 5
        (directory / names.EPOCH).write_bytes(b"garbage!!")
    elif what == "one put aside":
        shutil.copy(directory / names.EPOCH, directory / "epoch.01794772615522.5")
    else:  # the original's own tool leaves an empty catalog
        catalog.write(DISK, str(directory), Catalog())
    done = compact_offline(OUTSIDE, str(directory), epoch=epoch)
    assert done.plan.has_work
    assert done.backup is not None
    assert epoch_file.read(DISK, str(directory)).durable == (epoch or 5)
    assert not compact_offline(OUTSIDE, str(directory)).plan.has_work


@pytest.mark.parametrize("tool", ["compact", "repair"])
def test_replica_with_an_overridden_durable_epoch_is_not_resumed(directory: Path, tool: str) -> None:
    """This epoch is not the one that the master sent; with the real durable epoch it would remain a replica."""
    path, follows = str(directory), replica_seeding.SeedingState("11111111-1111-4111-8111-111111111111")
    replica_seeding.write(DISK, path, follows)
    durable = epoch_file.read(DISK, path).durable
    for epoch, left in ((durable, follows), (durable - 1, replica_seeding.SeedingState())):
        if tool == "compact":
            compact_offline(OUTSIDE, path, epoch=epoch, keeps_backup=False)
        else:
            planned = repair.plan(DISK, path, 1, epoch=epoch)
            with offline.held(DISK, path) as found:
                repair.execute(OUTSIDE, path, found, planned, keeps_backup=False)
            (directory / "pwal_0000").write_bytes(session(durable + 1, set_key(b"k", b"v", durable + 1)))
        assert replica_seeding.read(DISK, path) == left
    assert follows.follows in lineage.read(DISK, path)


def test_damaged_compacted_file_is_rejected(directory: Path) -> None:
    compact_offline(OUTSIDE, str(directory), keeps_backup=False)
    append(directory / names.COMPACTED, b"\x01")
    with pytest.raises(DamagedFile, match=names.COMPACTED):
        compact_offline(OUTSIDE, str(directory))


def test_torn_epoch_file_of_a_crash_is_replaced(directory: Path) -> None:
    (directory / names.EPOCH).rename(directory / "epoch.01794772615522.5")
    (directory / names.EPOCH).write_bytes(b"\x04\x01")
    compact_offline(OUTSIDE, str(directory))
    assert (directory / names.EPOCH).read_bytes() == epoch_file.record(5)
    assert not (directory / "epoch.01794772615522.5").exists()


def test_directory_of_an_older_format_is_migrated(directory: Path) -> None:
    (directory / names.MANIFEST).write_bytes(manifest.encode(Manifest(None, 2, "1.0")))
    compact_offline(OUTSIDE, str(directory))
    found = manifest.read(DISK, str(directory))
    assert found is not None
    assert found.is_current


def test_links_damage_and_directories_in_use_are_rejected_before_any_change(directory: Path) -> None:
    link = directory.parent / "link"
    link.symlink_to(directory)
    with pytest.raises(LimestoneError, match="symbolic link"):
        compact_offline(OUTSIDE, f"{link}/")
    with offline.held(DISK, str(directory)), pytest.raises(AlreadyLocked):
        compact_offline(OUTSIDE, str(directory))
    append(directory / "pwal_0000", encode(Marker(EntryType.MARKER_END, 5)))
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    with pytest.raises(DamagedFile, match="pwal_0000"):
        compact_offline(OUTSIDE, str(directory))
    with pytest.raises(DamagedFile, match="pwal_0000"):
        offline_compaction.check(DISK, str(directory), offline_compaction.plan(DISK, str(directory)))
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in directory.parent.iterdir()) == ["data", "link"]


def test_planning_and_checking_change_nothing(directory: Path) -> None:
    before = sorted(directory.rglob("*"))
    planned = offline_compaction.plan(DISK, str(directory))
    assert planned == offline_compaction.CompactionPlan(5, ("pwal_0000", "pwal_0001"), (), 788)
    assert offline_compaction.check(DISK, str(directory), planned) == 7
    assert sorted(directory.rglob("*")) == before


def test_crash_at_any_moment_leaves_the_same_rows() -> None:
    def prepare(disk: Disk) -> None:
        manifest.create(disk, DIRECTORY, "11111111-1111-4111-8111-111111111111")
        two_files(disk)

    def work(disk: Disk) -> None:
        outside = Outside(disk, OUTSIDE.clock, OUTSIDE.random, OUTSIDE.blocking, OUTSIDE.network)
        compact_offline(outside, DIRECTORY, keeps_backup=False)

    for number, (disk, _) in enumerate(crashed(prepare, work)):
        assert both(disk) == [(1, b"a", b"4")]
        if number % 5 == 0:  # only sometimes, because this is slow
            work(disk)
            assert both(disk) == [(1, b"a", b"4")]
