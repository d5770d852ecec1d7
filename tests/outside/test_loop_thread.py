"""The loop in a thread: results and errors come back, interruptions go in, nothing is left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.outside.loop_thread import LoopThread

DEADLINE_SECONDS = 30


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def test_a_coroutine_runs_in_the_other_thread_and_its_result_comes_back(loop: LoopThread) -> None:
    async def where() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    assert loop.run(where()) not in (0, threading.get_ident())
    assert loop.run(where()) == loop.run(where())


def test_a_coroutine_can_run_beside_the_caller(loop: LoopThread) -> None:
    begun = threading.Event()

    async def work() -> int:
        begun.set()
        return 7

    result = loop.start(work())
    assert begun.wait(DEADLINE_SECONDS)
    assert result.result(DEADLINE_SECONDS) == 7


def test_an_error_of_the_coroutine_is_raised_here(loop: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        loop.run(fail())


def test_who_is_called_in_the_loop_cannot_wait_for_it(loop: LoopThread) -> None:
    async def inner() -> None: ...

    async def outer() -> None:
        loop.run(inner())

    with pytest.raises(LocalProtocolError, match="must not wait"):
        loop.run(outer())


def test_close_cancels_what_still_runs_and_ends_the_thread() -> None:
    thread = LoopThread()
    ended = threading.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks = []

    async def begin() -> None:
        tasks.append(asyncio.create_task(wait_for_ever()))
        await asyncio.sleep(0)

    thread.run(begin())
    thread.close()
    assert ended.is_set()
    thread.close()

    async def late() -> None: ...

    with pytest.raises(LocalProtocolError, match="has ended"):
        thread.run(late())


def test_the_lock_can_be_taken_again_by_who_has_it(loop: LoopThread) -> None:
    with loop.lock, loop.lock:
        pass
