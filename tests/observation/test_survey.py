"""Whole replica sets are discovered from one member: nodes in a simulation, and real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import decode_greeting
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.row import Row
from flowstone.iproto.uri import parse_uri
from flowstone.observation.query import ASK_SECONDS
from flowstone.observation.replica_set import ReplicaSet
from flowstone.observation.survey import TOLD_MAX, Survey
from flowstone.outside import Outside, Stream, production
from flowstone.outside.network import SystemNetwork
from tests.interop.cluster import Cluster
from tests.interop.member import POLL_SECONDS, SECONDS, Member
from tests.interop.versions import fits
from tests.node.fake_server import OK, Reply, answering, greeting, peer
from tests.observation.reports import uuid
from tests.simulation.cluster import NAMES, all_follow_all, start_set
from tests.simulation.simulation import Simulation, simulated

Shown = list[tuple[int, str, str]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

GREETS = str(decode_greeting(greeting()).uuid)
"""The initial identity of every server of `fake_server`."""

THOUSANDS = {uuid(number): f"db{number}:3301" for number in range(10, 2000)}


def shown(one: ReplicaSet) -> Shown:
    return [(member.id, member.label, member.mode) for member in one.members]


def ways(one: ReplicaSet) -> list[tuple[str, int | None]]:
    """Return the links between members, with the number of missing rows."""
    return [(link.status, link.lag_lsn) for link in one.links]


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
    """Return the writable member once all of `names` know that it leads."""
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
async def test_killed_leader_is_described_by_its_peers_and_its_successor_leads(sim: Simulation) -> None:
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
async def test_returning_member_is_found_again(sim: Simulation) -> None:
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
async def test_survey_does_not_mistake_another_server_at_the_address_for_the_member(sim: Simulation) -> None:
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
    assert member.unreachable.reason == f"another instance answers at this address: {sim.node('b').info()['uuid']}"


@simulated(seeds=range(2))
async def test_members_lost_together_keep_their_identities_in_the_next_poll(sim: Simulation) -> None:
    """Only these two know each other: no other member follows them."""
    await sim.start("a")
    for name in ("b", "c"):
        await sim.start(name, replication=[sim.uri("a")], bootstrap_strategy="legacy")
    await sim.until(lambda: len(sim.node("a").info()["replication"]) == 3)
    uuids = {place(sim, name): str(sim.node(name).info()["uuid"]) for name in ("b", "c")}
    survey = survey_of(sim, "a", "b", "c")
    await survey.look()
    for name in ("b", "c"):
        sim.kill(name)
    (found,) = await survey.look()
    assert {member.address: member.uuid for member in found.members if member.unreachable is not None} == uuids
    disk = sim.look("b")
    for name in disk.list_directory("/b"):
        disk.unlink(f"/b/{name}")
    await sim.restart("b", replication=[], bootstrap_strategy="legacy")
    await survey.look()
    sim.kill("b")
    sets = await survey.look()
    await survey.close()
    (strange,) = [m for one in sets for m in one.members if m.address == place(sim, "b") and m.unreachable is not None]
    assert strange.uuid == place(sim, "b")


@simulated(seeds=range(2))
async def test_survey_finds_two_sets(sim: Simulation) -> None:
    await sim.start("a")
    await sim.start("b", dialect="2.6")
    first, second = await look(sim, "a", "b")
    assert shown(first) == [(1, place(sim, "a"), "rw")]
    assert shown(second) == [(1, place(sim, "b"), "rw")]
    assert first.uuid != second.uuid


@simulated(seeds=range(2))
async def test_survey_ends_when_given_and_found_servers_hang_together(sim: Simulation) -> None:
    await start_set(sim, ("a", "b"))
    await sim.until(lambda: all_follow_all(sim, ("a", "b")))
    survey = survey_of(sim, "a")
    (found,) = await survey.look()
    assert [member.mode for member in found.members] == ["rw", "rw"]
    for name in ("a", "b"):
        sim.freeze(name)
    began = sim.loop.time()
    await survey.look()
    took = sim.loop.time() - began
    for name in ("a", "b"):
        sim.thaw(name)
    await survey.close()
    assert took < 1.5 * ASK_SECONDS


# --- malicious members ---


def _telling(peers: dict[str, str], seen: list[int], own: str = uuid(1), replicaset: str = uuid(9)) -> Talk:
    """Run a server that claims to follow these instances at these addresses, and greets as `GREETS`."""
    rows = {
        number: {"id": number, "uuid": of, "upstream": {"status": "follow", "peer": address}}
        for number, (of, address) in enumerate(peers.items(), 2)
    }
    info = {"id": 1, "uuid": own, "cluster": {"uuid": replicaset}, "replication": rows}

    def answer(row: Row) -> Reply:
        seen.append(row.type)
        is_info = row.type == RequestType.CALL and unpack_body(row.body)[Key.FUNCTION_NAME] == "box.info"
        return (0, pack({Key.DATA.value: [info]})) if is_info else OK

    return answering(answer, (2, 6, 0))


async def _look_at(address: str, outside: Outside) -> tuple[ReplicaSet, ...]:
    survey = Survey(outside, [parse_uri(f"app:secret@{address}")])
    try:
        return await survey.look()
    finally:
        await survey.close()


async def test_credentials_are_not_sent_to_an_unexpected_server() -> None:
    asked: list[int] = []
    stranger: list[int] = []
    async with peer(_telling({}, stranger)) as elsewhere, peer(_telling({uuid(2): elsewhere}, asked)) as address:
        (found,) = await _look_at(address, production())
    assert RequestType.AUTH in asked
    assert stranger == []
    member = found.member(uuid(2))
    assert member is not None
    assert member.unreachable is not None
    assert member.unreachable.reason == f"another instance answers at this address: {GREETS}"
    assert member.unreachable.hint == f"expected {uuid(2)}"


class _FewServers(SystemNetwork):
    """Connects to the given addresses only, and records attempts to connect to others."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.tried: list[str] = []

    async def connect(self, host: str, port: int | None, **more: Any) -> Stream:
        if f"{host}:{port}" in self.addresses:
            return await super().connect(host, port, **more)
        self.tried.append(f"{host}:{port}")
        raise ConnectionRefusedError


