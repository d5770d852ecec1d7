"""Answers of our tools and of the original's to the same damage are equal, and the original accepts our output."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flowstone.limestone.format import epoch_file, names
from flowstone.limestone.store import offline_directory as offline
from flowstone.limestone.tools import inspection, repair
from flowstone.limestone.tools.offline_compaction import compact_offline
from flowstone.outside import production
from tests.limestone import damage, recorded
from tests.limestone.damage import MATRIX, Damage
from tests.limestone.interop.real_limestone import logutil

OUTSIDE = production()
DISK = OUTSIDE.disk
every_case = pytest.mark.parametrize("case", MATRIX, ids=[case.name for case in MATRIX])


def log_content(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.glob("pwal_*"))]


@every_case
def test_inspect_output_equals_that_of_the_real_tool(case: Damage, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", case.appended)
    with offline.held(DISK, str(directory), only_looks=True) as manifest:
        ours = inspection.inspect(DISK, str(directory), manifest)
    real = logutil("inspect", directory)
    assert (real.code, real.status) == (case.inspect, ours.status.value)
    assert real.fields["durable-epoch"] == str(ours.durable_epoch)
    assert real.fields["max-appeared-epoch"] == str(ours.max_epoch)


@pytest.mark.parametrize("cuts", [False, True], ids=["mark", "cut"])
@every_case
def test_repair_writes_the_bytes_of_the_real_tool(case: Damage, cuts: bool, tmp_path: Path) -> None:
    ours, theirs = (damage.write(tmp_path / name, case.appended) for name in ("ours", "theirs"))
    with offline.held(DISK, str(ours)) as manifest:
        planned = repair.plan(DISK, str(ours), 0, cuts=cuts)
        repair.execute(OUTSIDE, str(ours), manifest, planned)
    real = logutil("repair", theirs, *(["--cut"] if cuts else []))
    assert real.status == planned.status.value
    assert log_content(ours) == log_content(theirs)
    assert logutil("inspect", ours).status == ("unrepairable" if real.code else "OK")


def test_real_tool_reads_an_epoch_file_after_our_repair(tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "data", b"")
    (directory / names.EPOCH).write_bytes(epoch_file.record(5) + b"\x04\x06")
    assert logutil("inspect", directory).code == 64
    with offline.held(DISK, str(directory)) as manifest:
        repair.execute(OUTSIDE, str(directory), manifest, repair.plan(DISK, str(directory), 0))
    real = logutil("inspect", directory)
    assert (real.code, real.fields["durable-epoch"]) == (0, "5")


def test_real_tool_compacts_our_compacted_directory_to_the_same_bytes(tmp_path: Path) -> None:
    ours = Path(shutil.copytree(recorded.HERE / "dirs-master/before", tmp_path / "ours"))
    theirs = Path(shutil.copytree(recorded.HERE / "dirs-master/before", tmp_path / "theirs"))
    done = compact_offline(OUTSIDE, str(ours))
    assert logutil("compaction", theirs, "--force").code == 0
    compacted = (ours / names.COMPACTED).read_bytes()
    assert compacted == (theirs / names.COMPACTED).read_bytes()
    assert (ours / names.EPOCH).read_bytes() == (theirs / names.EPOCH).read_bytes()
    assert logutil("inspect", ours).code == 0
    assert done.backup is not None
    assert logutil("inspect", Path(done.backup)).code == 0
    assert logutil("compaction", ours, "--force").code == 0
    assert (ours / names.COMPACTED).read_bytes() == compacted
