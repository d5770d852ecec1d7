"""Checks on expelled members that still run: they do not lead, write, or get votes.

A member that has the row of its expulsion is bound by it as soon as the row is committed. A member that was isolated
learns of it when others reject it, and accepts no writes then; it never has the quorum to lead. Reads memory only, like
`watchers.py`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from uuid import UUID

from flowstone.node.instance import Instance
from flowstone.replication.raft.election import ElectionState
from flowstone.replication.vclock import VClock
from tests.simulation.cluster import decided_members
from tests.simulation.simulation import Simulation


class Departed(Protocol):
    """The part of a replica set that is inspected here."""

    @property
    def sim(self) -> Simulation: ...
    @property
    def members(self) -> list[str]: ...
    @property
    def departed(self) -> list[str]: ...


class _Bound(NamedTuple):
    """State that an instance must not change once it knows of its expulsion."""

    vclock: VClock
    term: int
    vote: int


class Expelled:
    """Call `look` periodically; violations are appended to `violations`."""

    def __init__(self, replica_set: Departed, violations: list[str]) -> None:
        self._set = replica_set
        self._violations = violations
        self._bound: dict[UUID, _Bound] = {}
        self._told: dict[str, None] = {}

    def look(self) -> None:
        for name in running(self._set):
            instance = self._set.sim.node(name)._instance
            self._look_at_elections(name, instance)
            if instance.is_expelled:
                self._look_at_bound(name, instance)
            elif instance.id and str(instance.uuid) not in decided_members(instance.box).values():
                self._tell(f"{name} was expelled as {instance.id} by its own data, and is not bound")

    def _look_at_elections(self, name: str, instance: Instance) -> None:
        """Check votes. A member may be elected until all others know of its expulsion (seed 947490231).

        It is not enough that its row is deleted in their memory: the DELETE may be pending, and a PROMOTE of this very
        member may decide it (seed 1003164). Raft and real servers also drop the id only when the DELETE commits.
        """
        if instance.elections.raft.state is ElectionState.LEADER and not self._is_registered(instance.uuid):
            self._tell(f"{name} was expelled, and leads term {instance.elections.raft.term}")

    def _is_registered(self, uuid: UUID) -> bool:
        sim = self._set.sim
        boxes = [sim.node(name).box for name in self._set.members if sim.is_ready(name)]
        return any(str(uuid) in decided_members(box).values() for box in boxes)

    def _look_at_bound(self, name: str, instance: Instance) -> None:
        if not instance.is_read_only:
            self._tell(f"{name} was expelled, knows it, and takes writes")
        if instance.id or self._set.sim.node(name)._parts.relays._followers:
            self._tell(f"{name} was expelled, knows it, and feeds others as {instance.id}")
        raft = instance.elections.raft
        now = _Bound(instance.vclock.without_zero(), raft.term, raft._vote)
        if not instance.journal.is_idle:
            return  # rows that were being written together with the one that expels it
        if self._bound.setdefault(instance.uuid, now) != now:
            self._tell(f"{name} was expelled at {self._bound[instance.uuid]}, knows it, and is at {now}")

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told[what] = None
            self._violations.append(what)


def running(replica_set: Departed) -> list[str]:
    """Return the expelled members that still run, except those that have joined again under their UUID."""
    return [name for name in replica_set.departed if replica_set.sim.is_ready(name)]


def unbound(replica_set: Departed) -> list[str]:
    """Return the expelled members that accept writes, or would without an option."""
    sim = replica_set.sim
    instances = {name: sim.node(name)._instance for name in running(replica_set)}
    return [name for name, instance in instances.items() if not (instance.is_expelled or instance.is_orphan)]
