"""Counters of a node: what it has done since its start. Every node has its own.

Work that comes in batches is counted per batch: one addition of integers, without locks and name lookups. This module
formats nothing: `statistics.py` makes `box.stat` of the counters, and `web/` the metrics for Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SECONDS_BOUNDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bucket bounds, from a write to the page cache to a write to a failing disk."""

TYPES_MAX: Final = 128
"""Upper bound of request types (exclusive)."""


class Histogram:
    """Counts of values up to each bound and above the previous one. The last count is for values above all bounds."""

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
    """Writes to the log. `failure` is the error of the last write; None if it succeeded."""

    __slots__ = ("failure", "failures", "rotations", "synced_seconds", "write_seconds")

    def __init__(self) -> None:
        self.write_seconds = Histogram()
        """Durations of writes without fsync."""
        self.synced_seconds = Histogram()
        """Durations of writes with fsync."""
        self.rotations = 0
        """Log files that were closed because they were full, or for a checkpoint."""
        self.failures = 0
        self.failure: str | None = None


class Counters:
    """Requests of clients and their bytes. Rows sent to replicas are not counted here."""

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
        """Executed requests by type, including requests that were answered with an error."""
        self.errors = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        self.connections = 0
        """Open connections."""
        self.connections_total = 0
        self.requests_in_progress = 0
        """Requests that wait for a function, the disk or other members."""
        self.auth_failures = 0
        """AUTH requests that were checked and had a wrong user or password."""
        self.auth_delays = 0
        """AUTH requests that were delayed, or rejected unchecked, after too many failures."""
