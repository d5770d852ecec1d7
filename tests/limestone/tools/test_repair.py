"""Repair: the original's bytes for every kind of damage, epoch files that the original cannot repair, and a backup."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowstone.limestone.errors import DamagedFile
from flowstone.limestone.format import epoch_file, manifest, names
from flowstone.limestone.format.entries import EntryType, Marker, encode
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.store.recovery import recover
from flowstone.limestone.tools import repair
from flowstone.limestone.tools.repair import RepairPlan, RepairStatus
from flowstone.outside import Disk, Outside, production
from tests.limestone import damage, original
from tests.limestone.crashes import DIRECTORY, crashed
from tests.limestone.damage import CLEAN, MATRIX, SIX, Damage
from tests.limestone.store.test_compaction import session, set_key

OUTSIDE = production()
DISK = OUTSIDE.disk
OURS = Manifest(damage.UUID)
MS = 1_794_772_615_522
ASIDE = f"pwal_0000.{MS:014d}.0"


def repaired(directory: Path, *, epoch: int | None = None, cuts: bool = False) -> tuple[RepairPlan, str | None]:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    planned = repair.plan(DISK, str(directory), MS, epoch=epoch, cuts=cuts)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    backup = repair.execute(OUTSIDE, str(directory), OURS, planned)
    kept = {path.name: data for path, data in before.items()}
    if backup is not None:
        assert {path.name: path.read_bytes() for path in Path(backup).iterdir()} == kept
    else:
        assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    return planned, backup


@pytest.mark.parametrize("cuts", [False, True], ids=["mark", "cut"])
@pytest.mark.parametrize("case", MATRIX, ids=[case.name for case in MATRIX])
def test_repaired_bytes_equal_those_of_the_real_tool(case: Damage, cuts: bool, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", case.appended)
    planned, _ = repaired(directory, cuts=cuts)
    assert planned.status.value == (case.cut if cuts else case.repair)
    if planned.status is RepairStatus.UNREPAIRABLE:
        assert (directory / "pwal_0000").read_bytes() == CLEAN + case.appended
        return
    assert not (directory / "pwal_0000").exists()
    assert (directory / ASIDE).read_bytes() == CLEAN + (case.after_cut if cuts else case.repaired)
    ours = recover(DISK, str(directory), repairs=False)
    assert ours.snapshot.rows() == original.rows(DISK, str(directory))
    assert ours.last_epoch <= 6
    assert repair.plan(DISK, str(directory), MS).status is RepairStatus.OK


def test_unreadable_bytes_before_a_session_are_cut_off_with_it(tmp_path: Path) -> None:
    """The original marks only the unreadable bytes, and its next start trusts the rest."""
    garbage = b"\x55" * 9 + session(5, set_key(b"ghost", b"", 5))
    directory = damage.write(tmp_path / "data", SIX + garbage)
    planned, _ = repaired(directory)
    assert planned.status is RepairStatus.REPAIRED
    assert (directory / ASIDE).read_bytes() == CLEAN + b"\x06" + SIX[1:]
    assert recover(DISK, str(directory), repairs=False).last_epoch == 6


def test_intact_files_are_rotated_and_empty_ones_are_not(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / "pwal_0001").write_bytes(b"")
    (directory / ASIDE).write_bytes(session(4, set_key(b"x", b"", 4)))
    planned, backup = repaired(directory)
    assert planned.status is RepairStatus.OK
    assert backup is not None
    assert planned.renames == (("pwal_0000", f"pwal_0000.{MS:014d}.1"),)
    assert (directory / "pwal_0001").exists()
    assert repaired(directory)[1] is None


def test_durable_epoch_can_be_overridden(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", SIX)
    planned, _ = repaired(directory, epoch=4)
    assert [len(file.changes.marks) for file in planned.files] == [2]
    assert (directory / names.EPOCH).read_bytes() == epoch_file.record(5)


@pytest.mark.parametrize(
    ("data", "epoch", "status", "record"),
    [
        (epoch_file.record(5) + b"\x04", None, RepairStatus.REPAIRED, 5),
        (epoch_file.record(4) + b"garbage!!" + epoch_file.record(5), None, RepairStatus.REPAIRED, 5),
        (epoch_file.record(5) + b"garbage!!" + epoch_file.record(99), None, RepairStatus.REPAIRED, 5),
        (b"garbage!!", None, RepairStatus.UNREPAIRABLE, None),
        (b"garbage!!", 5, RepairStatus.REPAIRED, 5),
        (b"garbage!!", 6, RepairStatus.REPAIRED, 6),
    ],
)
def test_epoch_file_that_the_real_tool_cannot_repair_is_repaired(
    tmp_path: Path, data: bytes, epoch: int | None, status: RepairStatus, record: int | None
) -> None:
    directory = damage.write(tmp_path / "data", SIX)
    (directory / names.EPOCH).write_bytes(data)
    planned, _ = repaired(directory, epoch=epoch)
    assert planned.status is status
    expected = data if record is None else epoch_file.record(record)
    assert (directory / names.EPOCH).read_bytes() == expected
    if record is not None:
        keys = [row.key for row in recover(DISK, str(directory)).snapshot.rows()]
        assert keys == [b"a", b"b", b"c"][: record - 3]


def test_directory_of_an_older_format_is_migrated(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    old = Manifest(None, 3, "1.0")
    (directory / names.MANIFEST).write_bytes(manifest.encode(old))
    repair.execute(OUTSIDE, str(directory), old, repair.plan(DISK, str(directory), MS), keeps_backup=False)
    found = manifest.read(DISK, str(directory))
    assert found is not None
    assert found.is_current
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_damaged_catalog_is_rejected(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.CATALOG).write_bytes(b"?")
    with pytest.raises(DamagedFile, match=names.CATALOG):
        repair.plan(DISK, str(directory), MS)


def test_repair_can_be_repeated_after_a_crash_at_any_moment() -> None:
    torn = session(2, set_key(b"b", b"2", 2)) + encode(Marker(EntryType.MARKER_BEGIN, 3)) + b"\x01\x02"

    def prepare(disk: Disk) -> None:
        manifest.create(disk, DIRECTORY, damage.UUID)
        for name, data in (("pwal_0000", session(1, set_key(b"a", b"1", 1))), ("pwal_0001", torn)):
            with disk.create(f"{DIRECTORY}/{name}") as file:
                file.append(data)
                file.sync()
        with disk.create(f"{DIRECTORY}/{names.EPOCH}") as file:
            file.append(epoch_file.record(2) + b"\x04\x03")
            file.sync()
        disk.sync_directory(DIRECTORY)

    def work(disk: Disk) -> None:
        outside = Outside(disk, OUTSIDE.clock, OUTSIDE.random, OUTSIDE.blocking, OUTSIDE.network)
        repair.execute(outside, DIRECTORY, OURS, repair.plan(disk, DIRECTORY, MS), keeps_backup=False)

    for disk, is_done in crashed(prepare, work):
        if not is_done:
            work(disk)
        assert repair.plan(disk, DIRECTORY, MS).status is RepairStatus.OK
        assert [row.key for row in original.rows(disk, DIRECTORY)] == [b"a", b"b"]


@pytest.mark.parametrize(
    "content", [None, b"", b"\x04\x05\x00\x00\x00", bytes(27)], ids=["gone", "empty", "torn", "zeros"]
)
def test_epoch_file_without_records_is_repaired_only_with_a_given_epoch(content: bytes | None, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    if content is None:
        (directory / "epoch").unlink()
    else:
        (directory / "epoch").write_bytes(content)
    planned, backup = repaired(directory)
    assert planned.status is RepairStatus.UNREPAIRABLE
    assert planned.durable_epoch is None
    assert backup is None
    planned, backup = repaired(directory, epoch=5)
    assert planned.status is RepairStatus.REPAIRED
    assert backup is not None
    assert epoch_file.read(DISK, str(directory)).durable == 5
    assert recover(DISK, str(directory), repairs=False).snapshot.rows()


def test_implausible_record_before_damage_is_ignored(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    records = [epoch_file.record(epoch) for epoch in (5, 2734246854320457035)]
    (directory / "epoch").write_bytes(b"".join(records) + b"\x55" * 20)
    planned, _ = repaired(directory)
    assert planned.durable_epoch == 5
    assert planned.status is RepairStatus.REPAIRED
