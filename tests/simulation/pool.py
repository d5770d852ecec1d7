"""Runs of many seeds in several processes: handed out in order, reported as they end, each with a time limit.

A run that exceeds its processor time, or whose process dies, is an outcome like any other: a violation of its seed.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final

from tests.simulation.plan import plan
from tests.simulation.run import Figures, Outcome

CPU_SECONDS_MAX: Final = 300.0
"""Maximum processor time of one run: a hundred times the usual, for busy machines."""

Runner = Callable[[int], Outcome]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    seed: int


def outcomes(seeds: Iterable[int], jobs: int, runner: Runner) -> Iterator[Outcome]:
    """Yield outcomes as they arrive; the processes end when the caller stops iterating or dies."""
    waiting = iter(seeds)
    workers: list[_Worker] = []
    try:
        for _ in range(jobs):
            _hire(workers, waiting, runner)
        while workers:
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(worker for worker in workers if worker.pipe is pipe)
                outcome, is_alive = _take(worker)
                yield outcome
                if not (is_alive and _hand_out(worker, waiting)):
                    _dismiss(worker)
                    workers.remove(worker)
                if not is_alive:
                    _hire(workers, waiting, runner)
    finally:
        for worker in workers:
            _dismiss(worker)


def _hire(workers: list[_Worker], seeds: Iterator[int], runner: Runner) -> None:
    seed = next(seeds, None)
    if seed is None:
        return
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    inherited = [ours, *(worker.pipe for worker in workers)]
    process = context.Process(target=_work, args=(theirs, inherited, runner), daemon=True)
    process.start()
    theirs.close()
    ours.send(seed)
    workers.append(_Worker(process, ours, seed))


def _hand_out(worker: _Worker, seeds: Iterator[int]) -> bool:
    seed = next(seeds, None)
    if seed is None:
        return False
    worker.seed = seed
    worker.pipe.send(seed)
    return True


def _take(worker: _Worker) -> tuple[Outcome, bool]:
    """Return the message of a worker, and whether the worker continues."""
    try:
        outcome: Outcome = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return _lost(worker), False
    return outcome, True


def _lost(worker: _Worker) -> Outcome:
    code = worker.process.exitcode
    if code == -signal.SIGPROF:
        reason = f"it took more than {CPU_SECONDS_MAX:g} s of processor time"
    else:
        reason = f"its process ended with {code}"
    return Outcome(worker.seed, plan(worker.seed), [reason], "none", Figures(), [])


def _dismiss(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.terminate()
    worker.process.join()


def _work(pipe: Connection, inherited: list[Connection], runner: Runner) -> None:
    """Run seeds until the parent process no longer hands them out or reads outcomes.

    `inherited` are pipe ends of other workers: while this process kept them open, those workers could not notice that
    the parent is gone.
    """
    for other in inherited:
        other.close()
    assert sys.__stderr__ is not None
    faulthandler.register(signal.SIGPROF, sys.__stderr__, chain=True)
    gc.freeze()
    with suppress(EOFError, ConnectionError):
        while True:
            seed: int = pipe.recv()
            pipe.send(_run(seed, runner))
            gc.collect()


def _run(seed: int, runner: Runner) -> Outcome:
    """Run a seed; the kernel kills a run that never ends, after its stack was printed."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_MAX)
    try:
        return runner(seed)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
