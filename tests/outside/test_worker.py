"""A cancelled caller waits for its worker; closed workers have finished all work and begin no more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.outside import production
from flowstone.outside.worker import by_worker, with_workers


async def test_result_and_error_of_the_work_are_returned() -> None:
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


async def test_workers_return_results_and_errors_until_closed() -> None:
    outside, workers = with_workers(production(), lambda: LocalProtocolError("closed"))
    assert await outside.blocking(divmod, 7, 2) == (3, 1)
    assert list(outside.blocking.map(abs, [-1, 2])) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await outside.blocking(divmod, 7, 0)
    await workers.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        await outside.blocking(divmod, 7, 2)


async def test_close_and_a_cancelled_caller_of_workers_wait_for_the_worker() -> None:
    outside, workers = with_workers(production(), lambda: LocalProtocolError("closed"))
    begun, may_end, ended = threading.Event(), threading.Event(), list[bool]()

    def work() -> None:
        begun.set()
        assert may_end.wait(10)
        ended.append(True)

    caller = asyncio.ensure_future(outside.blocking(work))
    assert await asyncio.to_thread(begun.wait, 10)
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


async def test_workers_skip_calls_still_queued_at_close() -> None:
    outside, workers = with_workers(production(), lambda: LocalProtocolError("closed"))
    caller = asyncio.ensure_future(outside.blocking(pytest.fail, "it has begun"))
    closing = asyncio.ensure_future(workers.close())
    await closing
    with pytest.raises(LocalProtocolError):
        await caller
