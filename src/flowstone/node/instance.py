"""A node as its sessions know it: its parts, who it is, and how it is doing.

Made once by whoever starts a node and shared by server, sessions, watchers and procedures; they read it anew for every
request, so that whoever changes a fact here need tell nobody. Holds no logic but what several of them would repeat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.node.commits import Commits
from flowstone.node.configuration import Configuration
from flowstone.node.journal import Journal
from flowstone.node.replay import Synchro
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

Function = Callable[..., Any]
"""A Python function that clients may CALL, plain or async. What it returns as a tuple are several results."""


class Files(Protocol):
    """Checkpoints and the files that they leave, for `box.snapshot`, `box.backup.*` and `box.info.gc`."""

    async def snapshot(self) -> None:
        """Returns when there is a checkpoint of now."""
        ...

    def start_backup(self, checkpoint: int) -> list[str]:
        """Keeps the files of a checkpoint, 0 being the newest, until `stop_backup`; their paths."""
        ...

    def stop_backup(self) -> None: ...

    def gc_info(self) -> dict[str, Any]:
        """What `box.info.gc()` shows."""
        ...

    @property
    def gc_vclock(self) -> VClock:
        """Where the oldest log that is still there begins."""
        ...


class NoFiles:
    """An instance that keeps nothing on disk, or not yet."""

    async def snapshot(self) -> None:
        raise errors.Unsupported("This instance does not support snapshots: it has no directory")

    def start_backup(self, checkpoint: int) -> list[str]:
        raise errors.Unsupported("This instance does not support backups: it has no directory")

    def stop_backup(self) -> None:
        return

    def gc_info(self) -> dict[str, Any]:
        return {}

    @property
    def gc_vclock(self) -> VClock:
        return VClock()


class Peers(Protocol):
    """Whom the instance follows and who follows it, for `box.info.replication`."""

    def upstream(self, uuid: UUID) -> dict[str, Any] | None:
        """How following the instance goes; None if it is not followed."""
        ...

    def downstream(self, uuid: UUID) -> dict[str, Any] | None:
        """How the instance follows us; None if it never did."""
        ...

    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        """Who follows us without being a member."""
        ...


class NoPeers:
    """An instance alone."""

    def upstream(self, uuid: UUID) -> dict[str, Any] | None:
        return None

    def downstream(self, uuid: UUID) -> dict[str, Any] | None:
        return None

    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        return []


@dataclass(slots=True, eq=False)
class Instance:
    """`status` is that of `box.info`: loading, running, orphan. `listen` is where clients reach it."""

    outside: Outside
    box: Box
    journal: Journal
    commits: Commits
    uuid: UUID
    replicaset_uuid: UUID
    configuration: Configuration
    files: Files = field(default_factory=NoFiles)
    functions: dict[str, Function] = field(default_factory=dict)
    status: str = "loading"
    listen: str | None = None
    pid: int = 0
    started: float = 0.0
    """By the monotonic clock."""

    synchro: Synchro = field(default_factory=Synchro)
    """Of elections and of the limbo, as recovery found them."""

    is_orphan: bool = False
    """It has not caught up with enough of its peers."""

    bootstrap_leader_uuid: UUID | None = None
    """Whose data this instance has taken, or is about to take, at its birth."""

    peers: Peers = field(default_factory=NoPeers)

    reload: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    """Applies options to the running node, for CALL of `box.cfg` with arguments."""

    @property
    def id(self) -> int:
        """The replica id; 0 without one."""
        return self.journal.replica_id

    @property
    def is_read_only(self) -> bool:
        return self.box.is_read_only

    @property
    def is_anonymous(self) -> bool:
        """It follows without being a member."""
        return self.id == 0 and self.configuration.replication_anon

    @property
    def is_queue_foreign(self) -> bool:
        """Another instance owns the queue of synchronous transactions: since 2.10 it alone may write anything."""
        return self.box.dialect is not Dialect.V2_6 and self.synchro.owner_id not in (0, self.id)

    def settle_read_only(self) -> None:
        """Makes the box writable or not, by the option, by its peers and by the queue of synchronous transactions.

        Without an id it never is: rows that nobody could tell from local ones would reach nobody.
        """
        is_queue_in_the_way = bool(self.synchro.pending) or self.is_queue_foreign
        is_held_back = self.id == 0 or self.is_orphan or is_queue_in_the_way
        self.box.is_read_only = self.configuration.read_only or is_held_back
        self.box.read_only_reason = self._read_only_text()
        if self.status != "loading":
            self.status = "orphan" if self.is_orphan else "running"

    def _read_only_text(self) -> str:
        match self.read_only_reason:
            case "orphan":
                return "it is an orphan"
            case "synchro":
                return f"synchro queue with term {self.synchro.term} belongs to {self.synchro.queue_owner_id}"
        return "box.cfg.read_only is true"

    @property
    def read_only_reason(self) -> str | None:
        """What `box.info.ro_reason` shows."""
        if self.synchro.pending or self.is_queue_foreign:
            return "synchro"
        if self.is_orphan:
            return "orphan"
        return "config" if self.is_read_only else None

    @property
    def vclock(self) -> VClock:
        """The position behind the last row written."""
        return self.journal.written_vclock

    def uptime(self) -> float:
        return self.outside.clock.monotonic() - self.started
