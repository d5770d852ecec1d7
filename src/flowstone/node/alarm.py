"""A timer for a deadline that is often moved, usually to a later time, without one event loop timer per deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowstone.outside import Clock


class Alarm:
    """Calls `ring` at the deadline or before it. If `ring` is called too early, it has to call `set` again."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._due = 0.0
        self.late = 0.0
        """Seconds from the time at which `ring` was due to its last call: the event loop was blocked for that long."""

    def set(self, deadline: float | None) -> None:
        """Set the deadline, in time of the monotonic clock; None does nothing.

        A pending timer that ends before the deadline is kept, which makes `ring` early but costs no new timer.
        """
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
