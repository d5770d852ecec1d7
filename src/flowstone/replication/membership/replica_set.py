"""The replica set as one instance sees it: registered members, upstreams, and the quorum of synced upstreams.

A member has an id from 1 to 31 and a UUID; the instance at a URI is known only after it has answered. The states of the
appliers are counted here: an instance is an orphan, and read-only, until it is in sync with a quorum of upstreams.
Pure: the caller reports events and queries the result.
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
from flowstone.replication.applier.states import ApplierState

UPSTREAMS_MAX: Final = VCLOCK_MAX - 1


class SyncProgress(Enum):
    """The progress of an upstream, as far as the quorum is concerned."""

    DISCONNECTED = "disconnected"
    LOADING = "loading"
    CONNECTED = "connected"
    SYNCED = "synced"


_PROGRESS: Final = {
    ApplierState.LOADING: SyncProgress.LOADING,
    ApplierState.DISCONNECTED: SyncProgress.DISCONNECTED,
    ApplierState.STOPPED: SyncProgress.DISCONNECTED,
    ApplierState.CONNECTED: SyncProgress.CONNECTED,
    ApplierState.FOLLOW: SyncProgress.SYNCED,
    ApplierState.OFF: SyncProgress.DISCONNECTED,
}
"""The progress for each applier state; states that are missing here do not change it."""


@dataclass(slots=True, eq=False)
class Upstream:
    """One URI of `replication`. `uuid` is None until the instance at the URI has answered."""

    address: str
    uuid: UUID | None = None
    progress: SyncProgress = SyncProgress.DISCONNECTED
    is_spare: bool = False
    """True if the URI leads to this instance, or to the same one as another URI: it counts as synced."""
    is_stranger: bool = False
    """True if the URI leads to an instance that is not a member: it never counts for the quorum."""
    is_awaited: bool = True
    """False if the upstream had no data or did not answer when the upstreams were connected: the quorum excludes it."""


class DuplicateConnection(FlowstoneError):
    """Two URIs lead to the same instance."""


class MemberSet:
    """Members by id and by UUID, upstreams in the order of `replication`."""

    def __init__(self) -> None:
        self.members: dict[int, UUID] = {}
        self.ids: dict[UUID, int] = {}
        self.upstreams: list[Upstream] = []
        self.quorum_max: int | None = None
        """The configured quorum, if there are that many upstreams; None means all of them."""

    # --- members ---

    def set_members(self, members: Iterable[tuple[int, UUID]]) -> dict[UUID, int]:
        """Set the members listed in `_cluster`; return the members that are no longer listed."""
        before = self.ids
        self.members = dict(sorted(members))
        self.ids = {uuid: replica_id for replica_id, uuid in self.members.items()}
        return {uuid: replica_id for uuid, replica_id in before.items() if uuid not in self.ids}

    # --- upstreams ---

    def set_upstreams(self, upstreams: Iterable[Upstream]) -> None:
        """Replace the upstreams; raise ER_CFG if there are more than a vclock has components."""
        wanted = list(upstreams)
        if len(wanted) > UPSTREAMS_MAX:
            raise errors.Cfg("Incorrect value for option 'replication': too many replicas")
        self.upstreams = wanted

    def follow(self, upstream: Upstream, state: ApplierState, uuid: UUID | None, own_uuid: UUID | None = None) -> None:
        """Record the new state of an applier; raise DuplicateConnection if another applier has the same peer."""
        if state is ApplierState.CONNECT:
            upstream.is_spare = upstream.is_stranger = False
        if uuid is not None and uuid == own_uuid:
            upstream.uuid, upstream.is_spare = uuid, True
        elif state is ApplierState.CONNECTED and uuid is not None and upstream.uuid != uuid:
            self._identify(upstream, uuid)
        progress = SyncProgress.SYNCED if upstream.is_spare else _PROGRESS.get(state)
        if progress is not None:
            upstream.progress = progress

    def _identify(self, upstream: Upstream, uuid: UUID) -> None:
        for other in self.upstreams:
            if other is not upstream and other.uuid == uuid and other.progress is not SyncProgress.DISCONNECTED:
                upstream.is_spare = True
                raise DuplicateConnection(
                    f"duplicate connection to the same replica: instance uuid {uuid},"
                    f" addr1 {upstream.address}, addr2 {other.address}",
                    hint="list each instance once in replication",
                )
        upstream.uuid = uuid

    def upstream_of(self, uuid: UUID) -> Upstream | None:
        return next((upstream for upstream in self.upstreams if upstream.uuid == uuid), None)

    def count(self, *progress: SyncProgress) -> int:
        return sum(upstream.progress in progress for upstream in self.upstreams if not upstream.is_stranger)

    @property
    def quorum(self) -> int:
        """The number of upstreams that must be synced before the instance becomes writable; strangers do not count."""
        total = sum(upstream.is_awaited and not upstream.is_stranger for upstream in self.upstreams)
        return connect_quorum(total, self.quorum_max)

    @property
    def is_synced(self) -> bool:
        """True if a quorum of upstreams is synced, so the instance is not an orphan."""
        return self.count(SyncProgress.SYNCED) >= self.quorum

    @property
    def may_sync(self) -> bool:
        """True if waiting can help: a quorum of upstreams is connected or loading."""
        return self.count(SyncProgress.CONNECTED, SyncProgress.SYNCED, SyncProgress.LOADING) >= self.quorum


def connect_quorum(total: int, configured: int | None) -> int:
    """Return how many upstreams must answer, up to 2.10 or with strategy `legacy`: all, unless fewer are configured."""
    return total if configured is None else min(total, configured)


def connect_quorum_of_birth(total: int, is_anybody_booted: bool) -> int:
    """Return how many upstreams must answer an instance without data with strategy `auto`.

    One is enough if any of them has data; otherwise it is a majority of the future replica set.
    """
    return 1 if is_anybody_booted else total // 2 + 1
