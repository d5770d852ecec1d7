"""A clock for tests without a runtime."""

from __future__ import annotations


class StandingClock:
    """A clock that tests advance explicitly."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
