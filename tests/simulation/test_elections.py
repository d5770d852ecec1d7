"""Replica sets of unmodified nodes that elect their leaders, automatically or manually, under faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from flowstone.client.connection import Connection
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from tests.conftest import FULL
from tests.simulation.cluster import NAMES, all_follow_all, converge, start_set
from tests.simulation.simulation import Simulation, simulated

TIMEOUT = 1.0
"""The default `replication_timeout`."""

DEATH = 4 * TIMEOUT


def some(count: int) -> range:
    return range(10 * count if FULL else count)


def election(sim: Simulation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = sim.node(name).info()["election"]
    return found


def running(sim: Simulation, names: Sequence[str]) -> list[str]:
    return [name for name in names if sim.is_running(name)]


def leaders(sim: Simulation, names: Sequence[str] = NAMES) -> list[str]:
    return [name for name in running(sim, names) if election(sim, name)["state"] == "leader"]


def owns_queue(sim: Simulation, name: str) -> bool:
    info = sim.node(name).info()
    return bool(info["synchro"]["queue"]["owner"] == info["id"]) and not info["ro"]


async def elect(sim: Simulation, names: Sequence[str] = NAMES, *, seconds: float = 60.0) -> str:
    """Return the leader once it is writable and all running nodes of `names` know it."""

    def is_settled() -> bool:
        found = leaders(sim, names)
        if len(found) != 1 or not owns_queue(sim, found[0]):
            return False
        number = sim.node(found[0]).info()["id"]
        return all(election(sim, name)["leader"] == number for name in running(sim, names))

    await sim.until(is_settled, seconds=seconds, what="one leader that all know")
    return leaders(sim, names)[0]


async def call(client: Connection, function: str, *arguments: object) -> list[Any]:
    body = {Key.FUNCTION_NAME.value: function, Key.TUPLE.value: arguments}
    results: list[Any] = (await client.request(RequestType.CALL, pack(body)))[Key.DATA]
    return results


async def write(sim: Simulation, name: str, key: int) -> None:
    node = sim.node(name)
    await sim.on(name, node.space("test").replace((key,)))


async def make_space(sim: Simulation, name: str, *, is_sync: bool = True) -> None:
    node = sim.node(name)

    async def create() -> None:
        space = await node.create_space("test", format=[("id", "unsigned")], is_sync=is_sync)
        await space.create_index("primary", parts=["id"])

    await sim.on(name, create())


@simulated(seeds=some(4))
async def test_three_nodes_elect_a_leader(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim, seconds=10)
    await sim.until(lambda: all_follow_all(sim))
    infos = {name: sim.node(name).info() for name in NAMES}
    assert [name for name in NAMES if not infos[name]["ro"]] == [leader]
    assert {info["ro_reason"] for name, info in infos.items() if name != leader} == {"election"}
    term = election(sim, leader)["term"]
    await sim.sleep(60)
    assert leaders(sim) == [leader]
    assert {election(sim, name)["term"] for name in NAMES} == {term}
    assert all(election(sim, name)["leader_idle"] < 2 * TIMEOUT for name in NAMES)


@simulated(seeds=some(4))
async def test_killed_leader_is_replaced_in_time_without_losing_confirmed_rows(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    first = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await make_space(sim, first)
    for key in range(20):
        await write(sim, first, key)
    await sim.sleep(sim.random.uniform(0, 3))
    sim.random.choice([sim.kill, sim.crash])(first)
    before, terms = sim.now, max(election(sim, name)["term"] for name in running(sim, NAMES))
    second = await elect(sim)
    split_votes = election(sim, second)["term"] - terms - 1
    assert sim.now - before <= DEATH + 1 + 1.1 * 5 * split_votes
    assert sorted(key for (key,) in await rows(sim, second)) == list(range(20))
    await write(sim, second, 20)
    await sim.restart(first)
    assert await elect(sim) == second
    await converge(sim)


async def rows(sim: Simulation, name: str) -> list[Any]:
    found: list[Any] = await sim.on(name, _select(sim, name))
    return found


async def _select(sim: Simulation, name: str) -> list[Any]:
    return [tuple(found.values) for found in sim.node(name).space("test").select()]


@simulated(seeds=some(2))
async def test_a_voter_never_leads(sim: Simulation) -> None:
    replication = [sim.uri(name) for name in NAMES]
    await asyncio.gather(
        sim.start("a", replication=replication, election_mode="candidate"),
        sim.start("b", replication=replication, election_mode="voter"),
        sim.start("c", replication=replication, election_mode="voter"),
    )
    assert await elect(sim) == "a"
    with pytest.raises(errors.Unsupported, match="election_mode='voter' does not support manual elections"):
        await sim.on("b", sim.node("b").promote())
    sim.kill("a")
    await sim.sleep(60)
    assert leaders(sim) == []
    assert {election(sim, name)["state"] for name in "bc"} == {"follower"}
    await sim.restart("a")
    assert await elect(sim) == "a"


@simulated(seeds=some(2))
async def test_manual_leader_is_the_member_promoted_last(sim: Simulation) -> None:
    await start_set(sim, election_mode="manual")
    await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    for name in sim.random.sample(NAMES, 3):
        await converge(sim)  # no member votes for a candidate with fewer rows
        await sim.on(name, sim.node(name).promote())
        assert await elect(sim) == name
    await converge(sim)
    sim.kill(name)
    await sim.sleep(60)
    assert leaders(sim) == [], "a leader appeared without a promotion"
    other = sim.random.choice([other for other in NAMES if other != name])
    await sim.on(other, sim.node(other).promote())
    assert await elect(sim) == other


@pytest.mark.parametrize("mode", ["manual", "candidate"])
@simulated(seeds=some(2))
async def test_demoted_leader_resigns(sim: Simulation, mode: str) -> None:
    await start_set(sim, election_mode=mode)
    first = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await sim.on(first, sim.node(first).demote())
    info = sim.node(first).info()
    assert (info["election"]["state"], info["ro"], info["ro_reason"]) == ("follower", True, "election")
    if mode == "candidate":
        assert await elect(sim, seconds=2) != first
    else:
        await sim.sleep(30)
        assert leaders(sim) == []


@simulated(seeds=some(2))
async def test_with_elections_off_a_promoted_node_writes_and_the_others_do_not(sim: Simulation) -> None:
    await start_set(sim)
    await sim.until(lambda: all_follow_all(sim))
    await sim.on("b", sim.node("b").promote())
    await sim.until(lambda: all(sim.node(name).info()["ro"] for name in "ac"))
    owner = sim.node("b").info()
    assert (owner["ro"], owner["election"]["state"], owner["election"]["leader"]) == (False, "follower", 0)
    assert "leader_idle" not in owner["election"]
    assert {sim.node(name).info()["ro_reason"] for name in "ac"} == {"synchro"}
    assert {election(sim, name)["term"] for name in NAMES} == {2}
    await make_space(sim, "b")
    await write(sim, "b", 1)
    await sim.on("b", sim.node("b").demote())
    await sim.until(lambda: not any(sim.node(name).info()["ro"] for name in NAMES))
    assert {election(sim, name)["term"] for name in NAMES} == {3}
    await converge(sim)


@pytest.mark.parametrize("loses_power", [False, True])
@simulated(seeds=some(2))
async def test_a_restart_keeps_term_and_vote(sim: Simulation, loses_power: bool) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    known = {name: (election(sim, name)["term"], election(sim, name)["vote"]) for name in NAMES}
    name = next(name for name in NAMES if name != leader)
    (sim.crash if loses_power else sim.kill)(name)
    node = await sim.restart(name, election_mode="off", replication=[])
    found = node.info()["election"]
    assert (found["term"], found["vote"]) == known[name]
    await sim.on(name, node.snapshot())
    found = (await sim.restart(name)).info()["election"]
    assert (found["term"], found["vote"]) == known[name]


@simulated(seeds=some(2))
async def test_isolated_node_does_not_depose_the_leader_when_it_returns(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    term = election(sim, leader)["term"]
    lonely = sim.random.choice([name for name in NAMES if name != leader])
    sim.isolate(lonely, is_quiet=sim.random.random() < 0.5)
    await sim.sleep(60)
    assert election(sim, lonely)["term"] == term
    sim.heal()
    await sim.sleep(60)
    assert leaders(sim) == [leader]
    assert {election(sim, name)["term"] for name in NAMES} == {term}


@simulated(seeds=some(2))
async def test_node_starts_no_election_while_others_see_the_leader(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    term = election(sim, leader)["term"]
    sim.cut(leader, next(name for name in NAMES if name != leader))
    await sim.sleep(60)
    assert leaders(sim) == [leader]
    assert {election(sim, name)["term"] for name in NAMES} == {term}


@pytest.mark.parametrize("is_quiet", [False, True])
@simulated(seeds=some(2))
async def test_a_leader_cut_off_from_its_quorum_resigns(sim: Simulation, is_quiet: bool) -> None:
    await start_set(sim, election_mode="candidate")
    first = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    others = [name for name in NAMES if name != first]
    sim.isolate(first, is_quiet=is_quiet)
    before = sim.now
    await sim.until(lambda: election(sim, first)["state"] == "follower")
    assert sim.now - before < DEATH + 1
    assert sim.node(first).info()["ro"]
    second = await elect(sim, others)
    sim.heal()
    assert await elect(sim) == second
    await converge(sim)


@simulated(seeds=some(4))
async def test_with_strict_fencing_there_are_never_two_leaders(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate", election_fencing_mode="strict")
    first = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await sim.sleep(sim.random.uniform(0, 3))
    others = [name for name in NAMES if name != first]
    moments: dict[str, float] = {}

    def look() -> bool:
        if election(sim, first)["state"] != "leader":
            moments.setdefault("resigned", sim.now)
        if leaders(sim, others):
            moments.setdefault("elected", sim.now)
        return len(moments) == 2

    sim.isolate(first, is_quiet=True)
    await sim.until(look)
    assert moments["resigned"] < moments["elected"]


@simulated(seeds=some(2))
async def test_leader_without_fencing_keeps_leading_alone(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate", election_fencing_mode="off")
    first = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    sim.isolate(first)
    second = await elect(sim, [name for name in NAMES if name != first])
    assert leaders(sim) == sorted((first, second))
    sim.heal()
    assert await elect(sim) == second


@pytest.mark.parametrize("loses_power", [False, True])
@simulated(seeds=some(2))
async def test_restart_of_all_members_elects_a_leader_in_a_new_term(sim: Simulation, loses_power: bool) -> None:
    await start_set(sim, election_mode="candidate")
    first = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    await make_space(sim, first)
    term = election(sim, first)["term"]
    for key in range(5):
        await write(sim, first, key)
    for name in NAMES:
        (sim.crash if loses_power else sim.kill)(name)
    await asyncio.gather(*(sim.restart(name) for name in NAMES))
    leader = await elect(sim)
    assert election(sim, leader)["term"] > term
    await converge(sim)
    if not loses_power:
        assert sorted(key for (key,) in await rows(sim, leader)) == list(range(5))


@simulated(seeds=some(2))
async def test_member_that_joins_later_takes_part_in_elections(sim: Simulation) -> None:
    await start_set(sim, "ab", election_mode="candidate")
    leader = await elect(sim, "ab")
    await sim.until(lambda: all_follow_all(sim, "ab"))
    everybody = [sim.uri(name) for name in NAMES]
    await sim.start("c", replication=everybody, election_mode="candidate")
    for name in "ab":
        await sim.on(name, sim.node(name).reconfigure(replication=everybody))
    await sim.until(lambda: all_follow_all(sim))
    assert await elect(sim) == leader
    sim.kill(leader)
    assert await elect(sim) != leader


@simulated()
async def test_clients_promote_by_call_and_watch_the_election(sim: Simulation) -> None:
    await start_set(sim, election_mode="manual")
    await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    client = await sim.client("b")
    await call(client, "box.ctl.promote")
    assert await elect(sim) == "b"
    await call(client, "box.ctl.wait_rw", 1)
    await call(client, "box.ctl.promote")
    await call(client, "box.ctl.demote")
    await call(client, "box.ctl.wait_ro", 1)
    (found,) = await call(client, "box.info.election")
    assert found["state"] == "follower"


@simulated()
async def test_dialect_2_6_has_no_elections(sim: Simulation) -> None:
    await start_set(sim, dialect="2.6")
    client = await sim.client("a")
    (info,) = await call(client, "box.info")
    assert not {"election", "synchro", "ro_reason"} & set(info)
    for name in ("box.ctl.promote", "box.ctl.demote"):
        with pytest.raises(errors.NoSuchProc, match=f"Procedure '{name}' is not defined"):
            await call(client, name)
