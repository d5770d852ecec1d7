"""Members that are expelled while they run: what they may do, and what others accept from them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from flowstone.box.system import CLUSTER_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from tests.simulation.cluster import NAMES, all_follow_all, contents, converge, start_set, upstream, vclock
from tests.simulation.membership_faults import ids_of_real_masters
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import elect, election, leaders

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
OPTIONS: dict[str, Any] = {"replication_timeout": 0.5, "replication_connect_timeout": 3, "replication_sync_timeout": 3}


async def put(sim: Simulation, name: str, key: int) -> None:
    await sim.on(name, sim.node(name).space("test").insert((key, name)))


async def expel(sim: Simulation, by: str, member: str) -> int:
    """Delete the row of `member`; return its id."""
    uuid = sim.machine(member).uuid
    number = next(row[0] for row in sim.node(by).space(CLUSTER_ID).select() if row[1] == uuid)
    await sim.on(by, sim.node(by).space(CLUSTER_ID).delete(number))
    return int(number)


def is_expelled(sim: Simulation, name: str) -> bool:
    return sim.node(name).info()["id"] is None


async def expel_and_tell(sim: Simulation, by: str, member: str) -> int:
    """Expel a connected member, wait until it knows that, and return its id."""
    number = await expel(sim, by, member)
    await sim.until(lambda: is_expelled(sim, member), seconds=5, what=f"{member} knows that it was expelled")
    return number


async def expel_untold(sim: Simulation, by: str, member: str, others: Sequence[str], *, is_quiet: bool) -> int:
    """Expel an isolated member, which stays isolated; return its id."""
    sim.isolate(member, is_quiet=is_quiet)
    await sim.sleep(5)
    number = await expel(sim, by, member)
    await converge(sim, others)
    return number


def is_writable(sim: Simulation, name: str) -> bool:
    return not sim.node(name).info()["ro"]


def statuses(sim: Simulation, name: str) -> list[str]:
    found = sim.node(name).info()["replication"].values()
    return [member["upstream"]["status"] for member in found if "upstream" in member]


async def formed(sim: Simulation, names: Sequence[str] = NAMES, **options: Any) -> None:
    await start_set(sim, names, **OPTIONS | options)
    await sim.until(lambda: all_follow_all(sim, names), what="all follow all")


async def formed_with_space(sim: Simulation, names: Sequence[str] = NAMES, **options: Any) -> None:
    """Form a replica set with the space "test", which member a created and all members have."""
    await formed(sim, names, **options)

    async def create() -> None:
        space = await sim.node("a").create_space("test", format=[("id", "unsigned"), ("by", "string")])
        await space.create_index("primary", parts=["id"])

    await sim.on("a", create())
    await converge(sim, names)


async def formed_with_leader(sim: Simulation) -> tuple[str, str, list[str]]:
    """Form a replica set of candidates; return its leader, a member to expel, and all others."""
    await formed(sim, election_mode="candidate")
    leader = await elect(sim)
    victim = next(name for name in NAMES if name != leader)
    return leader, victim, [name for name in NAMES if name != victim]


async def leader_stays(sim: Simulation, leader: str, term: int, *, seconds: float = 30.0) -> None:
    """Check that one member leads all the time in the same term."""
    for _ in range(int(2 * seconds)):
        await sim.sleep(0.5)
        assert leaders(sim, NAMES) == [leader]
        assert election(sim, leader)["term"] == term


async def refuse_snapshot(sim: Simulation, name: str) -> None:
    """Check that an expelled member refuses to write a snapshot."""
    with pytest.raises(errors.Unsupported, match="expelled"):
        await sim.on(name, sim.node(name).snapshot())


def joinable(dialect: str) -> dict[str, Any]:
    """Return options of a set that a new member can join while some listed members are down."""
    return {"dialect": dialect} | ({"bootstrap_strategy": "legacy"} if dialect == "2.11" else {})


async def seconds_pass(sim: Simulation, names: Sequence[str], seconds: float = 15.0) -> None:
    """Let time pass for actions of the expelled member; the others stay equal."""
    await sim.sleep(seconds)
    await converge(sim, names)


# --- a member that knows of its expulsion ---


@DIALECTS
@simulated(seeds=range(4))
async def test_expelled_member_learns_it_and_neither_writes_nor_replicates(sim: Simulation, dialect: str) -> None:
    await formed_with_space(sim, dialect=dialect)
    await put(sim, "c", 1)
    await converge(sim)
    number = await expel_and_tell(sim, "a", "c")
    info = sim.node("c").info()
    assert info["ro"]
    assert info["lsn"] == -1
    if dialect != "2.6":
        assert info["ro_reason"] == "expelled"
    with pytest.raises(errors.Readonly):
        await put(sim, "c", 2)
    await sim.until(lambda: statuses(sim, "c") == ["stopped", "stopped"], what="c has no upstream")
    shown = upstream(sim, "c", "a")["message"]
    assert f"The local instance id {number} is read-only" in shown
    assert "expelled" in shown
    assert not sim.node("c")._parts.relays._followers
    await put(sim, "b", 3)
    await seconds_pass(sim, "ab")
    assert vclock(sim, "c") != vclock(sim, "a")
    assert not sim.node("c")._parts.relays._followers
    for name in "ab":
        assert sim.machine("c").uuid not in [row[1] for row in sim.node(name).space(CLUSTER_ID).select()]


@DIALECTS
@simulated(seeds=range(3))
async def test_expelled_member_does_not_register_itself_again_after_a_restart(sim: Simulation, dialect: str) -> None:
    await formed_with_space(sim, dialect=dialect)
    await expel_and_tell(sim, "a", "c")
    if sim.random.random() < 0.5:
        await refuse_snapshot(sim, "c")
    await sim.stop("c")
    with pytest.raises(errors.UnknownReplica) as refused:
        await sim.restart("c")
    assert "delete" in str(refused.value.hint)
    assert "replication_anon" not in str(refused.value.hint)
    await seconds_pass(sim, "ab")
    assert len(sim.node("a").space(CLUSTER_ID).select()) == 2


@DIALECTS
@simulated(seeds=range(6))
async def test_expelled_member_does_not_start_as_an_anonymous_replica_with_its_data(
    sim: Simulation, dialect: str
) -> None:
    """It would keep its own rows and skip those of the next owner of its id."""
    options = joinable(dialect)
    await formed_with_space(sim, checkpoint_count=sim.random.choice((1, 2)), **options)
    if sim.random.random() < 0.5:
        await sim.on("c", sim.node("c").snapshot())
    sim.cut("c", "b")
    sim.cut("c", "a")
    for key in (10, 11):
        await put(sim, "c", key)
    sim.heal()
    await converge(sim)
    number = await expel_and_tell(sim, "a", "c")
    if sim.random.random() < 0.5:
        await refuse_snapshot(sim, "c")
    await sim.stop("c")
    sim.build("d")
    with ids_of_real_masters():
        await sim.start("d", replication=[sim.uri(name) for name in "abd"], **OPTIONS | options)
    assert sim.node("d").info()["id"] == number
    for _ in range(2):
        with pytest.raises(errors.Cfg, match="was a member") as refused:
            await sim.restart("c", replication=[sim.uri("a")], replication_anon=True, read_only=True)
        assert "flowstone rebootstrap" in str(refused.value.hint)


@pytest.mark.parametrize("is_reissued", [False, True])
@simulated(seeds=range(2))
async def test_member_expelled_while_stopped_does_not_follow_as_an_anonymous_replica(
    sim: Simulation, is_reissued: bool
) -> None:
    """The row that expels it comes before any row of the next member; if that one has its id, it is rejected."""
    await formed_with_space(sim, bootstrap_strategy="legacy")
    sim.isolate("c")
    await put(sim, "c", 1)
    await sim.stop("c")
    sim.heal()
    await expel(sim, "a", "c")
    await converge(sim, "ab")
    sim.build("d")
    with ids_of_real_masters() if is_reissued else nullcontext():
        await sim.start("d", replication=[sim.uri(name) for name in "abd"], bootstrap_strategy="legacy", **OPTIONS)
    for name in "ab":
        await sim.on(name, sim.node(name).reconfigure(replication=[sim.uri(other) for other in "abd"]))
    await put(sim, "d", 2)
    await converge(sim, "abd")
    await sim.restart("c", replication=[sim.uri("a"), sim.uri("b")], replication_anon=True, read_only=True)
    await sim.until(lambda: statuses(sim, "c") == ["stopped", "stopped"], what="c has no upstream")
    await put(sim, "d", 3)
    await seconds_pass(sim, "abd")
    assert is_expelled(sim, "c") is not is_reissued
    rows = [row[0] for row in sim.node("c").space("test").select()]
    assert rows == [1] or not is_reissued, "row 2 may arrive in one batch with the row that expels the member"
    await sim.stop("c")
    if not is_reissued:
        with pytest.raises(errors.Cfg, match="was a member"):
            await sim.restart("c")


@DIALECTS
@simulated(seeds=range(2))
async def test_master_refuses_an_anonymous_replica_whose_former_id_another_member_has(
    sim: Simulation, dialect: str
) -> None:
    options = joinable(dialect)
    await formed(sim, **options)
    uuid = sim.machine("c").uuid
    await expel(sim, "a", "c")
    await sim.stop("c")
    sim.build("d")
    anonymous = {"replication": [sim.uri("a")], "replication_anon": True, "read_only": True, "instance_uuid": uuid}
    await sim.start("e", **OPTIONS | options | anonymous)
    await sim.until(lambda: statuses(sim, "e") == ["follow"], what="e follows a")
    await sim.stop("e")
    with ids_of_real_masters():
        await sim.start("d", replication=[sim.uri(name) for name in "abd"], **OPTIONS | options)
    await sim.restart("e")
    await sim.until(lambda: statuses(sim, "e") == ["stopped"], what="a refuses e")
    assert "previously deleted" in upstream(sim, "e", "a")["message"]


@DIALECTS
@simulated(seeds=range(3))
async def test_anonymous_replica_starts_again_after_members_were_expelled(sim: Simulation, dialect: str) -> None:
    await formed_with_space(sim, dialect=dialect, checkpoint_count=sim.random.choice((1, 2)))
    await put(sim, "c", 1)
    await converge(sim)
    anonymous = {"replication": [sim.uri("a")], "replication_anon": True, "read_only": True}
    await sim.start("e", **OPTIONS | anonymous | {"dialect": dialect})
    await expel(sim, "a", "c")
    await put(sim, "a", 2)
    await converge(sim, "abe")
    if sim.random.random() < 0.5:
        await sim.on("e", sim.node("e").snapshot())
    for key in (3, 4):
        await sim.stop("e")
        await put(sim, "b", key)
        await sim.restart("e")
        await converge(sim, "abe")
    await sim.stop("e")
    with pytest.raises(errors.UnknownReplica) as refused:
        await sim.restart("e", replication_anon=False)
    assert "replication_anon" in str(refused.value.hint)


@simulated(seeds=range(3))
async def test_transaction_begun_before_the_expulsion_cannot_be_committed_after_it(sim: Simulation) -> None:
    await formed_with_space(sim)
    node = sim.node("c")
    is_over = asyncio.Event()

    async def transact() -> None:
        async with node.transaction() as transaction:
            transaction.space("test").insert((1, "c"))
            await is_over.wait()

    committing = asyncio.ensure_future(sim.on("c", transact()))
    await sim.sleep(0.1)
    await expel_and_tell(sim, "a", "c")
    is_over.set()
    with pytest.raises(FlowstoneError):
        await committing
    assert sim.node("c").space("test").get(1) is None


@simulated(seeds=range(4))
async def test_expelled_candidate_neither_leads_nor_votes_nor_disturbs_the_leader(sim: Simulation) -> None:
    leader, victim, others = await formed_with_leader(sim)
    term = election(sim, leader)["term"]
    await expel_and_tell(sim, leader, victim)
    await leader_stays(sim, leader, term)
    for attempt in (sim.node(victim).promote, sim.node(victim).demote):
        with pytest.raises(errors.LocalInstanceIdIsReadOnly) as refused:
            await sim.on(victim, attempt())
        text = r"The local instance id \d is read-only: this instance was expelled .*`flowstone rebootstrap`"
        assert re.match(text, refused.value.message), "clients get the message only, without a hint"
    await converge(sim, others)


@simulated(seeds=range(4))
async def test_leader_stays_when_it_expels_a_live_member_of_the_last_quorum(sim: Simulation) -> None:
    await formed(sim, "ab", election_mode="candidate")
    leader = await elect(sim, "ab")
    other = "b" if leader == "a" else "a"
    term = election(sim, leader)["term"]
    await expel(sim, leader, other)
    for _ in range(40):
        assert not sim.node(leader).info()["ro"]
        await sim.sleep(0.25)
    assert election(sim, leader)["term"] == term
    assert is_expelled(sim, other)


# --- a member that does not know of its expulsion ---


@DIALECTS
@simulated(seeds=range(4))
async def test_rows_of_an_expelled_member_unaware_of_it_are_rejected(sim: Simulation, dialect: str) -> None:
    await formed_with_space(sim, dialect=dialect)
    await put(sim, "c", 1)
    await converge(sim)
    await expel_untold(sim, "a", "c", "ab", is_quiet=sim.random.random() < 0.5)
    await put(sim, "c", 2)
    sim.heal()
    await seconds_pass(sim, "ab")
    assert sim.node("a").space("test").get(2) is None
    await sim.until(lambda: sim.node("c").info()["ro"], what="c takes no more writes")


@DIALECTS
@simulated(seeds=range(4))
async def test_reissued_id_does_not_mix_the_rows_of_two_members(sim: Simulation, dialect: str) -> None:
    """Both write equally many rows under one id, and the former owner still runs and is still configured."""
    options = joinable(dialect)
    await formed_with_space(sim, **options)
    await put(sim, "c", 1)
    await converge(sim)
    number = await expel_untold(sim, "a", "c", "ab", is_quiet=sim.random.random() < 0.5)
    replication = [sim.uri(name) for name in "abcd"]
    connect = {"replication_connect_quorum": 1} if dialect == "2.6" else {}
    sim.build("d")
    uuid = "dddddddd-0000-4000-8000-000000000001"
    await sim.on("a", sim.node("a").space(CLUSTER_ID).insert((number, uuid)))
    await sim.start("d", replication=replication, instance_uuid=uuid, **OPTIONS | options | connect)
    assert sim.node("d").info()["id"] == number
    for name in "ab":
        await sim.on(name, sim.node(name).reconfigure(replication=replication))
    await sim.until(lambda: not sim.node("d").info()["ro"], what="d can be written to")
    for key in (10, 11):
        await put(sim, "c", key)
        await put(sim, "d", key + 10)
    await converge(sim, "abd")
    sim.heal()
    await sim.sleep(10)
    for key in (30, 31):
        try:
            await put(sim, "c", key)
        except errors.Readonly:
            break
    await put(sim, "d", 40)
    await seconds_pass(sim, "abd")
    assert [row[0] for row in sim.node("b").space("test").select()] == [1, 20, 21, 40]
    assert contents(sim, "a") == contents(sim, "d")


@pytest.mark.parametrize("source", ["the same process", "log", "snapshot", "member that joined later"])
@DIALECTS
@simulated(seeds=range(2))
async def test_new_member_does_not_get_the_id_of_an_expelled_one_whose_rows_others_have(
    sim: Simulation, dialect: str, source: str
) -> None:
    """Member b relays rows that c wrote before b knew of the expulsion: d must not write rows with the same LSNs.

    `source`: where the master that d joins through learned of the expulsion.
    """
    options, names = joinable(dialect), "abd"
    await formed_with_space(sim, **options)
    if source in ("the same process", "log") and sim.random.random() < 0.5:
        await put(sim, "c", 1)  # its vclock component reveals the id, too
        await converge(sim)
    for name in "bc":
        sim.cut("a", name)
    await sim.sleep(1)
    for key in (10, 11):
        await put(sim, "c", key)
    await sim.until(lambda: sim.node("b").space("test").get(11) is not None, what="b has the rows of c")
    number = await expel(sim, "a", "c")
    if source == "snapshot":
        await sim.on("a", sim.node("a").snapshot())
    if source in ("log", "snapshot"):
        await sim.stop("a")
        await sim.restart("a", replication=[])
    joined = "d"
    if source == "member that joined later":
        joined, names = "ed", "abed"
    for master, name in pairwise("a" + joined):
        sim.build(name)
        for other in "bc":
            sim.cut(name, other)
        await sim.start(name, replication=[sim.uri(master), sim.uri(name)], **OPTIONS | options)
        await sim.until(partial(is_writable, sim, name), what=f"{name} can be written to")
    for key in (20, 21):
        await put(sim, "d", key)
    sim.heal()
    for name in names:
        await sim.on(name, sim.node(name).reconfigure(replication=[sim.uri(other) for other in names]))
    await converge(sim, names)
    assert sim.node("d").info()["id"] != number
    assert {20, 21} <= {row[0] for row in sim.node("b").space("test").select()}


@pytest.mark.parametrize("is_told", [False, True])
@DIALECTS
@simulated(seeds=range(2))
async def test_expelled_peer_does_not_count_for_the_quorum_of_a_start(
    sim: Simulation, dialect: str, is_told: bool
) -> None:
    """With a quorum of 1, b becomes writable when it has caught up with a, and not because c rejects it."""
    options = joinable(dialect)
    await formed_with_space(sim, **options)
    if not is_told:
        sim.isolate("c")
        await sim.sleep(5)
    await expel(sim, "a", "c")
    await converge(sim, "ab")
    await sim.sleep(1)
    assert is_expelled(sim, "c") is is_told
    await sim.stop("b")
    sim.heal()
    await put(sim, "a", 1)
    await sim.stop("a")
    await sim.restart("b", replication=[sim.uri("a"), sim.uri("c")], replication_connect_quorum=1)
    for _ in range(20):
        assert sim.node("b").info()["status"] == "orphan"
        await sim.sleep(0.5)
    await sim.restart("a", replication=[sim.uri("a"), sim.uri("b")])
    await sim.until(lambda: not sim.node("b").info()["ro"], what="b can be written to")
    assert sim.node("b").space("test").get(1) is not None


async def collect_logs(sim: Simulation, names: Sequence[str]) -> None:
    """Write and checkpoint until members with `checkpoint_count` 1 have deleted their first logs."""
    for key in (100, 200):
        for number, name in enumerate(names):
            await put(sim, name, key + number)
        await converge(sim, names)
        for name in names:
            await sim.on(name, sim.node(name).snapshot())
    first = [(name, f"/{name}/{0:020}.xlog") for name in names]
    await sim.until(lambda: not any(path in sim.storage(name).names for name, path in first), what="the logs are gone")


@DIALECTS
@simulated(seeds=range(4))
async def test_expelled_member_unaware_of_it_does_not_rejoin_when_its_logs_are_deleted(
    sim: Simulation, dialect: str
) -> None:
    """A JOIN registers any instance that the master does not know, and would undo the expulsion (seed 1004952)."""
    await formed_with_space(sim, dialect=dialect, checkpoint_count=1)
    sim.isolate("c")
    await expel(sim, "a", "c")
    await sim.stop("c")
    await collect_logs(sim, "ab")
    sim.heal()
    for _ in range(2):
        await sim.restart("c")
        await seconds_pass(sim, "ab")
        assert len(sim.node("a").space(CLUSTER_ID).select()) == 2
        assert sim.node("c").info()["status"] == "orphan"
        with pytest.raises(errors.Readonly):
            await put(sim, "c", 1)
        sim.random.choice([sim.kill, sim.crash])("c")


@pytest.mark.parametrize("is_alone", [False, True])
@simulated(seeds=range(4))
async def test_expelled_candidate_unaware_of_it_gets_no_vote_and_deposes_no_leader(
    sim: Simulation, is_alone: bool
) -> None:
    """It is promoted while isolated, or when it reaches the others again: while they see a leader, a candidate does not
    start a term by itself."""

    async def promote() -> None:
        with suppress(FlowstoneError, TimeoutError):
            await asyncio.wait_for(sim.on(victim, sim.node(victim).promote()), 10)

    leader, victim, others = await formed_with_leader(sim)
    await expel_untold(sim, leader, victim, others, is_quiet=sim.random.random() < 0.5)
    term = election(sim, leader)["term"]
    if is_alone:
        await promote()
        assert election(sim, victim)["term"] > term
    sim.heal()
    await leader_stays(sim, leader, term, seconds=10)
    await promote()
    await leader_stays(sim, leader, term, seconds=20)


@simulated(seeds=range(4))
async def test_new_member_brings_the_row_that_registers_it_to_its_only_follower(sim: Simulation) -> None:
    """A chain: the upstream is not a member yet as far as its replica knows."""
    await formed_with_space(sim, "ab")
    await sim.start("d", replication=[sim.uri("a")], replication_anon=True, read_only=True, **OPTIONS)
    sim.cut("a", "b")
    await sim.on("d", sim.node("d").reconfigure(replication_anon=False, read_only=False))
    await put(sim, "d", 1)
    await sim.on("b", sim.node("b").reconfigure(replication=[sim.uri("d")], replication_connect_timeout=1))
    await sim.until(lambda: sim.node("b").space("test").get(1) is not None, what="b follows d")
    await converge(sim, "bd")
