"""The stream: atomic transactions, local rows that are not sent, foreign replica sets, and lag."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack, unpack
from flowstone.node.node import Node
from tests.scenarios.middleman import Middleman
from tests.scenarios.simulated_members import (
    SPACE,
    files,
    held,
    insert,
    make_space,
    reconfigure,
    snapshot,
    uris,
)
from tests.simulation.cluster import converge, downstream, follows, upstream, vclock
from tests.simulation.simulation import Simulation, simulated

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
SPACES = 280


async def pair(sim: Simulation, **options: Any) -> tuple[Node, Node]:
    """Start a master `a` and a writable replica `b`."""
    master = await sim.start("a", **options)
    await make_space(sim, "a")
    replica = await sim.start("b", replication=uris(sim, "a"))
    await sim.until(lambda: follows(sim, "b", "a"))
    return master, replica


@DIALECTS
@pytest.mark.parametrize("conflict", [11, 12, 13])
@simulated()
async def test_conflict_anywhere_in_a_transaction_applies_none_of_it_and_stops_later_ones(
    sim: Simulation, dialect: str, conflict: int
) -> None:
    """C2: of two and three rows; when the replica's row is deleted, all are applied in order."""
    await pair(sim, dialect=dialect)
    await insert(sim, "a", 1, 2)
    await sim.until(lambda: held(sim, "b") == {1: "a", 2: "a"})
    await insert(sim, "b", conflict)
    before = vclock(sim, "b")[1]
    await insert(sim, "a", 11, 12, 13)
    await insert(sim, "a", 21, 22)
    await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    assert "Duplicate key exists in unique index" in upstream(sim, "b", "a")["message"]
    await sim.sleep(10)
    assert held(sim, "b") == {1: "a", 2: "a", conflict: "b"}
    assert vclock(sim, "b")[1] == before
    await sim.on("b", sim.node("b").space(SPACE).delete(conflict))
    await reconfigure(sim, "b", replication=uris(sim, "a"))
    await sim.until(lambda: follows(sim, "b", "a"))
    await sim.until(lambda: held(sim, "b") == dict.fromkeys((1, 2, 11, 12, 13, 21, 22), "a"))


@DIALECTS
@simulated()
async def test_only_definitions_of_local_and_temporary_spaces_are_replicated(sim: Simulation, dialect: str) -> None:
    """C6: with data from before and after the join; rows written on a replica are its own."""
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    await make_space(sim, "a", "own", is_local=True)
    await make_space(sim, "a", "passing", temporary=True)
    for space in (SPACE, "own", "passing"):
        await insert(sim, "a", 1, space=space)
    await sim.start("b", replication=uris(sim, "a"))
    for space in (SPACE, "own", "passing"):
        await insert(sim, "a", 2, space=space)
    await converge(sim, "ab")
    assert held(sim, "b") == {1: "a", 2: "a"}
    assert held(sim, "b", "own") == held(sim, "b", "passing") == {}
    before = vclock(sim, "b")
    for space in ("own", "passing"):
        await insert(sim, "b", 3, space=space)
    assert vclock(sim, "b") == before
    assert sim.node("b").info()["vclock"][0] == 1, "a temporary row has no LSN, a local row one of component 0"
    assert 0 not in downstream(sim, "a", "b")["vclock"]
    await sim.restart("b")
    assert held(sim, "b", "own") == {3: "b"}
    assert held(sim, "b", "passing") == {}


@DIALECTS
@simulated()
async def test_space_cannot_change_between_local_and_replicated(sim: Simulation, dialect: str) -> None:
    """C6: group_id cannot change."""
    await sim.start("a", dialect=dialect)
    for name, options, change in (("own", {"is_local": True}, {}), ("world", {}, {"group_id": 1})):
        await make_space(sim, "a", name, **options)
        row = next(row for row in map(unpack, sim.node("a").box.spaces[SPACES].tuples()) if row[2] == name)
        client = await sim.client("a")
        changed = (*row[:5], change, row[6])
        body = pack({Key.SPACE_ID.value: SPACES, Key.TUPLE.value: changed})
        with pytest.raises(errors.AlterSpace, match="replication group is immutable"):
            await client.request(RequestType.REPLACE, body)


@DIALECTS
@simulated()
async def test_local_rows_of_a_replica_do_not_keep_the_masters_logs(sim: Simulation, dialect: str) -> None:
    """C6: component 0 of one member is meaningless to another."""
    await pair(sim, dialect=dialect, checkpoint_count=1, wal_cleanup_delay=0)
    await make_space(sim, "a", "own", is_local=True)
    await converge(sim, "ab")
    for key in range(30):
        await insert(sim, "a", key, space="own")
        await insert(sim, "b", key, space="own")
    await insert(sim, "a", 1)
    await converge(sim, "ab")
    await sim.until(lambda: downstream(sim, "a", "b")["vclock"] == vclock(sim, "a"))
    await snapshot(sim, "a")
    await sim.until(lambda: len(files(sim, "a", ".xlog")) <= 1)
    await sim.restart("b")
    await insert(sim, "a", 2)
    await converge(sim, "ab")