async def test_number_of_members_connected_from_one_report_is_limited() -> None:
    async with peer(_telling(THOUSANDS, [])) as address:
        network = _FewServers(address)
        (found,) = await _look_at(address, replace(production(), network=network))
    assert len(network.tried) == TOLD_MAX
    assert len(found.members) == len(THOUSANDS) + 1


async def test_number_of_members_connected_from_a_foreign_set_is_limited() -> None:
    talk: list[Talk] = []

    async def named(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk[0](reader, writer)

    async with peer(named) as address:
        others = {uuid(number): f"db{number}:3301" for number in range(2000, 4000)}
        liar = _telling({uuid(1): address} | others, [], own=GREETS, replicaset=uuid(8))
        async with peer(liar) as elsewhere:
            talk.append(_telling({GREETS: elsewhere} | THOUSANDS, []))
            network = _FewServers(address, elsewhere)
            first, second = await _look_at(address, replace(production(), network=network))
    assert (first.uuid, second.uuid) == (uuid(9), uuid(8))
    assert len(network.tried) == TOLD_MAX - 1


# --- real servers ---


async def seen_from(*members: Member, when: Callable[[ReplicaSet], bool]) -> ReplicaSet:
    """Return the set at the first poll at which `when` holds; otherwise the last one."""
    survey = Survey(production(), [parse_uri(member.address) for member in members], timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    try:
        while True:
            (found,) = await survey.look()
            if when(found) or time.monotonic() > deadline:
                return found
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await survey.close()


@fits("2.6")
async def test_survey_follows_a_chain_of_servers_to_its_beginning(cluster: Cluster) -> None:
    first = cluster.real("first")
    second = cluster.ours("second", replication=[first.uri])
    third = cluster.real("third", replication=[second.uri], read_only=True)
    third.wait_follow(second)
    third.catch_up(first, second)
    found = await seen_from(third, when=lambda one: ways(one) == [("follow", 0)] * 2)
    assert shown(found) == [(1, first.address, "rw"), (2, second.address, "rw"), (3, third.address, "read")]
    assert ways(found) == [("follow", 0)] * 2


@fits("2.6")
async def test_stopped_link_between_real_servers_is_reported_with_its_message(cluster: Cluster) -> None:
    first = cluster.real("first")
    first.eval("box.schema.space.create('s'):create_index('pk')")
    second = cluster.real("second", replication=[first.uri])
    second.eval("box.space.s:insert{1, 'here'}")
    first.eval("box.space.s:insert{1, 'there'}")
    found = await seen_from(second, first, when=_has_come_to_rest)
    (link,) = found.links
    assert (link.status, link.downstream, link.lag_lsn) == ("stopped", "stopped", 1)
    assert link.lag == link.idle
    assert link.message is not None
    assert "Duplicate key" in link.message


def _has_come_to_rest(one: ReplicaSet) -> bool:
    """Return True if both sides report the link as stopped for longer than the delay of its last row."""
    return all((link.status, link.downstream) == ("stopped", "stopped") and link.lag == link.idle for link in one.links)
