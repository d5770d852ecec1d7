"""Work by a worker is never left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flowstone.limestone.work import by_worker
from flowstone.outside import production


async def test_what_the_worker_returns_or_raises_comes_back() -> None:
    assert await by_worker(production(), lambda number: number + 1, 1) == 2
    with pytest.raises(ZeroDivisionError):
        await by_worker(production(), lambda: 1 // 0)


async def test_who_is_cancelled_waits_for_the_worker() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(10)
        ended.set()

    waiting = asyncio.ensure_future(by_worker(production(), work))
    await asyncio.to_thread(begun.wait, 10)
    waiting.cancel()
    await asyncio.sleep(0.01)
    waiting.cancel()
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
