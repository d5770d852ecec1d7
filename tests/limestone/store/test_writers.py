"""Closing waits for threads that write to log files, and admits no new ones."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.store.writers import Writers

DEADLINE_SECONDS = 60


async def test_closing_waits_for_writers_and_admits_no_new_ones() -> None:
    is_open, begun, may_end = threading.Event(), threading.Event(), threading.Event()
    is_open.set()
    order: list[str] = []

    def check() -> None:
        if not is_open.is_set():
            raise WrongTime("closed")

    def write() -> None:
        with writers.writing():
            begun.set()
            may_end.wait(DEADLINE_SECONDS)
            order.append("written")

    writers = Writers(threading.RLock(), check)
    await writers.all_done()
    thread = asyncio.create_task(asyncio.to_thread(write))
    await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)
    is_open.clear()
    waiting = asyncio.create_task(writers.all_done())
    await asyncio.sleep(0)
    with pytest.raises(WrongTime), writers.writing():
        order.append("too late")
    assert not waiting.done()
    may_end.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await waiting
    await thread
    assert order == ["written"]


async def test_cancelled_wait_does_not_disturb_writers() -> None:
    writers = Writers(threading.RLock(), lambda: None)
    with writers.writing(), pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await writers.all_done()
    await asyncio.sleep(0)
    await writers.all_done()
