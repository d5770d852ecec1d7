"""The checks of expelled members report one that leads, writes or feeds others, and ignore members in good standing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from flowstone.box.system import CLUSTER_ID
from flowstone.node.components import Components
from tests.simulation import membership_faults
from tests.simulation.cluster import all_follow_all, decided_members, start_set
from tests.simulation.expelled import Expelled, running, unbound
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, leaders
from tests.simulation.test_expulsion import expel, is_expelled
from tests.simulation.test_faults import under_load


@dataclass
class Set:
    sim: Simulation
    members: list[str]
    departed: list[str] = field(default_factory=list)


async def with_one_expelled(sim: Simulation) -> tuple[Set, str]:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    name = next(each for each in "abc" if each != leader)
    await expel(sim, leader, name)
    await sim.until(lambda: is_expelled(sim, name), what="it knows")
    await sim.sleep(1)
    return Set(sim, [each for each in "abc" if each != name], [name]), name


@simulated()
async def test_expelled_member_that_obeys_is_not_reported(sim: Simulation) -> None:
    replica_set, name = await with_one_expelled(sim)
    violations: list[str] = []
    watch = Expelled(replica_set, violations)
    watch.look()
    await sim.sleep(5)
    watch.look()
    assert (violations, running(replica_set), unbound(replica_set)) == ([], [name], [])


@simulated()
async def test_expelled_member_that_leads_is_reported_once(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    others = [each for each in "abc" if each != leader]
    violations: list[str] = []
    watch = Expelled(Set(sim, others, [leader]), violations)
    watch.look()
    assert violations == []  # the others still have its row
    replica_set = Set(sim, [], [leader])
    watch = Expelled(replica_set, violations)
    watch.look()
    watch.look()
    (found,) = violations
    assert found.startswith(f"{leader} was expelled, and leads term")
    assert unbound(replica_set) == [leader]


async def with_one_elected_whose_expulsion_is_pending(sim: Simulation) -> tuple[Set, str]:
    """Return once a member leads whose row all others have deleted, in a transaction that is still pending."""
    await start_set(sim, election_mode="candidate", election_fencing_mode="off", wal_mode="fsync")
    old = await elect(sim)
    await sim.until(lambda: all_follow_all(sim), what="all follow all")
    name, other = (each for each in "abc" if each != old)
    await sim.on(other, sim.node(other).reconfigure(election_mode="voter"))
    await sim.on(old, sim.node(old).reconfigure(replication_synchro_quorum=3))
    sim.cut(old, other)  # it gets the row from the member to be expelled, but its acknowledgement does not arrive
    deleting = asyncio.ensure_future(sim.on(old, membership_faults._delete_member(sim.node(old), uuid_of(sim, name))))
    await sim.until(lambda: not is_in_memory(sim, other, name), what="all have the row")
    sim.kill(old)
    with suppress(Crashed):
        await deleting
    await sim.until(lambda: leaders(sim, [name]), what="it leads")
    return Set(sim, [other], [name]), name


def uuid_of(sim: Simulation, name: str) -> str:
    return sim.machine(name).uuid


def is_in_memory(sim: Simulation, where: str, name: str) -> bool:
    """Return True if a member has another's row in memory, pending changes included."""
    return uuid_of(sim, name) in [row[1] for row in sim.node(where).space(CLUSTER_ID).select()]


@simulated(seeds=range(4))
async def test_member_may_lead_until_its_expulsion_is_decided(sim: Simulation) -> None:
    """Its own PROMOTE decides the expulsion, and binds it (seed 1003164). Real servers free an id at commit, too."""
    replica_set, name = await with_one_elected_whose_expulsion_is_pending(sim)
    (other,) = replica_set.members
    assert not is_in_memory(sim, other, name)
    violations: list[str] = []
    watch = Expelled(replica_set, violations)
    moments = 0

    def is_over() -> bool:
        nonlocal moments
        moments += 1
        watch.look()
        return is_expelled(sim, name)

    await sim.until(is_over, what="it knows")
    assert moments > 1
    assert not leaders(sim, [name])
    await sim.sleep(5)
    watch.look()
    assert (violations, unbound(replica_set)) == ([], [])


@simulated()
async def test_member_that_still_leads_after_its_expulsion_is_committed_is_reported(sim: Simulation) -> None:
    with patch.object(Components, "_expelled", lambda self: None):
        replica_set, name = await with_one_elected_whose_expulsion_is_pending(sim)
        (other,) = replica_set.members
        boxes = [sim.node(each).box for each in (name, other)]
        await sim.until(lambda: not any(uuid_of(sim, name) in decided_members(box).values() for box in boxes))
    violations: list[str] = []
    Expelled(replica_set, violations).look()
    leads, is_unbound = violations
    assert leads.startswith(f"{name} was expelled, and leads term")
    assert is_unbound.endswith("by its own data, and is not bound")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda instance: setattr(instance.box, "is_read_only", False), "takes writes"),
        (lambda instance: setattr(instance.journal, "replica_id", 2), "feeds others as 2"),
        (lambda instance: setattr(instance.elections.raft, "_vote", 9), "vote=9"),
    ],
    ids=["writes", "feeds", "votes"],
)
@simulated()
async def test_expelled_member_that_writes_is_reported(sim: Simulation, harm: Any, words: str) -> None:
    replica_set, name = await with_one_expelled(sim)
    violations: list[str] = []
    watch = Expelled(replica_set, violations)
    watch.look()
    harm(sim.node(name)._instance)
    watch.look()
    (found,) = violations
    assert found.startswith(f"{name} was expelled")
    assert words in found


@simulated()
async def test_run_finds_an_expulsion_without_effect(sim: Simulation) -> None:
    async with under_load(sim) as replica_set:
        leader = replica_set.leader()
        name = next(
            each for each in replica_set.members if each != leader and membership_faults.is_spare(replica_set, each)
        )
        with patch.object(Components, "_expelled", lambda self: None):
            await membership_faults._expel_running(replica_set, Random(1), name)
        assert unbound(replica_set) == [name]
