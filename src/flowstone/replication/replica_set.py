"""The replica set as one instance sees it: who is registered, whom it follows, and whether it follows enough of them.

Members have ids 1 to 31 and a UUID each; whoever a URI leads to is known only once it has answered. What appliers
report is counted here: an instance is an orphan, and read-only, until as many as it needs have caught up. Pure: the
caller says what happened and asks what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final
from uuid import UUID

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import VCLOCK_MAX
from flowstone.replication.applier import ApplierState

UPSTREAMS_MAX: Final = VCLOCK_MAX - 1


class Progress(Enum):
    """How far an upstream has come, as far as the quorum is concerned."""

    DISCONNECTED = "disconnected"
    LOADING = "loading"
    CONNECTED = "connected"
    SYNCED = "synced"


_PROGRESS: Final = {
    ApplierState.LOADING: Progress.LOADING,
    ApplierState.DISCONNECTED: Progress.DISCONNECTED,
    ApplierState.STOPPED: Progress.DISCONNECTED,
    ApplierState.CONNECTED: Progress.CONNECTED,
    ApplierState.FOLLOW: Progress.SYNCED,
    ApplierState.OFF: Progress.DISCONNECTED,
}
"""What a state of an applier changes; others leave the progress as it was."""


@dataclass(slots=True, eq=False)
class Upstream:
    """One URI of `replication`. `uuid` is None until whoever is there has answered: those stand apart."""

    address: str
    uuid: UUID | None = None
    progress: Progress = Progress.DISCONNECTED
    is_spare: bool = False
    """It leads to this instance itself, or to whom another URI leads: there is nothing to catch up with."""
    is_stranger: bool = False
    """It leads to an instance that is not a member: it does not count for the quorum, whatever its progress is."""
    is_awaited: bool = True
    """False if it had no data, or did not answer, when the upstreams were tried: the quorum does not include it."""


class DuplicateConnection(FlowstoneError):
    """Two URIs lead to one instance."""


class ReplicaSet:
    """Members by id and by UUID, upstreams in the order of `replication`."""

    def __init__(self) -> None:
        self.members: dict[int, UUID] = {}
        self.ids: dict[UUID, int] = {}
        self.upstreams: list[Upstream] = []
        self.quorum_max: int | None = None
        """The quorum if there are that many upstreams; None: all of them."""

    # --- members ---

    def set_members(self, members: Iterable[tuple[int, UUID]]) -> dict[UUID, int]:
        """Takes over what `_cluster` holds; those that are no longer in it."""
        before = self.ids
        self.members = dict(sorted(members))
        self.ids = {uuid: replica_id for replica_id, uuid in self.members.items()}
        return {uuid: replica_id for uuid, replica_id in before.items() if uuid not in self.ids}

    # --- upstreams ---

    def set_upstreams(self, upstreams: Iterable[Upstream]) -> None:
        """Replaces those that were; error 59 for more than a vclock has room for."""
        wanted = list(upstreams)
        if len(wanted) > UPSTREAMS_MAX:
            raise errors.Cfg("Incorrect value for option 'replication': too many replicas")
        self.upstreams = wanted

    def follow(self, upstream: Upstream, state: ApplierState, uuid: UUID | None, own_uuid: UUID | None = None) -> None:
        """An applier is in a new state; DuplicateConnection if its peer is another applier's already."""
        if state is ApplierState.CONNECT:
            upstream.is_spare = upstream.is_stranger = False
        if uuid is not None and uuid == own_uuid:
            upstream.uuid, upstream.is_spare = uuid, True
        elif state is ApplierState.CONNECTED and uuid is not None and upstream.uuid != uuid:
            self._identify(upstream, uuid)
        progress = Progress.SYNCED if upstream.is_spare else _PROGRESS.get(state)
        if progress is not None:
            upstream.progress = progress

    def _identify(self, upstream: Upstream, uuid: UUID) -> None:
        for other in self.upstreams:
            if other is not upstream and other.uuid == uuid and other.progress is not Progress.DISCONNECTED:
                upstream.is_spare = True
                raise DuplicateConnection(
                    f"duplicate connection to the same replica: instance uuid {uuid},"
                    f" addr1 {upstream.address}, addr2 {other.address}",
                    hint="name each instance once in replication",
                )
        upstream.uuid = uuid

    def upstream_of(self, uuid: UUID) -> Upstream | None:
        return next((upstream for upstream in self.upstreams if upstream.uuid == uuid), None)

    def count(self, *progress: Progress) -> int:
        return sum(upstream.progress in progress for upstream in self.upstreams if not upstream.is_stranger)

    @property
    def quorum(self) -> int:
        """Upstreams that must be synced before the instance may be written to; strangers are not among them."""
        total = sum(upstream.is_awaited and not upstream.is_stranger for upstream in self.upstreams)
        return connect_quorum(total, self.quorum_max)

    @property
    def connected_count(self) -> int:
        return self.count(Progress.CONNECTED, Progress.SYNCED)

    @property
    def is_synced(self) -> bool:
        """Enough upstreams have caught up: no reason to be an orphan."""
        return self.count(Progress.SYNCED) >= self.quorum

    @property
    def may_sync(self) -> bool:
        """Whether waiting can help: enough are connected, or are about to have their data."""
        return self.count(Progress.CONNECTED, Progress.SYNCED, Progress.LOADING) >= self.quorum


def connect_quorum(total: int, configured: int | None) -> int:
    """Upstreams that must answer, up to 2.10 and with the strategy `legacy`: all, unless fewer are configured."""
    return total if configured is None else min(total, configured)


def connect_quorum_of_birth(total: int, is_anybody_booted: bool) -> int:
    """The same with `auto`, for an instance without data: one that has some is enough, else most of the set to be."""
    return 1 if is_anybody_booted else total // 2 + 1
