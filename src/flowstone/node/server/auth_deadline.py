"""Decides which connections to close because they have not authenticated within `auth_timeout`.

Replicas of Tarantool 2.11 and later keep one connection that never authenticates: they watch `internal.ballot` on it,
and nothing else, until they subscribe on their other connection (`docs/spec/replication.md#connection-sequence`). The
bootstrap of a replica set may take longer than `auth_timeout`, so these connections are exempt. Any client can watch a
ballot, so the number of exempt connections is bounded, for each address and for all addresses together.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from flowstone.node.server.limits import ServerLimits
from flowstone.node.server.session import Session

BALLOT_WATCHERS_MAX: Final = 64
"""Exempt connections of one address. All 31 other members of a replica set may share one address, and each of them may
have a second connection whose loss this node has not noticed yet."""

ADDRESS_SHARE: Final = 4
TOTAL_SHARE: Final = 2
"""Exempt connections may use at most a quarter of `connections_max` per address, and half of it in total, so that they
do not lock out clients if `connections_max` is small."""


class AuthDeadline:
    """One pass over the connections of a server at the time `now`, oldest first: the oldest ones stay exempt."""

    def __init__(self, limits: ServerLimits, now: float, *, trusts_guests: bool) -> None:
        self._seconds = None if trusts_guests else limits.auth_seconds
        self._now = now
        self._address_max = min(BALLOT_WATCHERS_MAX, limits.connections_max // ADDRESS_SHARE)
        self._total_max = limits.connections_max // TOTAL_SHARE
        self._exempt: Counter[str] = Counter()
        self._total = 0

    def has_passed(self, session: Session, opened: float) -> bool:
        """Return True if the connection of `session`, which was opened at `opened`, has to be closed."""
        if self._seconds is None or session.is_authenticated or self._now - opened <= self._seconds:
            return False
        return not (session.is_watching_ballot and self._exempts(session.address))

    def _exempts(self, address: str) -> bool:
        """Count one more exempt connection of `address`; return False if the limits do not allow it."""
        if self._total >= self._total_max or self._exempt[address] >= self._address_max:
            return False
        self._exempt[address] += 1
        self._total += 1
        return True
