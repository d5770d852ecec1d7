"""Failed logins: which attempts are delayed and for how long, and what is remembered, counted and logged."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from flowstone.iproto import errors
from flowstone.node.server import login_attempts
from flowstone.node.server.login_attempts import (
    LINES_BURST,
    PAIRS_MAX,
    USERS_MAX,
    WAITING_MAX,
    LoginAttempts,
    address_of,
)
from flowstone.outside import production
from flowstone.rate_limit import RateLimit
from tests.node.instances import make_instance
from tests.standing_clock import StandingClock

HERE, ELSEWHERE = "10.0.0.1:5001", "10.0.0.2:5001"


class Waiting(StandingClock):
    """A clock whose sleepers wake in order of their deadlines when the test waits for them."""

    async def sleep(self, seconds: float) -> None:
        due = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, due)


@pytest.fixture
def clock() -> Waiting:
    return Waiting()


@pytest.fixture
def attempts(clock: Waiting) -> LoginAttempts:
    outside = dataclasses.replace(production(), clock=clock)
    return LoginAttempts(make_instance(outside=outside, auth_delay=1, auth_retries=3))


def wrong() -> None:
    raise errors.CredsMismatch("Incorrect password supplied for user 'app'")


def right() -> None:
    """Raise nothing: the password is correct."""


async def attempt(attempts: LoginAttempts, peer: str = HERE, user: str = "app", *, is_right: bool = False) -> bool:
    """Make one attempt as a session does; return True if it was delayed."""
    check = right if is_right else wrong
    if attempts.must_wait(peer, user):
        try:
            await attempts.wait(peer, user, check)
        except errors.CredsMismatch:
            assert not is_right
        return True
    if not is_right:
        attempts.failed(peer, user)
    return False


async def test_failures_beyond_auth_retries_are_checked_once_per_auth_delay(
    attempts: LoginAttempts, clock: Waiting
) -> None:
    begun = clock.now
    assert [await attempt(attempts) for _ in range(10)] == [False] * 4 + [True] * 6
    assert clock.now == begun + 6


async def test_parallel_attempts_do_not_guess_faster(attempts: LoginAttempts, clock: Waiting) -> None:
    for _ in range(4):
        await attempt(attempts)
    begun = clock.now
    await asyncio.gather(*(attempt(attempts) for _ in range(8)))
    assert clock.now == begun + 8


async def test_login_delay_is_separate_for_each_user_and_address(
    attempts: LoginAttempts,
) -> None:
    for _ in range(20):
        await attempt(attempts)
    assert not await attempt(attempts, ELSEWHERE, is_right=True)
    assert not await attempt(attempts, HERE, "other", is_right=True)
    assert await attempt(attempts, "10.0.0.1:9", is_right=True)


async def test_failures_expire_one_per_auth_delay(attempts: LoginAttempts, clock: Waiting) -> None:
    for _ in range(4):
        await attempt(attempts)
    clock.now += 2
    assert [await attempt(attempts) for _ in range(3)] == [False, False, True]
    clock.now += 100
    assert not await attempt(attempts)


async def test_successful_attempt_has_no_delay(attempts: LoginAttempts, clock: Waiting) -> None:
    for _ in range(4):
        await attempt(attempts)
    begun = clock.now
    assert await attempt(attempts, is_right=True)
    assert [await attempt(attempts, is_right=True) for _ in range(50)] == [False] * 50
    assert clock.now == begun + 1


async def test_attempts_beyond_the_queue_are_rejected_unchecked(attempts: LoginAttempts) -> None:
    for _ in range(4):
        await attempt(attempts)
    queued = [asyncio.ensure_future(attempts.wait(HERE, "app", right)) for _ in range(WAITING_MAX + 1)]
    await asyncio.sleep(0)
    with pytest.raises(errors.CredsMismatch, match="Too many authentication attempts"):
        attempts.must_wait(HERE, "app")
    assert not attempts.must_wait(ELSEWHERE, "app")
    *answers, last = await asyncio.gather(*queued, return_exceptions=True)
    assert answers == [None] * WAITING_MAX
    assert isinstance(last, errors.CredsMismatch)
    assert not attempts.must_wait(HERE, "app")


async def test_client_that_leaves_the_queue_does_not_prolong_it(attempts: LoginAttempts, clock: Waiting) -> None:
    for _ in range(4):
        await attempt(attempts)
    for _ in range(100):
        gone = asyncio.ensure_future(attempts.wait(HERE, "app", right))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    begun = clock.now
    await attempt(attempts, is_right=True)
    assert clock.now <= begun + 1


async def test_attempt_cancelled_before_its_first_step_leaves_no_state(attempts: LoginAttempts, clock: Waiting) -> None:
    for _ in range(4):
        await attempt(attempts)
    for _ in range(WAITING_MAX + 1):
        assert attempts.must_wait(HERE, "app"), "no attempt is waiting"
        gone = asyncio.ensure_future(attempts.wait(HERE, "app", right))
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    begun = clock.now
    await attempt(attempts, is_right=True)
    assert clock.now <= begun + 1


async def test_shorter_delay_applies_at_once_and_zero_disables_it(attempts: LoginAttempts) -> None:
    for _ in range(20):
        await attempt(attempts)
    instance = attempts._instance
    instance.configuration = dataclasses.replace(instance.configuration, auth_delay=0)
    assert not any([await attempt(attempts) for _ in range(50)])
    assert instance.counters.auth_failures == 70


async def test_number_of_remembered_pairs_is_limited(attempts: LoginAttempts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_attempts, "PAIRS_MAX", 100)
    for number in range(1000):
        attempts.failed(f"10.0.{number % 200}.1:5001", f"{number}" + "x" * 100_000)
        assert attempts.pair_count <= 100
    assert attempts.pair_count == 100
    assert all(len(user) <= 64 for address in attempts._addresses.values() for user in address.users)


def rush(attempts: LoginAttempts, peer: str, count: int) -> int:
    """Fail with made-up names until one is delayed; return the number of undelayed attempts."""
    checked = 0
    for number in range(count):
        if not attempts.must_wait(peer, f"nobody{number}"):
            attempts.failed(peer, f"nobody{number}")
            checked += 1
    return checked


async def test_invented_names_gain_no_further_guesses_from_the_same_address(attempts: LoginAttempts) -> None:
    """Some 16,384 of them made the node forget the failures of the attacked user."""
    for _ in range(4):
        await attempt(attempts, user="admin")
    assert rush(attempts, HERE, 2 * PAIRS_MAX) < 2 * USERS_MAX
    assert attempts.must_wait(HERE, "admin")
    assert attempts.pair_count <= USERS_MAX


async def test_failures_of_one_address_do_not_make_the_node_forget_those_of_another(attempts: LoginAttempts) -> None:
    for _ in range(4):
        await attempt(attempts, user="admin")
    rush(attempts, ELSEWHERE, 2 * PAIRS_MAX)
    assert attempts.must_wait(HERE, "admin")


async def test_invented_names_of_one_address_delay_no_user_of_another(attempts: LoginAttempts) -> None:
    rush(attempts, HERE, 2 * PAIRS_MAX)
    assert attempts.must_wait(HERE, "app"), "further users of that address share one limit"
    assert not attempts.must_wait(ELSEWHERE, "app")
    assert rush(attempts, ELSEWHERE, USERS_MAX) == USERS_MAX


async def test_further_users_of_an_address_are_counted_separately_again_when_old_failures_have_expired(
    attempts: LoginAttempts, clock: Waiting
) -> None:
    rush(attempts, HERE, 2 * PAIRS_MAX)
    begun = clock.now
    assert await attempt(attempts), "delayed, but not locked out"
    assert clock.now <= begun + 1
    clock.now += 10
    assert [await attempt(attempts) for _ in range(5)] == [False] * 4 + [True]
    assert not await attempt(attempts, user="other")


async def test_failures_of_further_users_are_logged_as_such(
    attempts: LoginAttempts, clock: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(USERS_MAX):
        attempts.failed(HERE, f"nobody{number}")
    clock.now += 0.5
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flowstone.node"):
        for _ in range(2):
            attempts._lines = RateLimit(1, 1.0)
            attempts.failed(HERE, "app")
    text = "authentication failed for user 'app' from 10.0.0.1:5001 (failure 2 of further users from this address)"
    assert caplog.records[-1].getMessage() == text


async def test_pairs_with_expired_failures_are_dropped(attempts: LoginAttempts, clock: Waiting) -> None:
    for number in range(50):
        await attempt(attempts, user=f"u{number}")
    clock.now += 10
    await attempt(attempts)
    assert attempts.pair_count == 1


async def test_failures_are_logged_with_user_and_address_at_a_bounded_rate(
    attempts: LoginAttempts, clock: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flowstone.node"):
        for number in range(1000):
            attempts.failed(HERE, f"user\n{number % 2}")
        assert len(caplog.records) == LINES_BURST
        clock.now += 1
        attempts.failed(HERE, "app")
    text = "authentication failed for user 'user\\n0' from 10.0.0.1:5001 (failure 1 of this user from this address)"
    assert caplog.records[0].getMessage() == text
    assert caplog.records[-1].getMessage().endswith("from this address); 990 earlier failures were not logged")
    assert attempts._instance.counters.auth_failures == 1001


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("127.0.0.1:3301", "127.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:3301", "2001:db8:1:2::/64"),
        ("[::1]:3301", "::1"),
        ("[::ffff:10.0.0.1]:3301", "10.0.0.1"),
        ("[fe80::1%eth0]:3301", "fe80::/64"),
        ("unix/:", "unix/"),
        ("?", "?"),
    ],
)
def test_address_is_the_host_or_the_ipv6_subnet(peer: str, address: str) -> None:
    assert address_of(peer) == address
