"""Tarantool #5229, #5441, #6099, #10087, #11028, #12018, #12076 and #13085: bugs of its replication, tested on nodes.

Each docstring states the bug. #11180 has a file of its own; others are covered by earlier scenarios, see the list of
this package.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from tests.scenarios.queues import (
    NEVER,
    PATIENCE,
    SYNC,
    Pending,
    last_lsn,
    owned_by,
    promote,
    queue,
    start_members,
    told,
)
from tests.scenarios.simulated_members import held, insert, make_space, reconfigure, snapshot, uris
from tests.simulation.cluster import NAMES, all_follow_all, converge, follows, start_set, vclock
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, election, leaders

FIVE = ("a", "b", "c", "d", "e")
QUORUM_TIMEOUT = 216


async def led(sim: Simulation, names: tuple[str, ...], **options: Any) -> str:
    """Start candidates with a synchronous space; return the leader."""
    await start_set(sim, names, election_mode="candidate", replication_timeout=0.5, **options)
    leader = await elect(sim, names)
    await sim.until(lambda: all_follow_all(sim, names))
    await make_space(sim, leader, SYNC, is_sync=True)
    await converge(sim, names)
    return leader


async def part_and_heal(sim: Simulation, names: tuple[str, ...], rounds: int) -> None:
    """Partition the set into two, and heal it."""
    for _ in range(rounds):
        some = sim.random.sample(names, len(names) // 2)
        for one in some:
            for other in names:
                if other not in some:
                    sim.random.choice([sim.cut, sim.black_hole])(one, other)
        await sim.sleep(sim.random.uniform(2, 10))
        sim.heal()
        await sim.sleep(sim.random.uniform(0, 5))


async def read(sim: Simulation, name: str, isolation: str, timeout: float = 5) -> list[Any]:
    """Read the synchronous space in a separate transaction."""

    async def transact() -> list[Any]:
        async with sim.node(name).transaction(isolation, timeout=timeout) as transaction:
            return list(transaction.space(SYNC).select())

    return await sim.on(name, transact())


# --- bugs found by Jepsen ---


@simulated(seeds=range(2))
async def test_no_value_of_a_set_is_lost_in_partitions(sim: Simulation) -> None:
    """Tarantool #5441: acknowledged values were missing after partitions, and rejected ones were present."""
    await led(sim, FIVE, replication_synchro_timeout=3)
    added: list[int] = []
    undone: list[int] = []

    async def add(first: int) -> None:
        number = first
        while True:
            await sim.sleep(0.3)
            number += 3
            if not (found := leaders(sim, FIVE)):
                continue
            with suppress(errors.Readonly):
                try:
                    await insert(sim, sim.random.choice(found), number, space=SYNC)
                except (errors.SyncQuorumTimeout, errors.SyncRollback):
                    undone.append(number)
                else:
                    added.append(number)

    adding = asyncio.gather(*map(add, range(3)))
    await part_and_heal(sim, FIVE, 4)
    assert not adding.done(), "the run ends at the first unexpected answer"
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    await elect(sim, FIVE)
    await converge(sim, FIVE)
    assert len(added) > 50
    for name in FIVE:
        found = held(sim, name, SYNC)
        assert set(added) <= set(found)
        assert not set(undone) & set(found)


