"""What is between two hosts, in one direction: how long packets take, which are held or sent twice, whether any pass.

TCP hides loss: a lost packet is sent again after a while, and those behind it wait. So nothing is lost here, it is
late. Nor does TCP give bytes twice. What can come twice is a connection: its first packet was answered, the answer was
late, and the server has a connection that nobody uses; and rows, when their sender has to connect anew, which is not
the link's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

LATENCY: Final = (0.0001, 0.002)
"""Seconds that a packet is on its way: at least, and at most."""

RETRANSMISSION_SECONDS: Final = 0.2
"""When a kernel first sends again what was lost; twice as long each further time."""

RETRANSMISSIONS_MAX: Final = 4


class Fault(Enum):
    """What is wrong with a link that lets nothing pass."""

    CUT = "cut"
    """Connections are reset, new ones refused as unreachable."""

    BLACK_HOLE = "black hole"
    """Nothing arrives, and nobody is told."""


@dataclass(slots=True)
class Link:
    """One direction between two hosts."""

    latency: tuple[float, float] = LATENCY
    loss_probability: float = 0.0
    duplicate_probability: float = 0.0
    """Of a packet that opens a connection."""

    opens_at: float = 0.0
    """Until then it is clogged: it holds what is sent, and then lets it through."""

    fault: Fault | None = None
    faulty_since: float = 0.0
    hit_count: int = 0
    """Packets and attempts to connect that were late, lost or doubled, and connections that were reset."""

    def is_open(self) -> bool:
        """Asked for each packet: whether it passes."""
        if self.fault is None:
            return True
        self.hit_count += 1
        return False

    def seconds(self, now: float, rng: Random) -> float:
        """How long a packet that is sent now takes, alone."""
        held = max(self.opens_at - now, 0.0)
        seconds = held + rng.uniform(*self.latency) + self._retransmission_seconds(rng)
        if seconds > LATENCY[1]:
            self.hit_count += 1
        return seconds

    def is_doubled(self, rng: Random) -> bool:
        """Asked for each attempt to connect."""
        if not self.duplicate_probability or rng.random() >= self.duplicate_probability:
            return False
        self.hit_count += 1
        return True

    @property
    def is_calm(self) -> bool:
        """Whether packets that pass do so as they do elsewhere."""
        is_reliable = not self.loss_probability and not self.duplicate_probability
        return is_reliable and self.latency == LATENCY and not self.opens_at

    def calm(self) -> None:
        """Packets pass again as they do elsewhere, those that it held included."""
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
