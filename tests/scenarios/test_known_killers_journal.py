"""PySyncObj #84, #98, #133, #139, #197 and #202: data lost by a Raft that does not persist its promises.

It kept terms and votes in memory only, did not sync its log, and kept its commit index in a separate file. Here all
three are rows of one log, synced before they count; these tests cut the power of all machines at once, at any moment.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from tests.scenarios.queues import SYNC, owned_by, start_members
from tests.scenarios.simulated_members import held, ids, insert, make_space, reconfigure, snapshot, uris
from tests.simulation.cluster import NAMES, all_follow_all, converge, start_set
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, election, leaders


async def lead(sim: Simulation, **options: Any) -> str:
    """Start three candidates with a synchronous space; return the leader."""
    await start_set(sim, election_mode="candidate", wal_mode="fsync", **options)
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await make_space(sim, leader, SYNC, is_sync=True)
    await converge(sim)
    return leader


async def write(sim: Simulation, keys: range, acknowledged: list[int]) -> None:
    """Write to the leader until it loses the leadership."""
    for key in keys:
        if not (found := leaders(sim)):
            return
        with suppress(FlowstoneError, Crashed):
            await insert(sim, found[0], key, space=SYNC)
            acknowledged.append(key)


# --- votes ---


class Ballots:
    """Return all observed votes: voter, candidate and term, at any member and time."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.seen: dict[tuple[int, int], set[int]] = {}
        sim.loop.before_jump.append(self._look)

    def _look(self) -> None:
        for name in NAMES:
            if self._sim.is_ready(name):
                instance = self._sim.node(name)._instance
                raft = instance.elections.raft
                for voter, vote in raft._votes._votes.items():
                    if voter != instance.id:  # a member may withdraw state that it has not sent yet
                        self.seen.setdefault((raft.volatile_term, voter), set()).add(vote)


@pytest.mark.parametrize("mode", ["write", "fsync"])
@simulated(seeds=range(2))
async def test_voter_that_loses_power_during_a_vote_votes_once_per_term(sim: Simulation, mode: str) -> None:
    """PySyncObj #84: a vote was not persisted, so a restarted voter voted again in the same term."""
    await start_set(sim, election_mode="candidate", wal_mode=mode, election_timeout=1, replication_timeout=0.3)
    ballots = Ballots(sim)
    for operations in range(1, 5):
        leader = await elect(sim)
        await sim.until(lambda: all_follow_all(sim))
        voters = [name for name in NAMES if name != leader]
        sim.crash(leader, Loss.UNSYNCED)
        for voter in voters:
            sim.crash_after(voter, operations, Loss.UNSYNCED)
        with suppress(TimeoutError):
            await sim.until(lambda voters=voters: not any(map(sim.is_running, voters)), seconds=5)  # type: ignore[misc]
        for voter in voters:
            sim.storage(voter).spare()
        for name in NAMES:
            if not sim.is_running(name):
                await sim.restart(name)
    await elect(sim)
    assert len(ballots.seen) > 10
    assert all(len(votes) == 1 for votes in ballots.seen.values()), ballots.seen


# --- the log ---


@pytest.mark.parametrize("loss", [Loss.UNSYNCED, Loss.ANY], ids=["unsynced", "any"])
@simulated(seeds=range(2))
async def test_committed_rows_survive_a_power_loss_of_all_members(sim: Simulation, loss: Loss) -> None:
    """PySyncObj #98: the log was never synced, so a quorum had the rows in page caches only."""
    await lead(sim)
    acknowledged: list[int] = []
    for round_number in range(3):
        keys = range(100 * round_number, 100 * round_number + 100)
        writing = asyncio.ensure_future(write(sim, keys, acknowledged))
        await sim.sleep(sim.random.uniform(0.05, 0.5))
        for name in NAMES:
            sim.crash(name, loss)
        await writing
        await asyncio.gather(*(sim.restart(name) for name in NAMES))
        await elect(sim)
    assert acknowledged
    await converge(sim)
    for name in NAMES:
        assert set(acknowledged) <= set(held(sim, name, SYNC))


@pytest.mark.parametrize("mode", ["write", "fsync"])
@simulated(seeds=range(2))
async def test_replica_that_lost_confirmed_rows_receives_them_again(sim: Simulation, mode: str) -> None:
    """PySyncObj #197: its commit index was newer than its log after a power loss, and it waited for ever."""
    await start_members(sim, "abc", wal_mode=mode, replication_synchro_quorum=2)
    key = 0
    for operations in range(1, 7):
        sim.crash_after("b", operations, Loss.ANY)
        while sim.is_running("b"):
            key += 1
            assert key < 100
            await insert(sim, "a", key, space=SYNC)
        await sim.restart("b")
    await converge(sim, "abc")
    assert held(sim, "b", SYNC) == dict.fromkeys(range(1, key + 1), "a")


@simulated()
async def test_restarted_node_recovers_its_data_without_peers(sim: Simulation) -> None:
    """PySyncObj #139: the log was applied only after other nodes had reported its committed part."""
    await start_members(sim, "abc", wal_mode="fsync", replication_synchro_quorum=2)
    for key in range(5):
        await insert(sim, "a", key, space=SYNC)
    await converge(sim, "abc")
    for name in "abc":
        sim.crash(name)
    await sim.restart("b", replication=[])
    assert held(sim, "b", SYNC) == dict.fromkeys(range(5), "a")


# --- terms and members after a restart of all ---


@simulated(seeds=range(2))
async def test_slow_restart_overwrites_nothing(sim: Simulation) -> None:
    """PySyncObj #202: terms restarted at 0, so an old log of a high term won against later commits."""
    await lead(sim)
    acknowledged: list[int] = []
    await write(sim, range(10), acknowledged)
    await converge(sim)
    term = max(election(sim, name)["term"] for name in NAMES)
    for name in NAMES:
        sim.crash(name)
    quick, slow = NAMES[:2], NAMES[2]
    await asyncio.gather(*(sim.restart(name) for name in quick))
    assert election(sim, await elect(sim, quick))["term"] > term
    await write(sim, range(100, 110), acknowledged)
    assert len(acknowledged) == 20
    await sim.restart(slow, replication=[])
    for name in quick:
        sim.crash(name)
    await sim.restart(slow, replication=uris(sim, *NAMES), replication_connect_timeout=1)
    await asyncio.gather(*(sim.restart(name) for name in quick))
    await elect(sim)
    await converge(sim)
    for name in NAMES:
        assert list(held(sim, name, SYNC)) == acknowledged


@simulated()
async def test_members_agree_on_the_membership_after_all_have_restarted(sim: Simulation) -> None:
    """PySyncObj #133: a snapshot from before a member was added was trusted, and the rows after it were ignored."""
    await start_members(sim, "ab", wal_mode="fsync")
    for name in "ab":
        await snapshot(sim, name)
    await sim.start("c", replication=uris(sim, *"abc"), wal_mode="fsync")
    for name in "abc":
        await reconfigure(sim, name, replication=uris(sim, *"abc"))
    await owned_by(sim, "a", "abc")
    await converge(sim, "abc")
    members = ids(sim, "a")
    assert len(members) == 3
    for name in "abc":
        sim.crash(name)
    for name in "abc":
        await sim.restart(name, replication=[])
        assert ids(sim, name) == members
