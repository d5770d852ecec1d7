"""Anonymous replicas: their rights, their place in reports, and their registration."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import version_id
from flowstone.iproto.msgpack import pack
from tests.scenarios.middleman import Middleman
from tests.scenarios.simulated_members import held, ids, insert, make_space, reconfigure, uris
from tests.simulation.cluster import converge, downstream, follows, vclock
from tests.simulation.simulation import Simulation, simulated

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
ANONYMOUS: dict[str, Any] = {"replication_anon": True, "read_only": True}


@DIALECTS
@simulated()
async def test_anonymous_replica_counts_its_own_rows_in_component_zero_and_becomes_a_member(
    sim: Simulation, dialect: str
) -> None:
    """D1: before and after the registration, with the reports of both sides."""
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    await make_space(sim, "a", "own", is_local=True)
    await make_space(sim, "a", "passing", temporary=True)
    node = await sim.start("b", replication=uris(sim, "a"), **ANONYMOUS)
    info = node.info()
    assert (info["id"], info["lsn"], info["ro"], info["status"]) == (0, -1, True, "running")
    await sim.until(lambda: sim.node("a").info()["replication_anon"]["count"] == 1)
    assert list(ids(sim, "a").values()) == [1]
    with pytest.raises(errors.Readonly):
        await insert(sim, "b", 1)
    # Local and temporary spaces are writable even on a read-only instance.
    await insert(sim, "b", 1, 2, space="own")
    await insert(sim, "b", 1, space="passing")
    assert node.info()["vclock"].get(0) == 2
    await sim.restart("b")
    assert held(sim, "b", "own") == {1: "b", 2: "b"}
    await insert(sim, "a", 1)
    await converge(sim, "ab")
    await reconfigure(sim, "b", replication_anon=False)
    node = sim.node("b")
    assert node.info()["id"] == ids(sim, "a")[node.info()["uuid"]] == 2
    await sim.until(lambda: sim.node("a").info()["replication_anon"]["count"] == 0)
    await reconfigure(sim, "b", read_only=False)
    await reconfigure(sim, "a", replication=uris(sim, "b"))
    await sim.until(lambda: follows(sim, "a", "b"))
    await insert(sim, "b", 2)
    await converge(sim, "ab")
    assert held(sim, "a") == {1: "a", 2: "b"}
    assert vclock(sim, "a")[2] == 1
    assert 0 not in downstream(sim, "a", "b")["vclock"]
    await sim.restart("b")
    assert sim.node("b").info()["id"] == 2
    await converge(sim, "ab")


@DIALECTS
@simulated(seeds=range(3))
async def test_rows_missing_at_the_registration_of_an_anonymous_replica_are_not_lost(
    sim: Simulation, dialect: str
) -> None:
    """D2: newer masters start the rows of a registration at the replica's position, 2.6 at its own end: a gap
    until then.
    """
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    async with Middleman(sim, "a") as middle:
        await sim.start("b", replication=[middle.uri], **ANONYMOUS)
        await insert(sim, "a", 1)
        await sim.until(lambda: held(sim, "b") == {1: "a"})
        middle.on_answer = lambda packet: None
        for key in range(2, 50):
            await insert(sim, "a", key)
        await sim.sleep(1)
        assert held(sim, "b") == {1: "a"}
        middle.cut()
        middle.on_answer = lambda packet: packet
        await reconfigure(sim, "b", replication_anon=False)
        assert sim.node("b").info()["id"] == 2
        await sim.until(lambda: len(held(sim, "b")) == 49)
        await converge(sim, "ab")


@simulated()
async def test_anonymous_subscribe_without_a_uuid_is_rejected_and_the_master_survives(sim: Simulation) -> None:
    """D5: as raw requests, with the nil UUID and with none at all."""
    await sim.start("a")
    await make_space(sim, "a")
    replicaset = sim.node("a").info()["cluster"]["uuid"]
    body = {
        Key.REPLICASET_UUID.value: replicaset,
        Key.VCLOCK.value: {},
        Key.SERVER_VERSION.value: version_id(2, 11, 9),
        Key.REPLICA_ANON.value: True,
    }
    for uuid in ({Key.INSTANCE_UUID.value: str(UUID(int=0))}, {}):
        client = await sim.client("a")
        with pytest.raises(errors.NilUuid):
            await client.request(RequestType.SUBSCRIBE, pack(body | uuid))
    await insert(sim, "a", 1)
    await sim.start("b", replication=uris(sim, "a"), **ANONYMOUS)
    await converge(sim, "ab")