@simulated(seeds=range(2))
async def test_total_is_constant_in_partitions(sim: Simulation) -> None:
    """Tarantool #6099: of 788 reads of a bank 330 had a wrong total, and accounts went below zero."""
    total, accounts = 50, range(5)
    leader = await led(sim, NAMES, replication_synchro_timeout=3)

    async def open_accounts() -> None:
        async with sim.node(leader).transaction() as transaction:
            for account in accounts:
                transaction.space(SYNC).insert([account, total // len(accounts)])

    async def transfer(name: str) -> None:
        source, target = sim.random.sample(accounts, 2)
        amount = sim.random.randint(1, 5)
        async with sim.node(name).transaction() as transaction:
            space = transaction.space(SYNC)
            balance = space.get(source)
            assert balance is not None
            if balance[1] >= amount:
                space.update(source, [("-", 1, amount)])
                space.update(target, [("+", 1, amount)])

    async def keep(work: Any, count: list[int]) -> None:
        while True:
            await sim.sleep(0.2)
            with suppress(FlowstoneError, Crashed):
                await work()
                count.append(1)

    async def move() -> None:
        found = sim.random.choice(leaders(sim) or NAMES)
        await sim.on(found, transfer(found))

    async def look() -> None:
        isolation = sim.random.choice(["read-confirmed", "read-committed", "linearizable"])
        balances = [row[1] for row in await read(sim, sim.random.choice(NAMES), isolation)]
        assert sum(balances) == total, isolation
        assert min(balances) >= 0

    await sim.on(leader, open_accounts())
    await converge(sim)
    moved: list[int] = []
    seen: list[int] = []
    working = asyncio.gather(*(keep(move, moved) for _ in range(2)), *(keep(look, seen) for _ in range(2)))
    await part_and_heal(sim, NAMES, 4)
    assert not working.done(), "the run ends at the first wrong total"
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await elect(sim)
    await converge(sim)
    assert min(len(moved), len(seen)) > 20
    for name in NAMES:
        assert sum(row[1] for row in await read(sim, name, "linearizable")) == total


@pytest.mark.parametrize("isolation", ["read-confirmed", "linearizable"])
@simulated()
async def test_unconfirmed_rows_are_read_by_no_member_even_after_a_restart(sim: Simulation, isolation: str) -> None:
    """Tarantool #5229 (and #5610): replicas, and a restarted owner, showed rows without a quorum."""
    await start_members(sim, "abc", wal_mode="fsync", replication_synchro_quorum=2)
    await insert(sim, "a", 1, space=SYNC)
    await converge(sim, "abc")
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 2).seen_by("b", "c")

    async def keys(name: str) -> list[int]:
        with suppress(errors.System):  # a linearizable transaction waits for the verdict until its timeout
            return [row[0] for row in await read(sim, name, isolation, timeout=2)]
        return [1]

    assert [await keys(name) for name in "abc"] == [[1], [1], [1]]
    sim.crash("a")
    with pytest.raises(Crashed):
        await pending.code()
    await sim.restart("a", replication_synchro_quorum=NEVER)
    assert [await keys(name) for name in "abc"] == [[1], [1], [1]]
    for name in "abc":
        await reconfigure(sim, name, replication_synchro_quorum=2, replication_synchro_timeout=1)
    await promote(sim, "a")
    await insert(sim, "a", 3, space=SYNC)
    await converge(sim, "abc")
    assert [await keys(name) for name in "abc"] == [[1, 2, 3]] * 3


# --- elections and promotions ---


@pytest.mark.parametrize("is_witness", [False, True], ids=["dead", "heard by the one that is off"])
@simulated(seeds=range(2))
async def test_member_with_elections_off_does_not_prevent_an_election(sim: Simulation, is_witness: bool) -> None:
    """Tarantool #12018: it kept reporting that it heard the leader, so no member ever started an election."""
    names = ("a", "b", "c", "d")
    peers = uris(sim, *names)
    modes = dict.fromkeys("abc", "candidate") | {"d": "off"}
    options = {"replication_timeout": 0.5, "replication_synchro_quorum": 2}
    await asyncio.gather(
        *(sim.start(name, replication=peers, election_mode=mode, **options) for name, mode in modes.items())
    )
    first = await elect(sim, "abc")
    await sim.until(lambda: all_follow_all(sim, names) and election(sim, "d")["leader"] != 0)
    others = [name for name in "abc" if name != first]
    if is_witness:
        for other in others:
            sim.black_hole(first, other)
    else:
        sim.kill(first)
    second = await elect(sim, others)
    assert election(sim, second)["term"] > 2


@simulated(seeds=range(2))
async def test_pending_promotion_ends_when_another_member_clears_the_queue(sim: Simulation) -> None:
    """Tarantool #12076: the winner waited for ever for a quorum on rows that another member had decided meanwhile."""
    await start_members(sim, "ab", replication_synchro_quorum=3)
    await reconfigure(sim, "b", election_mode="manual")
    pending = await Pending(sim, "a", 1).seen_by("a", "b")
    await reconfigure(sim, "a", election_mode="manual")
    winning = asyncio.ensure_future(promote(sim, "a"))
    await sim.until(lambda: election(sim, "a")["state"] == "leader")
    assert sim.node("a").info()["ro"], "three must have what waits in the queue, and there are two"
    await reconfigure(sim, "b", replication_synchro_quorum=1)
    await promote(sim, "b")
    assert await owned_by(sim, "b") == election(sim, "b")["term"]
    assert await pending.code() == 0
    with suppress(errors.TarantoolError):
        await asyncio.wait_for(winning, 10)
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    await promote(sim, "a")
    await owned_by(sim, "a")
    await sim.until(lambda: not sim.node("a").info()["ro"])
    await insert(sim, "a", 2, space=SYNC)
    await converge(sim, "ab")
    assert held(sim, "b", SYNC) == {1: "a", 2: "a"}


@simulated()
async def test_waiting_leader_claims_the_queue_after_the_quorum_is_lowered(sim: Simulation) -> None:
    """Tarantool #11574: it waited for the quorum set at its start, and could not be helped."""
    await start_members(sim, "ab", replication_synchro_quorum=3)
    pending = await Pending(sim, "a", 1).seen_by("a", "b")
    for name in "ab":
        await reconfigure(sim, name, election_mode="manual")
    winning = asyncio.ensure_future(promote(sim, "a"))
    await sim.until(lambda: election(sim, "a")["state"] == "leader")
    assert queue(sim, "a")["len"] == 1
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    await winning
    assert await pending.code() == 0
    await sim.until(lambda: not sim.node("a").info()["ro"])


@simulated(seeds=range(2))
async def test_promotion_ends_even_if_only_others_know_the_winner(sim: Simulation) -> None:
    """Tarantool #10836: a candidate that could not reach the winner waited for a result for ever."""
    await start_members(sim, "abc", owner="", election_timeout=2, replication_timeout=0.5)
    for name in "abc":
        await reconfigure(sim, name, election_mode="manual")
    sim.black_hole("a", "c")
    await sim.sleep(3)
    outcomes = await asyncio.wait_for(asyncio.gather(promote(sim, "a"), promote(sim, "c"), return_exceptions=True), 60)
    assert all(outcome is None or isinstance(outcome, errors.TarantoolError) for outcome in outcomes)
    sim.heal()
    await sim.until(lambda: all_follow_all(sim))
    await promote(sim, "b")
    assert await elect(sim) == "b"


# --- members and quorums ---


@simulated(seeds=range(2))
async def test_joining_replica_counts_for_the_quorum_once_it_can_acknowledge(sim: Simulation) -> None:
    """Tarantool #10087: the quorum grew with the row that registers a member, which that member could not
    acknowledge.
    """
    await start_members(sim, "abc")
    sim.kill("c")
    pending = [Pending(sim, "a", key) for key in range(5)]
    joining = asyncio.ensure_future(
        sim.start("d", replication=uris(sim, *"abd"), replication_synchro_timeout=PATIENCE, bootstrap_strategy="legacy")
    )
    pending += [Pending(sim, "a", key) for key in range(5, 10)]
    await joining
    assert [await each.code() for each in pending] == [0] * 10
    await insert(sim, "a", 10, space=SYNC)
    sim.kill("d")
    waiting = await Pending(sim, "a", 11).seen_by("b")
    await sim.sleep(10)
    assert waiting.is_waiting, "three of four are a quorum now"
    await sim.restart("d")
    assert await waiting.code() == 0
    await sim.restart("c", replication=uris(sim, *"abcd"))
    await converge(sim, "abcd")
    assert list(held(sim, "c", SYNC)) == list(range(12))


@simulated(seeds=range(4))
async def test_replica_that_joins_during_snapshots_misses_no_row(sim: Simulation) -> None:
    """Tarantool #11028: rows after a checkpoint were written before it, and so belonged to a position without them."""
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a", SYNC)
    sim.machine("a").blocking_seconds = (0.01, 0.1)
    is_over = False
    written: list[int] = []

    async def write(first: int) -> None:
        key = first
        while not is_over:
            await insert(sim, "a", key, space=SYNC)
            written.append(key)
            key += 4

    async def make_snapshots() -> None:
        while not is_over:
            await snapshot(sim, "a")

    working = asyncio.gather(make_snapshots(), *map(write, range(4)))
    await sim.sleep(sim.random.uniform(0, 1))
    await sim.start("b", replication=uris(sim, "a"))
    is_over = True
    await working
    await converge(sim, "ab")
    assert set(held(sim, "b", SYNC)) == set(written)


# --- rollback by timeout ---


@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
@simulated(seeds=range(2))
async def test_ack_during_the_write_of_a_rollback_confirms_nothing(sim: Simulation, dialect: str) -> None:
    """Tarantool #13085: it counted, and a CONFIRM followed the ROLLBACK of a row; both histories then merged."""
    await start_members(sim, "abc", dialect=dialect, wal_mode="fsync", replication_synchro_quorum=2)
    await insert(sim, "a", 1, space=SYNC)
    await converge(sim, "abc")
    before = last_lsn(sim, "a")
    for name in "bc":
        sim.black_hole("a", name)
    await reconfigure(sim, "a", replication_synchro_timeout=0.5)
    pending = await Pending(sim, "a", 2).seen_by("a")
    await sim.sleep(0.1)
    sim.machine("a").blocking_seconds = (0.5, 0.5)
    await sim.sleep(0.5)
    assert pending.is_waiting, "the verdict is being written"
    sim.heal()
    await pending.seen_by("b", "c")
    assert await pending.code() == QUORUM_TIMEOUT
    sim.machine("a").blocking_seconds = (0.001, 0.002)
    await sim.until(lambda: follows(sim, "b", "a") and follows(sim, "c", "a"))
    await insert(sim, "a", 3, space=SYNC)
    await converge(sim, "abc")
    story = ["+1 insert", "+2 rollback 1+1", "+3 insert", "+4 confirm 1+3"]
    for name in "abc":
        assert told(sim, name, 1, before) == story
        assert held(sim, name, SYNC) == {1: "a", 3: "a"}


@simulated(seeds=range(2))
async def test_rollback_that_contradicts_the_next_leader_is_found(sim: Simulation) -> None:
    """Tarantool #13085: a row rolled back by the old leader and confirmed by the new one merged silently."""
    await start_members(sim, "abc", wal_mode="fsync", replication_synchro_quorum=3)
    await insert(sim, "a", 1, space=SYNC)
    await converge(sim, "abc")
    sim.kill("c")
    pending = await Pending(sim, "a", 2).seen_by("b")
    sim.cut("a", "b")
    await sim.restart("c", replication=uris(sim, "b", "c"))
    sim.cut("a", "c")
    await pending.seen_by("c")
    await reconfigure(sim, "a", replication_synchro_timeout=0.1)
    assert await pending.code() == QUORUM_TIMEOUT
    await reconfigure(sim, "b", replication_synchro_quorum=2, replication_synchro_timeout=0.1)
    await promote(sim, "b")
    await sim.until(lambda: held(sim, "c", SYNC) == {1: "a", 2: "a"} and vclock(sim, "c") == vclock(sim, "b"))
    sim.heal()
    await sim.until(lambda: "Split-Brain" in message(sim, "a", "b") or "Split-Brain" in message(sim, "b", "a"))
    assert held(sim, "a", SYNC) == {1: "a"}
    assert held(sim, "b", SYNC) == {1: "a", 2: "a"}


def message(sim: Simulation, name: str, peer: str) -> str:
    """Return the reason why a member does not follow another."""
    uuid = sim.machine(peer).uuid
    members = sim.node(name).info()["replication"].values()
    return str(next(member for member in members if member["uuid"] == uuid).get("upstream", {}).get("message", ""))
