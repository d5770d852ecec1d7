"""The link between two hosts in one direction: latency, delays, duplicate connections, and outages.

TCP hides loss: a lost packet is retransmitted after a while, and later packets wait for it. Packets here are therefore
delayed but never lost, and no bytes are duplicated. A connection can be duplicated: its first packet was answered late,
and the server keeps a connection that is never used. Rows can be duplicated if their sender reconnects; the link is not
involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

LATENCY: Final = (0.0001, 0.002)
"""Minimum and maximum latency of a packet, in seconds."""

RETRANSMISSION_SECONDS: Final = 0.2
"""Time until a kernel first retransmits a lost packet; it doubles with each retry."""

RETRANSMISSIONS_MAX: Final = 4


class Fault(Enum):
    """The kind of outage of a link."""

    CUT = "cut"
    """Connections are reset, new ones refused as unreachable."""

    BLACK_HOLE = "black hole"
    """Packets vanish without an error."""


@dataclass(slots=True)
class Link:
    """One direction between two hosts."""

    latency: tuple[float, float] = LATENCY
    loss_probability: float = 0.0
    duplicate_probability: float = 0.0
    """Probability that a packet that opens a connection is duplicated."""

    opens_at: float = 0.0
    """The link is clogged until this time: it queues packets, and delivers them then."""

    fault: Fault | None = None
    faulty_since: float = 0.0
    hit_count: int = 0
    """Number of packets and connection attempts that were delayed, lost or duplicated, and of connection resets."""

    def is_open(self) -> bool:
        """Return whether this packet passes; called once per packet."""
        if self.fault is None:
            return True
        self.hit_count += 1
        return False

    def seconds(self, now: float, rng: Random) -> float:
        """Return the latency of a single packet sent now."""
        held = max(self.opens_at - now, 0.0)
        seconds = held + rng.uniform(*self.latency) + self._retransmission_seconds(rng)
        if seconds > LATENCY[1]:
            self.hit_count += 1
        return seconds

    def is_doubled(self, rng: Random) -> bool:
        """Return whether this connection attempt is duplicated; called once per attempt."""
        if not self.duplicate_probability or rng.random() >= self.duplicate_probability:
            return False
        self.hit_count += 1
        return True

    @property
    def is_calm(self) -> bool:
        """True if latency is normal."""
        is_reliable = not self.loss_probability and not self.duplicate_probability
        return is_reliable and self.latency == LATENCY and not self.opens_at

    def calm(self) -> None:
        """Restore normal latency, also for queued packets."""
        self.latency = LATENCY
        self.loss_probability = self.duplicate_probability = 0.0
        self.opens_at = 0.0

    def _retransmission_seconds(self, rng: Random) -> float:
        if not self.loss_probability:
            return 0.0
        losses = 0
        while losses < RETRANSMISSIONS_MAX and rng.random() < self.loss_probability:
            losses += 1
        return RETRANSMISSION_SECONDS * (2**losses - 1)
