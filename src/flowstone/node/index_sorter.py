"""Sorts new keys into ordered indexes while the node is idle; until then, ordered reads must merge them.

A step takes about a millisecond, and the event loop runs other work between two steps.
"""

from __future__ import annotations

from flowstone.box.box import Box
from flowstone.box.engine.index import SETTLED_BY_READ
from flowstone.outside import Outside

LOOK_INTERVAL = 0.1
"""Seconds between two checks of the indexes."""

LOOK_INTERVAL_MAX = 1.0
"""Maximum interval: an idle node increases the interval up to this value, to save CPU time."""

STEP_INTERVAL = 0.002
"""Seconds between two steps."""

STEP = 1000
"""Number of keys that are sorted in one step."""

BUSY_INTERVAL = 0.1
"""Extra pause in seconds if the event loop is busy, which a late wake-up shows."""


async def settle_indexes(outside: Outside, box: Box) -> None:
    """Sort new keys until cancelled. A few keys are left for the next ordered read, which sorts them itself."""
    interval = LOOK_INTERVAL
    while True:
        await outside.clock.sleep(interval)
        indexes = [index for space in box.spaces.values() for index in space.served]
        interval = min(2 * interval, LOOK_INTERVAL_MAX)
        for index in indexes:
            while index.debt > SETTLED_BY_READ:
                interval = LOOK_INTERVAL
                if index.settle_partly(STEP):
                    break
                due = outside.clock.monotonic() + 2 * STEP_INTERVAL
                await outside.clock.sleep(STEP_INTERVAL)
                if outside.clock.monotonic() > due:
                    await outside.clock.sleep(BUSY_INTERVAL)
