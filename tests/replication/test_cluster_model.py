"""Whole replica sets of pure machines under random schedules: confirmed rows stay, and all end with one history.

A schedule is generated from its number alone, so a failure can be repeated by that number, and shows its story. For
some seconds of virtual time clients write; the network loses, delays and reorders; members are killed with writes in
flight, restart one by one or together, are promoted, resign, change modes and quorums, take checkpoints. Then all
faults stop. Members that raised ER_SPLIT_BRAIN are rebuilt, as by an operator, and all must agree.
"""

from __future__ import annotations

import pytest

from flowstone.replication.raft.election import ElectionState
from tests.conftest import FULL
from tests.replication.cluster_member import Member
from tests.replication.cluster_world import World

SCHEDULES = 10_000 if FULL else 100
CHAOS_S, CALM_S, SETTLE_S = 6.0, 2.0, 0.4


def leader_of(world: World) -> Member | None:
    leaders = [member for member in world.members.values() if member.raft.state is ElectionState.LEADER]
    return max(leaders, key=lambda member: member.raft.term, default=None)


def settle(world: World) -> None:
    world.has_clients = False
    world.run_until(world.now + SETTLE_S)


def play(world: World) -> None:
    world.run_until(CHAOS_S)
    world.calm_down()
    world.run_until(CHAOS_S + CALM_S)
    settle(world)
    world.checker.check_divergence(world.follows())
    donor = leader_of(world) or max(world.members.values(), key=lambda member: member.limbo.term)
    if world.rebootstrap(donor):
        world.has_clients = True
        world.run_until(world.now + CALM_S)
        settle(world)
    leader = leader_of(world)
    assert leader is not None, "no member leads"
    leaders = {member.id: member.raft.leader for member in world.members.values()}
    assert set(leaders.values()) == {leader.id}, f"leaders by member: {leaders}"
    world.checker.check_end(leader)


@pytest.mark.parametrize("size", [3, 5])
def test_random_schedules_keep_confirmed_rows_and_end_with_one_history(size: int) -> None:
    for seed in range(SCHEDULES // 2):
        try:
            play(World(seed, size))
        except AssertionError as error:
            told = World(seed, size, is_told=True)
            with pytest.raises(AssertionError):
                play(told)
            story = "\n".join(told.story or ())
            raise AssertionError(f"schedule {seed} of {size} members: {error}\n{story}") from error
