"""The components of a node at its start: adopted version and name, when it listens, and which joins it refuses."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import BallotKey, Key, RequestType
from flowstone.node.upstream.node_sink import JoinRefused
from tests.simulation.simulation import Simulation, simulated

OTHER = "7c025e42-2394-11e7-aacf-0242ac110002"


@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
def test_new_data_has_the_version_of_the_peer_it_is_fetched_from(dialect: str) -> None:
    async def scenario(sim: Simulation) -> None:
        await sim.start("a", dialect=dialect)
        joined = await sim.start("b", replication=[sim.uri("a")])
        assert joined.box.dialect.value == dialect
        assert (await sim.restart("b")).box.dialect.value == dialect

    Simulation(1).run(scenario)


@simulated()
async def test_error_about_a_wrong_dialect_names_that_of_the_peers(sim: Simulation) -> None:
    await sim.start("a", dialect="2.6")
    with pytest.raises(JoinRefused, match=r"peer runs Tarantool 2\.6\.0.*match dialect 2\.11; start with dialect 2\.6"):
        await sim.start("b", dialect="2.11", replication=[sim.uri("a")])


@simulated()
async def test_instance_with_peers_answers_votes_before_it_has_data(sim: Simulation) -> None:
    starting = asyncio.ensure_future(sim.start("a", replication=[sim.uri("a"), sim.uri("b")]))
    await sim.sleep(5)
    client = await sim.client("a", user=None)
    ballot = (await client.request(RequestType.VOTE))[Key.BALLOT.value]
    assert (ballot[BallotKey.IS_BOOTED.value], ballot[BallotKey.IS_RO.value]) == (False, True)
    with pytest.raises(errors.Loading):
        await client.request(RequestType.SELECT, b"\x83\x10\xcd\x01\x18\x12\x01\x20\x90")
    await sim.start("b", replication=[sim.uri("a"), sim.uri("b")])
    await starting


@simulated()
async def test_data_of_an_unexpected_replica_set_is_rejected(sim: Simulation) -> None:
    await sim.start("a")
    with pytest.raises(errors.ReplicasetUuidMismatch, match=OTHER):
        await sim.start("b", replication=[sim.uri("a")], replicaset_uuid=OTHER)
    assert not [name for name in sim.storage("b").names if name.endswith(".snap")]


@simulated()
async def test_joined_instance_keeps_its_name_and_id(sim: Simulation) -> None:
    await sim.start("a")
    info = (await sim.start("b", replication=[sim.uri("a")], instance_uuid=OTHER)).info()
    assert (UUID(info["uuid"]), info["id"]) == (UUID(OTHER), 2)
    sim.kill("b")
    info = (await sim.restart("b")).info()
    assert (UUID(info["uuid"]), info["id"], info["status"]) == (UUID(OTHER), 2, "running")


@simulated()
async def test_read_only_instance_bootstraps_no_replica_set(sim: Simulation) -> None:
    with pytest.raises(errors.BootstrapReadonly):
        await sim.start("a", read_only=True)
