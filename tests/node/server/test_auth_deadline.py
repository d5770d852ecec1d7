"""Connections without a login: which are closed after the timeout, and how many may watch ballots for longer."""

from __future__ import annotations

from typing import Final

import pytest

from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import encode_request
from flowstone.iproto.requests import decode_request
from flowstone.node.server.auth_deadline import BALLOT_WATCHERS_MAX, AuthDeadline
from flowstone.node.server.limits import ServerLimits
from flowstone.node.server.procedures_box import built_in
from flowstone.node.server.session import Session
from flowstone.node.server.watchers import Watchers, sources_of
from tests.node.instances import make_instance

SALT: Final = bytes(32)
NOW: Final = 1000.0


def session(key: str | None = None, host: str = "10.0.0.1") -> Session:
    """Return the session of a connected guest that watches `key`."""
    instance = make_instance()
    made = Session(
        instance, Watchers(sources_of(instance)), built_in(), lambda _: None, id=1, salt=SALT, peer=f"{host}:5001"
    )
    if key is not None:
        made.handle(decode_request(encode_request(RequestType.WATCH, 1, pack({0x57: key}))[5:], is_2_6=False))
    return made


def deadline(limits: ServerLimits | None = None, *, trusts_guests: bool = False) -> AuthDeadline:
    return AuthDeadline(limits or ServerLimits(), NOW, trusts_guests=trusts_guests)


def test_silent_guest_is_closed_after_auth_timeout() -> None:
    assert deadline().has_passed(session(), NOW - 61)
    assert not deadline().has_passed(session(), NOW - 59)


def test_auth_deadline_closes_no_connection_without_timeout_or_when_guests_have_privileges() -> None:
    assert not deadline(ServerLimits(auth_seconds=None)).has_passed(session(), NOW - 1000)
    assert not deadline(trusts_guests=True).has_passed(session(), NOW - 1000)


def test_authenticated_client_is_not_closed() -> None:
    known = session()
    known.is_authenticated = True
    assert not deadline().has_passed(known, NOW - 1000)


@pytest.mark.parametrize("key", ["nosuchkey", "box.id", "box.status", "box.shutdown"])
def test_guest_that_watches_another_key_than_the_ballot_is_closed(key: str) -> None:
    """A WATCH of any key used to keep a connection open forever."""
    assert deadline().has_passed(session(key), NOW - 61)


def test_guest_that_watches_the_ballot_is_not_closed() -> None:
    assert not deadline().has_passed(session("internal.ballot"), NOW - 1000)


def test_ballot_watchers_of_one_address_are_limited_and_the_oldest_kept() -> None:
    one_pass, watching = deadline(), session("internal.ballot")
    closed = [one_pass.has_passed(watching, NOW - 61) for _ in range(BALLOT_WATCHERS_MAX + 5)]
    assert closed == [False] * BALLOT_WATCHERS_MAX + [True] * 5
    assert not one_pass.has_passed(session("internal.ballot", "10.0.0.2"), NOW - 61)
    assert not one_pass.has_passed(watching, NOW - 59), "no exemption is needed within the timeout"


def test_ballot_watchers_leave_most_connections_to_others_when_few_are_allowed() -> None:
    one_pass = deadline(ServerLimits(connections_max=40))
    closed = [
        one_pass.has_passed(session("internal.ballot", f"10.0.0.{host}"), NOW - 61)
        for host in range(4)
        for _ in range(12)
    ]
    assert closed == ([False] * 10 + [True] * 2) * 2 + [True] * 24
