"""`python -m tests.simulation`: replays the run of one seed, or runs many seeds and summarizes them.

    --seed 17 --verbose     one run with all its events; the last line has the verdict and the hash
    --runs 300              the ordinary seeds 0, 1, 2, …; a summary, and the seeds that were violated
    --runs 250 --fresh 50   and 50 more that change from commit to commit (fresh.py); the first line names them
    --soak 3600             as many as the time allows
    --mutation NAME         with one of the deliberate bugs of mutations.py, which runs must find
    --mutations             the table of these bugs: effect, seed that finds it, message

The exit code is 1 after any violation.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from tests.simulation.all_mutations import MUTATIONS, table_lines
from tests.simulation.fresh import fresh
from tests.simulation.pool import outcomes
from tests.simulation.run import run
from tests.simulation.summary import Summary

PROGRESS_RUNS: Final = 50
"""Number of runs between two lines of progress."""


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if options.mutations:
        print("\n".join(table_lines()))
        return 0
    if options.seed is not None:
        return _replay(options.seed, options.mutation, is_verbose=options.verbose)
    seeds: Iterable[int] = itertools.count(options.first)
    if options.soak is None:
        seeds = range(options.first, options.first + (options.runs or 0))
    if options.fresh is not None:
        chosen = fresh(options.fresh)
        print(chosen, flush=True)
        seeds = itertools.chain(seeds, chosen.seeds)
    return _run_many(_for_a_while(seeds, options.soak), options.jobs, options.mutation)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seed", type=int, help="the run of this seed")
    what.add_argument("--runs", type=int, help="so many runs")
    what.add_argument("--soak", type=float, metavar="SECONDS", help="runs for so long")
    what.add_argument("--mutations", action="store_true", help="the table of deliberate bugs")
    parser.add_argument("--fresh", type=int, metavar="RUNS", help="with --runs or alone: so many runs of fresh seeds")
    parser.add_argument("--verbose", action="store_true", help="with --seed: everything that happened")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one for each processor)")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), metavar="NAME", help="with this bug in the nodes")
    options = parser.parse_args(arguments)
    if not options.mutations and {options.seed, options.runs, options.soak, options.fresh} == {None}:
        parser.error("one of --seed, --runs, --soak, --fresh and --mutations is needed")
    if options.fresh is not None and (options.seed is not None or options.soak is not None or options.mutations):
        parser.error("--fresh goes with --runs, or alone")
    return options


def _replay(seed: int, mutation: str | None, *, is_verbose: bool) -> int:
    with _mutated(mutation):
        outcome = run(seed, is_verbose=is_verbose)
    if is_verbose:
        for line in outcome.story:
            moment, who, what = line.split(" ", 2)
            print(f"{moment:>10} {who:<9} {what}")
        print()
    print(outcome.plan)
    print(outcome.figures)
    for violation in outcome.violations:
        print(f"violated: {violation}")
    print(f"seed {seed}: {outcome.verdict} hash {outcome.trace_hash}")
    return bool(outcome.violations)


def _mutated(name: str | None) -> AbstractContextManager[object]:
    return nullcontext() if name is None else MUTATIONS[name]()


def _run_many(seeds: Iterable[int], jobs: int, mutation: str | None) -> int:
    begun = time.monotonic()
    summary = Summary()
    with _mutated(mutation):
        for outcome in outcomes(seeds, jobs, run):
            summary.add(outcome)
            if outcome.violations:
                print(f"seed {outcome.seed}: {outcome.verdict}: {outcome.violations[0]}")
                print(f"  to run it again: {_command(outcome.seed, mutation)}", flush=True)
            elif summary.runs % PROGRESS_RUNS == 0:
                print(f"{summary.runs} runs in {time.monotonic() - begun:.0f} s", flush=True)
    print(summary.text(time.monotonic() - begun))
    return bool(summary.violated)


def _command(seed: int, mutation: str | None) -> str:
    suffix = "" if mutation is None else f" --mutation {mutation}"
    return f"python -m tests.simulation --seed {seed} --verbose{suffix}"


def _for_a_while(seeds: Iterable[int], seconds: float | None) -> Iterator[int]:
    """Yield seeds until `seconds` have passed."""
    begun = time.monotonic()
    for seed in seeds:
        if seconds is not None and time.monotonic() - begun >= seconds:
            return
        yield seed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
