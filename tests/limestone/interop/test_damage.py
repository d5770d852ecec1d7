"""Damaged log files, judged and repaired by the original's tool and by ours, with equal verdicts and equal bytes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Final

import pytest

from flowstone.limestone.format import names
from flowstone.limestone.format.entries import walk
from flowstone.limestone.format.epoch_file import read as read_epochs
from flowstone.limestone.format.log_scan import INSPECT, REPAIR, REPAIR_CUT, LogScan, ScanMode, Verdict
from flowstone.limestone.store.recovery import apply
from flowstone.outside import production
from tests.conftest import FULL
from tests.limestone import recorded
from tests.limestone.interop.real_limestone import logutil
from tests.limestone.mutations import mutated

DISK: Final = production().disk
CASES: Final = 600 if FULL else 20
SIZE_MAX: Final = 1 << 20

WHOLE: Final = sorted(path.parent for path in recorded.HERE.rglob(names.MANIFEST))
LOGS: Final = [path.read_bytes() for path in recorded.log_files() if names.is_pwal(path.name)]


def damaged(rng: random.Random, target: Path) -> Path:
    """Return a copy of a recorded directory with one damaged log file."""
    source = rng.choice([path for path in WHOLE if logs(path)])
    shutil.copytree(source, target)
    path = rng.choice(logs(target))
    path.write_bytes(mutated(path.read_bytes(), rng, LOGS)[:SIZE_MAX])
    return target


def logs(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if names.is_pwal(path.name))


def scanned(path: Path, mode: ScanMode, durable_epoch: int, *, is_detached: bool) -> LogScan:
    data = path.read_bytes()
    scan = LogScan(walk(lambda at, size: data[at : at + size], len(data)), durable_epoch, mode, is_detached=is_detached)
    assert len(list(scan)) == scan.counted
    return scan


def verdict(directory: Path) -> Verdict:
    durable = read_epochs(DISK, str(directory)).durable
    found = [scanned(path, INSPECT, durable, is_detached=names.is_detached(path.name)) for path in logs(directory)]
    return max((scan.verdict for scan in found), default=Verdict.OK)


@pytest.mark.parametrize("seed", range(CASES))
def test_verdict_equals_that_of_the_real_tool(seed: int, tmp_path: Path) -> None:
    directory = damaged(random.Random(seed), tmp_path / "d")
    ours = verdict(directory)
    said = logutil("inspect", directory)
    if said.died:
        assert ours is not Verdict.OK
        return
    assert said.code == (0 if ours is Verdict.OK else 1 if ours.is_repairable else 2), said


@pytest.mark.parametrize("option", ["", "--cut"])
@pytest.mark.parametrize("seed", range(CASES))
def test_bytes_after_a_repair_equal_those_of_the_real_tool(seed: int, option: str, tmp_path: Path) -> None:
    theirs = damaged(random.Random(seed), tmp_path / "theirs")
    ours = Path(shutil.copytree(theirs, tmp_path / "ours"))
    said = logutil("repair", theirs, *filter(None, [option]))
    if said.died:
        return
    durable = read_epochs(DISK, str(ours)).durable
    mode = REPAIR_CUT if option else REPAIR
    verdicts = []
    for path in logs(ours):
        scan = scanned(path, mode, durable, is_detached=True)
        apply(DISK, str(path), scan.changes)
        verdicts.append(scan.verdict)
    expected = [(0, "OK"), (0, "repaired")] if max(verdicts).is_clean else [(16, "unrepairable")]
    assert (said.code, said.status) in expected
    assert sorted(path.read_bytes() for path in logs(theirs)) == sorted(path.read_bytes() for path in logs(ours))
