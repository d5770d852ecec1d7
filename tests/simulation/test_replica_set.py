"""The operator of a run restarts nodes after disk failures, and reports other nodes that do not start or stop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Final
from unittest.mock import patch

from flowstone import Node
from flowstone.errors import FlowstoneError
from tests.simulation import endings
from tests.simulation.plan import plan
from tests.simulation.process_faults import stop
from tests.simulation.replica_set import ReplicaSet
from tests.simulation.simulation import Simulation, simulated

PLAN: Final = replace(plan(0), size=3, dialect="2.11", election_mode="off", wal_mode="fsync", anonymous=0)


async def form(sim: Simulation) -> ReplicaSet:
    replica_set = ReplicaSet(sim, PLAN)
    await replica_set.form()
    return replica_set


@simulated()
async def test_failed_start_on_a_healthy_disk_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    sim.kill("b")
    with patch.object(Node, "start", side_effect=[FlowstoneError("the log is damaged"), FlowstoneError("again")]):
        restarting = asyncio.ensure_future(replica_set.restart("b"))
        await sim.until(lambda: len(replica_set.violations) == 2)
    assert replica_set.violations[0] == "b does not start: the log is damaged; nothing is wrong with its disk"
    assert await restarting


@simulated()
async def test_start_from_an_unreadable_disk_may_fail(sim: Simulation) -> None:
    replica_set = await form(sim)
    sim.kill("b")
    sim.storage("b").broken.add("read_at")
    restarting = asyncio.ensure_future(replica_set.restart("b"))
    await sim.until(lambda: sim.machine("b").refusal)
    sim.storage("b").broken.clear()
    assert await restarting
    assert not replica_set.violations


@simulated()
async def test_start_from_a_rotten_disk_may_fail(sim: Simulation) -> None:
    replica_set = await form(sim)
    sim.kill("b")
    sim.storage("b").is_rotten = True
    with patch.object(Node, "start", side_effect=[FlowstoneError("the log is damaged")] * 3):
        restarting = asyncio.ensure_future(replica_set.restart("b"))
        await sim.until(lambda: sim.machine("b").refusal)
    assert await restarting
    assert not replica_set.violations


@simulated()
async def test_failed_stop_on_a_healthy_disk_is_reported(sim: Simulation) -> None:
    replica_set = await form(sim)
    stopping = Node.stop

    async def stop_badly(node: Node) -> None:
        await stopping(node)
        raise FlowstoneError("there was another node")

    with patch.object(Node, "stop", stop_badly):
        assert await stop(replica_set, Random(0))
    assert replica_set.violations
    assert "ends with an error: there was another node; nothing is wrong with its disk" in replica_set.violations[0]


@simulated()
async def test_stop_on_a_failing_disk_may_fail(sim: Simulation) -> None:
    replica_set = await form(sim)
    for name in replica_set.names:
        sim.storage(name).broken.update(("append", "sync"))
    stopping = asyncio.ensure_future(stop(replica_set, Random(0)))
    await sim.until(lambda: not all(map(sim.is_running, replica_set.names)))
    for name in replica_set.names:
        sim.storage(name).broken.clear()
    assert await stopping
    assert not replica_set.violations


@simulated()
async def test_node_that_never_starts_is_reported_with_its_error(sim: Simulation) -> None:
    replica_set = await form(sim)
    sim.kill("b")
    with patch.object(Node, "start", side_effect=FlowstoneError("the log is damaged")):
        await asyncio.gather(sim.restart("b"), return_exceptions=True)
    (found,) = await endings.check_liveness(replica_set, seconds=1)
    assert "b is not up, it did not start: the log is damaged" in found
    await replica_set.restart("b")
