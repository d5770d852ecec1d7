"""Tarantool #11180: nine bugs of the queue of synchronous transactions in one ticket, each tested on nodes.

There, transactions that waited for room in the queue or in the log were already visible, and code that considered only
written rows ignored them. Here no transaction waits for room: a full queue rejects it. Transactions pending for the log
or for a verdict must not be ignored either. Rows that could be applied twice increment a counter, which reveals it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.node.changes import Change
from tests.scenarios.queues import NEVER, PATIENCE, SYNC, Pending, queue, start_members, told
from tests.scenarios.simulated_members import files, held, insert, reconfigure, snapshot, uris
from tests.simulation.cluster import converge, follows, upstream
from tests.simulation.simulation import Simulation, simulated

COUNTER = 1
JOINER = "7c025e42-2394-11e7-aacf-0242ac110002"
SLOW = (0.2, 0.3)
"""Seconds that a worker of a machine with a slow disk takes."""


async def add(sim: Simulation, name: str, space: str = SYNC) -> None:
    """Increment the counter of a space."""

    async def write() -> None:
        await sim.node(name).space(space).update(COUNTER, [("+", 1, 1)])

    await sim.on(name, write())


def counted(sim: Simulation, name: str) -> int:
    found = sim.node(name).space(SYNC).get(COUNTER)
    assert found is not None
    return int(found[1])


async def start_counting(sim: Simulation, names: str = "a", **options: Any) -> None:
    """Start members that sync every write; "a" owns the queue, and the counter is 0."""
    await start_members(sim, names, wal_mode="fsync", replication_synchro_quorum=1, **options)

    async def begin() -> None:
        await sim.node("a").space(SYNC).insert((COUNTER, 0))

    await sim.on("a", begin())
    await converge(sim, names)


def outcomes(results: list[BaseException | None]) -> list[bool]:
    """Return, for each write, whether it was committed; a failure must have a reason."""
    assert all(result is None or isinstance(result, FlowstoneError) for result in results)
    return [result is None for result in results]


# --- a full queue ---


@simulated(seeds=range(2))
async def test_writers_that_wait_for_a_full_queue_keep_the_order_of_the_others(sim: Simulation) -> None:
    """Tarantool #11180: transactions that waited for room were written in wake-up order."""
    await start_members(sim, wal_mode="fsync", replication_synchro_queue_max_size=100)
    committed: list[int] = []

    def note(changes: tuple[Change, ...]) -> None:
        committed.extend(change.fields[0] for change in changes if change.fields)

    sim.node("a").on_commit(note)
    sim.machine("a").blocking_seconds = SLOW
    begun: list[int] = []

    async def write(key: int) -> None:
        await sim.sleep(sim.random.uniform(0, 3))
        begun.append(key)
        await insert(sim, "a", key, space=SYNC)

    done = outcomes(await asyncio.gather(*map(write, range(60)), return_exceptions=True))
    acknowledged = {key for key in range(60) if done[key]}
    assert 0 < len(acknowledged) < 60, "some writes were rejected, but not all"
    assert committed == [key for key in begun if key in acknowledged]
    await converge(sim, "ab")
    assert sorted(held(sim, "b", SYNC)) == sorted(acknowledged)


@simulated(seeds=range(2))
async def test_rejected_write_does_not_undo_later_writes(sim: Simulation) -> None:
    """Tarantool #11180: a transaction that stopped waiting for room was undone alone, and newer changes of the
    same tuple were kept.
    """
    await start_counting(sim, "ab", replication_synchro_queue_max_size=100)
    sim.machine("a").blocking_seconds = SLOW

    async def write() -> None:
        await sim.sleep(sim.random.uniform(0, 3))
        await add(sim, "a")

    done = outcomes(await asyncio.gather(*(write() for _ in range(60)), return_exceptions=True))
    assert 0 < sum(done) < 60
    await converge(sim, "ab")
    assert counted(sim, "a") == counted(sim, "b") == sum(done)
    await sim.restart("a")
    assert counted(sim, "a") == sum(done)


# --- a log that fails ---


@pytest.mark.parametrize("quorum", [1, NEVER], ids=["decided at once", "in the queue"])
@simulated(seeds=range(3))
async def test_failed_write_rolls_back_all_newer_ones(sim: Simulation, quorum: int) -> None:
    """Tarantool #11180: the log rolled back its queued rows, but not those still waiting to be queued."""
    await start_counting(sim, replication_synchro_timeout=5)
    await reconfigure(sim, "a", replication_synchro_quorum=quorum)
    sim.machine("a").blocking_seconds = SLOW

    async def write(after: float) -> None:
        await sim.sleep(after)
        await add(sim, "a")

    writing = [asyncio.ensure_future(write(number / 100)) for number in range(20)]
    await sim.sleep(0.1)
    sim.storage("a").broken.add("append")
    done = outcomes(await asyncio.gather(*writing, return_exceptions=True))
    assert not all(done)
    sim.storage("a").broken.clear()
    sim.machine("a").blocking_seconds = (0.001, 0.002)
    assert counted(sim, "a") == sum(done)
    await reconfigure(sim, "a", replication_synchro_quorum=1)
    await add(sim, "a")
    assert counted(sim, "a") == sum(done) + 1
    await sim.restart("a")
    assert counted(sim, "a") == sum(done) + 1


# --- snapshots ---


