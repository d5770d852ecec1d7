"""Promises of single members: no violation in a healthy set, and each deliberate bug is found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import pytest

from flowstone.box.system import CLUSTER_ID
from flowstone.errors import FlowstoneError
from flowstone.replication.limbo.control_rows import RaftState
from tests.scenarios.queues import number_of
from tests.simulation.all_mutations import MUTATIONS
from tests.simulation.cluster import NAMES, all_follow_all, start_set
from tests.simulation.consensus import Consensus
from tests.simulation.disk import ROOM
from tests.simulation.disk_reports import DiskReports
from tests.simulation.member_promises import MemberPromises
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, make_space, owns_queue, write

FIVE = tuple("abcde")


def watch(sim: Simulation, members: Sequence[str] = NAMES) -> list[str]:
    """Return the violations found from now on by two checkers, one of which feeds the other."""
    violations: list[str] = []
    consensus = Consensus(sim, [], is_durable=True, counts_anonymous=False)
    promises = MemberPromises(sim, violations, is_durable=True, holders=consensus.holders)

    def look() -> None:
        consensus.look(list(members), [])
        promises.look(list(members))

    sim.loop.before_jump.append(look)
    return violations


def mutated(name: str) -> AbstractContextManager[object]:
    return MUTATIONS[name]() if name else nullcontext()


async def formed(sim: Simulation, names: Sequence[str] = NAMES, **options: object) -> str:
    """Form a set with a synchronous space; return its leader."""
    await start_set(sim, names, wal_mode="fsync", **{"election_mode": "candidate"} | options)
    leader = await elect(sim, names)
    await sim.until(lambda: all_follow_all(sim, names))
    await make_space(sim, leader)
    await write(sim, leader, 0)
    return leader


async def ignore(work: asyncio.Future[object] | asyncio.Task[None]) -> None:
    with suppress(FlowstoneError, Crashed):
        await work


@pytest.mark.parametrize("mutation", ["", "vote_without_a_second_look"])
@simulated()
async def test_vote_for_a_candidate_that_lacks_unwritten_rows_is_found(sim: Simulation, mutation: str) -> None:
    leader = await formed(sim, election_timeout=60)
    found = watch(sim)
    voter, candidate = (name for name in NAMES if name != leader)
    sim.machine(voter).blocking_seconds = (2.0, 2.0)
    sim.cut(leader, candidate)
    sim.cut(voter, candidate)
    writing = asyncio.ensure_future(write(sim, leader, 1))
    await sim.until(lambda: not sim.node(voter)._instance.journal.is_idle)
    sim.crash(leader)
    sim.heal(voter, candidate)
    sim.machine(candidate).blocking_seconds = (0.0001, 0.0002)
    with mutated(mutation):
        promoting = asyncio.ensure_future(sim.on(candidate, sim.node(candidate).promote()))
        await sim.sleep(20)
    assert bool(found) == bool(mutation)
    assert all(f"{voter} votes for" in each for each in found)
    promoting.cancel()
    sim.machine(voter).blocking_seconds = (0.0001, 0.0002)
    await asyncio.gather(writing, promoting, return_exceptions=True)


@pytest.mark.parametrize("is_vote_written", [False, True])
@simulated(seeds=(1, 2, 5))
async def test_vote_in_a_term_that_began_unobserved_is_checked_against_the_log(
    sim: Simulation, is_vote_written: bool
) -> None:
    """Like a starting node, which may have written the term, and even the vote, before it is observed.

    With these seeds the checkers begin to look before the voter has decided on its vote.
    """
    leader = await formed(sim, election_timeout=60)
    voter, candidate = (name for name in NAMES if name != leader)
    sim.machine(voter).blocking_seconds = (2.0, 2.0)
    sim.cut(leader, candidate)
    sim.cut(voter, candidate)
    writing = asyncio.ensure_future(write(sim, leader, 1))
    await sim.until(lambda: not sim.node(voter)._instance.journal.is_idle)
    sim.crash(leader)
    sim.heal(voter, candidate)
    sim.machine(candidate).blocking_seconds = (0.0001, 0.0002)
    raft, term = sim.node(voter)._instance.elections.raft, sim.node(voter)._instance.elections.term + 1
    with mutated("vote_without_a_second_look"):
        promoting = asyncio.ensure_future(sim.on(candidate, sim.node(candidate).promote()))
        await sim.until(
            lambda: raft.persisted == RaftState(term=term, vote=number_of(sim, candidate) * is_vote_written)
        )
        found = watch(sim)
        await sim.sleep(20)
    (vote,) = found
    assert vote.startswith(f"{voter} votes for {number_of(sim, candidate)} in term {term}, a candidate at")
    promoting.cancel()
    sim.machine(voter).blocking_seconds = (0.0001, 0.0002)
    await asyncio.gather(writing, promoting, return_exceptions=True)


@pytest.mark.parametrize("is_term_seen", [False, True])
@simulated()
async def test_vote_may_ignore_rows_written_after_its_term_began(sim: Simulation, is_term_seen: bool) -> None:
    """A leader that learns that the voter has such a row learns of the term from the same ACK, and confirms nothing
    more."""
    never_notices = {"election_fencing_mode": "off", "replication_synchro_timeout": 1000}
    leader = await formed(sim, NAMES, election_mode="manual", **never_notices)
    voter, candidate = (name for name in NAMES if name != leader)
    found = watch(sim) if is_term_seen else []
    sim.cut(leader, candidate)
    sim.cut(voter, candidate)
    sim.black_hole(voter, leader, is_one_way=True)
    elections = sim.node(voter)._instance.elections
    term, confirmed = elections.term + 1, sim.node(leader)._instance.queue.limbo.confirmed_lsn

    async def hear() -> None:
        elections.heard_term(number_of(sim, candidate), term)

    await sim.on(voter, hear())
    await sim.until(lambda: elections.term == term)
    if not is_term_seen:
        found = watch(sim)
    sim.machine(voter).blocking_seconds = (3.0, 3.0)
    writing = asyncio.ensure_future(write(sim, leader, 1))
    await sim.until(lambda: not sim.node(voter)._instance.journal.is_idle)
    sim.heal(voter, candidate)
    promoting = asyncio.ensure_future(sim.on(candidate, sim.node(candidate).promote()))
    await sim.until(lambda: elections.raft._vote == number_of(sim, candidate))
    sim.heal(voter, leader)
    lsn = sim.node(leader)._instance.vclock.get(number_of(sim, leader))
    assert sim.node(voter)._instance.vclock.get(number_of(sim, leader)) == lsn
    assert sim.node(candidate)._instance.vclock.get(number_of(sim, leader)) < lsn
    await sim.until(lambda: sim.node(leader)._instance.elections.term == term)
    assert sim.node(leader)._instance.queue.limbo.confirmed_lsn == confirmed
    assert not found
    sim.machine(voter).blocking_seconds = (0.0001, 0.0002)
    sim.crash(leader)
    await asyncio.gather(ignore(writing), ignore(promoting))


@pytest.mark.parametrize("mutation", ["", "leave_a_recovered_log_unsynced"])
@simulated()
async def test_start_with_unsynced_rows_is_found(sim: Simulation, mutation: str) -> None:
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a", is_sync=False)
    found = watch(sim, "a")
    sim.kill("a")
    inode = sim.storage("a").find(max(path for path in sim.storage("a").names if path.endswith(".xlog")))
    inode.unsynced = [bytes(inode.data[-10:])]
    inode.synced = inode.data[:-10]
    with mutated(mutation):
        await sim.restart("a")
        await sim.sleep(1)
    assert bool(found) == bool(mutation)
    assert all("a has started with rows of" in each for each in found)


@pytest.mark.parametrize("mutation", ["", "count_an_expelled_member"])
@simulated()
async def test_acknowledgement_counted_after_an_expulsion_is_found(sim: Simulation, mutation: str) -> None:
    leader = await formed(sim)
    found = watch(sim)
    expelled = next(name for name in NAMES if name != leader)
    node = sim.node(leader)
    number = next(row[0] for row in node.space(CLUSTER_ID).select() if row[1] == sim.machine(expelled).uuid)
    with mutated(mutation):
        await sim.on(leader, node.space(CLUSTER_ID).delete(number))
        await sim.sleep(3)
    assert bool(found) == bool(mutation)
    assert all(f"counts acknowledgements of [{number}]" in each for each in found)


@pytest.mark.parametrize("mutation", ["", "answer_before_a_promote_is_proven"])
@simulated()
async def test_answer_by_a_promote_without_a_quorum_is_found(sim: Simulation, mutation: str) -> None:
    leader = await formed(sim, FIVE)
    found = watch(sim, FIVE)
    heir = next(name for name in FIVE if name != leader)
    slow = [sim.machine(name) for name in FIVE if name not in (leader, heir)]
    usual = slow[0].blocking_seconds
    for machine in slow:
        machine.blocking_seconds = (0.3, 0.3)
    with mutated(mutation):
        writing = asyncio.ensure_future(write(sim, leader, 1))
        await sim.sleep(0.05)
        await sim.on(heir, sim.node(heir).promote())
        await sim.until(lambda: owns_queue(sim, heir))
        await sim.sleep(3)
    for machine in slow:
        machine.blocking_seconds = usual
    await asyncio.gather(writing, return_exceptions=True)
    assert bool(found) == bool(mutation)
    assert all(f"{leader} has answered clients by the PROMOTE" in each for each in found)


@pytest.mark.parametrize("is_lying", [False, True])
@simulated()
async def test_node_that_does_not_report_its_failing_log_is_found(sim: Simulation, is_lying: bool) -> None:
    leader = await formed(sim)
    found: list[str] = []
    reports = DiskReports(sim, found)
    sim.loop.before_jump.append(lambda: reports.look(list(NAMES)))
    sim.storage(leader).room = 0
    with suppress(FlowstoneError):
        await write(sim, leader, 1)
    await sim.sleep(1)
    if is_lying:
        sim.node(leader)._instance.journal.counters.failure = None
        await sim.sleep(1)
    assert found == ([f"{leader} reports that its log can be written, and the last write has failed"] * is_lying)
    sim.storage(leader).room = ROOM
