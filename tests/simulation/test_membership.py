"""Members of simulated replica sets change under load and faults: joins, registrations, conflicts, rejoins."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from flowstone import Node
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.node.upstream.upstreams import Replication
from tests.simulation.cluster import NAMES, all_follow_all, converge, is_converged, start_set, upstream
from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect, leaders, write
from tests.simulation.test_elections import make_space as make_synchronous_space
from tests.simulation.workload import SPACE_ID, Row, Writer, make_space, replace, rows

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
ATTEMPTS_MAX = 30


async def start_at_last(sim: Simulation, name: str, **options: object) -> Node:
    """Start a node with the same UUID again and again until it runs."""
    uuid = str(UUID(bytes=sim.random.randbytes(16), version=4))
    work = sim.start(name, instance_uuid=uuid, **options)
    for _ in range(ATTEMPTS_MAX):
        try:
            return await work
        except (Crashed, FlowstoneError) as error:
            sim.trace.note(name, f"does not start: {error!r}")
        await sim.sleep(sim.random.uniform(0, 1))
        work = sim.restart(name)
    work.close()
    raise AssertionError(f"{name} never starts")


async def write_until(sim: Simulation, writer: Writer, name: str, deadline: float) -> None:
    while sim.now < deadline:
        if sim.is_running(name):
            await writer.run(name, 10, timeout=3)
        await sim.sleep(0.3)


@DIALECTS
@simulated(seeds=range(4))
async def test_replicas_join_a_writing_master_while_all_of_them_crash(sim: Simulation, dialect: str) -> None:
    await sim.start("a", dialect=dialect, wal_mode="fsync", wal_max_size=20_000)
    await make_space(sim, "a")
    writers = [Writer(sim, number) for number in range(2)]
    await writers[0].run("a", 50)
    writing = asyncio.gather(*(write_until(sim, writer, "a", sim.now + 8) for writer in writers))
    options = {"dialect": dialect, "replication": [sim.uri("a")], "wal_mode": "fsync", "replication_connect_timeout": 3}
    if dialect == "2.11":
        options["bootstrap_strategy"] = "legacy"
    joining = asyncio.gather(*(start_at_last(sim, name, **options) for name in "bc"))
    for _ in range(3):
        await sim.sleep(sim.random.uniform(0, 0.4))
        victim = sim.random.choice(NAMES)
        if sim.is_running(victim):
            sim.crash(victim, sim.random.choice(list(Loss)))
        await sim.sleep(sim.random.uniform(0, 2))
        if not sim.is_running("a"):
            await sim.restart("a")
    await joining
    await writing
    for name in NAMES:
        if not sim.is_running(name):
            await sim.restart(name)
    await converge(sim)
    found = await rows(await sim.client("c"))
    for writer in writers:
        writer.check(found)
    assert sorted(sim.node("a").info()["replication"]) == [1, 2, 3]


@DIALECTS
@simulated(seeds=range(3))
async def test_new_member_follows_members_that_learn_of_it_late(sim: Simulation, dialect: str) -> None:
    """Members that cannot reach the one that registered it do not know it, however often it connects."""
    await start_set(sim, dialect=dialect, replication_timeout=0.5)
    await sim.until(lambda: all_follow_all(sim), what="all follow all")
    await make_space(sim, "a")  # else all members are as empty as the new one, which may bootstrap a set of its own
    await converge(sim)
    for name in "bc":
        sim.cut("a", name)
    replication = [sim.uri(name) for name in "abcd"]
    await sim.start("d", replication=replication, replication_timeout=0.5, replication_connect_timeout=3)
    await sim.sleep(30)
    for name in "bc":
        sim.heal("a", name)
    await converge(sim, "abcd")
    for name in "abc":
        await sim.on(name, sim.node(name).reconfigure(replication=replication))
    await sim.until(lambda: all_follow_all(sim, "abcd"), what="all follow all")


@simulated(seeds=range(5))
async def test_join_from_a_machine_that_lost_power_times_out(sim: Simulation) -> None:
    await sim.start("a", wal_mode="fsync")
    starting = asyncio.gather(start_at_last(sim, "b", replication=[sim.uri("a")], replication_connect_timeout=3))
    await sim.until(lambda: "/b" in sim.storage("b").directories)
    await sim.sleep(sim.random.uniform(0, 0.05))
    sim.crash("a")
    await sim.sleep(sim.random.uniform(0, 100))
    await sim.restart("a")
    await starting
    await converge(sim, "ab")


@simulated(seeds=range(5))
async def test_member_keeps_its_data_if_its_rejoin_receives_nothing(sim: Simulation) -> None:
    """The only reachable peer lacks the logs that the member needs; another peer, which has them, returns meanwhile."""
    options = {"replication_timeout": 0.5, "replication_connect_timeout": 3, "bootstrap_strategy": "legacy"}
    await start_set(sim, "ab", **options)
    await make_space(sim, "a")
    await converge(sim, "ab")
    await sim.stop("b")
    writer = Writer(sim, 0)
    await writer.run("a", 20)
    await sim.start("c", replication=[sim.uri("a")], **options)
    await sim.stop("a")
    starting = asyncio.ensure_future(sim.restart("b", replication=[sim.uri("a"), sim.uri("c")]))
    await sim.sleep(1)
    sim.freeze("c")
    await sim.sleep(5)
    await sim.restart("a", replication=[sim.uri("b"), sim.uri("c")])
    await starting
    await converge(sim, "ab")
    sim.thaw("c")
    await converge(sim)
    writer.check(await rows(await sim.client("b")))


@simulated(seeds=range(5))
async def test_registered_replica_of_a_2_6_mesh_has_one_id(sim: Simulation) -> None:
    """Its id arrives with the next rows: it must not ask another master for an id in the meantime."""
    await start_set(sim, "ab", dialect="2.6")
    await make_space(sim, "a")
    await converge(sim, "ab")
    replication = [sim.uri("a"), sim.uri("b")]
    await sim.start("c", dialect="2.6", replication=replication, replication_anon=True, read_only=True)
    await sim.until(lambda: all_follow_all(sim, "ab"))
    writers = [Writer(sim, number) for number in range(2)]
    writing = asyncio.gather(
        *(write_until(sim, writer, name, sim.now + 3) for writer, name in zip(writers, "ab", strict=True))
    )
    await sim.sleep(sim.random.uniform(0, 1))
    await sim.on("c", sim.node("c").reconfigure(replication_anon=False))
    await writing
    assert sim.node("c").info()["id"] == 3
    await converge(sim)
    assert all(sorted(sim.node(name).info()["replication"]) == [1, 2, 3] for name in NAMES)


async def insert(sim: Simulation, name: str, row: Row) -> None:
    client = await sim.client(name)
    await client.request(RequestType.INSERT, pack({Key.SPACE_ID.value: SPACE_ID, Key.TUPLE.value: row}))


async def insert_the_same_key_on_both_sides_of_a_cut(sim: Simulation) -> None:
    await make_space(sim, "a")
    await converge(sim)
    sim.isolate("c", is_quiet=sim.random.random() < 0.5)
    for name in "ac":
        await insert(sim, name, (1, 1, name))
    await insert(sim, "a", (2, 1, "a"))
    await insert(sim, "c", (3, 1, "c"))
    sim.heal()


@DIALECTS
@simulated(seeds=range(2))
async def test_conflict_stops_replication_on_both_sides(sim: Simulation, dialect: str) -> None:
    await start_set(sim, dialect=dialect)
    await insert_the_same_key_on_both_sides_of_a_cut(sim)
    sides = (("a", "c"), ("c", "a"))
    await sim.until(lambda: all(upstream(sim, *side).get("status") == "stopped" for side in sides))
    for side in sides:
        assert "Duplicate key exists in unique index 'pk'" in upstream(sim, *side)["message"]


@DIALECTS
@simulated(seeds=range(2))
async def test_conflicts_are_skipped_on_request_and_positions_stay_equal(sim: Simulation, dialect: str) -> None:
    await start_set(sim, dialect=dialect, replication_skip_conflict=True)
    await insert_the_same_key_on_both_sides_of_a_cut(sim)
    await sim.until(lambda: is_converged(sim))
    for name in NAMES:
        assert [row[0] for row in await rows(await sim.client(name))] == [1, 2, 3]


@simulated(seeds=range(4))
async def test_replica_rejoins_when_the_logs_it_needs_are_deleted(sim: Simulation) -> None:
    """A restarted 2.6 master forgets which logs its replicas need, and here is configured not to wait for them."""
    options: dict[str, Any] = {"wal_max_size": 5000, "checkpoint_count": 1, "wal_cleanup_delay": 0}
    await start_set(sim, "ab", dialect="2.6", wal_mode="fsync", **options)
    await make_space(sim, "a")
    await converge(sim, "ab")
    await sim.stop("b")
    writer = Writer(sim, 0)
    await writer.run("a", 100)
    await sim.restart("a", replication_connect_timeout=2, replication_sync_timeout=2, replication_connect_quorum=0)
    for _ in range(3):
        await writer.run("a", 50)
        await sim.on("a", sim.node("a").snapshot())
    assert "/a/00000000000000000000.xlog" not in sim.storage("a").names
    if sim.random.random() < 0.5:
        sim.crash_after("b", sim.random.randrange(1, 30))
    for _ in range(2):
        if not sim.is_running("b"):
            try:
                await sim.restart("b")
            except Crashed:
                continue
    await converge(sim, "ab")
    writer.check(await rows(await sim.client("b")))
    await replace(await sim.client("b"), (1000, 1, ""))
    await converge(sim, "ab")


@simulated(seeds=range(3))
async def test_isolated_leader_registers_no_members(sim: Simulation) -> None:
    """Its history would diverge: the others have elected a new leader by then (seed 1026 of a set with joins)."""
    await start_set(sim, NAMES, election_mode="candidate", replication_timeout=0.5, replication_synchro_timeout=2)
    await sim.until(lambda: all_follow_all(sim) and leaders(sim, NAMES))
    old = leaders(sim, NAMES)[0]
    sim.isolate(old, is_quiet=True)
    replication = [sim.uri(name) for name in NAMES]
    joining = asyncio.gather(start_at_last(sim, "d", replication=replication, election_mode="candidate"))
    others = [name for name in NAMES if name != old]
    await sim.until(lambda: leaders(sim, others), what="others have a leader of their own")
    sim.heal()
    await joining
    await converge(sim, (*NAMES, "d"))


@simulated()
async def test_ballot_of_a_starting_node_shows_where_its_logs_begin(sim: Simulation) -> None:
    """A replica that starts at the same time uses the ballot to decide whether it can follow or must rejoin."""
    await sim.start("a", checkpoint_count=1)
    await make_space(sim, "a")
    client = await sim.client("a")
    for key in (1, 2):
        await sim.on("a", sim.node("a").snapshot())
        await replace(client, (key, key, "w"))
    await sim.until(lambda: sim.node("a")._instance.files.gc_vclock.signature > 0, what="its first log is deleted")
    oldest, shown = sim.node("a")._instance.files.gc_vclock, []
    connect = Replication.connect

    async def connecting(replication: Replication, **options: bool) -> None:
        shown.append(replication._instance.files.gc_vclock)
        await connect(replication, **options)

    await sim.stop("a")
    with patch.object(Replication, "connect", connecting):
        await sim.restart("a", replication=[sim.uri("a")])
    assert shown == [oldest]


@simulated(seeds=range(3))
async def test_acknowledgement_of_a_member_that_is_gone_does_not_confirm_a_row(sim: Simulation) -> None:
    """Its data may be deleted by now: of five members, only two would have the row."""
    names = "abcde"
    await start_set(sim, names, election_mode="candidate", replication_timeout=0.5, replication_synchro_timeout=600)
    await sim.until(lambda: all_follow_all(sim, names) and leaders(sim, names))
    leader = await elect(sim, names)
    await make_synchronous_space(sim, leader)
    await converge(sim, names)
    others = [name for name in names if name != leader]
    for name in others[1:]:
        sim.freeze(name)
    committing = asyncio.ensure_future(write(sim, leader, 1))
    position = sim.node(leader)._instance.vclock.get(sim.node(leader)._instance.id) + 1
    number = sim.node(leader)._instance.id
    await sim.until(lambda: sim.node(others[0])._instance.vclock.get(number) >= position, what="one other has the row")
    await sim.sleep(0.1)
    sim.kill(others[0])
    sim.storage(others[0]).names.clear()
    await sim.sleep(0.1)
    sim.thaw(others[1])
    await sim.until(lambda: sim.node(others[1])._instance.vclock.get(number) >= position, what="another has the row")
    await sim.sleep(0.3)
    assert not committing.done()
    sim.thaw(others[2])
    await committing
    for name in others[3:]:
        sim.thaw(name)
