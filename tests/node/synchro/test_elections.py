"""A node's part in elections: rows are written before they are broadcast; recipients; the queue."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import pytest

from flowstone.iproto import errors
from flowstone.node.wal.journal import WalMode
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.raft.election import ElectionMode, ElectionState, Fencing, RaftError
from flowstone.replication.vclock import VClock
from tests.node.electorate import Electorate
from tests.simulation.disk import Loss, SimulatedDisk
from tests.simulation.simulation import Simulation, simulated


@simulated(seeds=range(10))
async def test_three_members_elect_one_leader_that_claims_the_queue(sim: Simulation) -> None:
    them = Electorate(sim)
    them.start()
    leader = await them.elect()
    assert them.leaders == [leader]
    term = them.members[leader].term
    assert them.queues[leader].promote_terms == {leader: term}
    assert [member.is_read_only for member in them.members.values()] == [number != leader for number in them.ids]
    await them.beat(60)
    assert (them.leaders, them.members[leader].term) == ([leader], term)
    await them.close()


@simulated(seeds=range(5))
async def test_lost_leader_is_replaced_and_returns_as_a_follower(sim: Simulation) -> None:
    them = Electorate(sim)
    them.start()
    first = await them.elect()
    them.cut(first)
    second = await them.elect()
    assert second != first
    them.heal()
    await them.elect()
    assert them.leaders == [second]
    assert them.members[first].raft.leader == second
    await them.close()


@simulated()
async def test_term_and_vote_are_local_rows_and_on_disk_before_they_are_sent(sim: Simulation) -> None:
    them = Electorate(sim)
    shown: list[tuple[int, int]] = []
    member = them.members[1]
    member.on_broadcast.append(lambda: shown.append((member.shown.term, member.shown.vote)))
    member.start(RaftState(term=1), 1)
    member.message(2, RaftState(term=5, vote=2, state=2, vclock=VClock({1: 10})))
    assert member.shown == RaftState(term=1, state=1)
    await sim.until(lambda: (5, 2) in shown)
    assert member.persisted == RaftState(term=5, vote=2)
    assert them.written(1) == [(1, 5, 0), (2, 5, 2)]
    await them.close()


@simulated()
async def test_broadcast_vote_survives_a_power_loss_although_other_rows_may_not(sim: Simulation) -> None:
    them = Electorate(sim, 1, mode=ElectionMode.VOTER, wal_mode=WalMode.WRITE)
    member = them.members[1]
    member.set_quorum(2, (1, 2, 3))
    member.start(RaftState(term=1), 1)
    member.message(2, RaftState(term=5, vote=2, state=2, vclock=VClock({1: 10})))
    await sim.until(lambda: member.shown.vote == 2)
    disk = sim.outside.disk
    assert isinstance(disk, SimulatedDisk)
    disk.enter().crash(Loss.UNSYNCED)
    assert them.written(1)[-1] == (2, 5, 2)
    await member.close()


@simulated()
async def test_row_written_before_the_vote_counts(sim: Simulation) -> None:
    """The candidate has all rows that we had when it asked, but not those on their way to our log at that time."""
    them = Electorate(sim)
    member, journal = them.members[1], them.journals[1]
    member.start(RaftState(term=1), 1)
    journal.submit(b"", 1, lambda error: None)
    member.message(2, RaftState(term=5, vote=2, state=2, vclock=VClock({1: 10})))
    await sim.until(lambda: member.term == 5)
    assert journal.written_vclock.get(1) == 11
    await sim.sleep(1)
    assert member.persisted == RaftState(term=5)
    await them.close()


@simulated()
async def test_term_that_cannot_be_written_is_retried_and_not_broadcast_before(sim: Simulation) -> None:
    them = Electorate(sim)
    member, journal = them.members[1], them.journals[1]
    member.start(RaftState(term=1), 1)
    write = journal._write
    failures = 2

    def failing(rows: list[bytes], after: dict[int, int], sync: bool = False) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.ENOSPC, "no space left")
        write(rows, after, sync)

    journal._write = failing  # type: ignore[method-assign]
    member.heard_term(2, 7)
    await sim.sleep(1.5)
    assert (member.term, member.raft.volatile_term) == (1, 7)
    await sim.until(lambda: member.term == 7)
    assert any("RAFT: cannot write term 7" in line for line in sim.trace.story)
    assert them.written(1) == [(1, 7, 0)]
    await them.close()


@simulated()
async def test_elections_start_only_with_data(sim: Simulation) -> None:
    them = Electorate(sim)
    member = them.members[1]
    assert (member.mode, member.is_read_only, member.term, member.replica_id) == (ElectionMode.OFF, False, 1, 0)
    await sim.sleep(60)
    assert member.raft.deadline is None
    await member.promote()
    await member.demote()
    assert member.term == 1
    member.start(RaftState(term=8, vote=2), 1)
    assert member.persisted == RaftState(term=8, vote=2)
    assert (member.mode, member.is_read_only, member.replica_id) == (ElectionMode.CANDIDATE, True, 1)
    assert member.info().vote == 2
    await them.close()


@simulated()
async def test_elections_start_in_the_term_of_the_queue_when_it_is_newer(sim: Simulation) -> None:
    them = Electorate(sim)
    member, queue = them.members[1], them.queues[1]
    queue.take(2, 9)
    member.start(RaftState(term=8, vote=3), 1)
    assert member.persisted == RaftState(term=9)
    assert queue.story[-1] == "term 9"
    await them.close()


@simulated()
async def test_rejoin_adopts_the_term_of_the_fetched_data(sim: Simulation) -> None:
    them = Electorate(sim)
    member = them.members[1]
    them.start()
    await them.elect()
    member.heard_term(2, 50)
    member.start(RaftState(term=4), 1)
    await sim.sleep(0.5)
    assert member.term == 4
    assert member.raft.peers.healthy_count == 3
    await them.close()


@simulated()
async def test_newer_term_fences_the_queue_unless_already_known(sim: Simulation) -> None:
    them = Electorate(sim)
    member, queue = them.members[1], them.queues[1]
    member.start(RaftState(term=3), 1)
    queue.take(2, 3)
    queue.story.clear()
    member.heard_term(2, 4)
    assert queue.story == ["term 4"]
    assert queue.is_frozen
    queue.take(3, 6)
    queue.story.clear()
    member.heard_term(3, 6)
    assert queue.story == ["term 6"]
    assert not queue.is_frozen
    await them.close()


@simulated()
async def test_leader_that_loses_its_quorum_fences_its_queue(sim: Simulation) -> None:
    them = Electorate(sim)
    them.start()
    leader = await them.elect()
    member, queue = them.members[leader], them.queues[leader]
    queue.story.clear()
    them.cut(leader)
    assert member.is_read_only
    assert queue.story == ["fence"]
    await them.close()


@simulated()
async def test_strict_fencing_shortens_the_timeout_of_the_leader_only(sim: Simulation) -> None:
    them = Electorate(sim)
    them.config = replace(them.config, fencing=Fencing.STRICT, death_timeout=8.0)
    for member in them.members.values():
        member.configure(them.config)
        assert member.disconnect_timeout == 8.0
    them.start()
    leader = await them.elect()
    expected = {number: 4.0 if number == leader else 8.0 for number in them.ids}
    assert {number: member.disconnect_timeout for number, member in them.members.items()} == expected
    await them.close()


@simulated()
async def test_leader_with_a_failing_log_resigns(sim: Simulation) -> None:
    monkeypatch = pytest.MonkeyPatch()
    them = Electorate(sim)
    them.start()
    leader = await them.elect()
    journal = them.journals[leader]

    def refuse(rows: list[bytes], after: dict[int, int], sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_write", refuse)
        journal.submit(b"row", 1, lambda error: None)
        journal.flush()
        await journal.drain()
    assert them.members[leader].is_read_only
    other = await them.elect()
    assert other != leader
    await them.close()


@simulated()
async def test_leader_that_cannot_write_promote_resigns(sim: Simulation) -> None:
    them = Electorate(sim)
    for queue in them.queues.values():
        queue.error = errors.WalIo("Failed to write to disk")
    them.start()
    await sim.until(lambda: any(queue.error is None for queue in them.queues.values()))
    (first,) = (number for number, queue in them.queues.items() if queue.error is None)
    assert "fence" in them.queues[first].story
    await them.until(lambda: any(queue.term for queue in them.queues.values()))
    await them.close()


@simulated()
async def test_leader_retries_to_claim_a_busy_queue(sim: Simulation) -> None:
    them = Electorate(sim)
    for queue in them.queues.values():
        queue.error = errors.InAnotherPromote("box.ctl.promote() is already running")
    them.start()
    leader = await them.elect()
    assert them.queues[leader].owner_id == leader
    await them.close()


@simulated()
async def test_leader_waits_for_its_queue_while_it_leads(sim: Simulation) -> None:
    them = Electorate(sim)
    for queue in them.queues.values():
        queue.waits = 1
    them.start()
    await them.until(lambda: them.leaders)
    (leader,) = them.leaders
    member, queue = them.members[leader], them.queues[leader]
    await them.beat(100)
    assert them.leaders == [leader]
    assert not queue.promote_terms
    other = leader % 3 + 1
    member.message(other, RaftState(term=member.term + 1, vote=other, state=3))
    assert queue.story[-1] == f"226: The instance is not a leader. New leader is {other}"
    await them.close()


@simulated()
async def test_leader_resigns_when_it_cannot_claim_the_queue(sim: Simulation) -> None:
    them = Electorate(sim)
    for queue in them.queues.values():
        queue.error = errors.OldTerm("The term is outdated: old - 2, new - 2")
    them.start()
    leader = await them.elect()
    assert them.members[leader].term > 2
    await them.close()


@simulated()
async def test_row_that_no_member_may_send_is_rejected(sim: Simulation) -> None:
    them = Electorate(sim)
    member = them.members[1]
    member.start(RaftState(term=1), 1)
    with pytest.raises(RaftError):
        member.message(1, RaftState(term=2, state=1))
    with pytest.raises(RaftError):
        member.message(2, RaftState(term=0, state=1))
    assert member.raft.volatile_term == 1
    await them.close()


@simulated()
async def test_anonymous_instance_follows_terms_and_votes_after_its_registration(sim: Simulation) -> None:
    them = Electorate(sim, mode=ElectionMode.VOTER)
    member = them.members[1]
    member.start(RaftState(term=1), 0)
    member.message(2, RaftState(term=3, vote=2, state=3, leader_id=2))
    await sim.until(lambda: member.term == 3)
    assert member.raft.leader == 2
    member.registered(1)
    assert member.replica_id == 1
    member.message(3, RaftState(term=4, vote=3, state=2, vclock=VClock({1: 10})))
    await sim.until(lambda: member.persisted == RaftState(term=4, vote=3))
    await them.close()


@simulated()
async def test_triggers_receive_every_election_event_and_their_exceptions_are_logged(sim: Simulation) -> None:
    them = Electorate(sim)
    states: list[ElectionState] = []
    member = them.members[1]

    def fails() -> None:
        raise ZeroDivisionError

    async def fails_later() -> None:
        await asyncio.sleep(0.1)
        states.append(member.raft.state)
        raise ZeroDivisionError

    async def never_ends() -> None:
        await asyncio.sleep(1000)

    member.on_election += [fails, fails_later, never_ends]
    member.start(RaftState(term=1), 1)
    await sim.sleep(1)
    assert states == [ElectionState.FOLLOWER]
    assert len(sim.failures) == 2
    assert all("on_election trigger failed" in failure for failure in sim.failures)
    sim.failures.clear()
    await them.close()


@simulated()
async def test_waiters_for_an_election_get_an_error_when_the_node_stops(sim: Simulation) -> None:
    them = Electorate(sim, mode=ElectionMode.MANUAL)
    them.start()
    them.cut(1)
    waiting = asyncio.ensure_future(them.members[1].promote())
    await sim.sleep(1)
    await them.close()
    with pytest.raises(errors.Loading, match="being stopped"):
        await waiting
    them.members[1].heard_term(2, 99)
    assert them.members[1].raft.volatile_term < 99


@simulated()
async def test_promotion_under_way_fails_when_the_member_is_expelled(sim: Simulation) -> None:
    """Without elections, the term that it waits for is never written."""
    them = Electorate(sim, mode=ElectionMode.OFF)
    them.start()
    waiting = asyncio.ensure_future(them.members[1].promote())
    await asyncio.sleep(0)
    assert not waiting.done()
    them.members[1].expelled()
    async with asyncio.timeout(60):
        with pytest.raises(errors.LocalInstanceIdIsReadOnly, match="expelled"):
            await waiting
    await them.close()
