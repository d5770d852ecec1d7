"""Access to the outside world: disk, network, clock, randomness and worker threads.

All code that does I/O receives an `Outside` and uses nothing else, so that the simulator can replace it. Each module
defines an interface as a Protocol and its production implementation. Nothing in this package knows about logs, rows or
replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowstone.outside.blocking import Blocking, ThreadBlocking
from flowstone.outside.clock import Clock, SystemClock
from flowstone.outside.disk import AlreadyLocked, Disk, File, Lock, SystemDisk
from flowstone.outside.network import Client, Listener, Network, Receiver, SocketOptions, Stream, SystemNetwork, Tls
from flowstone.outside.random import Random, SystemRandom

__all__ = [
    "AlreadyLocked",
    "Blocking",
    "Client",
    "Clock",
    "Disk",
    "File",
    "Listener",
    "Lock",
    "Network",
    "Outside",
    "Random",
    "Receiver",
    "SocketOptions",
    "Stream",
    "Tls",
    "production",
]


@dataclass(frozen=True, slots=True)
class Outside:
    """Everything outside the process that a node, a log or a tool may use."""

    disk: Disk
    clock: Clock
    random: Random
    blocking: Blocking
    network: Network


def production() -> Outside:
    """Return the real disk, clock, network and so on. They hold no shared state, so several instances are harmless."""
    return Outside(
        disk=SystemDisk(),
        clock=SystemClock(),
        random=SystemRandom(),
        blocking=ThreadBlocking(),
        network=SystemNetwork(),
    )
