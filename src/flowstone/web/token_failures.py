"""Handling of wrong tokens: counts and logs them, and delays responses to an address that keeps guessing.

A right token is never delayed: tokens are too long to be guessed even without delays, and a browser with an old cookie
must not lock out another client at the same address. Memory and log lines are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from flowstone.rate_limit import RateLimit

LOG = logging.getLogger("flowstone.web")

RETRIES: Final = 5
"""Wrong tokens per address that are answered without delay; the allowance recovers by one per DELAY_SECONDS."""

DELAY_SECONDS: Final = 1.0
WAITING_MAX: Final = 8
"""Delayed responses per address; further wrong tokens get status 429 at once."""

HOSTS_MAX: Final = 4096
"""Addresses remembered; the one without failures for the longest time is forgotten first."""

LINE_SECONDS: Final = 10.0
"""Minimum interval between two log lines."""


class _Host:
    __slots__ = ("forgiven_at", "waiting")

    def __init__(self) -> None:
        self.forgiven_at = 0.0
        self.waiting = 0


class TokenFailures:
    """The wrong tokens that one server has received."""

    def __init__(self) -> None:
        self.count = 0
        self._hosts: dict[str, _Host] = {}
        self._lines = RateLimit(1, LINE_SECONDS)

    async def failed(self, host: str, path: str) -> bool:
        """Record a wrong token and delay its response if necessary; return False if too many responses wait already."""
        self.count += 1
        now = time.monotonic()
        self._log(host, path, now)
        known = self._hosts.pop(host, None) or _Host()
        if len(self._hosts) >= HOSTS_MAX:
            del self._hosts[next(iter(self._hosts))]
        self._hosts[host] = known
        if known.waiting >= WAITING_MAX:
            return False
        known.forgiven_at = min(max(known.forgiven_at, now) + DELAY_SECONDS, now + (RETRIES + 1) * DELAY_SECONDS)
        if known.forgiven_at - now <= RETRIES * DELAY_SECONDS:
            return True
        known.waiting += 1
        try:
            await asyncio.sleep(DELAY_SECONDS)
        finally:
            known.waiting -= 1
        return True

    def _log(self, host: str, path: str, now: float) -> None:
        unlogged = self._lines.take(now)
        if unlogged is None:
            return
        more = f"; {unlogged} earlier failures were not logged" if unlogged else ""
        LOG.warning("wrong token for %r from %s%s", path, host, more, extra={"peer": host})
