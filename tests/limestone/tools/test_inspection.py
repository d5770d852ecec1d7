"""Inspection: the original's answers to every kind of damage, and epoch files that the original cannot read.

No file changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowstone.limestone.format import catalog, epoch_file, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import EntryType
from flowstone.limestone.format.log_scan import Verdict
from flowstone.limestone.format.manifest import Manifest
from flowstone.limestone.tools import inspection
from flowstone.limestone.tools.inspection import Inspection, InspectionStatus, inspect
from flowstone.outside import production
from tests.limestone import damage, recorded
from tests.limestone.damage import MATRIX, Damage

DISK = production().disk
OURS = Manifest(damage.UUID)
CODES = [InspectionStatus.OK, InspectionStatus.AUTO_REPAIRABLE, InspectionStatus.UNREPAIRABLE]


def inspected(directory: Path, epoch: int | None = None) -> Inspection:
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    found = inspect(DISK, str(directory), OURS, epoch=epoch)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    return found


@pytest.mark.parametrize("case", MATRIX, ids=[case.name for case in MATRIX])
def test_verdict_on_damage_equals_that_of_the_real_tool(case: Damage, tmp_path: Path) -> None:
    found = inspected(damage.write(tmp_path / "data", case.appended))
    assert found.status is CODES[case.inspect]
    assert found.durable_epoch == 5


@pytest.mark.parametrize("side", ["dirs-master", "dirs-replica"])
def test_counts_of_recorded_directories_equal_those_of_the_real_tool(side: str) -> None:
    found = inspected(recorded.HERE / side / "before")
    lines = (recorded.HERE / side / "inspect.out").read_text().splitlines()
    counted = found.counts.get(EntryType.NORMAL, 0) + found.counts.get(EntryType.REMOVE, 0)
    for line in (
        f"durable-epoch: {found.durable_epoch}",
        f"max-appeared-epoch: {found.max_epoch}",
        f"count-durable-wal-entries: {counted}",
        f"status: {found.status.value}",
    ):
        assert line in lines
    assert found.counts[EntryType.NORMAL_WITH_BLOB] == 2
    assert (found.blob_count, found.missing_blobs) == (3, ())
    assert [(file.name, file.size, file.sessions) for file in found.files] == [
        ("pwal_0000", 511, 4),
        ("pwal_0001", 277, 3),
    ]


def test_detached_files_that_a_compaction_replaced_are_inspected_as_superfluous(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    detached = "pwal_0000.01794772615522.0"
    (directory / detached).write_bytes(damage.CLEAN + damage.ENTRY[:-1])
    catalog.write(DISK, str(directory), Catalog((), (detached,), 5, 0))
    found = inspected(directory)
    assert [(file.is_detached, file.is_superfluous) for file in found.files] == [(False, False), (True, True)]
    assert found.files[1].verdict is Verdict.UNEXPECTED
    assert found.status is InspectionStatus.UNREPAIRABLE


def test_missing_blobs_of_rows_are_reported(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(recorded.HERE / "dirs-master/before", tmp_path / "data"))
    (directory / names.blob(2)).unlink()
    assert inspected(directory).missing_blobs == (2,)
    (directory / "pwal_0001").write_bytes(damage.ENTRY)
    assert inspected(directory).missing_blobs == ()  # unreadable rows name no blobs


def test_durable_epoch_can_be_overridden(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", damage.SIX)
    assert inspected(directory, epoch=6).status is InspectionStatus.OK
    assert inspected(directory, epoch=4).counts == {EntryType.NORMAL: 1}


RECORDS = epoch_file.record(4) + epoch_file.record(5)


@pytest.mark.parametrize(
    ("data", "durable", "status"),
    [
        (RECORDS + b"\x04\x05", 5, InspectionStatus.AUTO_REPAIRABLE),  # a torn record
        (RECORDS + bytes(20), 5, InspectionStatus.AUTO_REPAIRABLE),
        (epoch_file.record(4) + b"garbage!!" + epoch_file.record(5), 5, InspectionStatus.AUTO_REPAIRABLE),
        (
            epoch_file.record(4) + b"garbage!!" + epoch_file.record(1 << 60),
            4,
            InspectionStatus.AUTO_REPAIRABLE,
        ),  # unrepairable
        (b"garbage!!" + epoch_file.record(5), 5, InspectionStatus.AUTO_REPAIRABLE),
        (b"garbage!!", None, InspectionStatus.UNREPAIRABLE),
        (b"", None, InspectionStatus.UNREPAIRABLE),  # there were several epochs
    ],
)
def test_epoch_files_that_the_real_tool_cannot_read_are_inspected(
    tmp_path: Path, data: bytes, durable: int | None, status: InspectionStatus
) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.EPOCH).write_bytes(data)
    found = inspected(directory)
    assert (found.durable_epoch, found.status) == (durable, status)
    assert found.epoch_file.problem is not None


def test_durable_epoch_is_at_least_that_of_the_catalog(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    catalog.write(DISK, str(directory), Catalog(max_epoch_id=4))
    (directory / names.EPOCH).write_bytes(b"garbage")
    assert inspected(directory).durable_epoch == 4


def test_unreadable_catalog_is_reported(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.CATALOG).write_bytes(b"?")
    found = inspected(directory)
    assert found.catalog_problem is not None
    assert found.status is InspectionStatus.UNREPAIRABLE


def test_progress_is_reported_in_bytes(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"\x55")
    told: list[tuple[int, str]] = []
    inspect(DISK, str(directory), OURS, tell=lambda size, name: told.append((size, name)))
    assert sum(size for size, _ in told) == sum(map(DISK.size, map(str, directory.glob("pwal_*"))))
    assert inspection.log_files(DISK, str(directory)) == ["pwal_0000"]
