"""The clocks: a monotonic one, a wall clock, and sleeping by the first."""

from __future__ import annotations

import time

from flowstone.outside.clock import SystemClock


def test_monotonic_never_decreases() -> None:
    clock = SystemClock()
    readings = [clock.monotonic() for _ in range(1000)]
    assert readings == sorted(readings)


def test_wall_is_unix_time() -> None:
    before = time.time()
    assert before <= SystemClock().wall() <= time.time()


async def test_sleep_takes_at_least_the_requested_time() -> None:
    clock = SystemClock()
    start = clock.monotonic()
    await clock.sleep(0.01)
    assert clock.monotonic() - start >= 0.009


async def test_sleep_of_zero_or_less_returns_at_once() -> None:
    await SystemClock().sleep(0)
    await SystemClock().sleep(-5)
