"""Workers are waited for by cancelled callers and by `close`, after which none begins."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.store.workers import with_workers
from flowstone.outside import production

DEADLINE_SECONDS = 10.0


async def test_results_and_errors_come_back() -> None:
    outside, workers = with_workers(production(), lambda: WrongTime("closed"))
    assert await outside.blocking(divmod, 7, 2) == (3, 1)
    assert list(outside.blocking.map(abs, [-1, 2])) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await outside.blocking(divmod, 7, 0)
    await workers.close()
    with pytest.raises(WrongTime, match="closed"):
        await outside.blocking(divmod, 7, 2)


async def test_close_and_a_cancelled_caller_wait_for_the_worker() -> None:
    outside, workers = with_workers(production(), lambda: WrongTime("closed"))
    begun, may_end, ended = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        begun.set()
        assert may_end.wait(DEADLINE_SECONDS)
        ended.append(True)

    caller = asyncio.ensure_future(outside.blocking(work))
    assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)
    caller.cancel()
    closing = asyncio.ensure_future(workers.close())
    await asyncio.wait([caller, closing], timeout=0.02)
    assert not caller.done()
    assert not closing.done()
    may_end.set()
    await closing
    assert ended == [True]
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_work_that_was_queued_when_it_closed_does_not_begin() -> None:
    outside, workers = with_workers(production(), lambda: WrongTime("closed"))
    caller = asyncio.ensure_future(outside.blocking(pytest.fail, "it has begun"))
    closing = asyncio.ensure_future(workers.close())
    await closing
    with pytest.raises(WrongTime):
        await caller
