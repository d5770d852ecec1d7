"""Failed logins by user and address: counts them, logs them, and delays further attempts.

After `auth_retries` failures of a user from an address, attempts of that pair are checked one at a time, one every
`auth_delay` seconds (a leaky bucket: old failures are forgotten at the same rate). Attempts from other addresses are
never delayed, so an attacker cannot lock a user out elsewhere. Attempts of other users from the same address are not
delayed either, until USERS_MAX users of that address have failures: further users then share one limit, so that
invented names gain no extra guesses. Unknown users are treated like known ones, so that delays do not reveal which
users exist. Memory and log lines are bounded.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from flowstone.iproto import errors
from flowstone.node.instance import Instance
from flowstone.rate_limit import RateLimit

LOG = logging.getLogger("flowstone.node")

PAIRS_MAX: Final = 16_384
"""Remembered pairs of user and address. The address whose last failure is oldest is forgotten first."""

USERS_MAX: Final = 32
"""Users of one address whose failures are counted separately. More users than usually fail at the same time through one
proxy, but so few that only hundreds of addresses can fill PAIRS_MAX and make the node forget failures."""

WAITING_MAX: Final = 16
"""Waiting attempts of one pair; further ones are rejected at once."""

NAME_MAX: Final = 64
"""Characters of a user name that are remembered and logged: clients may send names of any length."""

LINES_BURST: Final = 10
LINE_SECONDS: Final = 1.0
"""Log lines about failures: how many may follow each other at once, and the seconds until one more is allowed."""

_IPV6_SUBNET: Final = 64

T = TypeVar("T")


class _Pair:
    """The failures of one user from one address, or of all users of an address beyond USERS_MAX."""

    __slots__ = ("failures", "is_shared", "paid_at", "waiting")

    def __init__(self, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.failures = 0
        self.paid_at = 0.0
        """The time at which all failures so far are forgotten. Each failure adds `auth_delay`."""
        self.waiting = 0


class _Address:
    """The failures from one address: `users` by name, and `others` for the users beyond USERS_MAX."""

    __slots__ = ("others", "users")

    def __init__(self) -> None:
        self.users: dict[str, _Pair] = {}
        self.others = _Pair(is_shared=True)

    def find(self, user: str, now: float) -> _Pair | None:
        """Return the pair that counts an attempt of `user`; None if `user` has no failures and can get a pair."""
        pair = self.users.get(user)
        if pair is None and sum(each.paid_at > now for each in self.users.values()) >= USERS_MAX:
            return self.others
        return pair

    def drop_passed(self, now: float) -> int:
        """Drop the users whose failures are forgotten; return their number."""
        passed = [user for user, pair in self.users.items() if pair.paid_at <= now]
        for user in passed:
            del self.users[user]
        return len(passed)

    def has_passed(self, now: float) -> bool:
        return self.others.paid_at <= now and all(pair.paid_at <= now for pair in self.users.values())


class LoginAttempts:
    """The login attempts of all clients of `instance`."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._clock = instance.outside.clock
        self._counters = instance.counters
        self._addresses: dict[str, _Address] = {}
        """Ordered by the last failure, oldest first."""
        self._pair_count = 0
        self._lines = RateLimit(LINES_BURST, LINE_SECONDS)

    @property
    def pair_count(self) -> int:
        return self._pair_count

    def must_wait(self, peer: str, user: str) -> bool:
        """Return True if an attempt has to use `wait`; raise CredsMismatch if too many attempts wait already."""
        address = self._addresses.get(address_of(peer))
        pair = address.find(user[:NAME_MAX], self._clock.monotonic()) if address is not None else None
        if pair is None or self._seconds(pair) <= 0:
            return False
        self._check_queue(pair)
        return True

    async def wait(self, peer: str, user: str, check: Callable[[], T]) -> T:
        """Wait for the turn of this attempt, then return the result of `check`.

        Raise CredsMismatch without calling `check` if too many attempts wait. `check` logs in or raises CredsMismatch.
        The attempt counts as a failure from the beginning, so that later attempts queue up after it; this is undone
        unless it fails. Nothing is counted before the first step of the coroutine: a task that is cancelled before it
        runs leaves nothing to undo.
        """
        pair, delay = self._remembered(peer, user), self._instance.configuration.auth_delay
        self._check_queue(pair)
        seconds = max(0.0, self._seconds(pair))
        pair.paid_at = max(pair.paid_at, self._clock.monotonic()) + delay
        pair.waiting += 1
        self._counters.auth_delays += 1
        is_failure = False
        try:
            await self._clock.sleep(seconds)
            return check()
        except errors.CredsMismatch:
            is_failure = True
            self._note(peer, user, pair)
            raise
        finally:
            pair.waiting -= 1
            if not is_failure:
                pair.paid_at -= delay

    def _check_queue(self, pair: _Pair) -> None:
        """Raise CredsMismatch if too many attempts of `pair` wait."""
        if pair.waiting >= WAITING_MAX:
            self._counters.auth_delays += 1
            # Not ER_AUTH_DELAY (257), although the text is that of 257: real replicas retry after 47, but stop
            # permanently after 257.
            raise errors.CredsMismatch("Too many authentication attempts")

    def failed(self, peer: str, user: str) -> None:
        """Count a failed attempt that did not use `wait`."""
        pair = self._remembered(peer, user)
        pair.paid_at = max(pair.paid_at, self._clock.monotonic()) + self._instance.configuration.auth_delay
        self._note(peer, user, pair)

    def _remembered(self, peer: str, user: str) -> _Pair:
        """Return the pair of an attempt, a new one if needed, and mark its address as the most recent."""
        key, name, now = address_of(peer), user[:NAME_MAX], self._clock.monotonic()
        address = self._addresses.pop(key, None)
        if address is None:
            address = _Address()
        self._addresses[key] = address
        pair = address.find(name, now)
        if pair is None:
            self._pair_count -= address.drop_passed(now)
            self._make_room(now)
            pair = address.users[name] = _Pair()
            self._pair_count += 1
        return pair

    def _seconds(self, pair: _Pair) -> float:
        """Return the seconds until the next attempt of `pair` may be checked."""
        options = self._instance.configuration
        seconds = pair.paid_at - options.auth_retries * options.auth_delay - self._clock.monotonic()
        return min(seconds, (pair.waiting + 1) * options.auth_delay)  # `auth_delay` may have been longer before

    def _make_room(self, now: float) -> None:
        """Drop the oldest addresses if their failures are forgotten, or to make room for one more pair."""
        while len(self._addresses) > 1:
            oldest = next(iter(self._addresses))
            address = self._addresses[oldest]
            if self._pair_count < PAIRS_MAX and not address.has_passed(now):
                break
            del self._addresses[oldest]
            self._pair_count -= len(address.users)

    def _note(self, peer: str, user: str, pair: _Pair) -> None:
        pair.failures += 1
        self._counters.auth_failures += 1
        unlogged = self._lines.take(self._clock.monotonic())
        if unlogged is None:
            return
        more = f"; {unlogged} earlier failures were not logged" if unlogged else ""
        whose = "further users" if pair.is_shared else "this user"
        text = "authentication failed for user %r from %s (failure %d of %s from this address)%s"
        LOG.warning(text, user[:NAME_MAX], peer, pair.failures, whose, more, extra={"peer": peer})


def address_of(peer: str) -> str:
    """Return the part of `host:port` that identifies a machine; for IPv6 the subnet, since hosts choose the rest."""
    host = peer.rpartition(":")[0].strip("[]") or peer
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address if address.is_loopback else ipaddress.ip_network((address, _IPV6_SUBNET), strict=False))
