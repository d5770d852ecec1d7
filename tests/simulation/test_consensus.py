"""The consensus checker finds no violation in a healthy set, and each planted one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import pytest

from flowstone.box.engine.index import EngineIndex
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.msgpack import pack
from flowstone.node.instance import Instance
from flowstone.replication.vclock import VClock
from tests.scenarios.queues import NEVER, Pending, number_of, promote, start_members
from tests.scenarios.simulated_members import reconfigure
from tests.simulation.cluster import NAMES, all_follow_all, start_set
from tests.simulation.consensus import CONTENTS_SECONDS, Consensus
from tests.simulation.mutations import MUTATIONS
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import elect, make_space, write


def watch(
    sim: Simulation, members: Sequence[str] = NAMES, *, counts_anonymous: bool = False
) -> tuple[Consensus, list[str]]:
    """Return a checker that runs from now on, and its violations."""
    violations: list[str] = []
    consensus = Consensus(sim, violations, is_durable=True, counts_anonymous=counts_anonymous)
    sim.loop.before_jump.append(lambda: consensus.look(list(members), []))
    return consensus, violations


async def live(sim: Simulation) -> None:
    """Let a set elect a leader, write, and elect another after a power loss."""
    await start_set(sim, election_mode="candidate", wal_mode="fsync")
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await make_space(sim, leader)
    for key in range(5):
        await write(sim, leader, key)
    sim.crash(leader)
    await elect(sim, [name for name in NAMES if name != leader])
    await sim.restart(leader)
    await sim.until(lambda: all_follow_all(sim))


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        ("", ""),
        ("confirm_before_the_quorum", "confirmed, which only"),
        ("skip_the_fsync_of_a_vote", "would lose with the power"),
        ("acknowledge_a_write_before_its_fsync", "would lose with the power"),
    ],
)
@simulated()
async def test_each_violated_promise_is_found(sim: Simulation, mutation: str, words: str) -> None:
    mutated: AbstractContextManager[object] = MUTATIONS[mutation]() if mutation else nullcontext()
    _, found = watch(sim)
    with mutated:
        await live(sim)
    assert bool(found) == bool(words)
    assert all(words in each for each in found)


@simulated()
async def test_anonymous_followers_count_only_if_the_set_has_some(sim: Simulation) -> None:
    _, found = watch(sim, counts_anonymous=True)
    with MUTATIONS["confirm_before_the_quorum"]():
        await live(sim)
    assert found
    assert all("confirmed, which only" in each for each in found)


def cut_off(sim: Simulation, members: Sequence[str], names: str) -> None:
    """Isolate members in both directions."""
    for name in names:
        for other in members:
            if other != name:
                sim.cut(name, other)


async def strike_off(sim: Simulation, members: list[str], name: str) -> None:
    """Delete the row of a member on the first member, as operators do."""
    replica_id, owner = number_of(sim, name), members[0]
    members.remove(name)

    async def delete() -> None:
        async with sim.node(owner).transaction(is_sync=True) as transaction:
            transaction.space(CLUSTER_ID).delete(replica_id)

    await sim.on(owner, delete())


def verdicts_unseen() -> AbstractContextManager[object]:
    """Skip observed verdicts, as if the node died right after writing them: they are seen after its restart."""

    def written(self: Consensus, name: str, instance: Instance, rows: bytes, vclock: VClock) -> None:
        self._written[name] = vclock

    return patch.object(Consensus, "_verdict_written", written)


@pytest.mark.parametrize("is_seen_late", [False, True])
@simulated()
async def test_expelled_member_counts_for_the_row_that_expels_it(sim: Simulation, is_seen_late: bool) -> None:
    members = list("abcde")
    _, found = watch(sim, members)
    with verdicts_unseen() if is_seen_late else nullcontext():
        await start_members(sim, members, wal_mode="fsync")
        cut_off(sim, members, "bd")
        await strike_off(sim, members, "c")
        await sim.sleep(1)
    assert not found


@pytest.mark.parametrize("is_seen_late", [False, True])
@simulated()
async def test_expelled_member_counts_in_the_majority_for_the_row_that_expels_it(
    sim: Simulation, is_seen_late: bool
) -> None:
    members = list("abcd")
    _, found = watch(sim, members)
    with verdicts_unseen() if is_seen_late else nullcontext():
        await start_members(sim, members, wal_mode="fsync")
        await reconfigure(sim, "a", replication_synchro_quorum=2)
        cut_off(sim, members, "bd")
        await strike_off(sim, members, "c")
        await sim.sleep(1)
    (verdict,) = found
    assert "confirmed, which only a" in verdict


@simulated()
async def test_member_expelled_before_a_row_does_not_count_for_it(sim: Simulation) -> None:
    members = list("abcde")
    consensus, found = watch(sim, members)
    await start_members(sim, members, wal_mode="fsync")
    await strike_off(sim, members, "c")
    await sim.sleep(1)
    assert not found
    consensus._unseen["c"] = None  # which may have any rows
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    cut_off(sim, members, "bd")
    assert await Pending(sim, "a", 1).code() == 0
    (verdict,) = found
    assert verdict.endswith("confirmed, which only a, e have; 3 must")


@simulated()
async def test_index_that_differs_from_its_space_is_found(sim: Simulation) -> None:
    _, found = watch(sim)
    await start_set(sim, election_mode="candidate", wal_mode="fsync")
    leader = await elect(sim)
    await make_space(sim, leader)
    await write(sim, leader, 1)
    box = sim.node(leader).box
    space = box.space("test")
    space.indexes[1] = EngineIndex(space.indexes[0].definition, space.definition, {}, [], box.dialect)
    await sim.sleep(2 * CONTENTS_SECONDS)
    assert found
    assert all(f"index primary of {space.id} on {leader} has []" in each for each in found)


@simulated()
async def test_leader_that_lacks_confirmed_rows_is_found(sim: Simulation) -> None:
    consensus, found = watch(sim)
    consensus._confirmed.follow(31, 7)
    await live(sim)
    assert found
    assert all("31: 7} was confirmed before" in each for each in found)


@simulated()
async def test_new_owner_that_drops_its_pending_rows_is_found(sim: Simulation) -> None:
    _, found = watch(sim)
    await start_members(sim, "abc", wal_mode="fsync", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 1).seen_by("b", "c")
    await reconfigure(sim, "b", replication_synchro_quorum=2, replication_synchro_timeout=0.1)
    with MUTATIONS["promote_without_waiting"]():
        await promote(sim, "b")
    assert await pending.code()
    (takeover,) = found
    assert takeover.startswith("b takes the queue of 1 over up to row ")


@pytest.mark.parametrize("has_more", [True, False])
@simulated()
async def test_different_data_at_the_same_position_is_found(sim: Simulation, has_more: bool) -> None:
    _, found = watch(sim)
    await live(sim)
    assert not found
    space = sim.node("b").box.names["test"]
    assert space.primary is not None
    if has_more:
        space.primary.set(space.primary.key.entries((9,))[0], pack((9,)))
    else:
        space.primary.set(space.primary.key.entries((1,))[0], None)
    await sim.sleep(2 * CONTENTS_SECONDS)
    words = "only b has [(9,)], only a []" if has_more else "only b has [], only a [(1,)]"
    assert any(f"in {space.id} {words}" in each for each in found)
