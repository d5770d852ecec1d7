"""A seed reproduces its run, and no error goes unreported."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.conftest import FULL
from tests.simulation import run as runs
from tests.simulation.plan import plan
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.run import FAULTS_MIN, OPERATIONS_MIN, run

SEED: Final = 3

HASH_SEEDS: Final = (1, 2) if FULL else (1,)
"""Hash seeds of the processes that repeat a run; the test itself has another one."""

SEEDS: Final = range(60) if FULL else (SEED, 22, 47)
"""Including sets with and without elections, of 2.6, and with archives, followers and Limestone pairs."""


def replay(seed: int, hash_seed: int) -> str:
    """Return the last line that a separate process prints."""
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_determines_a_run_of_sufficient_size_in_any_process(seed: int) -> None:
    outcome = run(seed)
    assert outcome.violations == []
    assert outcome.figures.answered >= OPERATIONS_MIN
    assert outcome.figures.fault_count >= FAULTS_MIN
    assert outcome.figures.seconds >= 60
    for hash_seed in HASH_SEEDS:
        assert replay(seed, hash_seed) == f"seed {seed}: ok hash {outcome.trace_hash}"


def test_exception_of_the_simulation_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: ReplicaSet) -> None:
        raise TimeoutError("nobody leads")

    monkeypatch.setattr(ReplicaSet, "form", never)
    outcome = run(SEED)
    assert outcome.verdict == "VIOLATED"
    assert outcome.violations[0].startswith("TimeoutError: nobody leads (never, line ")


def test_run_with_too_few_operations_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SECONDS_MAX", 5.0)
    outcome = run(SEED)
    assert f"only {outcome.figures.answered} operations were answered" in outcome.violations


def test_client_history_is_checked_even_if_the_run_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: ReplicaSet) -> None:
        raise TimeoutError("nobody leads")

    workload = plan(SEED).workloads[0]
    monkeypatch.setattr(ReplicaSet, "form", never)
    monkeypatch.setitem(runs.CHECKERS, workload, lambda history, name: [f"{name} was looked at"])
    assert f"{workload} was looked at" in run(SEED).violations


def test_run_ends_at_the_first_moment_at_which_until_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def form_and_tell(self: ReplicaSet) -> None:
        self.violations.append("told")
        await self.sim.sleep(1)
        self.violations.append("told too late")

    monkeypatch.setattr(ReplicaSet, "form", form_and_tell)
    outcome = run(SEED, until=lambda violations: "told" in violations)
    assert outcome.violations == ["told"]
    assert outcome.story == ["0.000000 run begins"]
