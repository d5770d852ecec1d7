"""Time: the monotonic clock for timeouts and the wall clock for timestamps.

Needs the running asyncio loop only to sleep. Timeouts and intervals are defined by the callers.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Reads the clocks, and sleeps."""

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary fixed time; never decreases. For timeouts and durations."""
        ...

    def wall(self) -> float:
        """Return the seconds since the Unix epoch; may jump. For timestamps in rows."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after at least `seconds` of monotonic time; zero or less yields to the loop once."""
        ...


class SystemClock:
    """The clocks of this machine."""

    # The functions themselves, without a wrapper: an extra call is measurable in the latency of a single request.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))
