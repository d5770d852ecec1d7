"""Randomness: salts, UUIDs and jitter, all from one source.

The production implementation uses the operating system's generator, so that salts are suitable for authentication.
Flowstone uses no other source of randomness.
"""

from __future__ import annotations

import random
import uuid
from typing import Protocol


class Random(Protocol):
    """A source of randomness; the simulator replaces it with a seeded one."""

    def bytes(self, n: int) -> bytes:
        """Return `n` random bytes, suitable for a salt."""
        ...

    def uuid(self) -> uuid.UUID:
        """Return a random (version 4) UUID, as used for instances and replica sets."""
        ...

    def uniform(self, a: float, b: float) -> float:
        """Return a float between `a` and `b`, both included, in either order. For jitter."""
        ...

    def randrange(self, n: int) -> int:
        """Return an integer in `0 <= value < n`; raise ValueError if `n` is less than one."""
        ...


class SystemRandom:
    """The operating system's random number generator."""

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
