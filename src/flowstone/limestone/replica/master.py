"""One master as a replica sees it: its connections, its identity, and its sessions that are not durable yet.

State that `replica.py` and `conversations.py` keep from the first connection of a master to its last.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from flowstone.limestone.replica.connection import ReplicaConnection
from flowstone.limestone.replica.epoch_commits import EpochCommits


@dataclass
class Master:
    """The connections of one master, from the first to the last. `instance` and `token` are set by masters that send
    HELLO."""

    peer: str
    commits: EpochCommits = field(default_factory=EpochCommits)
    control: ReplicaConnection | None = None
    had_control: bool = False
    channels: dict[int, ReplicaConnection] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    """Ids of all log channels that the master has opened, and the numbers of their files."""
    instance: str | None = None
    token: bytes | None = None
    claims: frozenset[str] = frozenset()
    """The instance, and its former identities according to itself."""
    is_preparing: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a session has been synced, or lost."""

    @property
    def is_over(self) -> bool:
        """True if no further data of this master can become durable."""
        return self.control is None and (self.had_control or not self.channels)
