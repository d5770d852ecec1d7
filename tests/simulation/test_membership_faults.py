"""Operators can expel a member in any state, and leave no node with rows that are lost elsewhere."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random
from unittest.mock import patch

from flowstone.iproto import errors
from tests.simulation import membership_faults
from tests.simulation.expelled import unbound
from tests.simulation.membership_faults import _has_stopped, remove_member, replace_member, resume_replication
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_faults import PLAN, under_load


@simulated(seeds=range(3))
async def test_leader_elected_during_its_expulsion_resigns(sim: Simulation) -> None:
    async def elect(replica_set: ReplicaSet, name: str) -> None:
        while not replica_set.leads(name):
            with suppress(errors.OldTerm, errors.InterferingPromote):  # another member was a candidate at the same time
                await sim.on(name, sim.node(name).promote())
            await sim.sleep(0.1)

    async with under_load(sim, replace(PLAN, size=5)) as replica_set:
        leader = replica_set.leader()
        leaving = next(name for name in replica_set.members if name != leader)
        with patch.object(membership_faults, "_spare", elect):
            await remove_member(replica_set, leaving, is_alive=True)
        sim.kill(leaving)
        assert replica_set.leader() not in (None, leaving)


@simulated(seeds=range(3))
async def test_anonymous_replica_with_a_row_of_the_lost_member_is_dropped(sim: Simulation) -> None:
    async with under_load(sim) as replica_set:
        (follower,), lost = replica_set.anonymous, replica_set.leader()
        assert lost is not None
        number = sim.node(lost)._instance.id
        others = [name for name in replica_set.members if name != lost]
        for name in others:
            sim.cut(lost, name)

        def has_it_alone() -> bool:
            lsns = [sim.node(name)._instance.vclock.get(number) for name in (follower, *others)]
            return lsns[0] > max(lsns[1:])

        await replica_set.until(has_it_alone, what="it has a row that no other member gets")
        sim.kill(lost)
        sim.heal()
        await replace_member(replica_set, Random(0), lost)
        assert follower in replica_set.departed
        assert follower not in replica_set.names


@simulated(seeds=range(3))
async def test_anonymous_replica_stays_if_no_row_was_lost(sim: Simulation) -> None:
    async with under_load(sim) as replica_set:
        lost = next(name for name in replica_set.members if name != replica_set.leader())
        sim.kill(lost)
        await replace_member(replica_set, Random(0), lost)
        assert len(replica_set.anonymous) == 1


@simulated(seeds=range(3))
async def test_expelled_member_learns_of_it_when_its_stopped_appliers_are_restarted(sim: Simulation) -> None:
    async with under_load(sim) as replica_set:
        name = next(name for name in replica_set.members if name != replica_set.leader())
        storage = sim.storage(name)
        room, storage.room = storage.room, 0
        await replica_set.until(lambda: _has_stopped(sim.node(name)), what="its appliers stop on the full disk")
        storage.room = room
        with patch.object(membership_faults, "_spare", _nothing):
            await remove_member(replica_set, name, is_alive=True)
        assert name in unbound(replica_set)
        await resume_replication(replica_set, name)
        await replica_set.until(lambda: not unbound(replica_set), what="it takes no more writes")


async def _nothing(replica_set: ReplicaSet, name: str) -> None:
    """Skip the wait for the member's rows: its appliers have stopped."""
