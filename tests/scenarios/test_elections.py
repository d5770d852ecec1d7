"""Elections: modes, dead and hanging leaders, fencing, and pending transactions of a lost leader."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import decode_row
from flowstone.replication.limbo.control_rows import RaftState, decode_control
from tests.scenarios.middleman import Middleman
from tests.scenarios.queues import (
    NEVER,
    PATIENCE,
    PLAIN,
    SYNC,
    Pending,
    demote,
    last_lsn,
    number_of,
    promote,
    queue,
    start_members,
    told,
)
from tests.scenarios.simulated_members import held, insert, make_space, reconfigure, uris
from tests.simulation.cluster import NAMES, all_follow_all, converge, follows, start_set, vclock
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import DEATH, elect, election, leaders

QUORUM_TIMEOUT, ROLLED_BACK = 216, 217


async def led(sim: Simulation, **options: Any) -> tuple[str, list[str]]:
    """Start three candidates with the two spaces; return the leader, and the others."""
    options = {"replication_synchro_timeout": PATIENCE} | options
    await start_set(sim, election_mode="candidate", **options)
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await make_space(sim, leader, PLAIN)
    await make_space(sim, leader, SYNC, is_sync=True)
    await converge(sim)
    return leader, [name for name in NAMES if name != leader]


# --- modes ---


@simulated()
async def test_single_node_in_each_election_mode(sim: Simulation) -> None:
    """I1: writable with elections off, read-only as a voter, elects itself as a candidate; term and vote
    survive restarts.
    """
    node = await sim.start("a")
    assert (node.info()["ro"], election(sim, "a")["term"], election(sim, "a")["state"]) == (False, 1, "follower")
    await reconfigure(sim, "a", election_mode="voter")
    await sim.sleep(30)
    info = node.info()
    assert (info["ro"], info["ro_reason"], info["election"]["term"]) == (True, "election", 1)
    with pytest.raises(errors.Readonly):
        await make_space(sim, "a")
    await reconfigure(sim, "a", election_mode="candidate")
    await sim.until(lambda: not node.info()["ro"])
    assert election(sim, "a") | {"leader_idle": 0} == {
        "state": "leader",
        "term": 2,
        "vote": 1,
        "leader": 1,
        "leader_idle": 0,
    }
    await make_space(sim, "a", SYNC, is_sync=True)
    await insert(sim, "a", 1, space=SYNC)
    await reconfigure(sim, "a", election_mode="off")
    assert (election(sim, "a")["state"], election(sim, "a")["term"], node.info()["ro"]) == ("follower", 2, False)
    for mode in ("off", "voter"):
        sim.crash("a")
        await sim.restart("a", election_mode=mode)
        assert (election(sim, "a")["term"], election(sim, "a")["vote"], election(sim, "a")["leader"]) == (2, 1, 0)
        assert held(sim, "a", SYNC) in ({1: "a"}, {})
    await sim.restart("a", election_mode="candidate")
    await sim.until(lambda: not sim.node("a").info()["ro"])
    assert (election(sim, "a")["term"], queue(sim, "a")["term"]) == (3, 3)


@simulated(seeds=range(2))
async def test_dead_leader_is_replaced_and_follows_when_it_returns(sim: Simulation) -> None:
    """I1: the successor leads in a newer term with all committed rows; the returning member still has its term and
    vote.
    """
    first, others = await led(sim)
    await insert(sim, first, 1, space=SYNC)
    before = election(sim, first)
    sim.kill(first)
    second = await elect(sim, others)
    assert election(sim, second)["term"] > before["term"]
    await insert(sim, second, 2, space=SYNC)
    await sim.restart(first, replication=[])
    assert (election(sim, first)["term"], election(sim, first)["vote"]) == (before["term"], before["vote"])
    assert sim.node(first).info()["ro"]
    await sim.restart(first, replication=[sim.uri(name) for name in NAMES])
    assert await elect(sim) == second
    assert sim.node(first).info()["ro_reason"] == "election"
    await converge(sim)
    assert held(sim, first, SYNC) == {1: first, 2: second}


@pytest.mark.parametrize("quorum", [2, 3, NEVER])
@simulated(seeds=range(2))
async def test_candidates_start_before_their_quorum(sim: Simulation, quorum: int) -> None:
    """I1: the first candidate leads alone until the others have joined, without resigning."""
    first, others = await led(sim, replication_synchro_quorum=quorum)
    assert election(sim, first)["term"] == 2
    sim.isolate(first)
    await sim.until(lambda: election(sim, first)["state"] == "follower")
    assert (quorum == 2) == bool(await is_elected(sim, others))


async def is_elected(sim: Simulation, names: list[str]) -> bool:
    await sim.sleep(20)
    return bool(leaders(sim, names))


# --- pending transactions of a lost leader ---


@simulated(seeds=range(3))
async def test_next_leader_commits_transactions_replicated_by_the_dead_one(sim: Simulation) -> None:
    """I2: the PROMOTE of the next leader confirms them; no CONFIRM is written."""
    first, others = await led(sim)
    await reconfigure(sim, first, replication_synchro_quorum=NEVER)
    pending = await Pending(sim, first, 1).seen_by(*others)
    positions = {name: last_lsn(sim, name) for name in others}
    sim.kill(first)
    with pytest.raises(Crashed):
        await pending.code()
    second = await elect(sim, others)
    term = election(sim, second)["term"]
    assert (queue(sim, second)["len"], queue(sim, second)["term"]) == (0, term)
    number = number_of(sim, second)
    await sim.restart(first)
    await converge(sim)
    for name in NAMES:
        assert held(sim, name, SYNC) == {1: first}
        story = told(sim, name, number, positions[second])
        assert story == [f"+1 promote in term {term} after {number_of(sim, first)}"]
    await insert(sim, second, 2, space=SYNC)


@simulated(seeds=range(2))
async def test_candidate_without_rows_of_a_quorum_is_not_elected(sim: Simulation) -> None:
    """I2: the member that has the transaction leads, whichever member requests votes first."""
    first, others = await led(sim)
    await reconfigure(sim, first, replication_synchro_quorum=3)
    informed, ignorant = others
    sim.cut(first, ignorant)
    sim.cut(informed, ignorant)
    pending = await Pending(sim, first, 1).seen_by(informed)
    sim.kill(first)
    with pytest.raises(Crashed):
        await pending.code()
    await reconfigure(sim, informed, election_mode="voter")
    sim.heal()
    await sim.until(lambda: follows(sim, informed, ignorant) and follows(sim, ignorant, informed))
    await pending.seen_by(ignorant)
    assert await elect(sim, others) == ignorant, "as soon as this member has the transaction, too"
    assert held(sim, ignorant, SYNC) == {1: first}
    await sim.until(lambda: not queue(sim, informed)["len"])
    assert held(sim, informed, SYNC) == {1: first}


# --- fencing ---


@pytest.mark.parametrize("mode", ["soft", "strict"])
@simulated(seeds=range(2))
async def test_isolated_leader_resigns_and_the_next_one_decides_its_queue(sim: Simulation, mode: str) -> None:
    """I5: pending transactions are frozen, even past their timeout; clients are answered when the next leader
    has decided.
    """
    first, others = await led(sim, election_fencing_mode=mode)
    await reconfigure(sim, first, replication_synchro_quorum=NEVER)
    kept = await Pending(sim, first, 1).seen_by(*others)
    sim.isolate(first, is_quiet=mode == "strict")
    lost = await Pending(sim, first, 2).seen_by(first)
    await sim.until(lambda: election(sim, first)["state"] == "follower")
    info = sim.node(first).info()
    assert (info["ro"], info["ro_reason"]) == (True, "election")
    with pytest.raises(errors.Readonly):
        await insert(sim, first, 3, space=PLAIN)
    await reconfigure(sim, first, replication_synchro_timeout=0.1)
    await sim.sleep(10)
    assert kept.is_waiting
    assert lost.is_waiting
    assert queue(sim, first)["len"] == 2
    second = await elect(sim, others)
    sim.heal()
    assert [await kept.code(), await lost.code()] == [0, ROLLED_BACK]
    assert await elect(sim) == second
    await converge(sim)
    assert held(sim, first, SYNC) == held(sim, second, SYNC) == {1: first}


@simulated(seeds=range(2))
async def test_leader_that_regains_its_quorum_before_an_election_continues(sim: Simulation) -> None:
    """I5: the leader is elected again, and confirms its pending transactions."""
    first, others = await led(sim)
    for name in others:
        await reconfigure(sim, name, election_mode="voter")
    sim.isolate(first)
    pending = await Pending(sim, first, 1).seen_by(first)
    await sim.until(lambda: election(sim, first)["state"] == "follower")
    await sim.sleep(10)
    assert pending.is_waiting
    assert leaders(sim) == []
    sim.heal()
    assert await elect(sim) == first
    assert await pending.code() == 0
    await converge(sim)
    assert held(sim, others[0], SYNC) == {1: first}


@simulated(seeds=range(2))
async def test_unfenced_leader_continues_and_contradictions_are_found(sim: Simulation) -> None:
    """I5: with fencing off, an isolated leader can write asynchronously; when another member leads, that is a split
    brain.
    """
    first, others = await led(sim, election_fencing_mode="off")
    sim.isolate(first)
    waiting = await Pending(sim, first, 1).seen_by(first)
    second = await elect(sim, others)
    assert sorted(leaders(sim)) == sorted((first, second))
    assert not sim.node(first).info()["ro"]
    assert waiting.is_waiting
    sim.heal()
    assert await elect(sim) == second
    assert await waiting.code() == ROLLED_BACK
    await converge(sim)
    assert held(sim, first, SYNC) == {}


# --- terms ---


@simulated()
async def test_missed_term_is_sent_with_the_subscription(sim: Simulation) -> None:
    """I6: elections are off, and there is no other row to send."""
    await start_members(sim, owner="")
    heard: list[RaftState] = []

    def note(packet: bytes) -> bytes:
        row = decode_row(packet)
        if row.type == RequestType.RAFT:
            state = decode_control(row.type, row.body)
            assert isinstance(state, RaftState)
            heard.append(state)
        return packet

    await sim.stop("b")
    for _ in range(3):
        await promote(sim, "a")
        await demote(sim, "a")
    term = election(sim, "a")["term"]
    assert term == 7
    async with Middleman(sim, "a") as middle:
        middle.on_answer = note
        await sim.restart("b", replication=[middle.uri])
        await sim.until(lambda: election(sim, "b")["term"] == term)
        assert heard[0].term == term, "before any row of the log"
    await sim.restart("b", replication=[])
    assert election(sim, "b")["term"] == term


# --- rows that the new leader rolled back ---


@simulated(seeds=range(2))
async def test_rolled_back_rows_of_an_old_leader_do_not_return(sim: Simulation) -> None:
    """I8: neither when the old leader returns nor when it is elected again; members that had the rows have dropped
    them.
    """
    first, others = await led(sim, election_fencing_mode="off")
    await insert(sim, first, 1, space=SYNC)
    await converge(sim)
    await reconfigure(sim, first, replication_synchro_quorum=3)
    second, witness = others
    await sim.stop(second)
    pending = await Pending(sim, first, 2).seen_by(witness)
    await sim.stop(witness)
    sim.kill(first)
    with pytest.raises(Crashed):
        await pending.code()
    # Members that know the row do not vote: a quorum of 1 replaces other voters.
    await sim.restart(second, replication_synchro_quorum=1, replication_connect_timeout=1)
    assert await elect(sim, [second]) == second
    await sim.restart(witness, election_mode="voter")
    await sim.until(lambda: held(sim, witness, SYNC) == {1: first})
    assert not queue(sim, witness)["len"]
    await sim.restart(first, election_mode="voter")
    await sim.until(lambda: held(sim, first, SYNC) == {1: first} and vclock(sim, first) == vclock(sim, second))
    await insert(sim, second, 3, space=SYNC)
    await converge(sim)
    await reconfigure(sim, first, election_mode="candidate")
    await reconfigure(sim, second, election_mode="voter")
    assert await elect(sim) == first
    await insert(sim, first, 4, space=SYNC)
    await converge(sim)
    await sim.until(lambda: all_follow_all(sim))
    for name in NAMES:
        assert held(sim, name, SYNC) == {1: first, 3: second, 4: first}


# --- a leader that hangs ---


@simulated(seeds=range(2))
async def test_hanging_leader_with_open_connections_is_replaced(sim: Simulation) -> None:
    """I9: connections stay open, and no bytes arrive; the others notice by their timeouts."""
    first, others = await led(sim)
    await insert(sim, first, 1, space=SYNC)
    before = sim.now
    sim.crash(first)
    second = await elect(sim, others)
    assert DEATH - 1 < sim.now - before < DEATH + 8
    await insert(sim, second, 2, space=SYNC)
    await sim.restart(first)
    assert await elect(sim) == second
    await converge(sim)


@simulated(seeds=range(2))
async def test_leader_with_a_failing_log_is_replaced(sim: Simulation) -> None:
    """I9: the leader still sends heartbeats, so no other member would replace it; no member has rejected rows."""
    first, others = await led(sim)
    sim.storage(first).broken.add("append")
    with pytest.raises(FlowstoneError):
        await insert(sim, first, 1, space=SYNC)
    second = await elect(sim, others)
    sim.storage(first).broken.clear()
    await reconfigure(sim, first, replication=uris(sim, *NAMES))  # its applier may have stopped
    await insert(sim, second, 2, space=SYNC)
    assert await elect(sim) == second
    await sim.until(lambda: held(sim, first, SYNC) == held(sim, second, SYNC) == {2: second})
