"""Indexes are sorted in the background, in small steps."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from flowstone.box.engine.index import SETTLED_BY_READ, EngineIndex
from flowstone.node.index_sorter import BUSY_INTERVAL, STEP, STEP_INTERVAL, settle_indexes
from tests.box.spaces import box_with, definition, on
from tests.node.fault_disk import FaultDisk


class Clock:
    """A fast clock that records the work between two sleeps."""

    def __init__(self, index: EngineIndex, lateness: float = 0.0) -> None:
        self.index = index
        self.debts: list[int] = []
        self.sleeps: list[float] = []
        self._lateness, self._now = lateness, 0.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.debts.append(self.index.debt)
        self.sleeps.append(seconds)
        self._now += seconds + self._lateness
        await asyncio.sleep(0)


async def test_many_inserted_and_deleted_keys_are_sorted_in_steps() -> None:
    box = box_with(definition(512, on("0:unsigned")))
    index = box.space(512).index(0)
    clock = Clock(index)
    task = asyncio.create_task(settle_indexes(replace(FaultDisk().outside(), clock=clock), box))
    for number in range(50_000):
        index.set(number * 7919 % 1_000_003, b"x")
    async with asyncio.timeout(20):
        while index.debt > SETTLED_BY_READ:  # noqa: ASYNC110 - of another task's making
            await asyncio.sleep(0)
    for key in sorted(index.map)[:20_000]:
        index.set(key, None)
    async with asyncio.timeout(20):
        while index.debt > SETTLED_BY_READ:  # noqa: ASYNC110
            await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    steps = [before - after for before, after in zip(clock.debts, clock.debts[1:], strict=False)]
    assert max(steps) <= STEP
    assert len(steps) >= 70_000 // STEP - 2
    assert [key for key, _ in index.scan()] == sorted(index.map)


async def test_sorter_waits_between_steps_on_a_busy_node() -> None:
    box = box_with(definition(512, on("0:unsigned")))
    index = box.space(512).index(0)
    for number in range(10 * STEP):
        index.set(number, b"x")
    clock = Clock(index, lateness=0.05)
    task = asyncio.create_task(settle_indexes(replace(FaultDisk().outside(), clock=clock), box))
    async with asyncio.timeout(20):
        while index.debt > SETTLED_BY_READ:  # noqa: ASYNC110
            await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert clock.sleeps.count(BUSY_INTERVAL) >= clock.sleeps.count(STEP_INTERVAL) - 1 > 5
