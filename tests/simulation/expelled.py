"""What must hold of members that were expelled and run on: they lead nothing, write nothing, and are not voted for.

A member that has the row that expels it is bound as soon as the row is decided. One that was cut off meanwhile finds
out by the others' refusals, and takes no writes then; it never has what it takes to lead. Looks at memory only, as
`watchers.py` does.
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
    """A replica set, as far as it is looked at here."""

    @property
    def sim(self) -> Simulation: ...
    @property
    def members(self) -> list[str]: ...
    @property
    def departed(self) -> list[str]: ...


class _Bound(NamedTuple):
    """What an instance that knows of its expulsion cannot change any more."""

    vclock: VClock
    term: int
    vote: int


class Expelled:
    """`look` now and then; what is found goes to `violations`."""

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
        """A member that is to be expelled may be elected until all others know that it was (seed 947490231).

        That its row is deleted in their memory is not enough: the DELETE may be pending, and the PROMOTE of this very
        member may decide it (seed 1003164). Raft and real servers take the id away when the DELETE commits, too.
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
            return  # rows that were on their way to the disk with the one that expels it
        if self._bound.setdefault(instance.uuid, now) != now:
            self._tell(f"{name} was expelled at {self._bound[instance.uuid]}, knows it, and is at {now}")

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told[what] = None
            self._violations.append(what)


def running(replica_set: Departed) -> list[str]:
    """Those who were expelled and still run. A UUID that is a member again, after it joined anew, is none of them."""
    return [name for name in replica_set.departed if replica_set.sim.is_ready(name)]


def unbound(replica_set: Departed) -> list[str]:
    """Those who were expelled and take writes, or would without an option."""
    sim = replica_set.sim
    instances = {name: sim.node(name)._instance for name in running(replica_set)}
    return [name for name, instance in instances.items() if not (instance.is_expelled or instance.is_orphan)]
