"""Decides which connections to close because they have not authenticated within `auth_timeout`.

Replicas of Tarantool 2.11 and later keep one connection that never authenticates: they watch `internal.ballot` on it,
and nothing else, until they subscribe on their other connection (reference section 7). The bootstrap of a replica set
may take longer than `auth_timeout`, so such connections are exempt. Any client can watch a ballot, so the number of
exempt connections is bounded, for each address and for all addresses together.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from flowstone.node.limits import Limits
from flowstone.node.session import Session

BALLOT_WATCHERS_MAX: Final = 64
"""Exempt connections of one address. All 31 other members of a replica set may share one address, and each may have a
second connection that its network has lost and this node has not noticed yet."""

ADDRESS_SHARE: Final = 4
TOTAL_SHARE: Final = 2
"""One address may hold at most a quarter of `connections_max` in exempt connections, all addresses half of them: where
`connections_max` is small, exempt connections must not lock out clients either."""


class AuthDeadline:
    """One pass over the connections of a server at the time `now`, oldest first: the oldest keep their exemption."""

    def __init__(self, limits: Limits, now: float, *, trusts_guests: bool) -> None:
        self._seconds = None if trusts_guests else limits.auth_seconds
        self._now = now
        self._address_max = min(BALLOT_WATCHERS_MAX, limits.connections_max // ADDRESS_SHARE)
        self._total_max = limits.connections_max // TOTAL_SHARE
        self._exempt: Counter[str] = Counter()
        self._total = 0

    def has_passed(self, session: Session, opened: float) -> bool:
        """Return whether the connection of `session` has to be closed; `opened` is when the client connected."""
        if self._seconds is None or session.is_authenticated or self._now - opened <= self._seconds:
            return False
        return not (session.is_watching_ballot and self._exempts(session.address))

    def _exempts(self, address: str) -> bool:
        """Count one more exempt connection of `address`, if there is room for it."""
        if self._total >= self._total_max or self._exempt[address] >= self._address_max:
            return False
        self._exempt[address] += 1
        self._total += 1
        return True
