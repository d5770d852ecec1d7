"""The judge's verdicts are as expected, and equal those of the available real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.versions import binaries, is_fit
from tests.judges.broken_directories import CASES, Case, put, together, write
from tests.judges.real_server import booted
from tests.judges.recovery import recovered

REAL = [binary for binary in binaries() if is_fit(binary.version, ">=2.11")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict_equals_the_expected_one_and_that_of_real_servers(case: Case, tmp_path: Path) -> None:
    write(tmp_path / "data", case.rows)
    verdict = recovered(tmp_path / "data")
    if case.refusal is None:
        assert verdict.refusal is None
    else:
        assert verdict.refusal is not None
        assert case.refusal in verdict.refusal
    for binary in REAL if case.is_defined else ():
        real = booted(binary.path, tmp_path / "data", tmp_path / str(binary))
        ours = recovered(tmp_path / "data", binary.version)
        assert (real.refusal is None) == (ours.refusal is None), f"{binary}: {real.refusal}; judge: {ours.refusal}"
        if ours.refusal is None:
            assert real == ours
        elif case.refusal is not None:
            assert case.refusal in str(real.refusal)


def damage(directory: Path, how: str) -> None:
    """Damages the files of a valid directory."""
    snapshot, log = directory / f"{0:020}.snap", directory / f"{0:020}.xlog"
    data = log.read_bytes()
    match how:
        case "torn tail":
            log.write_bytes(data[:-7])
        case "flipped bit":
            at = data.index(b"\n\n") + 2 + 25
            log.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        case "wrong magic":
            at = data.index(b"\n\n") + 2
            log.write_bytes(data[:at] + b"\xd5\xba\x0b\x00" + data[at + 4 :])
        case "snapshot without an end":
            snapshot.write_bytes(snapshot.read_bytes()[:-4])
        case "log of another instance":
            log.write_bytes(
                data.replace(b"11111111-0000-4000-8000-000000000001", b"11111111-0000-4000-8000-00000000000f")
            )
        case "renamed log":
            log.rename(directory / f"{9:020}.xlog")
        case "missing log":
            text = data.replace(b"VClock: {}", b"VClock: {1: 9}", 1)
            log.unlink()
            (directory / f"{9:020}.xlog").write_bytes(text)


DAMAGES = {
    "torn tail": False,
    "flipped bit": True,
    "wrong magic": True,
    "snapshot without an end": True,
    "log of another instance": True,
    "renamed log": True,
    "missing log": True,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_verdict_on_damaged_files_equals_that_of_real_servers(how: str, tmp_path: Path) -> None:
    write(tmp_path / "data", [together(put(number, number)) for number in (1, 2, 3)])
    damage(tmp_path / "data", how)
    ours = recovered(tmp_path / "data")
    assert (ours.refusal is not None) == DAMAGES[how], ours.refusal
    for binary in REAL:
        real = booted(binary.path, tmp_path / "data", tmp_path / str(binary))
        assert (real.refusal is not None) == DAMAGES[how], f"{binary}: {real.refusal}"
        if ours.refusal is None:
            assert real == ours
