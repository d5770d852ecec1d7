"""What a node has done since its start, in numbers that only grow; a node has its own, and whoever asks reads them.

Counted per batch where work comes in batches: an addition of integers, no lock, no name to look up. How they are shown
is for others: `box.stat` by `statistics.py`, Prometheus by `web/`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SECONDS_BOUNDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""From what a page cache takes to what a disk does that is about to fail."""

TYPES_MAX: Final = 128
"""Request types are below this."""


class Histogram:
    """How many values were at or below each bound, and above the one before; the last count is for all above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class WalCounters:
    """Writes to the log. `failure` is what the last one failed with; None: it went well."""

    __slots__ = ("failure", "failures", "rotations", "synced_seconds", "write_seconds")

    def __init__(self) -> None:
        self.write_seconds = Histogram()
        """Of writes that were not synced."""
        self.synced_seconds = Histogram()
        """Of writes with their fsync."""
        self.rotations = 0
        """Logs that were ended."""
        self.failures = 0
        self.failure: str | None = None


class Counters:
    """Requests of clients and their bytes; what replicas are sent is not among them."""

    __slots__ = (
        "auth_delays",
        "auth_failures",
        "connections",
        "connections_total",
        "errors",
        "operations",
        "received_bytes",
        "requests_in_progress",
        "sent_bytes",
    )

    def __init__(self) -> None:
        self.operations = [0] * TYPES_MAX
        """Requests that were executed, by their type; those that were answered with an error, too."""
        self.errors = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        self.connections = 0
        """Those that are open now."""
        self.connections_total = 0
        self.requests_in_progress = 0
        """Those that wait for something now: a function, a disk, other members."""
        self.auth_failures = 0
        """AUTH requests with a wrong user or password that were checked."""
        self.auth_delays = 0
        """AUTH requests that were delayed, or rejected unchecked, after too many failures."""
