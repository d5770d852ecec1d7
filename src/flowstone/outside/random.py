"""Randomness: salts, UUIDs and jitter, all from one source.

The production form draws from the operating system, so that salts are fit for authentication.
Nothing random in Flowstone comes from anywhere else.
"""

from __future__ import annotations

import random
import uuid
from typing import Protocol


class Random(Protocol):
    """A source of randomness that a simulator can replace by a seeded one."""

    def bytes(self, n: int) -> bytes:
        """`n` random bytes, fit for a salt."""
        ...

    def uuid(self) -> uuid.UUID:
        """A random (version 4) UUID, as instances and replica sets are named by."""
        ...

    def uniform(self, a: float, b: float) -> float:
        """A float between `a` and `b`, both included, in either order. For jitter."""
        ...

    def randrange(self, n: int) -> int:
        """An integer in `0 <= value < n`; `n` below one is a ValueError."""
        ...


class SystemRandom:
    """The operating system's random source."""

    def __init__(self) -> None:
        self._source = random.SystemRandom()

    def bytes(self, n: int) -> bytes:
        return self._source.randbytes(n)

    def uuid(self) -> uuid.UUID:
        return uuid.UUID(bytes=self._source.randbytes(16), version=4)

    def uniform(self, a: float, b: float) -> float:
        return self._source.uniform(a, b)

    def randrange(self, n: int) -> int:
        return self._source.randrange(n)
