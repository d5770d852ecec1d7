"""Bootstrap of a replica set, and the connections of a member without data."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.greeting import decode_greeting, encode_greeting
from flowstone.iproto.packet import split
from flowstone.iproto.replies import encode_error
from flowstone.iproto.row import decode_row
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged
from tests.interop.member import Member, eventually
from tests.interop.versions import fits
from tests.real_tarantool import free_port
from tests.scenarios.middleman import Middleman
from tests.scenarios.simulated_members import held, ids, insert, make_space, uris
from tests.simulation.cluster import all_follow_all, converge, follows, upstream
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import elect

SMALL, MIDDLE, LARGE = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "123")
DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])


@pytest.mark.parametrize("mode", ["candidate", "manual"])
@simulated(seeds=range(3))
async def test_voter_does_not_bootstrap_despite_its_smaller_uuid(sim: Simulation, mode: str) -> None:
    """A7: a member that can be elected bootstraps before others, whenever it starts; it then leads, and
    becomes writable.
    """
    peers = uris(sim, "a", "b", "c")
    await asyncio.gather(
        sim.start("a", replication=peers, instance_uuid=SMALL, election_mode="voter"),
        sim.start("b", replication=peers, instance_uuid=MIDDLE, election_mode="voter"),
        sim.start("c", replication=peers, instance_uuid=LARGE, election_mode=mode),
    )
    assert {number[LARGE] for number in (ids(sim, name) for name in "abc")} == {1}
    assert await elect(sim) == "c"
    await sim.until(lambda: all_follow_all(sim))
    await make_space(sim, "c")
    await insert(sim, "c", 1)
    await converge(sim)
    assert {name: sim.node(name).info()["ro"] for name in "abc"} == {"a": True, "b": True, "c": False}


@simulated()
async def test_members_wait_only_for_the_configured_leader(sim: Simulation) -> None:
    """A10: `c` never starts, and no member waits for it."""
    await sim.start("a")
    for leader in (sim.machine("a").uuid, "a:3301"):
        name = f"b{len(leader)}"
        before = sim.now
        await sim.start(
            name,
            replication=uris(sim, "a", name, "c"),
            bootstrap_strategy="config",
            bootstrap_leader=leader,
            replication_connect_timeout=30,
        )
        assert sim.now - before < 15, "the member waited for the others"
        assert ids(sim, name)[sim.machine("a").uuid] == 1


@simulated()
async def test_configured_bootstrap_leader_starts_alone(sim: Simulation) -> None:
    """A10: the leader does not wait for other members either, and they join it although their UUIDs are smaller."""
    options: dict[str, Any] = {
        "replication": uris(sim, "a", "b", "c"),
        "bootstrap_strategy": "config",
        "bootstrap_leader": LARGE,
    }
    before = sim.now
    await sim.start("a", instance_uuid=LARGE, **options)
    assert sim.now - before < 15, "the member waited for the others"
    await sim.start("b", instance_uuid=SMALL, **options)
    assert ids(sim, "b") == {LARGE: 1, SMALL: 2}


@simulated()
async def test_unknown_leader_is_a_startup_error(sim: Simulation) -> None:
    """A10: the leader is given by URI or by UUID."""
    await sim.start("a")
    for leader in ("elsewhere:3301", MIDDLE):
        with pytest.raises(errors.Cfg, match=f"failed to connect to the bootstrap leader {leader}"):
            await sim.start(
                "b",
                replication=uris(sim, "a", "b"),
                bootstrap_strategy="config",
                bootstrap_leader=leader,
                replication_connect_timeout=3,
            )
    assert list(ids(sim, "a").values()) == [1]


@fits(">=3.0")
def test_real_leader_is_joined_by_its_name(cluster: Cluster) -> None:
    """A10: a node of dialect 2.11 has no name itself and knows those of newer peers from their ballots."""
    leader = cluster.real("leader", instance_name="leader")
    ours = cluster.ours(
        "ours",
        replication=[leader.uri, f"replicator:secret@127.0.0.1:{free_port()}"],
        bootstrap_strategy="config",
        bootstrap_leader="leader",
    )
    ours.wait_follow(leader)
    assert_converged(leader, ours)


@DIALECTS
@simulated()
async def test_peer_without_a_uuid_is_retried_until_it_has_one(sim: Simulation, dialect: str) -> None:
    """A12: servers that are starting greet with the nil UUID."""
    await sim.start("a", dialect=dialect)
    greetings: list[bytes] = []

    def nil_at_first(greeting: bytes) -> bytes:
        greetings.append(greeting)
        if len(greetings) > 3:
            return greeting
        heard = decode_greeting(greeting)
        return encode_greeting(type(heard)(heard.version, UUID(int=0), heard.salt))

    async with Middleman(sim, "a") as middle:
        middle.on_greeting = nil_at_first
        await sim.start("b", replication=[middle.uri])
        assert len(greetings) > 3
        await sim.until(lambda: follows(sim, "b", "a"))


@simulated()
async def test_running_replica_reports_a_peer_without_a_uuid(sim: Simulation) -> None:
    """A12: the replica recovers by itself."""
    await sim.start("a")
    async with Middleman(sim, "a") as middle:
        await sim.start("b", replication=[middle.uri])
        await sim.until(lambda: follows(sim, "b", "a"))
        is_nil = True

        def nil(greeting: bytes) -> bytes:
            heard = decode_greeting(greeting)
            return encode_greeting(type(heard)(heard.version, UUID(int=0), heard.salt)) if is_nil else greeting

        middle.on_greeting = nil
        middle.cut()
        await sim.until(lambda: "UUID" in upstream(sim, "b", "a").get("message", ""))
        assert upstream(sim, "b", "a")["status"] in ("disconnected", "connecting", "connect")
        tried = middle.connections
        await sim.until(lambda: middle.connections > tried + 2)
        is_nil = False
        await sim.until(lambda: follows(sim, "b", "a"))


@pytest.mark.parametrize("timeout", [0.5, 2.0])
@simulated()
async def test_silent_peer_is_dropped_after_four_timeouts_and_retried(sim: Simulation, timeout: float) -> None:
    """A13: the peer accepts connections and does not greet."""
    await sim.start("a")
    async with Middleman(sim, "a") as middle:
        await sim.start("b", replication=[middle.uri], replication_timeout=timeout)
        await sim.until(lambda: follows(sim, "b", "a"))
        middle.on_greeting = lambda greeting: None
        middle.cut()
        before = middle.connections
        await sim.until(lambda: middle.connections == before + 1)
        start = sim.now
        await sim.until(lambda: middle.connections == before + 2)
        assert 4 * timeout <= sim.now - start < 6 * timeout
        assert upstream(sim, "b", "a")["message"]
        middle.on_greeting = lambda greeting: greeting
        await sim.until(lambda: follows(sim, "b", "a"))


@simulated()
async def test_master_that_rejects_the_id_request_is_joined_and_followed(sim: Simulation) -> None:
    """A14: request type 73 is answered with an error, and all others work."""
    await sim.start("a")
    await make_space(sim, "a")
    refused: list[int] = []

    def refuse_id(packet: bytes) -> bytes | None:
        row = decode_row(packet)
        if row.type != RequestType.ID:
            return None
        refused.append(row.sync)
        error = errors.UnknownRequestType("Unknown request type 73")
        ((payload,), _) = split(encode_error(row.sync, 0, error))
        return payload

    async with Middleman(sim, "a") as middle:
        middle.answer_instead = refuse_id
        await sim.start("b", replication=[middle.uri])
        await insert(sim, "a", 1)
        await sim.until(lambda: held(sim, "b") == {1: "a"})
        assert refused
        await converge(sim, "ab")


@fits(">=2.11")
def test_real_candidate_leads_and_becomes_writable_next_to_a_node(cluster: Cluster) -> None:
    """A7: the node, with elections off, has the smaller UUID and still joins."""
    candidate = cluster.real("candidate", start=False, instance_uuid=LARGE, election_mode="candidate")
    voter = cluster.real("voter", start=False, instance_uuid=MIDDLE, election_mode="voter")
    ours = cluster.ours("ours", start=False, instance_uuid=SMALL, dialect="2.11")
    members: list[Member] = [candidate, voter, ours]
    for real in (candidate, voter):
        real.options["replication_synchro_quorum"] = 1
    for member in members:
        member.launch(replication=[one.uri for one in members])
    for member in members:
        member.wait_ready()
    eventually("the candidate leads", lambda: candidate.info()["election"]["state"] == "leader")
    candidate.wait_writable()
    ours.wait_follow(candidate, voter)
    assert (candidate.id, voter.info()["ro"]) == (1, True)
    assert_converged(candidate, ours)
