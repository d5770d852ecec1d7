"""Time: the monotonic clock for waiting and the wall clock for stamping.

Relies on the running asyncio loop only to sleep. Never decides how long anybody waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What time it is, and waiting for it to pass."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back. For time-outs and durations."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump. For the time stamps in rows."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after at least `seconds` of monotonic time; zero or less yields to the loop once."""
        ...


class SystemClock:
    """The clocks of this machine."""

    # The functions themselves: a request that is alone in its turn feels every call.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, 0.0))
