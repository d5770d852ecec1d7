"""Who is cancelled while a worker has their files leaves when it has given them back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flowstone.outside import production
from flowstone.outside.worker import by_worker


async def test_the_result_and_the_error_of_the_work_come_back() -> None:
    outside = production()
    assert await by_worker(outside, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await by_worker(outside, divmod, 7, 0)


async def test_a_cancelled_caller_waits_for_the_worker() -> None:
    started, may_end, ended = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        started.set()
        assert may_end.wait(10)
        ended.append(True)

    caller = asyncio.create_task(by_worker(production(), work))
    assert await asyncio.to_thread(started.wait, 10)
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0.01)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]