@DIALECTS
@simulated()
async def test_component_zero_of_a_master_is_not_adopted_by_the_replica(sim: Simulation, dialect: str) -> None:
    """C7: even before its first ACK, which is late."""
    await pair(sim, dialect=dialect)
    await make_space(sim, "a", "own", is_local=True)
    for key in range(10):
        await insert(sim, "a", key, space="own")
    await converge(sim, "ab")
    await sim.stop("b")
    async with Middleman(sim, "a") as middle:
        seen: list[bytes] = []

        def hold_acks(packet: bytes) -> bytes | None:
            seen.append(packet)
            return None if b"\x00\x00" in packet[:3] else packet

        middle.on_request = hold_acks
        restarting = asyncio.ensure_future(sim.restart("b", replication=[middle.uri], replication_timeout=10))
        await sim.until(lambda: downstream(sim, "a", "b").get("status") == "follow")
        assert 0 not in downstream(sim, "a", "b")["vclock"]
        middle.on_request = lambda packet: packet
        await restarting
        await insert(sim, "a", 1)
        await sim.until(lambda: downstream(sim, "a", "b")["vclock"] == vclock(sim, "a"))
        assert downstream(sim, "a", "b")["status"] == "follow"


@pytest.mark.parametrize("theirs", ["2.6", "2.11"])
@simulated()
async def test_instance_of_another_replica_set_is_rejected_and_becomes_an_orphan(sim: Simulation, theirs: str) -> None:
    """C12: a newer master rejects the instance; with an older one, the instance notices by itself."""
    await sim.start("a", dialect=theirs)
    await sim.start("b", dialect="2.6")
    await make_space(sim, "b")
    await sim.restart("b", replication=uris(sim, "a"), replication_connect_quorum=1, replication_sync_timeout=5)
    info = sim.node("b").info()
    assert (info["status"], info["ro"]) == ("orphan", True)
    text = "not registered with replica set" if theirs == "2.6" else "Replica set UUID mismatch: expected"
    stopped = [line for line in sim.trace.lines if "is stopped" in line and text in line]
    assert len(stopped) == 1
    with pytest.raises(errors.Readonly):
        await insert(sim, "b", 1)
    await reconfigure(sim, "b", replication=[])
    await insert(sim, "b", 1)


@simulated(seeds=range(2))
async def test_downstream_lag_is_the_duration_of_the_last_transaction(sim: Simulation) -> None:
    """C13: 0 before the first ACK of a transaction, then computed from the echoed time; heartbeats do not count."""
    await pair(sim, dialect="2.11", wal_mode="fsync")
    await sim.restart("b", wal_mode="fsync")
    await sim.until(lambda: downstream(sim, "a", "b").get("status") == "follow")
    await sim.sleep(10)
    assert downstream(sim, "a", "b")["lag"] == 0
    sim.machine("b").blocking_seconds = (0.4, 0.5)
    await insert(sim, "a", 1)
    await sim.until(lambda: downstream(sim, "a", "b")["lag"] > 0)
    lag = downstream(sim, "a", "b")["lag"]
    assert 0.4 < lag < 2
    await sim.sleep(20)
    assert downstream(sim, "a", "b")["lag"] == lag, "idle times are no lag"
    sim.machine("b").blocking_seconds = (0.001, 0.002)
    await insert(sim, "a", 2)
    await sim.until(lambda: downstream(sim, "a", "b")["lag"] < 0.1)
    await sim.restart("b")
    await sim.until(lambda: downstream(sim, "a", "b").get("status") == "follow")
    await sim.sleep(10)
    assert downstream(sim, "a", "b")["lag"] == 0, "a new connection has no lag yet"


@simulated()
async def test_master_sends_heartbeats_while_it_searches_the_first_row(sim: Simulation) -> None:
    """C14: the master scans old logs of known rows for long, on a slow disk; heartbeats still arrive."""
    await pair(sim, dialect="2.11", wal_max_size=2000)
    await reconfigure(sim, "a", replication_timeout=0.2)
    await sim.stop("b")
    await make_space(sim, "a", "own", is_local=True)
    for key in range(200):
        await insert(sim, "a", key, space="own")
    await insert(sim, "a", 1)
    await sim.restart("a", replication_timeout=0.2)
    sim.machine("a").blocking_seconds = (0.2, 0.3)
    await sim.restart("b", replication_timeout=0.2)
    lines = len(sim.trace.lines)
    await sim.until(lambda: held(sim, "b") == {1: "a"}, seconds=600)
    assert not [line for line in list(sim.trace.lines)[lines:] if "is lost" in line or "disconnected" in line]
