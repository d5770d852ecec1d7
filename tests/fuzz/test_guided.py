"""Guided fuzzing: it finds bugs that blind mutation misses, its runs are repeatable, and every target is covered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FULL
from tests.fuzz import __main__ as command
from tests.fuzz.coverage import Coverage
from tests.fuzz.guided import Fuzzer
from tests.fuzz.targets import TARGETS, Target
from tests.places import ROOT

SECONDS = 120.0
"""Of each target, at full scale."""

PLANTED_RUNS = 20_000


def planted(data: bytes) -> None:
    """A bug after five checks, each of an independent byte."""
    if data[:1] != b"F":
        return
    if len(data) < 12:
        return
    if data[3] ^ data[1] != 0x5A:
        return
    if data[7] != (data[2] + 17) % 256:
        return
    if data[9] % 61 != 7:
        return
    if data[11] == data[5]:
        raise IndexError("planted")


CORPUS = (bytes(8), b"F" + bytes(4))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_guided_mutation_finds_a_bug_after_several_checks_and_blind_mutation_does_not(seed: int) -> None:
    target, here = Target(planted, CORPUS), Coverage(__file__)
    guided = Fuzzer(target, seed, coverage=here).run(runs=PLANTED_RUNS)
    assert guided is not None
    assert "planted" in guided.why
    with pytest.raises(IndexError):
        planted(guided.data)
    assert Fuzzer(target, seed, is_guided=False).run(runs=PLANTED_RUNS) is None


def test_inputs_with_new_coverage_join_the_pool() -> None:
    here = Coverage(__file__)
    assert here.is_news(planted, b"x")
    assert not here.is_news(planted, b"y")
    assert here.is_news(planted, b"F")
    count = here.edge_count
    assert not here.is_news(planted, b"F1")
    assert here.edge_count == count > 0
    assert b"F" in here.tokens


def fuzz(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_decoder_survives_guided_inputs() -> None:
    """Kernels run as plain Python: an out-of-bounds read is an error, and their edges count."""
    found = fuzz("all", *(["--seconds", str(SECONDS)] if FULL else []))
    assert found.returncode == 0, found.stdout + found.stderr
    assert [line.partition(":")[0] for line in found.stderr.splitlines() if " edges, " in line] == sorted(TARGETS)


def test_run_is_repeatable_in_another_process() -> None:
    first, second = (fuzz("row_stream", "--runs", "300", hash_seed=seed).stderr for seed in ("1", "2"))
    inputs, edges, pool, digest, _ = first.split(", ")
    assert second.startswith(f"{inputs}, {edges}, {pool}, {digest}, ")


def test_input_that_breaks_a_decoder_is_printed_kept_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fragile(data: bytes) -> None:
        if len(data) > 3:
            raise ValueError(data)

    monkeypatch.setitem(TARGETS, "greeting", Target(fragile, (b"abc",)))
    monkeypatch.setattr(command, "CORPORA", tmp_path / "fuzz")
    monkeypatch.setattr("sys.argv", ["fuzz", "greeting", "--runs", "100000"])
    assert command.main() == 1
    name, text = capsys.readouterr().out.split()
    assert name == "greeting"
    assert len(bytes.fromhex(text)) > 3
    (kept,) = (tmp_path / "fuzz").iterdir()
    assert kept.read_text() == f"{text}\n"
