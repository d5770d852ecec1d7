"""The state of a running node that its server, sessions, watchers and procedures share: components, identity, status.

`node/components.py` creates one `Instance` per node. Its users read it again for every request, so a change needs no
notification. It has no logic of its own beyond what several users would repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from flowstone.box.box import Box
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto import errors
from flowstone.iproto.msgpack import unpack
from flowstone.node.configuration import Configuration
from flowstone.node.counters import Counters
from flowstone.node.disk_query import DiskQuery
from flowstone.node.synchro.elections import Elections
from flowstone.node.synchro.limbo_driver import LimboDriver
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal
from flowstone.outside import Outside
from flowstone.replication.vclock import VClock

LOG = logging.getLogger("flowstone.node")

Function = Callable[..., Any]
"""A Python function that clients may CALL, plain or async. A returned tuple stands for several results."""


class Files(Protocol):
    """Checkpoints and their files, for `box.snapshot`, `box.backup.*` and `box.info.gc`."""

    async def snapshot(self) -> None:
        """Write a checkpoint of the present state."""
        ...

    def start_backup(self, checkpoint: int) -> list[str]:
        """Keep the files of a checkpoint, 0 being the newest, until `stop_backup`; return their paths."""
        ...

    def stop_backup(self) -> None: ...

    def gc_info(self) -> dict[str, Any]:
        """Return the map that `box.info.gc()` shows."""
        ...

    @property
    def gc_vclock(self) -> VClock:
        """The start of the oldest log that is kept."""
        ...


class NoFiles:
    """`Files` of an instance without a directory, or of one that is starting and has its oldest log at `gc_vclock`."""

    def __init__(self, gc_vclock: VClock | None = None) -> None:
        self._gc_vclock = gc_vclock if gc_vclock is not None else VClock()

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
        return self._gc_vclock


class PeerStates(Protocol):
    """Upstreams and downstreams of the instance, for `box.info.replication`."""

    def upstream(self, uuid: UUID) -> dict[str, Any] | None:
        """Return the state of the upstream `uuid`; None if we do not follow it."""
        ...

    def downstream(self, uuid: UUID) -> dict[str, Any] | None:
        """Return the state of the downstream `uuid`; None if it never followed us."""
        ...

    def is_intact(self, uuid: UUID) -> bool:
        """See `replication.membership.Members.is_intact`."""
        ...

    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        """Return UUID and state of each anonymous replica."""
        ...


class Followers(Protocol):
    """Members that follow this instance, and report their vclock on request."""

    on_answer: list[Callable[[int, int, VClock], None]]
    """Called with the id of a member, the number of the heartbeat that it answers, and its vclock."""

    def synchronize(self) -> Mapping[int, int]:
        """Send a heartbeat to all members; return the number of the heartbeat by replica id.

        An answer to a heartbeat with this or a higher number is newer than this call. For a member that is missing in
        the result, use 1.
        """
        ...


class NoFollowers:
    """`Followers` of an instance that serves no replicas, or not yet."""

    def __init__(self) -> None:
        self.on_answer: list[Callable[[int, int, VClock], None]] = []

    def synchronize(self) -> Mapping[int, int]:
        return {}


class NoPeers:
    """`PeerStates` of an instance without replication."""

    def upstream(self, uuid: UUID) -> dict[str, Any] | None:
        return None

    def downstream(self, uuid: UUID) -> dict[str, Any] | None:
        return None

    def is_intact(self, uuid: UUID) -> bool:
        return False

    def anonymous(self) -> list[tuple[UUID, dict[str, Any]]]:
        return []


@dataclass(slots=True, eq=False)
class Instance:
    """A running node. `status` is that of `box.info`: loading, running or orphan. `listen` is its own address."""

    outside: Outside
    box: Box
    journal: Journal
    commits: Commits
    uuid: UUID
    replicaset_uuid: UUID
    configuration: Configuration
    elections: Elections
    files: Files = field(default_factory=NoFiles)
    functions: dict[str, Function] = field(default_factory=dict)
    status: str = "loading"
    listen: str | None = None
    pid: int = 0
    started: float = 0.0
    """Start time of the node, by the monotonic clock."""

    is_orphan: bool = False
    """True if the instance is not in sync with enough of its peers."""

    is_stopping: bool = False
    """True if the instance accepts no more writes, because it transfers its leadership before it stops."""

    expelled_id: int = 0
    """The id that the instance had when its row of `_cluster` was deleted; 0 if it was not expelled."""

    bootstrap_leader_uuid: UUID | None = None
    """The instance from which this instance got its first data, or is about to get it."""

    counters: Counters = field(default_factory=Counters)
    peers: PeerStates = field(default_factory=NoPeers)
    followers: Followers = field(default_factory=NoFollowers)
    free_space_query: DiskQuery[list[int]] = field(default_factory=DiskQuery)

    reload: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    """Applies options to the running node, for a CALL of `box.cfg` with arguments."""

    @property
    def id(self) -> int:
        """The replica id; 0 without an id."""
        return self.journal.replica_id

    @property
    def is_read_only(self) -> bool:
        return self.box.is_read_only

    @property
    def is_anonymous(self) -> bool:
        """True if the instance replicates without being a member."""
        return self.id == 0 and self.configuration.replication_anon

    @property
    def is_expelled(self) -> bool:
        """True if its row in `_cluster` was deleted: no id, no writes and no replication until the instance rejoins."""
        return self.expelled_id != 0

    @property
    def queue(self) -> LimboDriver:
        """The synchronous queue."""
        return self.commits.queue

    def settle_read_only(self) -> None:
        """Make the box read-only or writable, depending on options, sync with peers, elections and owner of the queue.

        Without an id the box is read-only: its rows would look like local rows, which are not replicated.
        """
        is_held_back = self.id == 0 or self.is_orphan or self.queue.limbo.is_read_only or self.elections.is_read_only
        is_read_only = self.configuration.read_only or self.is_stopping or is_held_back
        was_read_only, self.box.is_read_only = self.box.is_read_only, is_read_only
        self.box.read_only_reason = self._read_only_text()
        if self.is_read_only != was_read_only:
            self.elections.wake()
        if self.is_read_only != was_read_only and self.status != "loading":
            LOG.info("now %s", f"read-only: {self.box.read_only_reason}" if self.is_read_only else "writable")
        if self.status != "loading":
            self.status = "orphan" if self.is_orphan else "running"

    def _read_only_text(self) -> str:
        match self.read_only_reason:
            case "expelled":
                return "it was expelled from its replica set"
            case "election":
                info = self.elections.info()
                leader = f", leader is {self._member(info.leader)}" if info.leader else ""
                return f"state is election {info.state} with term {info.term}{leader}"
            case "synchro":
                limbo = self.queue.limbo
                frozen = ""
                if limbo.is_owner:
                    why = "due to fencing" if limbo.is_fenced else "until promotion"
                    frozen = f" and is frozen {why}"
                return f"synchro queue with term {limbo.term} belongs to {self._member(limbo.owner_id)}{frozen}"
            case "orphan":
                return "it is an orphan"
            case "stopping":
                return "it is stopping"
        return "box.cfg.read_only is true"

    def _member(self, replica_id: int) -> str:
        """Return the name of a member for error messages: the id, and the UUID if it is registered."""
        cluster = self.box.spaces.get(CLUSTER_ID)
        rows = map(unpack, cluster.tuples() if cluster is not None else ())
        uuid = next((row[1] for row in rows if row[0] == replica_id), None)
        return f"{replica_id} ({uuid})" if uuid is not None else str(replica_id)

    @property
    def read_only_reason(self) -> str | None:
        """The value of `box.info.ro_reason`. Real servers have no `expelled` and no `stopping`: such a server still
        accepts writes."""
        if self.is_expelled:
            return "expelled"
        if self.elections.is_read_only:
            return "election"
        if self.queue.limbo.is_read_only:
            return "synchro"
        if self.configuration.read_only:
            return "config"
        if self.is_orphan:
            return "orphan"
        if self.is_stopping:
            return "stopping"
        return "config" if self.is_read_only else None

    @property
    def vclock(self) -> VClock:
        """The vclock after the last written row."""
        return self.journal.written_vclock

    def uptime(self) -> float:
        return self.outside.clock.monotonic() - self.started
