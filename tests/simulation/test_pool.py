"""Runs in several processes: each seed once, and no wait for a run that hangs or a dead process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import select
from multiprocessing.connection import Connection
from typing import Final

import pytest

from tests.simulation import pool
from tests.simulation.plan import plan
from tests.simulation.pool import outcomes
from tests.simulation.run import Figures, Outcome

END_SECONDS: Final = 20.0
"""Time within which a worker must notice that its parent is gone."""


def run_well(seed: int) -> Outcome:
    return Outcome(seed, plan(seed), [], f"hash of {seed}", Figures(), [])


def die_of_three(seed: int) -> Outcome:
    if seed == 3:
        os._exit(5)
    return run_well(seed)


def hang_in_three(seed: int) -> Outcome:
    while seed == 3:
        pass
    return run_well(seed)


def tell_who_runs(pipe: Connection) -> None:
    """Take outcomes of two workers forever; their hashes identify the workers."""

    def run_as(seed: int) -> Outcome:
        return Outcome(seed, plan(seed), [], str(os.getpid()), Figures(), [])

    for outcome in outcomes(itertools.count(), 2, run_as):
        pipe.send(int(outcome.trace_hash))


def test_each_seed_is_run_once() -> None:
    found = sorted(outcomes(range(20), 3, run_well), key=lambda outcome: outcome.seed)
    assert [(outcome.seed, outcome.trace_hash) for outcome in found] == [(n, f"hash of {n}") for n in range(20)]


def test_pool_accepts_fewer_seeds_than_processes() -> None:
    assert [outcome.seed for outcome in outcomes([8], 3, run_well)] == [8]
    assert not list(outcomes([], 3, run_well))


def test_dead_process_violates_only_its_seed() -> None:
    violated = {outcome.seed: outcome.violations for outcome in outcomes(range(8), 2, die_of_three)}
    assert violated == {seed: ["its process ended with 5"] if seed == 3 else [] for seed in range(8)}


def test_hanging_run_violates_only_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CPU_SECONDS_MAX", 0.3)
    violated = {outcome.seed: outcome.violations for outcome in outcomes(range(8), 2, hang_in_three)}
    expected = ["it took more than 0.3 s of processor time"]
    assert violated == {seed: expected if seed == 3 else [] for seed in range(8)}


def test_caller_may_stop_before_the_last_outcome() -> None:
    assert len(list(itertools.islice(outcomes(itertools.count(), 2, run_well), 5))) == 5


def test_workers_end_with_their_parent() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=tell_who_runs, args=(theirs,))
    process.start()
    theirs.close()
    workers: dict[int, int] = {}
    while len(workers) < 2:
        if (pid := ours.recv()) not in workers:
            workers[pid] = os.pidfd_open(pid)
    process.kill()
    process.join()
    for watched in workers.values():
        assert select.select([watched], [], [], END_SECONDS)[0], "a worker runs without a parent"
        os.close(watched)
