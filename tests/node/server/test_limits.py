"""Limits on clients: each is an option."""

from __future__ import annotations

from typing import Any

from flowstone.node.server.limits import ServerLimits, limits_of
from tests.node.instances import make_instance


def test_every_limit_is_an_option() -> None:
    given: dict[str, Any] = {
        "connections_max": 1,
        "net_msg_max": 2,
        "wal_queue_max_size": 3,
        "packet_size_max": 4000,
        "guest_packet_size_max": 2000,
        "output_size_max": 5000,
        "slow_reader_timeout": 6.0,
        "auth_timeout": 7.0,
    }
    assert limits_of(make_instance(**given)) == ServerLimits(1, 2, 3, 4000, 2000, 5000, 6.0, 7.0)
    assert limits_of(make_instance()) == ServerLimits()
    assert limits_of(make_instance(packet_size_max=2000)).packet_size_max_before_auth == 2000


def test_unauthenticated_connection_ends_after_a_minute_unless_configured() -> None:
    assert limits_of(make_instance()).auth_seconds == 60
    assert limits_of(make_instance(auth_timeout=0)).auth_seconds is None
