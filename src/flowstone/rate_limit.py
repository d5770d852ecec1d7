"""A rate limit for log lines that clients can cause: a token bucket.

Pure: the time is an argument, so every package may use it with its own clock.
"""

from __future__ import annotations


class RateLimit:
    """Allows `burst` events at once, and one more every `seconds`."""

    __slots__ = ("_burst", "_filled_at", "_seconds", "_suppressed", "_tokens")

    def __init__(self, burst: int, seconds: float) -> None:
        assert burst >= 1, "a limit that allows nothing"
        assert seconds > 0, "a limit that allows everything"
        self._burst = burst
        self._seconds = seconds
        self._tokens = float(burst)
        self._filled_at: float | None = None
        self._suppressed = 0

    def take(self, now: float) -> int | None:
        """Ask for one event at the monotonic time `now`.

        Return None if the event has to be suppressed, else how many were suppressed since the last allowed one.
        """
        if self._filled_at is not None:
            self._tokens = min(self._burst, self._tokens + (now - self._filled_at) / self._seconds)
        self._filled_at = now
        if self._tokens < 1:
            self._suppressed += 1
            return None
        self._tokens -= 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed
