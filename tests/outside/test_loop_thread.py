"""The loop in a thread: results and errors are returned, interrupts are forwarded, no leftovers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from flowstone.errors import LocalProtocolError
from flowstone.outside.loop_thread import LoopEnded, LoopThread

DEADLINE_SECONDS = 30


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def test_coroutine_runs_in_the_other_thread_and_returns_its_result(loop: LoopThread) -> None:
    async def where() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    assert loop.run(where()) not in (0, threading.get_ident())
    assert loop.run(where()) == loop.run(where())


def test_coroutine_can_run_concurrently_with_the_caller(loop: LoopThread) -> None:
    begun = threading.Event()

    async def work() -> int:
        begun.set()
        return 7

    result = loop.start(work())
    assert begun.wait(DEADLINE_SECONDS)
    assert result.result(DEADLINE_SECONDS) == 7


def test_exception_of_the_coroutine_is_raised_in_the_caller(loop: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        loop.run(fail())


def test_wait_on_the_loop_from_its_own_thread_is_rejected(loop: LoopThread) -> None:
    async def inner() -> None: ...

    async def outer() -> None:
        loop.run(inner())

    with pytest.raises(LocalProtocolError, match="cannot block on the event loop"):
        loop.run(outer())


def test_close_cancels_running_coroutines_and_ends_the_thread() -> None:
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

    with pytest.raises(LocalProtocolError, match="event loop is closed"):
        thread.run(late())


def outcome(call: Callable[[], object]) -> object:
    """Return the result or error of a call in another thread; TimeoutError if the call hangs."""
    result: Future[object] = Future()

    def answer() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return result.exception(DEADLINE_SECONDS) or result.result()


def test_calls_are_rejected_while_the_loop_is_closing() -> None:
    """A coroutine that the loop accepts after it has cancelled the others would never run: its caller would hang."""
    thread = LoopThread()
    waiting, closing, may_end = (threading.Event() for _ in range(3))

    async def end_slowly() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closing.set()
            may_end.wait(DEADLINE_SECONDS)

    async def late() -> None: ...

    thread.start(end_slowly())
    assert waiting.wait(DEADLINE_SECONDS)
    closers = [threading.Thread(target=thread.close, daemon=True) for _ in range(2)]
    try:
        for closer in closers:
            closer.start()
        assert closing.wait(DEADLINE_SECONDS)
        refused = [outcome(lambda: thread.start(late())), outcome(lambda: thread.run(late()))]
    finally:
        may_end.set()
    for closer in closers:
        closer.join(DEADLINE_SECONDS)
    assert [type(error) for error in refused] == [LoopEnded, LoopEnded]
    assert not any(closer.is_alive() for closer in closers)


def test_run_reports_a_closed_loop_when_close_cancels_the_coroutine() -> None:
    thread = LoopThread()
    waiting = threading.Event()

    async def wait_for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def close() -> None:
        waiting.wait(DEADLINE_SECONDS)
        thread.close()

    closer = threading.Thread(target=close)
    closer.start()
    assert isinstance(outcome(lambda: thread.run(wait_for_ever())), LoopEnded)
    closer.join(DEADLINE_SECONDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_pending_coroutines_fail_when_an_exit_ends_the_loop() -> None:
    thread = LoopThread()
    may_exit = threading.Event()

    async def leave() -> None:
        may_exit.wait(DEADLINE_SECONDS)
        raise SystemExit

    async def never() -> None:
        await asyncio.Event().wait()

    leaving = thread.start(leave())
    left = [thread.start(never()) for _ in range(3)]
    may_exit.set()
    assert isinstance(leaving.exception(DEADLINE_SECONDS), SystemExit)
    assert {type(outcome(partial(thread.result, future))) for future in left} == {LoopEnded}
    assert isinstance(outcome(lambda: thread.run(never())), LoopEnded)
    thread.close()


def test_lock_is_reentrant(loop: LoopThread) -> None:
    with loop.lock, loop.lock:
        pass
