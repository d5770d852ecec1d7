"""The only door to the world: disk, network, clock, randomness and worker threads.

One `Outside` is handed to everything that touches the world; whoever holds another one (the
simulator does) decides what the world is. Each module here states a contract as a Protocol and gives
its production form. Nothing in this package knows about logs, rows or replicas.
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
    """Everything a node, a log or a tool may touch, in one hand."""

    disk: Disk
    clock: Clock
    random: Random
    blocking: Blocking
    network: Network


def production() -> Outside:
    """The real world. Its parts hold no state of their own, so calling twice is harmless."""
    return Outside(
        disk=SystemDisk(),
        clock=SystemClock(),
        random=SystemRandom(),
        blocking=ThreadBlocking(),
        network=SystemNetwork(),
    )
