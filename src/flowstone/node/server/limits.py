"""Limits on the resources that the clients of a node may use, set by its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.iproto.limits import PACKET_SIZE_MAX_BEFORE_AUTH
from flowstone.node.instance import Instance


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on clients. The nesting depth of MessagePack is a constant elsewhere."""

    connections_max: int = 10_000
    net_msg_max: int = 768
    """Pending requests of one connection, such as calls of async functions; further requests wait."""

    wal_queue_max_size: int = 16 * 1024 * 1024
    """Bytes of requests whose rows are not written yet; above this, the next turn waits for the disk."""

    packet_size_max: int = 128 * 1024 * 1024
    packet_size_max_before_auth: int = PACKET_SIZE_MAX_BEFORE_AUTH
    output_max: int = 1024 * 1024
    """Bytes of unsent replies of one connection; further requests wait until they are sent."""

    slow_reader_seconds: float = 60.0
    """Seconds after which a client that does not read its replies is disconnected."""

    auth_seconds: float | None = 60.0
    """Timeout of authentication; None for no limit. `node/server/auth_deadline.py` defines the exemptions."""

    transactions_max: int = 1000
    """Open transactions of all clients. Each transaction that has read something makes every write slightly slower."""

    transactions_max_before_auth: int = 16
    """Open transactions of clients that have not authenticated, unless guests have been granted rights."""


def limits_of(instance: Instance) -> ServerLimits:
    """Return the limits of the configuration."""
    configuration = instance.configuration
    return ServerLimits(
        connections_max=configuration.connections_max,
        net_msg_max=configuration.net_msg_max,
        wal_queue_max_size=configuration.wal_queue_max_size,
        packet_size_max=configuration.packet_size_max,
        packet_size_max_before_auth=min(configuration.guest_packet_size_max, configuration.packet_size_max),
        output_max=configuration.output_size_max,
        slow_reader_seconds=configuration.slow_reader_timeout,
        auth_seconds=configuration.auth_timeout or None,
    )
