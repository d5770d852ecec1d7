"""Puts new keys of indexes in their places while nobody waits: until then reads in order read around them.

A step takes a millisecond, and between two of them everybody else has a turn.
"""

from __future__ import annotations

from flowstone.box.box import Box
from flowstone.box.index import SETTLED_BY_READ
from flowstone.outside import Outside

LOOK_INTERVAL = 0.1
LOOK_INTERVAL_MAX = 1.0
"""The pause grows to this while there is nothing to do: idle nodes are to be idle."""

STEP_INTERVAL = 0.002
STEP = 1000
"""Keys that are put in their places at once."""

BUSY_INTERVAL = 0.1
"""How long it stands back when it was woken late: there is work that somebody waits for."""


async def settle_indexes(outside: Outside, box: Box) -> None:
    """Until it is cancelled. What the next read in order settles by itself is left to it."""
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
