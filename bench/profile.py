"""`python -m bench.profile [SCENARIO …]`: profiles a node under load by function.

The node runs as its own process under a sampler: a timer of processor time interrupts it each millisecond and counts
the Python functions on its stack, so that a kernel or a system call counts for the function that called it. The rates
shown are those of the sampled node, a little lower than usual.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from flowstone import cli

INTERVAL_SECONDS = 0.001
SHOWN = 22
SWITCH = signal.SIGUSR2


class Sampler:
    """Sample the process between two signals; at the second, write the counts to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own: Counter[str] = Counter()
        self._within: Counter[str] = Counter()
        self._is_on = False
        signal.signal(SWITCH, self._switch)
        signal.signal(signal.SIGPROF, self._sample)

    def _switch(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_on = not self._is_on
        signal.setitimer(signal.ITIMER_PROF, *([INTERVAL_SECONDS] * 2 if self._is_on else [0.0]))
        if not self._is_on:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps([self._own, self._within]))
            part.rename(self._path)
            self._own.clear()
            self._within.clear()

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        seen = []
        while frame is not None:
            code = frame.f_code
            seen.append(f"{code.co_qualname}  {'/'.join(code.co_filename.split('/')[-2:])}")
            frame = frame.f_back
        if seen:
            self._own[seen[0]] += 1
            self._within.update(dict.fromkeys(seen, 1))


def main() -> None:
    from bench import contender, serving
    from bench.load import EVERYTHING, pings, selects, sequential, shuffled, statements
    from flowstone.iproto.constants import RequestType

    many, count = contender.IN_FLIGHT, serving.REQUESTS
    random_keys = shuffled(count, seed=1)
    replaces, reads = statements(RequestType.REPLACE, sequential(count)), selects(sequential(count))
    random_replaces, random_reads = statements(RequestType.REPLACE, random_keys), selects(random_keys)
    single = statements(RequestType.REPLACE, sequential(20_000))
    scenarios: dict[str, Callable[[contender.Contender], float]] = {
        "replace-one": lambda node: node.one.run(replaces, EVERYTHING).rate,
        "replace-many": lambda node: node.many.run(random_replaces, many).rate,
        "select-one": lambda node: node.one.run(reads, EVERYTHING).rate,
        "select-many": lambda node: node.many.run(random_reads, many).rate,
        "replace-single": lambda node: node.one.run(single, 1).rate,
        "ping-one": lambda node: node.one.run(pings(count), EVERYTHING).rate,
    }
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("scenario", nargs="*", help=f"of {', '.join(scenarios)} (default: all)")
    wanted = parser.parse_args().scenario or list(scenarios)
    with tempfile.TemporaryDirectory(prefix="flowstone-profile-") as work:
        samples = Path(work) / "samples.json"
        command = (sys.executable, "-m", "bench.profile", "--sample-into", str(samples))
        with contender.served(Path(work) / "node", command=command) as node:
            node.many.run(random_replaces, many)
            for name in wanted:
                scenarios[name](node)  # warm
                os.kill(node.pid, SWITCH)
                user, system = _processor_seconds(node.pid)
                rate = scenarios[name](node)
                user, system = (b - a for a, b in zip((user, system), _processor_seconds(node.pid), strict=True))
                os.kill(node.pid, SWITCH)
                print(f"\n== {name}: {rate / 1e3:.0f} k/s; processor: {user:.2f} s user, {system:.2f} s system")
                _show(samples)


def _processor_seconds(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def _show(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit("profile: the node wrote no samples")
        time.sleep(0.01)
    own, within = json.loads(path.read_text())
    path.unlink()
    total = sum(own.values()) or 1
    print(f"{'own':>6} {'within':>6}  function ({total} samples)")
    for name, count in Counter(own).most_common(SHOWN):
        print(f"{count / total:6.1%} {within[name] / total:6.1%}  {name}")
    print("  by what is called within:")
    inner = Counter({name: count for name, count in within.items() if count < 0.99 * total})
    for name, count in inner.most_common(SHOWN):
        print(f"{own.get(name, 0) / total:6.1%} {count / total:6.1%}  {name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample-into"]:
        Sampler(Path(sys.argv[2]))
        sys.exit(cli.run(sys.argv[3:]))
    main()
