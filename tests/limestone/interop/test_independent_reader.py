"""The independent reader agrees with the original on intact and broken directories: verdicts, epochs and rows."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import FULL
from tests.limestone import damage, recorded
from tests.limestone.independent_reader import CATALOG, COMPACTED, EPOCH, MANIFEST, files_of, judge
from tests.limestone.interop.real_limestone import logutil
from tests.limestone.interop.real_master import opened_by_the_original
from tests.limestone.mutations import mutated

CASES: Final = 1000 if FULL else 20
SIZE_MAX: Final = 1 << 20
WHOLE: Final = sorted(path.parent for path in recorded.HERE.rglob(MANIFEST))
OTHERS: Final = [path.read_bytes() for path in recorded.log_files()]


def compare(directory: Path) -> None:
    """Judge a directory, and compare the verdict with the original's tool and library."""
    ours = judge(files_of(directory))
    said = logutil("inspect", directory)
    assert said.died or said.code == ours.inspect, (ours, said)
    theirs = opened_by_the_original(directory)
    if theirs is None:
        assert ours.problem is not None, ours
        return
    assert ours.problem is None, (ours, theirs)
    last_epoch, rows = theirs
    assert (ours.last_epoch, ours.plain_rows()) == (last_epoch, rows)


@pytest.mark.parametrize("source", WHOLE, ids=lambda path: str(path.relative_to(recorded.HERE)))
def test_verdict_on_recorded_directories_equals_the_originals(source: Path, tmp_path: Path) -> None:
    compare(Path(shutil.copytree(source, tmp_path / "d")))


@pytest.mark.parametrize("case", damage.MATRIX, ids=lambda case: case.name)
@pytest.mark.parametrize("is_detached", [False, True])
def test_verdict_on_known_damage_equals_the_originals(case: damage.Damage, is_detached: bool, tmp_path: Path) -> None:
    directory = damage.write(tmp_path / "d", case.appended)
    if is_detached:
        (directory / "pwal_0000").rename(directory / "pwal_0000.00000000000001.0")
    compare(directory)


@pytest.mark.parametrize("seed", range(CASES))
def test_verdict_on_any_damage_equals_the_originals(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    directory = Path(shutil.copytree(rng.choice(WHOLE), tmp_path / "d"))
    names = [path for path in directory.iterdir() if path.is_file() and path.name.startswith(("pwal_", EPOCH))]
    path = rng.choice([*names, directory / CATALOG])
    if path.name != COMPACTED:  # on these files, the library trusts entry sizes without a limit
        path.write_bytes(mutated(path.read_bytes(), rng, OTHERS)[:SIZE_MAX])
    compare(directory)


def _without_catalog(directory: Path) -> None:
    (directory / CATALOG).rename(directory / f"{CATALOG}.back")


def _torn_catalog(directory: Path) -> None:
    shutil.copy(directory / CATALOG, directory / f"{CATALOG}.back")
    (directory / CATALOG).write_bytes(b"COMPACTION_CATALOG_HEADER\n")


def _torn_catalog_without_another(directory: Path) -> None:
    (directory / f"{CATALOG}.back").unlink(missing_ok=True)
    (directory / CATALOG).write_bytes(b"COMPACTION_CATALOG_HEADER\n")


def _without_manifest(directory: Path) -> None:
    (directory / MANIFEST).unlink()


def _torn_manifest(directory: Path) -> None:
    shutil.copy(directory / MANIFEST, directory / f"{MANIFEST}.back")
    (directory / MANIFEST).write_bytes(b"{")


def _newer_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_bytes((directory / MANIFEST).read_bytes().replace(b":7", b":8"))


def _without_epochs(directory: Path) -> None:
    (directory / EPOCH).unlink()


def _with_another_epoch_file(directory: Path) -> None:
    (directory / EPOCH).rename(directory / "epoch.00000000000001.5")


BREAKS: Final = [
    _without_catalog,
    _torn_catalog,
    _torn_catalog_without_another,
    _without_manifest,
    _torn_manifest,
    _newer_manifest,
    _without_epochs,
    _with_another_epoch_file,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda broken: broken.__name__)
@pytest.mark.parametrize("source", WHOLE, ids=lambda path: str(path.relative_to(recorded.HERE)))
def test_verdict_on_broken_small_files_equals_the_originals(break_it: object, source: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(source, tmp_path / "d"))
    assert callable(break_it)
    break_it(directory)
    compare(directory)
