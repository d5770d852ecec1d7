"""A timer for a deadline that moves all the time, mostly away: one call of the loop serves many deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowstone.outside import Clock


class Alarm:
    """Calls `ring` when the deadline has come, or earlier: then it is still to come, and has to be set again."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._due = 0.0
        self.late = 0.0
        """Seconds by which it rang too late: for so long the process has stood still."""

    def set(self, deadline: float | None) -> None:
        """By the monotonic clock; None for none."""
        if deadline is None:
            return
        if self._handle is not None:
            if self._rings_at <= deadline:
                return
            self._handle.cancel()
        self._rings_at = deadline
        now = self._clock.monotonic()
        delay = max(0.0, deadline - now)
        self._due = now + delay
        self._handle = asyncio.get_running_loop().call_later(delay, self._rung)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rung(self) -> None:
        self._handle = None
        self.late = self._clock.monotonic() - self._due
        self._ring()
