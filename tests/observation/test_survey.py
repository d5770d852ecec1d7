"""Whole replica sets are found from one of their members: of nodes in a simulation, and of real servers."""

from __future__ import annotations

from flowstone.iproto.uri import parse_uri
from flowstone.observation.replica_set import ReplicaSet
from flowstone.observation.survey import Survey
from flowstone.outside import production
from tests.interop.cluster import Cluster
from tests.interop.member import Member, eventually
from tests.interop.versions import fits
from tests.simulation.cluster import NAMES, all_follow_all, start_set
from tests.simulation.simulation import Simulation, simulated

Shown = list[tuple[int, str, str]]


def shown(one: ReplicaSet) -> Shown:
    return [(member.id, member.label, member.mode) for member in one.members]


def survey_of(sim: Simulation, *names: str) -> Survey:
    return Survey(sim.outside, [parse_uri(sim.uri(name)) for name in names])


async def look(sim: Simulation, *names: str) -> tuple[ReplicaSet, ...]:
    survey = survey_of(sim, *names)
    try:
        return await survey.look()
    finally:
        await survey.close()


def place(sim: Simulation, name: str) -> str:
    return parse_uri(sim.uri(name)).address


def leads(sim: Simulation, *names: str) -> str | None:
    """Who can be written to, as soon as all of `names` know that it leads."""
    infos = {name: sim.node(name).info() for name in names}
    leader = next((name for name, info in infos.items() if not info["ro"]), None)
    number = infos[leader]["id"] if leader is not None else 0
    return leader if number and all(info["election"]["leader"] == number for info in infos.values()) else None


@simulated(seeds=range(3))
async def test_one_member_is_enough_to_find_the_others(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    await sim.until(lambda: leads(sim, *NAMES) and all_follow_all(sim))
    leader = leads(sim, *NAMES)
    for name in NAMES:
        (found,) = await look(sim, name)
        assert sorted(label for _, label, _ in shown(found)) == [place(sim, each) for each in NAMES]
        assert [member.label for member in found.members if member.mode == "rw"] == [place(sim, leader or "")]
        assert (found.master, found.failover) == ("single", "election")
        assert len(found.links) == 6
        assert {(link.status, link.lag, link.lag_lsn) for link in found.links} == {("follow", 0.0, 0)}


@simulated(seeds=range(3))
async def test_a_killed_leader_is_seen_with_what_the_others_know_and_its_successor_leads(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    await sim.until(lambda: leads(sim, *NAMES) and all_follow_all(sim))
    first = leads(sim, *NAMES) or ""
    survey = survey_of(sim, next(name for name in NAMES if name != first))
    (before,) = await survey.look()
    (led,) = [member for member in before.members if member.is_leader]
    assert (led.label, before.role(led)) == (place(sim, first), "leader")
    assert before.queue is not None
    assert before.queue.owner == led.id
    sim.kill(first)
    others = [name for name in NAMES if name != first]
    await sim.until(lambda: leads(sim, *others))
    (after,) = await survey.look()
    await survey.close()
    (now,) = [member for member in after.members if member.is_leader]
    assert now.label == place(sim, leads(sim, *others) or "")
    assert (after.term or 0) > (before.term or 0)
    gone = after.member(led.uuid)
    assert gone is not None
    assert gone.unreachable is not None
    assert (gone.id, gone.label, gone.mode) == (led.id, led.label, "unknown")
    assert gone.vclock


@simulated(seeds=range(2))
async def test_a_member_that_comes_back_is_found_again(sim: Simulation) -> None:
    await start_set(sim, ("a", "b"))
    await sim.until(lambda: all_follow_all(sim, ("a", "b")))
    survey = survey_of(sim, "a")
    (found,) = await survey.look()
    assert [member.mode for member in found.members] == ["rw", "rw"]
    sim.kill("b")
    (found,) = await survey.look()
    assert {(member.label, member.mode) for member in found.members} == {
        (place(sim, "a"), "rw"),
        (place(sim, "b"), "unknown"),
    }
    await sim.restart("b")
    await sim.until(lambda: all_follow_all(sim, ("a", "b")))
    (found,) = await survey.look()
    assert [member.mode for member in found.members] == ["rw", "rw"]
    await survey.close()


@simulated(seeds=range(2))
async def test_who_answers_in_the_place_of_a_member_is_not_taken_for_it(sim: Simulation) -> None:
    await start_set(sim, ("a", "b"))
    await sim.until(lambda: all_follow_all(sim, ("a", "b")))
    meant = str(sim.node("b").info()["uuid"])
    await sim.stop("b")
    disk = sim.look("b")
    for name in disk.list_directory("/b"):
        disk.unlink(f"/b/{name}")
    await sim.restart("b", replication=[])
    (found,) = await look(sim, "a")
    member = found.member(meant)
    assert member is not None
    assert member.unreachable is not None
    assert member.unreachable.reason == f"another instance answers there, {sim.node('b').info()['uuid']}"


@simulated(seeds=range(2))
async def test_two_sets_are_seen_at_once(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", dialect="2.6")
    first, second = await look(sim, "a", "b")
    assert shown(first) == [(1, place(sim, "a"), "rw")]
    assert shown(second) == [(1, place(sim, "b"), "rw")]
    assert first.uuid != second.uuid


# --- real servers ---


async def seen_from(*members: Member) -> tuple[ReplicaSet, ...]:
    survey = Survey(production(), [parse_uri(member.address) for member in members])
    try:
        return await survey.look()
    finally:
        await survey.close()


@fits("2.6")
async def test_a_chain_of_real_servers_and_a_node_is_followed_to_its_beginning(cluster: Cluster) -> None:
    first = cluster.real("first")
    second = cluster.ours("second", replication=[first.uri])
    third = cluster.real("third", replication=[second.uri], read_only=True)
    third.wait_follow(second)
    third.catch_up(first, second)
    (found,) = await seen_from(third)
    assert shown(found) == [(1, first.address, "rw"), (2, second.address, "rw"), (3, third.address, "read")]
    assert [(link.status, link.lag_lsn) for link in found.links] == [("follow", 0)] * 2


@fits("2.6")
async def test_a_stopped_link_between_real_servers_is_seen_with_its_message(cluster: Cluster) -> None:
    first = cluster.real("first")
    first.eval("box.schema.space.create('s'):create_index('pk')")
    second = cluster.real("second", replication=[first.uri])
    second.eval("box.space.s:insert{1, 'here'}")
    first.eval("box.space.s:insert{1, 'there'}")
    eventually("replication stops", lambda: second.upstream(first)["status"] == "stopped")
    (found,) = await seen_from(second, first)
    (link,) = found.links
    assert (link.status, link.downstream, link.lag_lsn) == ("stopped", "stopped", 1)
    assert link.lag == link.idle
    assert link.message is not None
    assert "Duplicate key" in link.message
