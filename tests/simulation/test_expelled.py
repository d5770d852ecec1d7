"""The eyes on expelled members see one that leads, writes or feeds others, and leave the others alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from flowstone.node.components import Components
from tests.simulation import membership_faults
from tests.simulation.cluster import start_set
from tests.simulation.expelled import Expelled, running, unbound
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import elect
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
async def test_expelled_member_that_is_bound_is_fine(sim: Simulation) -> None:
    replica_set, name = await with_one_expelled(sim)
    violations: list[str] = []
    watch = Expelled(replica_set, violations)
    watch.look()
    await sim.sleep(5)
    watch.look()
    assert (violations, running(replica_set), unbound(replica_set)) == ([], [name], [])


@simulated()
async def test_member_that_was_taken_for_expelled_and_leads_is_told_once(sim: Simulation) -> None:
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
async def test_expelled_member_that_breaks_its_bounds_is_told(sim: Simulation, harm: Any, words: str) -> None:
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
async def test_run_finds_an_expulsion_that_binds_nobody(sim: Simulation) -> None:
    async with under_load(sim) as replica_set:
        leader = replica_set.leader()
        name = next(
            each for each in replica_set.members if each != leader and membership_faults.is_spare(replica_set, each)
        )
        with patch.object(Components, "_expelled", lambda self: None):
            await membership_faults._expel_running(replica_set, Random(1), name)
        assert unbound(replica_set) == [name]
