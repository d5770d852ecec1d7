"""Worker threads: results in order, a limited number in flight, exceptions in order, no leftovers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from flowstone.outside.blocking import ThreadBlocking

DEADLINE_SECONDS = 30


async def test_a_call_runs_in_another_thread_and_returns_its_result() -> None:
    def where(argument: str) -> tuple[str, int]:
        return argument, threading.get_ident()

    argument, thread = await ThreadBlocking()(where, "x")
    assert argument == "x"
    assert thread != threading.get_ident()


async def test_loop_continues_while_a_call_blocks() -> None:
    release = threading.Event()
    call = asyncio.ensure_future(ThreadBlocking()(release.wait, DEADLINE_SECONDS))
    await asyncio.sleep(0)
    release.set()
    assert await call is True


async def test_an_exception_of_the_call_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await ThreadBlocking()(divmod, 1, 0)


def test_map_keeps_the_order_when_later_items_finish_first() -> None:
    second_done = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second_done.wait(DEADLINE_SECONDS)
        if item == 1:
            second_done.set()
        return item * 10

    assert list(ThreadBlocking().map(work, range(20), workers=2)) == [item * 10 for item in range(20)]


def test_map_of_an_empty_iterable_is_empty() -> None:
    assert list(ThreadBlocking().map(abs, [])) == []


def test_map_reads_only_a_limited_number_of_items_ahead() -> None:
    taken: list[int] = []

    def endless() -> Iterator[int]:
        number = 0
        while True:
            taken.append(number)
            yield number
            number += 1

    results = ThreadBlocking().map(abs, endless(), workers=3)
    for returned in range(10):
        assert next(results) == returned
        assert len(taken) <= returned + 2 * 3
    results.close()


def test_map_raises_the_exception_of_an_item_after_the_results_before_it() -> None:
    got: list[float] = []
    with pytest.raises(ZeroDivisionError):
        got.extend(ThreadBlocking().map(lambda item: 1 / item, [1, 2, 0, 4]))
    assert got == [1, 0.5]


def test_map_raises_the_exception_of_its_source_after_the_results_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("torn")

    got: list[int] = []
    with pytest.raises(ValueError, match="torn"):
        got.extend(ThreadBlocking().map(abs, source()))
    assert got == [1, 2]


def test_map_stops_its_workers_when_the_consumer_stops_early() -> None:
    running = 0
    guard = threading.Lock()

    def work(item: int) -> int:
        nonlocal running
        with guard:
            running += 1
        try:
            return item
        finally:
            with guard:
                running -= 1

    before = threading.active_count()
    results = ThreadBlocking().map(work, range(10_000), workers=2)
    assert next(results) == 0
    results.close()
    assert running == 0
    assert threading.active_count() == before


def test_map_without_workers_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        ThreadBlocking().map(abs, [1], workers=0)
