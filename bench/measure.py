"""Measuring: alternating rounds of us and the peer, medians, memory of a child process."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One line of the table. `ratio` is ours over the peer's if there is a peer; `target` is what we promise."""

    what: str
    ours: str
    peer: str
    ratio: float | None = None
    target: str = ""
    holds: bool = True


def alternate(rounds: int, *contenders: Callable[[], float]) -> list[float]:
    """Return the median per contender, with interleaved rounds so that noise affects all of them."""
    measured: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, values in zip(contenders, measured, strict=True):
            values.append(contender())
    return [statistics.median(values) for values in measured]


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def child(code: str, *arguments: str) -> str:
    """Return the output of a fresh Python process that runs `code` with `arguments` in sys.argv."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def million_rows_per_second(rows: int, taken: float) -> str:
    return f"{rows / taken / 1e6:.2f} M rows/s"
