"""`python -m tests.fuzz TARGET --seconds N [--seed S]`: mutates the target's corpus until time is up.

An input that breaks the target is printed as hex, and the exit code is 1. `--runs` bounds by count instead.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.fuzz.targets import TARGETS, mutated


def fuzz(name: str, seed: int, seconds: float, runs: int) -> bytes | None:
    """The first input that breaks the target, or None. Inputs grow out of earlier ones, away from the corpus."""
    target, rng = TARGETS[name], random.Random(seed)
    pool = list(target.corpus)
    for data in pool:  # the first call of a kernel may compile it
        target.try_input(data)
    deadline = time.monotonic() + seconds
    done = 0
    while done < runs and time.monotonic() < deadline:
        data = rng.randbytes(rng.randrange(64)) if rng.random() < 0.02 else mutated(rng.choice(pool), rng)
        started = time.monotonic()
        try:
            target.try_input(data)
        except Exception:
            traceback.print_exc()
            return data
        if time.monotonic() - started > 20:
            sys.stderr.write("slow\n")
            return data
        if rng.random() < 0.05 and len(data) < 4096:
            pool.append(data)
            if len(pool) > 400:
                pool = list(target.corpus)
        done += 1
    sys.stderr.write(f"{name}: {done} inputs, seed {seed}\n")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    broken = fuzz(given.target, given.seed, given.seconds, given.runs)
    if broken is not None:
        sys.stdout.write(f"{given.target} {broken.hex()}\n")
    return 1 if broken is not None else 0


if __name__ == "__main__":
    raise SystemExit(main())
