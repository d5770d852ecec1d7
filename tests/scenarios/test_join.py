"""Joining: rows during a join, state transferred with it, and failing joins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.errors import SyncQuorumTimeout, WalIo
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import decode_row
from tests.interop import ledger, workload
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged
from tests.interop.ledger import LEDGER
from tests.interop.member import Member, RealMember, eventually
from tests.interop.versions import fits
from tests.places import VECTORS
from tests.scenarios.middleman import Cut, Middleman
from tests.scenarios.queues import NEVER, PATIENCE, PLAIN, SYNC, Pending, demote, owned_by, promote, start_members
from tests.scenarios.simulated_members import (
    CLUSTER,
    SPACE,
    files,
    held,
    ids,
    insert,
    make_space,
    move_in,
    reconfigure,
    snapshot,
    uris,
)
from tests.simulation.cluster import all_follow_all, contents, converge, follows, start_set, vclock
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.test_elections import elect

OTHER = "7c025e42-2394-11e7-aacf-0242ac110002"
SMALL = "00000000-2394-11e7-aacf-0242ac110002"
DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
REPLICATOR = "replicator:secret"
ELECTION = VECTORS / "tarantool-2.11/05-election/files/a"


LARGE = 50_000
"""Bytes of a tuple."""


async def fill(sim: Simulation, name: str, count: int, size: int = 10) -> None:
    """200 large tuples are more than fits into the connections between two nodes."""
    await make_space(sim, name)

    async def write() -> None:
        async with sim.node(name).transaction() as transaction:
            for key in range(count):
                transaction.space(SPACE).insert([key, name, "x" * size])

    await sim.on(name, write())


def hold_large_tuples(middle: Middleman) -> None:
    """Blocks the snapshot at the first of them, so that the master cannot finish it."""
    is_first = True

    def change(packet: bytes) -> bytes:
        nonlocal is_first
        if is_first and len(packet) >= LARGE:
            is_first = False
            middle.is_open.clear()
        return packet

    middle.on_answer = change


async def change_cluster(sim: Simulation, name: str, *steps: tuple[Any, ...]) -> None:
    """Change `_cluster`: insert complete rows, and delete rows given only by their id."""
    client = await sim.client(name)
    for step in steps:
        if len(step) == 1:
            body = {Key.SPACE_ID.value: CLUSTER, Key.KEY.value: step}
            await client.request(RequestType.DELETE, pack(body))
        else:
            await client.request(RequestType.REPLACE, pack({Key.SPACE_ID.value: CLUSTER, Key.TUPLE.value: step}))


# --- rows during a join ---


def make_synchronous_ledger(member: RealMember, *, is_2_6: bool) -> None:
    """Writes to it are pending for a verdict, which has a row of its own; newer servers need an owner for it."""
    create = ["call", "box.schema.space.create", ["ledger", {"id": LEDGER, "is_sync": True}]]
    index = ["call", "box.space.ledger:create_index", ["pk", {"parts": [1, "unsigned", 2, "unsigned"]}]]
    workload.run(member, [create, index])
    if not is_2_6:
        member.eval("box.ctl.promote()")


def write_until_ready(master: Member, joining: Member, answered: list[int]) -> None:
    """Write synchronous transactions, each with its verdict, until the other member has joined in the middle
    of them.
    """

    def is_ready() -> bool:
        number = (answered[-1] if answered else 0) + 1
        try:
            master.call("interop.transaction", ledger.transaction(number))
        except (WalIo, SyncQuorumTimeout):  # 2.6.0 sometimes drops a verdict for which a join waits
            return joining.check_ready()
        answered.append(number)
        return joining.check_ready()

    eventually(f"{joining} joins", is_ready)
    joining.wait_ready()


def test_verdicts_on_synchronous_rows_may_arrive_during_a_join(cluster: Cluster) -> None:
    """B3: a node joins a real master that writes synchronously; where members may register each other, as in 2.6, it
    relays the rows to a real replica that joins it.
    """
    is_2_6 = cluster.binary.dialect == "2.6"
    master = cluster.real("master", replication_synchro_quorum=1)
    make_synchronous_ledger(master, is_2_6=is_2_6)
    answered: list[int] = []
    ours = cluster.ours("ours", start=False, replication=[master.uri])
    joining: list[Member] = [ours]
    if is_2_6:
        joining.append(cluster.real("behind", start=False, replication=[ours.uri], read_only=True))
    for member in joining:
        member.launch()
        write_until_ready(master, member, answered)
    for member in joining:
        member.catch_up(master)
        ledger.assert_whole(member, answered)
    ours.wait_follow(master)


@DIALECTS
@simulated(seeds=range(2))
async def test_replica_joins_the_owner_of_the_queue_during_synchronous_writes(sim: Simulation, dialect: str) -> None:
    """B3: verdicts are between the rows of the final stage, and before the row that registers the replica."""
    await own_queue(sim, dialect, replication_synchro_quorum=1)
    writing = True

    async def write() -> int:
        number = 0
        while writing:
            number += 1
            await insert(sim, "a", number, space=SYNC)
            await sim.sleep(0.001)
        return number

    writer = asyncio.ensure_future(write())
    await sim.start("b", replication=uris(sim, "a"), dialect=dialect)
    writing = False
    count = await writer
    await converge(sim, "ab")
    assert count > 3
    assert list(held(sim, "b", SYNC)) == list(range(1, count + 1))


@DIALECTS
@pytest.mark.parametrize("is_confirmed", [True, False], ids=["confirmed", "rolled back"])
@simulated()
async def test_a_join_waits_for_the_verdict_of_the_owner(sim: Simulation, dialect: str, is_confirmed: bool) -> None:
    """B3: and rows rolled back during the join are not part of it."""
    await own_queue(sim, dialect, replication_synchro_quorum=NEVER, replication_synchro_timeout=PATIENCE)
    pending = await Pending(sim, "a", 1).seen_by("a")
    joining = asyncio.ensure_future(sim.start("b", replication=uris(sim, "a"), dialect=dialect))
    await sim.sleep(5)
    assert pending.is_waiting
    assert not joining.done()
    change = {"replication_synchro_quorum": 1} if is_confirmed else {"replication_synchro_timeout": 0.01}
    await reconfigure(sim, "a", **change)
    assert await pending.code() == (0 if is_confirmed else SyncQuorumTimeout.code)
    await joining
    await converge(sim, "ab")
    assert held(sim, "b", SYNC) == ({1: "a"} if is_confirmed else {})


async def own_queue(sim: Simulation, dialect: str, **options: Any) -> None:
    """ "a" with a synchronous space, alone."""
    await sim.start("a", dialect=dialect, **options)
    await make_space(sim, "a", SYNC, is_sync=True)
    if dialect != "2.6":
        await promote(sim, "a")


@DIALECTS
@simulated(seeds=range(2))
async def test_replica_removed_during_its_join_becomes_a_member(sim: Simulation, dialect: str) -> None:
    """B6: rows that register it and remove it again are in the log between the snapshot and its registration.

    Its id is then another one: a node does not reuse ids.
    """
    await sim.start("a", dialect=dialect)
    await fill(sim, "a", 200, LARGE)
    async with Middleman(sim, "a") as middle:
        hold_large_tuples(middle)
        joining = asyncio.ensure_future(sim.start("b", replication=[middle.uri], instance_uuid=OTHER))
        await sim.until(lambda: not middle.is_open.is_set())
        assert list(ids(sim, "a").values()) == [1], "the replica is registered already: the snapshot is too small"
        await change_cluster(sim, "a", (2, OTHER), (2,), (2, OTHER), (2,))
        middle.is_open.set()
        await joining
        assert ids(sim, "a")[OTHER] == ids(sim, "b")[OTHER] == sim.node("b").info()["id"] == 3
        await insert(sim, "a", 10_000)
        await sim.until(lambda: 10_000 in held(sim, "b"))
        await converge(sim, "ab")


@simulated()
async def test_second_join_of_a_uuid_is_rejected_during_the_first(sim: Simulation) -> None:
    """B7: the master survives, the first one becomes a member, and it is the only one with that UUID."""
    await sim.start("a")
    await fill(sim, "a", 200, LARGE)
    async with Middleman(sim, "a") as middle:
        hold_large_tuples(middle)
        first = asyncio.ensure_future(sim.start("b", replication=[middle.uri], instance_uuid=OTHER))
        await sim.until(lambda: not middle.is_open.is_set())
        second = asyncio.ensure_future(sim.start("c", replication=uris(sim, "a"), instance_uuid=OTHER))
        await sim.until(lambda: _is_logged(sim, "duplicate connection with the same replica UUID"))
        assert not second.done()
        sim.kill("c")
        with pytest.raises(Crashed):
            await second
        middle.is_open.set()
        await first
        await sim.until(lambda: follows(sim, "b", "a"))
        assert sorted(ids(sim, "a").values()) == [1, 2]
        await converge(sim, "ab")


def _is_logged(sim: Simulation, text: str) -> bool:
    return any(text in line for line in sim.trace.lines)


# --- transferred state ---


def queue_and_term(sim: Simulation, name: str) -> tuple[Any, ...]:
    info = sim.node(name).info()
    queue = info["synchro"]["queue"]
    return info["election"]["term"], queue["owner"], queue["term"]


@pytest.mark.parametrize("is_anonymous", [False, True], ids=["member", "anonymous"])
@simulated()
async def test_term_and_queue_arrive_with_a_join_and_persist(sim: Simulation, is_anonymous: bool) -> None:
    """B4, B5 and D6: the state of a real leader after three terms is transferred by JOIN_META, and written to the log.

    A member must be registered, which requires that its master is promoted. The joined replica, promoted itself, starts
    the next term, which its master learns.
    """
    move_in(sim, "a", ELECTION)
    await sim.start("a", replication_synchro_quorum=1)
    assert queue_and_term(sim, "a") == (4, 1, 4)
    uri = f"{REPLICATOR}@a:3301"
    options: dict[str, Any] = {"bootstrap_strategy": "config", "bootstrap_leader": "a:3301"}
    if is_anonymous:
        options |= {"replication_anon": True, "read_only": True}
    else:
        await promote(sim, "a")
    left = queue_and_term(sim, "a")
    await sim.start("b", replication=[uri], instance_uuid=OTHER, replication_synchro_quorum=1, **options)
    assert queue_and_term(sim, "b") == left
    assert queue_and_term(sim, "a") == left, "the leader's term is not disturbed"
    await sim.restart("b")
    assert queue_and_term(sim, "b") == left
    # And one more: from the files of a member that only joined.
    if not is_anonymous:
        await sim.start("c", replication=[f"{REPLICATOR}@b:3301"], replication_anon=True, read_only=True)
        assert queue_and_term(sim, "c") == left == (5, 1, 5)
        await promote(sim, "b")
        number = sim.node("b").info()["id"]
        assert queue_and_term(sim, "b") == (6, number, 6)
        await sim.until(lambda: queue_and_term(sim, "c") == (6, number, 6) and queue_and_term(sim, "a") == (6, 1, 5))


@simulated(seeds=range(2))
async def test_joining_candidate_does_not_disturb_a_leading_node(sim: Simulation) -> None:
    """B4: it has term and queue at once, and votes in the next election."""
    await start_set(sim, "ab", election_mode="candidate")
    leader = await elect(sim, "ab")
    for _ in range(2):
        await promote(sim, leader)
    term = queue_and_term(sim, leader)
    peers = uris(sim, *"abc")
    await sim.start("c", replication=peers, election_mode="candidate")
    assert queue_and_term(sim, "c") == term
    for name in "ab":
        await reconfigure(sim, name, replication=peers)
    await sim.until(lambda: all_follow_all(sim))
    await sim.sleep(30)
    assert await elect(sim) == leader
    assert {queue_and_term(sim, name) for name in "abc"} == {term}
    sim.kill(leader)
    assert await elect(sim, "abc") != leader


@simulated()
async def test_node_that_joined_a_node_is_promoted_without_a_split_brain(sim: Simulation) -> None:
    """B5: the join transfers the terms of the master."""
    await start_members(sim)
    for _ in range(3):
        await demote(sim, "a")
        await promote(sim, "a")
    peers = uris(sim, *"abc")
    await sim.start("c", replication=peers)
    for name in "ab":
        await reconfigure(sim, name, replication=peers)
    await promote(sim, "c")
    assert await owned_by(sim, "c", "abc") == 9
    await sim.until(lambda: all_follow_all(sim))
    await insert(sim, "c", 1, space=SYNC)
    await converge(sim)
    assert {sim.node(name).info()["ro"] for name in "ab"} == {True}


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "given back"])
@simulated()
async def test_anonymous_replica_has_the_queue_of_its_master(sim: Simulation, is_claimed: bool) -> None:
    """D6: with all terms, so that rows of former owners are distinguished from those of the current one."""
    await start_members(sim)
    for name in "ba":
        await promote(sim, name)
        await owned_by(sim, name)
    if not is_claimed:
        await demote(sim, "a")
    await sim.start("c", replication=uris(sim, "a"), replication_anon=True, read_only=True)
    assert queue_and_term(sim, "c") == queue_and_term(sim, "a") == ((4, 1, 4) if is_claimed else (5, 0, 5))
    await insert(sim, "a", 1, space=SYNC if is_claimed else PLAIN)
    await sim.until(lambda: vclock(sim, "c") == vclock(sim, "a"))
    assert contents(sim, "c") == contents(sim, "a")


@fits(">=2.11")
def test_node_that_joins_a_real_leader_has_its_term_and_does_not_disturb_it(cluster: Cluster) -> None:
    """B4."""
    leader = cluster.real("leader", election_mode="candidate", replication_synchro_quorum=1)
    eventually("it leads", lambda: leader.info()["election"]["state"] == "leader")
    term = leader.info()["election"]["term"]
    ours = cluster.ours("ours", replication=[leader.uri])
    ours.wait_follow(leader)
    assert_converged(leader, ours)
    assert ours.info()["election"]["term"] == leader.info()["election"]["term"] == term
    assert leader.info()["election"]["state"] == "leader"
    queues = [member.info()["synchro"]["queue"] for member in (leader, ours)]
    assert queues[0]["owner"] == queues[1]["owner"] == 1
    if "term" in queues[0]:
        assert queues[0]["term"] == queues[1]["term"]
    ours.restart()
    ours.wait_follow(leader)
    assert ours.info()["election"]["term"] == term


@fits(">=2.11")
def test_real_replica_that_joined_a_node_is_promoted_without_a_split_brain(cluster: Cluster) -> None:
    """B5: the replica got the term from the node, which got it from the real master."""
    master = cluster.real("master", replication_synchro_quorum=1, instance_uuid=OTHER)
    for _ in range(3):
        master.eval("box.ctl.promote() box.ctl.demote()")
    ours = cluster.ours("ours", replication=[master.uri], instance_uuid=SMALL)
    ours.wait_follow(master)
    master.configure(replication=[ours.uri])
    master.wait_follow(ours)
    fresh = cluster.real("fresh", replication=[ours.uri, master.uri], replication_synchro_quorum=1)
    assert f"bootstrapping replica from {SMALL}" in fresh.log()
    fresh.eval("box.ctl.promote()")
    ours.configure(replication=[master.uri, fresh.uri])
    master.configure(replication=[ours.uri, fresh.uri])
    for member in (ours, master):
        member.catch_up(fresh)
        member.wait_follow(fresh)
        assert member.info()["synchro"]["queue"]["owner"] == fresh.id
        assert member.info()["ro"]
    assert_converged(master, ours, fresh)


# --- failing joins ---


def cut_after(rows_max: int) -> Any:
    """Break the connection in the middle of the rows of a snapshot."""
    count = 0

    def change(packet: bytes) -> bytes:
        nonlocal count
        if decode_row(packet).type == RequestType.INSERT:
            count += 1
            if count > rows_max:
                raise Cut
        return packet

    return change


@pytest.mark.parametrize("is_anonymous", [False, True], ids=["member", "anonymous"])
@DIALECTS
@simulated()
async def test_partial_snapshot_is_not_accepted(sim: Simulation, dialect: str, is_anonymous: bool) -> None:
    """B13: the replica stops, leaves no files, and restarts from scratch."""
    await sim.start("a", dialect=dialect)
    await fill(sim, "a", 500)
    options = {"replication_anon": True, "read_only": True} if is_anonymous else {}
    async with Middleman(sim, "a") as middle:
        middle.on_answer = cut_after(600)
        with pytest.raises(FlowstoneError, match=r"lost|closed"):
            await sim.start("b", replication=[middle.uri], instance_uuid=OTHER, **options)
        tried = middle.connections
        await sim.sleep(20)
        assert middle.connections == tried
    assert not files(sim, "b", ".snap")
    assert not files(sim, "b", ".inprogress")
    await sim.start("b", replication=uris(sim, "a", "b"), instance_uuid=OTHER, **options)
    await converge(sim, "ab")


@simulated()
async def test_member_keeps_its_data_when_a_rejoin_fails(sim: Simulation) -> None:
    """B13: its logs are lost, the snapshot breaks off in the middle, and its original files are untouched."""
    await sim.start("a", checkpoint_count=1, wal_cleanup_delay=0)
    await fill(sim, "a", 500)
    await sim.start("b", replication=uris(sim, "a"))
    sim.kill("b")
    await sim.restart("a")
    for key in (1000, 2000, 3000):
        await insert(sim, "a", key)
        await snapshot(sim, "a")
    async with Middleman(sim, "a") as middle:
        middle.on_answer = cut_after(600)
        with pytest.raises(FlowstoneError, match=r"lost|closed"):
            await sim.restart("b", replication=[middle.uri])
    await sim.restart("b", replication=[])
    assert len(held(sim, "b")) == 500
    await reconfigure(sim, "b", replication=[])
    await sim.restart("b", replication=uris(sim, "a"))
    await converge(sim, "ab")


# --- names of newer servers ---


@simulated()
async def test_keys_of_newer_servers_are_kept_and_relayed(sim: Simulation) -> None:
    """B14 and G5: system spaces, options and fields of 3.8 in the data of a node, its replica, and its files."""
    move_in(sim, "a", VECTORS / "tarantool-3.8/01-join-subscribe/files/master")
    await sim.start("a")
    names = [space.name for space in sim.node("a").box.spaces.values()]
    assert "_gc_consumers" in names
    client = await sim.client("a", user="replicator", password="secret")
    assert await client.request(RequestType.PING) is not None
    await sim.start("b", replication=[f"{REPLICATOR}@a:3301"], replication_anon=True, read_only=True)
    assert contents(sim, "b") == contents(sim, "a")
    await sim.restart("b")
    assert contents(sim, "b") == contents(sim, "a")
    await snapshot(sim, "a")
    before = contents(sim, "a")
    await sim.restart("a")
    assert contents(sim, "a") == before


@fits(">=3.0")
def test_names_of_real_members_are_kept_by_a_node_and_relayed_to_real_replicas(cluster: Cluster) -> None:
    """B14."""
    named = cluster.real("named", instance_name="named", replicaset_name="the-set")
    ours = cluster.ours("ours", replication=[named.uri])
    ours.wait_follow(named)
    named.configure(replication=[ours.uri])
    other = cluster.real("other", instance_name="other", replicaset_name="the-set", replication=[ours.uri, named.uri])
    other.wait_follow(ours, named)
    assert_converged(named, ours, other)
    rows = {row[0]: row[2:] for row in map(unpack, ours.tuples(CLUSTER))}
    assert rows[1] == ("named",)
    assert rows[3] == ("other",)


@fits(">=3.0")
def test_named_real_instance_cannot_join_an_older_schema_and_an_unnamed_one_follows_both_ways(
    cluster: Cluster,
) -> None:
    """B14: a node of dialect 2.11 is the 2.x replica set; the compat switch of 3.x must omit the names."""
    ours: Member = cluster.ours("ours")
    ledger.define(ours)
    named = cluster.real("named", start=False, replication=[ours.uri], instance_name="n", replicaset_name="r")
    named.launch()
    assert named.exit_code() != 0
    assert "name mismatch" in named.log()
    ours.client.delete(CLUSTER, 2)  # the name under which it was registered before
    plain = cluster.real("plain", replication=[ours.uri])
    ours.configure(replication=[plain.uri])
    ours.wait_follow(plain)
    plain.wait_follow(ours)
    for number, member in enumerate((ours, plain), 1):
        member.call("interop.transaction", ledger.transaction(number * 3))
        plain.catch_up(ours)
        ours.catch_up(plain)
    assert_converged(ours, plain)
