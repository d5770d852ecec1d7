"""Linearizable reads in simulated replica sets return everything committed before they began, on every member.

The owner of the queue writes growing numbers to one register, and all members read it, while links become black holes,
break and heal, and leaders change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import pytest

from flowstone.box.system import CLUSTER_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from tests.conftest import FULL
from tests.simulation.cluster import NAMES, all_follow_all, converge, start_set, vclock
from tests.simulation.simulation import Simulation, simulated

SPACE = "register"


async def start(sim: Simulation, **options: Any) -> None:
    """Start three members; "a" owns the queue, and the register is 0."""
    await start_set(sim, **options)
    await sim.on("a", _make_register(sim))
    await sim.until(lambda: all_follow_all(sim))
    await converge(sim)


async def _make_register(sim: Simulation) -> None:
    node = sim.node("a")
    await node.promote()
    space = await node.create_space(SPACE, is_sync=True)
    await space.create_index("primary")
    await space.replace((0, 0))


async def write(sim: Simulation, name: str, number: int) -> None:
    await sim.on(name, sim.node(name).space(SPACE).replace((0, number)))


async def read(sim: Simulation, name: str, *, timeout: float = 60.0) -> int:
    """Return what a linearizable transaction on this member reads."""

    async def transact() -> int:
        async with sim.node(name).transaction("linearizable", timeout=timeout) as transaction:
            found = transaction.space(SPACE).get(0)
            assert found is not None
            return int(found[1])

    return await sim.on(name, transact())


def held(sim: Simulation, name: str) -> int:
    """Return what a plain read on this member returns."""
    found = sim.node(name).space(SPACE).get(0)
    assert found is not None
    return int(found[1])


async def is_waiting(sim: Simulation, work: asyncio.Future[int]) -> bool:
    await sim.sleep(0.3)
    return not work.done()


@simulated(seeds=range(3))
async def test_every_member_of_an_idle_set_serves_reads(sim: Simulation) -> None:
    await start(sim)
    assert [await read(sim, name) for name in NAMES] == [0, 0, 0]


@simulated(seeds=range(3))
async def test_member_cut_off_from_the_owner_reads_committed_data(sim: Simulation) -> None:
    await start(sim)
    sim.black_hole("a", "c", is_one_way=True)
    sim.black_hole("b", "c", is_one_way=True)
    await write(sim, "a", 1)
    assert held(sim, "c") == 0, "the member already knows of the write"
    sim.heal("b", "c")
    assert await read(sim, "c") == 1
    sim.heal()


@simulated(seeds=range(3))
async def test_read_on_an_isolated_member_waits_until_it_is_reconnected(sim: Simulation) -> None:
    await start(sim)
    sim.isolate("c", is_quiet=sim.random.random() < 0.5)
    await write(sim, "a", 1)
    reading = asyncio.ensure_future(read(sim, "c"))
    assert await is_waiting(sim, reading)
    assert held(sim, "c") == 0
    await sim.sleep(sim.random.uniform(0, 20))
    assert not reading.done()
    sim.heal()
    assert await reading == 1


@simulated(seeds=range(3))
async def test_read_times_out_without_a_quorum(sim: Simulation) -> None:
    await start(sim)
    sim.isolate("c", is_quiet=sim.random.random() < 0.5)
    begun = sim.now
    with pytest.raises(errors.System, match="timed out"):
        await read(sim, "c", timeout=2.5)
    assert sim.now - begun == pytest.approx(2.5, abs=0.1)
    assert await read(sim, "a") == await read(sim, "b") == 0


@simulated(seeds=range(3))
async def test_read_waits_for_pending_transactions(sim: Simulation) -> None:
    await start(sim)
    await sim.on("a", sim.node("a").reconfigure(replication_synchro_quorum=3, replication_synchro_timeout=100))
    sim.isolate("c")
    writing = asyncio.ensure_future(write(sim, "a", 1))
    await sim.until(lambda: vclock(sim, "a") == vclock(sim, "b"))
    for name in "ab":
        with pytest.raises(errors.System, match="timed out"):
            await read(sim, name, timeout=1)
    assert sim.node("b").info()["synchro"]["queue"]["len"] == 1
    await sim.on("a", sim.node("a").reconfigure(replication_synchro_quorum=2))
    assert [await read(sim, name) for name in "ba"] == [1, 1]
    await writing


@simulated(seeds=range(3))
async def test_read_omits_a_transaction_rolled_back_while_it_waits(sim: Simulation) -> None:
    await start(sim)
    await sim.on("a", sim.node("a").reconfigure(replication_synchro_quorum=3, replication_synchro_timeout=2))
    sim.isolate("c")
    writing = asyncio.ensure_future(write(sim, "a", 1))
    await sim.until(lambda: vclock(sim, "a") == vclock(sim, "b"))
    assert await read(sim, "b") == 0
    with pytest.raises(errors.SyncQuorumTimeout):
        await writing


@simulated(seeds=range(3))
async def test_read_after_the_quorum_was_raised_returns_earlier_commits(sim: Simulation) -> None:
    await start(sim)
    sim.isolate("c", is_quiet=sim.random.random() < 0.5)
    await write(sim, "a", 1)
    await sim.on("c", sim.node("c").reconfigure(replication_synchro_quorum=3))
    reading = asyncio.ensure_future(read(sim, "c"))
    assert await is_waiting(sim, reading)
    sim.heal()
    assert await reading == 1


@simulated()
async def test_member_unaware_of_a_new_member_reads_its_commits(sim: Simulation) -> None:
    """In a set of two, the quorum is both members, so each has everything committed; in a set of three it may not."""
    await sim.start("a")
    await sim.start("b", replication=[sim.uri("a")])
    await sim.on("a", sim.node("a").reconfigure(replication=[sim.uri("b")]))
    await sim.on("a", _make_register(sim))
    await converge(sim, "ab")
    sim.black_hole("a", "b")
    await sim.start("c", replication=[sim.uri("a"), sim.uri("b")])
    await write(sim, "a", 1)
    reading = asyncio.ensure_future(read(sim, "b"))
    assert await is_waiting(sim, reading)
    sim.heal()
    assert await reading == 1


@simulated(seeds=range(3))
async def test_anonymous_replica_refuses_linearizable_reads(sim: Simulation) -> None:
    await start(sim)
    await sim.start("x", replication=[sim.uri("a")], replication_anon=True, read_only=True)
    with pytest.raises(errors.Unsupported, match="does not support linearizable"):
        await read(sim, "x")


@simulated(seeds=range(3))
async def test_expelled_member_refuses_linearizable_reads_and_says_why(sim: Simulation) -> None:
    await start(sim)
    number = sim.node("c").info()["id"]
    await sim.on("a", sim.node("a").space(CLUSTER_ID).delete(number))
    await sim.until(lambda: sim.node("c").info()["id"] is None, what="c knows that it was expelled")
    with pytest.raises(errors.LocalInstanceIdIsReadOnly, match="expelled"):
        await read(sim, "c")


@simulated(seeds=range(3))
async def test_deposed_owner_reads_commits_of_its_successor(sim: Simulation) -> None:
    await start(sim)
    sim.isolate("a", is_quiet=sim.random.random() < 0.5)
    await sim.on("b", sim.node("b").promote())
    await write(sim, "b", 1)
    assert held(sim, "a") == 0
    assert sim.node("a").info()["synchro"]["queue"]["owner"] == sim.node("a").info()["id"], (
        "the member already knows of the change"
    )
    reading = asyncio.ensure_future(read(sim, "a"))
    assert await is_waiting(sim, reading)
    sim.heal()
    assert await reading == 1
    assert sim.node("a").info()["synchro"]["queue"]["owner"] == sim.node("b").info()["id"]


@simulated(seeds=range(3))
async def test_members_that_return_during_a_read_count(sim: Simulation) -> None:
    await start(sim)
    for name in "bc":
        await sim.stop(name)
    reading = asyncio.ensure_future(read(sim, "a"))
    assert await is_waiting(sim, reading)
    await sim.restart(sim.random.choice("bc"))
    assert await reading == 0


@dataclass
class Register:
    """The written and read values, and whether they are linearizable."""

    begun: int = 0
    committed: int = 0
    seen: int = 0
    """The largest value of a read that has ended."""
    reads: int = 0

    async def write(self, work: Awaitable[None], number: int) -> None:
        self.begun = number
        await work
        self.committed = number

    async def read(self, work: Awaitable[int]) -> None:
        least = max(self.committed, self.seen)
        found = await work
        assert least <= found <= self.begun, f"read {found}, but {least} was known before it began"
        self.seen = max(self.seen, found)
        self.reads += 1


async def disturb(sim: Simulation, until: float) -> None:
    """Break and heal links between pairs of members, one after another."""
    while sim.now < until:
        one, other = sim.random.sample(NAMES, 2)
        if sim.random.random() < 0.3:
            sim.cut(one, other)
        else:
            sim.black_hole(one, other, is_one_way=sim.random.random() < 0.5)
        await sim.sleep(sim.random.expovariate(1))
        sim.heal()
        await sim.sleep(sim.random.expovariate(2))


async def promote(sim: Simulation, name: str) -> None:
    async with asyncio.timeout(5):
        await sim.on(name, sim.node(name).promote())


async def write_on(sim: Simulation, register: Register, until: float) -> None:
    """Write growing numbers to the leader; after a failure, or occasionally, promote another member."""
    leader, number = "a", 0
    while sim.now < until:
        number += 1
        try:
            async with asyncio.timeout(3):
                await register.write(write(sim, leader, number), number)
        except (FlowstoneError, TimeoutError) as error:
            sim.trace.note(leader, f"does not write {number}: {error!r}")
            leader = await find_leader(sim)
        if sim.random.random() < 0.05:
            leader = await find_leader(sim)
        await sim.sleep(sim.random.expovariate(20))


async def find_leader(sim: Simulation) -> str:
    while True:
        name = sim.random.choice(NAMES)
        try:
            await promote(sim, name)
        except (FlowstoneError, TimeoutError) as error:
            sim.trace.note(name, f"does not lead: {error!r}")
            await sim.sleep(sim.random.uniform(0, 1))
        else:
            return name


async def read_on(sim: Simulation, register: Register, name: str, until: float) -> None:
    while sim.now < until:
        try:
            await register.read(read(sim, name, timeout=3))
        except errors.System as error:
            sim.trace.note(name, f"does not read: {error}")
        await sim.sleep(sim.random.expovariate(20))


@simulated(seeds=range(40 if FULL else 4))
async def test_no_read_is_stale(sim: Simulation) -> None:
    await start(sim, election_mode="manual")
    register, end = Register(), sim.now + 30
    await asyncio.gather(
        disturb(sim, end), write_on(sim, register, end), *(read_on(sim, register, name, end) for name in NAMES)
    )
    assert register.committed > 20
    assert register.reads > 50
    sim.heal()
    await write(sim, await find_leader(sim), register.begun + 1)
    assert {await read(sim, name) for name in NAMES} == {register.begun + 1}
    await converge(sim)