@simulated(seeds=range(3))
async def test_snapshot_states_the_end_of_its_data(sim: Simulation) -> None:
    """Tarantool #11180: the snapshot contained rows pending for the log, under the earlier position; a restart
    applied them again.
    """
    await start_counting(sim, "ab")
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    sim.machine("a").blocking_seconds = SLOW
    before = len(files(sim, "a", ".snap"))
    writing = [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    await sim.sleep(sim.random.uniform(0, 0.3))
    writing += [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    made = asyncio.ensure_future(snapshot(sim, "a"))
    writing += [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    await asyncio.gather(made, *writing)
    assert len(files(sim, "a", ".snap")) == before + 1
    sim.crash("a")
    sim.machine("a").blocking_seconds = (0.001, 0.002)
    await sim.restart("a")
    await converge(sim, "ab")
    assert counted(sim, "a") == counted(sim, "b") == 9


# --- joins ---


@simulated(seeds=range(3))
async def test_joining_replica_gets_rows_pending_for_the_log_once(sim: Simulation) -> None:
    """Tarantool #11180: the position sent to it did not include rows in its data that were not in the log yet."""
    await start_counting(sim)
    sim.machine("a").blocking_seconds = SLOW
    writing = [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    joining = asyncio.ensure_future(sim.start("b", replication=uris(sim, "a")))
    while not joining.done():
        writing.append(asyncio.ensure_future(add(sim, "a")))
        await sim.sleep(0.05)
    await asyncio.gather(joining, *writing)
    await converge(sim, "ab")
    assert counted(sim, "a") == counted(sim, "b") == len(writing)


async def join(sim: Simulation) -> None:
    """Retry, as an operator does, until the master could write everything in the join."""
    while True:
        try:
            await sim.start("b", replication=uris(sim, "a", "b"), instance_uuid=JOINER)
        except (errors.WalIo, errors.SyncRollback):
            await sim.sleep(0.1)
        else:
            return


@simulated(seeds=range(3))
async def test_joining_replica_gets_no_row_rejected_by_the_log_during_the_join(sim: Simulation) -> None:
    """Tarantool #11180, its bug 7: a join waited for the log, and did not notice that the log had failed."""
    await start_counting(sim, replication_synchro_timeout=PATIENCE)
    sim.machine("a").blocking_seconds = SLOW
    joining = asyncio.ensure_future(join(sim))
    done = 0
    for _ in range(4):
        writing = [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
        await sim.sleep(sim.random.uniform(0, 0.5))
        sim.storage("a").broken.add("append")
        await sim.sleep(1)
        sim.storage("a").broken.clear()
        done += sum(outcomes(await asyncio.gather(*writing, return_exceptions=True)))
    sim.machine("a").blocking_seconds = (0.001, 0.002)
    await joining
    await add(sim, "a")
    await converge(sim, "ab")
    assert counted(sim, "a") == counted(sim, "b") == done + 1


@simulated(seeds=range(3))
async def test_joining_replica_gets_no_row_rolled_back_during_the_join(sim: Simulation) -> None:
    """Tarantool #11180: rows undone while a join waited were in its data, and remained there."""
    await start_counting(sim, replication_synchro_timeout=PATIENCE)
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    waiting = [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    joining = asyncio.ensure_future(sim.start("b", replication=uris(sim, "a")))
    await sim.sleep(2)
    assert not joining.done()
    await reconfigure(sim, "a", replication_synchro_timeout=0.01)
    for each in waiting:
        with pytest.raises(errors.TarantoolError):
            await each
    await reconfigure(sim, "a", replication_synchro_timeout=PATIENCE, replication_synchro_quorum=1)
    await joining
    await add(sim, "a")
    await converge(sim, "ab")
    assert counted(sim, "a") == counted(sim, "b") == 1


@pytest.mark.parametrize("seconds", [0, 0.5])
@simulated()
async def test_joining_replica_gets_no_verdict_on_rows_that_it_lacks(sim: Simulation, seconds: float) -> None:
    """Tarantool #11180: rows confirmed together with newer ones resulted in a position beyond the joining
    replica's data.
    """
    await start_counting(sim)
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    old = [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    joining = asyncio.ensure_future(sim.start("b", replication=uris(sim, "a"), wal_mode="fsync"))
    await sim.sleep(seconds)
    new = [asyncio.ensure_future(add(sim, "a")) for _ in range(3)]
    await sim.sleep(0.5)
    assert not joining.done()
    await reconfigure(sim, "a", replication_synchro_quorum=1)
    await asyncio.gather(joining, *old, *new)
    await add(sim, "a")
    await converge(sim, "ab")
    assert follows(sim, "b", "a")
    assert counted(sim, "a") == counted(sim, "b") == 7
    assert not queue(sim, "b")["len"]


@simulated(seeds=range(3))
async def test_known_verdict_is_no_contradiction_for_a_joining_replica(sim: Simulation) -> None:
    """Tarantool #11180, its bug 9: the CONFIRM after its position referred to rows in its data, and stopped it."""
    await start_members(sim, "a", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 1).seen_by("a")
    joining = asyncio.ensure_future(sim.start("b", replication=uris(sim, "a")))
    await sim.sleep(2)
    before = sim.node("a").info()["vclock"][1]
    await reconfigure(sim, "a", replication_synchro_quorum=1)
    assert await pending.code() == 0
    await joining
    assert told(sim, "a", 1, before)[0] == "+1 confirm 1+0", "the CONFIRM is after the position of the join"
    await insert(sim, "a", 2, space=SYNC)
    await converge(sim, "ab")
    assert upstream(sim, "b", "a")["status"] == "follow"
    assert held(sim, "b", SYNC) == {1: "a", 2: "a"}
