"""The virtual loop: time jumps, the order is fixed, and callbacks of dead processes never run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.simulation.loop import Life, NeverEnds, NothingWillHappen, TimeStandsStill, VirtualLoop


def run(scenario: Coroutine[Any, Any, Any], loop: VirtualLoop | None = None) -> Any:
    return (loop or VirtualLoop()).run_until_complete(scenario)


def test_long_sleep_returns_at_once() -> None:
    async def scenario() -> float:
        before = time.monotonic()
        await asyncio.sleep(365 * 86400)
        assert time.monotonic() - before < 1
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 365 * 86400


def test_timers_run_in_order_and_equal_ones_in_order_of_creation() -> None:
    async def scenario() -> list[int]:
        loop, seen = asyncio.get_running_loop(), list[int]()
        for number, delay in enumerate([3, 1, 2, 1, 1, 0]):
            loop.call_later(delay, seen.append, number)
        await asyncio.sleep(4)
        return seen

    assert run(scenario()) == [5, 1, 3, 4, 2, 0]


def test_timeout_expires_in_virtual_time() -> None:
    async def scenario() -> float:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 60


def test_cancelled_timers_do_not_advance_the_clock_or_accumulate() -> None:
    loop = VirtualLoop()

    async def scenario() -> None:
        for _ in range(5000):
            async with asyncio.timeout(1000):
                await asyncio.sleep(0)
        await asyncio.sleep(1)

    run(scenario(), loop)
    assert loop.time() == 1
    assert len(loop._timers) < 2500


def test_deadlock_is_an_error() -> None:
    async def scenario() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingWillHappen):
        run(scenario())


def test_endless_loop_without_waiting_is_an_error() -> None:
    def again() -> None:
        asyncio.get_running_loop().call_soon(again)

    async def scenario() -> None:
        again()
        await asyncio.sleep(1)

    with pytest.raises(TimeStandsStill):
        run(scenario())


def test_scenario_past_its_deadline_is_an_error_that_says_where_it_waits() -> None:
    async def wait_for_long() -> None:
        await asyncio.sleep(10)
        await asyncio.sleep(1)

    async def scenario() -> None:
        await wait_for_long()

    loop = VirtualLoop()
    loop.deadline = 10
    with pytest.raises(NeverEnds, match=r"after 10 virtual seconds: scenario:\d+ > wait_for_long:\d+ > sleep:\d+"):
        run(scenario(), loop)


def test_dead_process_does_not_run_its_finally_blocks() -> None:
    loop, said = VirtualLoop(), list[str]()
    life = Life("a")

    async def work() -> None:
        try:
            said.append("begin")
            await asyncio.sleep(1)
            said.append("middle")
            await asyncio.sleep(10)
        finally:
            said.append("goodbye")

    async def scenario() -> None:
        loop.create_task(work(), context=life.context.copy())
        loop.call_later(5, said.append, "alive")
        await asyncio.sleep(2)
        life.is_dead = True
        await asyncio.sleep(100)

    run(scenario(), loop)
    assert said == ["begin", "middle", "alive"]
    loop.bury([life])  # while no callback can receive it
    assert not life.tasks


def test_tasks_started_by_a_life_belong_to_it() -> None:
    loop, said = VirtualLoop(), list[str]()
    life = Life("a")

    async def grandchild() -> None:
        await asyncio.sleep(1)
        said.append("grandchild")

    async def child() -> None:
        asyncio.get_running_loop().call_later(1, said.append, "timer")
        await asyncio.create_task(grandchild())

    async def scenario() -> None:
        loop.create_task(child(), context=life.context.copy())
        await asyncio.sleep(0.5)
        assert len(life.tasks) == 2
        life.is_dead = True
        await asyncio.sleep(10)

    run(scenario(), loop)
    assert said == []
    loop.bury([life])


def test_unhandled_exception_is_reported() -> None:
    loop, told = VirtualLoop(), list[dict[str, Any]]()
    loop.on_failure = told.append

    async def scenario() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    run(scenario(), loop)
    assert isinstance(told[0]["exception"], ZeroDivisionError)
