"""`python -m tests.fuzz TARGET|all [--seconds N] [--runs N] [--seed S] [--blind]`: runs inputs until the budget is
spent.

Guided by coverage, with kernels as plain Python. An input that breaks a target is printed as hex and stored in
`tests/vectors/fuzz`, where the suite runs it again; the exit code is 1. Without a budget, each target gets its number
of runs in the suite.
"""

from __future__ import annotations

import os

from tests.places import VECTORS

if __name__ == "__main__":
    os.environ.setdefault("FLOWSTONE_INTERPRETED", "1")  # before our modules are imported

import argparse
import hashlib
import sys
import time

import numpy as np

from tests.fuzz.guided import Broken, Fuzzer
from tests.fuzz.targets import TARGETS

CORPORA = VECTORS / "fuzz"


def fuzz(name: str, given: argparse.Namespace) -> bool:
    """Return False if an input has broken the target."""
    target, started = TARGETS[name], time.process_time()
    fuzzer = Fuzzer(target, f"{given.seed}/{name}", is_guided=not given.blind)
    runs = given.runs if given.runs is not None else sys.maxsize if given.seconds is not None else target.runs
    broken = fuzzer.run(runs=runs, seconds=given.seconds if given.seconds is not None else float("inf"))
    found = f"{fuzzer.run_count} inputs, {fuzzer.coverage.edge_count} edges, pool of {len(fuzzer.pool)}"
    digest = hashlib.sha256(b"\0".join(fuzzer.pool)).hexdigest()[:12]
    sys.stderr.write(f"{name}: {found}, {digest}, {time.process_time() - started:.1f} s\n")
    if broken is not None:
        keep(name, broken)
    return broken is None


def keep(name: str, broken: Broken) -> None:
    sys.stderr.write(broken.why)
    sys.stdout.write(f"{name} {broken.data.hex()}\n")
    CORPORA.mkdir(exist_ok=True)
    (CORPORA / f"{name}-{hashlib.sha256(broken.data).hexdigest()[:12]}.hex").write_text(broken.data.hex() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=["all", *sorted(TARGETS)])
    parser.add_argument("--seconds", type=float, help="for each target")
    parser.add_argument("--runs", type=int, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="without guidance: mutations of the corpus only")
    given = parser.parse_args()
    np.seterr(over="ignore")  # compiled code overflows silently, too
    names = sorted(TARGETS) if given.target == "all" else [given.target]
    sound = [name for name in names if fuzz(name, given)]
    return 0 if sound == names else 1


if __name__ == "__main__":
    raise SystemExit(main())
