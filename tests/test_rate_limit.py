"""The token bucket for log lines: burst, rate, and the number of suppressed lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowstone.rate_limit import RateLimit


def test_burst_is_allowed_at_once_and_then_one_event_per_interval() -> None:
    limit = RateLimit(3, 10.0)
    assert [limit.take(100.0) is not None for _ in range(5)] == [True, True, True, False, False]
    assert limit.take(109.0) is None
    assert limit.take(110.0) is not None
    assert limit.take(110.0) is None


def test_allowed_event_returns_the_number_suppressed_since_the_last() -> None:
    limit = RateLimit(1, 1.0)
    assert [limit.take(0.0) for _ in range(4)] == [0, None, None, None]
    assert limit.take(1.0) == 3
    assert limit.take(2.0) == 0


def test_idle_time_restores_at_most_the_burst() -> None:
    limit = RateLimit(2, 1.0)
    assert [limit.take(0.0), limit.take(0.0)] == [0, 0]
    assert [limit.take(1_000.0) for _ in range(3)] == [0, 0, None]


def test_burst_is_full_at_first_for_any_clock_value() -> None:
    for now in (-5.0, 0.0, 1e9):
        limit = RateLimit(2, 1.0)
        assert [limit.take(now) for _ in range(3)] == [0, 0, None]


@given(
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), max_size=200),
)
def test_events_in_any_window_are_limited_by_burst_and_rate(burst: int, seconds: float, steps: list[float]) -> None:
    limit, now, allowed, total = RateLimit(burst, seconds), 0.0, [], 0
    for step in steps:
        now += step
        suppressed = limit.take(now)
        if suppressed is not None:
            allowed.append(now)
            total += suppressed + 1
    for first, begun in enumerate(allowed):
        for last, ended in enumerate(allowed[first:], first):
            assert last - first + 1 <= burst + (ended - begun) / seconds
    assert total <= len(steps)
