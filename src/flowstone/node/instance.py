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

    reload: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    """Applies options to the running node, for CALL of `box.cfg` with arguments."""

    @property
    def id(self) -> int:
        """The replica id; 0 without one."""
        return self.journal.replica_id

    @property
    def is_read_only(self) -> bool:
        return self.box.is_read_only

    def settle_read_only(self) -> None:
        """Makes the box writable or not, by the option and by whether anything waits in the limbo."""
        self.box.is_read_only = self.configuration.read_only or bool(self.synchro.pending)

    @property
    def read_only_reason(self) -> str | None:
        """What `box.info.ro_reason` shows."""
        if self.synchro.pending:
            return "synchro"
        return "config" if self.is_read_only else None

    @property
    def vclock(self) -> VClock:
        """The position behind the last row written."""
        return self.journal.written_vclock

    def uptime(self) -> float:
        return self.outside.clock.monotonic() - self.started
