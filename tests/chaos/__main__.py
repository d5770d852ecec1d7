"""`python -m tests.chaos`: injects faults into replica sets of real processes for some seconds, and reports the
verdict.

Without `--set`, both kinds of sets run at the same time. The exit code is the verdict. After a violation, the directory
with the logs of all processes is kept and named.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.chaos.run import SETS_BY_NAME, run
from tests.chaos.small_disk import enter_namespace

TOGETHER = "elections", "dialect-2.6"
INTERRUPTED = 128 + signal.SIGTERM


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=None, help="where the faults come from; default: any")
    parser.add_argument("--set", choices=SETS_BY_NAME, help="default: " + " and ".join(TOGETHER))
    options = parser.parse_args()
    seed = SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    enter_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))  # so that every process is stopped
    if options.set is None:
        return _run_together(options.seconds, seed)
    return _run_one(options.set, options.seconds, seed)


def _run_together(seconds: float, seed: int) -> int:
    command = [sys.executable, "-m", "tests.chaos", f"--seconds={seconds}", f"--seed={seed}"]
    both = [subprocess.Popen([*command, f"--set={name}"]) for name in TOGETHER]
    try:
        codes = [process.wait() for process in both]
        return int(any(codes))  # negative for a killed process
    finally:
        for process in both:
            process.terminate()
            process.wait()


def _run_one(name: str, seconds: float, seed: int) -> int:
    directory = Path(tempfile.mkdtemp(prefix="flowstone-chaos-"))
    report = run(name, seconds, seed, directory)
    sys.stdout.write(f"{report}\n")
    if report.violations:
        sys.stdout.write(f"  what the processes said is in {directory}\n")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
