"""Guided fuzzing: an input with new coverage joins the pool of inputs to mutate.

If the budget is a number of runs, the seed determines all choices and the order of the pool.
"""

from __future__ import annotations

import random
import time
import traceback
from dataclasses import dataclass
from typing import Final

from tests.fuzz.coverage import Coverage
from tests.fuzz.mutation import mutated, spliced
from tests.fuzz.targets import Target

SIZE_MAX: Final = 8192
"""Limit on the bytes of an input to mutate: long ones are slow and add little."""

SLOW_SECONDS: Final = 20.0
POOL_MAX: Final = 4000


@dataclass(frozen=True)
class Broken:
    """An input that a decoder neither accepted nor rejected."""

    data: bytes
    why: str


class Fuzzer:
    """The runs of one target. Without guidance, inputs are mutations of the corpus alone."""

    def __init__(
        self, target: Target, seed: int | str, *, is_guided: bool = True, coverage: Coverage | None = None
    ) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._is_guided = is_guided
        self.coverage = coverage or Coverage()
        self.pool = list(target.corpus)
        self.run_count = 0

    def run(self, *, runs: int, seconds: float = float("inf")) -> Broken | None:
        """Return the first input that breaks the target, within a number of runs and a time."""
        deadline = time.monotonic() + seconds
        for data in self._target.corpus:
            if (broken := self._try(data)) is not None:
                return broken
        while self.run_count < runs and time.monotonic() < deadline:
            if (broken := self._try(self._next())) is not None:
                return broken
            self.run_count += 1
        return None

    def _next(self) -> bytes:
        rng, pool = self._rng, self.pool
        kind = rng.random()
        if kind < 0.02 or not pool:
            return rng.randbytes(rng.randrange(64))
        # New coverage is likely near the latest find.
        newest = pool[-max(1, len(pool) // 8) :] if kind < 0.5 else pool
        parent = rng.choice(newest)
        if kind > 0.9:
            parent = spliced(parent, rng.choice(pool), rng)
        return mutated(parent, rng, self.coverage.tokens if self._is_guided else ())

    def _try(self, data: bytes) -> Broken | None:
        started = time.monotonic()
        try:
            if not self._is_guided:
                self._target.try_input(data)
            elif self.coverage.is_news(self._target.try_input, data):
                self._keep(data)
        except Exception:
            return Broken(data, traceback.format_exc())
        if time.monotonic() - started > SLOW_SECONDS:
            return Broken(data, f"it took more than {SLOW_SECONDS:g} s")
        return None

    def _keep(self, data: bytes) -> None:
        if len(data) <= SIZE_MAX and len(self.pool) < POOL_MAX and self.run_count:
            self.pool.append(data)
