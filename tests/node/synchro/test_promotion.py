"""box.ctl.promote() and demote(): every mode and role, with the errors of 2.11.9."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flowstone.iproto import errors
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import ElectionMode, ElectionState
from tests.node.electorate import Electorate
from tests.simulation.simulation import Simulation, simulated

ELECTING = pytest.mark.parametrize("mode", [ElectionMode.MANUAL, ElectionMode.CANDIDATE])


async def started(sim: Simulation, mode: ElectionMode, count: int = 3) -> Electorate:
    them = Electorate(sim, count, mode=mode)
    them.start()
    await sim.sleep(1)
    return them


@simulated()
async def test_promotion_without_elections_starts_a_term_and_claims_the_queue(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    await member.promote()
    assert (member.term, queue.owner_id, queue.term) == (2, 1, 2)
    assert not member.is_read_only
    await sim.sleep(1)
    assert them.members[2].term == 2
    await member.promote()
    assert member.term == 2, "it owns the queue in this term"
    them.queues[1].is_frozen = True
    await member.promote()
    assert (member.term, queue.term) == (3, 3)
    await them.close()


@simulated()
async def test_promotion_without_elections_lets_the_old_owner_decide_first(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    queue.take(2, 1)
    queue.waits = 3
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(5)
    assert (member.term, queue.story[-1]) == (1, "waits 10 s for its owner")
    queue.empty()
    await promoting
    assert (member.term, queue.owner_id) == (2, 1)
    await them.close()


@simulated()
async def test_promotion_without_elections_ends_when_no_quorum_arrives(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    queue.take(2, 1)
    queue.waits = 3
    before = sim.now
    with pytest.raises(errors.System, match="timed out"):
        await member.promote()
    assert sim.now - before == pytest.approx(3 * queue.timeout, abs=0.2)
    assert (member.term, queue.owner_id) == (2, 2)
    queue.empty()
    await member.promote()
    assert (member.term, queue.owner_id) == (3, 1)
    await them.close()


@simulated()
async def test_concurrent_promotion_of_another_member_wins(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    queue.take(2, 1)
    queue.waits = 3
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(5)
    queue.take(3, 2)
    queue.empty()
    with pytest.raises(errors.InterferingPromote, match=r"^Instance with replica id 3 was promoted first \(ER_"):
        await promoting
    await them.close()


@simulated()
async def test_newer_term_interrupts_a_promotion_that_waits_for_its_quorum(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    queue.take(2, 1)
    queue.waits = 3
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(12)
    assert member.term == 2
    member.heard_term(3, 3)
    with pytest.raises(errors.InterferingElections, match=r"^Interfering elections started \(ER_"):
        await promoting
    await them.close()


@simulated()
async def test_concurrent_promotions_are_rejected(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    queue.take(2, 1)
    queue.waits = 3
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(1)
    for attempt in (member.promote, member.demote):
        with pytest.raises(
            errors.Unsupported, match=r"^box\.ctl\.promote/demote does not support simultaneous invocations \(ER_"
        ):
            await attempt()
    queue.empty()
    await promoting
    await them.close()


@pytest.mark.parametrize("mode", list(ElectionMode))
@simulated()
async def test_anonymous_instance_can_be_neither_promoted_nor_demoted(sim: Simulation, mode: ElectionMode) -> None:
    them = Electorate(sim, mode=mode)
    member = them.members[1]
    member.start(RaftState(term=1), 0)
    for attempt in (member.promote, member.demote):
        with pytest.raises(errors.Unsupported, match=r"^replication_anon=true does not support manual elections \(ER_"):
            await attempt()
    await them.close()


@pytest.mark.parametrize("mode", list(ElectionMode))
@simulated()
async def test_expelled_instance_can_be_neither_promoted_nor_demoted(sim: Simulation, mode: ElectionMode) -> None:
    them = await started(sim, mode)
    member = them.members[1]
    member.expelled()
    for attempt in (member.promote, member.demote):
        with pytest.raises(errors.LocalInstanceIdIsReadOnly, match="The local instance id 1 is read-only"):
            await attempt()
    await them.close()


@simulated()
async def test_voter_cannot_be_promoted(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.VOTER)
    with pytest.raises(errors.Unsupported, match=r"^election_mode='voter' does not support manual elections \(ER_"):
        await them.members[1].promote()
    await them.members[1].demote()
    await them.close()


@ELECTING
@simulated()
async def test_promotion_of_a_candidate_starts_an_election(sim: Simulation, mode: ElectionMode) -> None:
    them = await started(sim, mode)
    await them.members[2].promote()
    assert them.leaders == [2]
    assert await them.elect() == 2
    term = them.members[2].term
    await them.members[2].promote()
    assert them.members[2].term == term
    await them.members[1].promote()
    assert await them.elect() == 1
    assert them.members[1].term == term + 1
    assert them.leaders == [1]
    await them.close()


@simulated()
async def test_promotion_of_the_manual_leader_changes_nothing(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.MANUAL)
    await them.members[2].promote()
    them.cut(2)
    await them.beat(100)
    assert them.leaders == []
    await them.close()


@simulated()
async def test_promotion_without_a_quorum_fails(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.MANUAL)
    them.cut(1)
    with pytest.raises(
        errors.NoElectionQuorum,
        match=r"^Not enough peers connected to start elections: 1 out of minimal required 2 \(ER_",
    ):
        await them.members[1].promote()
    await them.close()


@simulated()
async def test_promotion_times_out_when_connected_peers_do_not_answer(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.MANUAL)
    them.cut_off.add(1)
    with pytest.raises(errors.System, match=r"^timed out \(ER_"):
        await them.members[1].promote()
    await them.close()


@simulated()
async def test_promotion_fails_when_another_member_wins_its_term_or_starts_the_next(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.MANUAL)
    member = them.members[1]
    them.cut_off.add(1)
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(1)
    member.message(3, RaftState(term=2, vote=3, state=3))
    with pytest.raises(errors.InterferingPromote, match=r"^Instance with replica id 3 was promoted first \(ER_"):
        await promoting
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(1)
    member.message(3, RaftState(term=9, vote=3, state=1))
    with pytest.raises(errors.OldTerm, match=r"^The term is outdated: old - 3, new - 9 \(ER_"):
        await promoting
    promoting = asyncio.ensure_future(member.promote())
    await sim.sleep(1)
    member.configure(replace(them.config, mode=ElectionMode.OFF))
    with pytest.raises(errors.ElectionDisabled, match=r"^Elections were turned off \(ER_"):
        await promoting
    await them.close()


@ELECTING
@simulated()
async def test_demoted_leader_resigns_and_fences_its_queue(sim: Simulation, mode: ElectionMode) -> None:
    them = await started(sim, mode)
    await them.members[1].promote()
    await them.elect()
    for number in (2, 3):
        them.queues[number].take(1, them.members[1].term)
    await them.members[2].demote()
    assert them.leaders == [1]
    await them.members[1].demote()
    assert them.leaders == []
    assert them.queues[1].story[-1] == "fence"
    if mode is ElectionMode.CANDIDATE:
        assert await them.elect() != 1
    else:
        await them.beat(100)
        assert {member.raft.state for member in them.members.values()} == {ElectionState.FOLLOWER}
    await them.close()


@simulated()
async def test_demotion_without_elections_clears_the_owner_of_the_queue(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    await member.demote()
    assert member.term == 1, "there is no queue to give up"
    await member.promote()
    await member.demote()
    assert (member.term, queue.owner_id, queue.term, queue.promote_terms) == (3, 0, 3, {1: 3})
    await them.close()


@simulated()
async def test_demotion_without_elections_clears_another_owner_only_of_an_outdated_queue(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    member.heard_term(2, 2)
    queue.take(2, 2)
    await sim.sleep(1)
    await member.demote()
    assert (member.term, queue.owner_id) == (2, 2)
    member.heard_term(2, 3)
    await sim.sleep(1)
    await member.demote()
    assert (member.term, queue.owner_id, queue.promote_terms) == (4, 0, {1: 4, 2: 2})
    await them.close()


@simulated()
async def test_demotion_without_elections_is_rejected_while_another_member_leads(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.OFF)
    member, queue = them.members[1], them.queues[1]
    await member.promote()
    member.message(3, RaftState(term=5, vote=3, state=3))
    with pytest.raises(errors.NotLeader, match=r"^The instance is not a leader\. New leader is 3 \(ER_"):
        await member.demote()
    assert queue.owner_id == 1
    await them.close()


@simulated()
async def test_mode_change_ends_the_wait_of_a_leader_for_its_queue(sim: Simulation) -> None:
    them = await started(sim, ElectionMode.MANUAL)
    member, queue = them.members[1], them.queues[1]
    queue.waits = 1
    await member.promote()
    assert them.leaders == [1]
    await sim.sleep(1)
    member.configure(replace(them.config, mode=ElectionMode.OFF))
    assert queue.story[-1] == "226: The instance is not a leader. New leader is 0"
    await sim.sleep(1)
    queue.empty()
    await member.promote()
    assert queue.owner_id == 1
    await them.close()
