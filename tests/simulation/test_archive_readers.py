"""Readers of an archive never get uncommitted rows of a deposed leader, however the upstream learned of that."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from flowstone.errors import FlowstoneError
from flowstone.replication.settled_position import SettledTracker
from tests import served_node
from tests.simulation.cluster import NAMES, converge
from tests.simulation.endings import names, stop_and_compare
from tests.simulation.final_history import FinalHistory
from tests.simulation.followers import Archiver
from tests.simulation.logs import read_all, read_log
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_endings import LedSet, form
from tests.simulation.workload import FIELDS

SYNCHRONOUS = 513


async def overtake(sim: Simulation, replica_set: LedSet, upstream: str) -> tuple[Archiver, FinalHistory]:
    """Let `a` write a shared row and, until `b` is promoted, one of its own; an archive follows `upstream`."""
    client = await sim.client("a")
    await served_node.create_space(client, SYNCHRONOUS, "sync", FIELDS, options={"is_sync": True})
    archiver = Archiver(replica_set, Random(1))
    await archiver.tend(upstream)
    await catch_up(sim, archiver, "a")
    await sim.on("a", sim.node("a").space("sync").replace((1, 1, "kept")))
    await catch_up(sim, archiver, "a")
    sim.isolate("a")
    writing = sim.loop.create_task(sim.on("a", sim.node("a").space("sync").replace((2, 2, "alone"))))
    await sim.sleep(1)
    await sim.on("b", sim.node("b").promote())
    sim.heal()
    with pytest.raises(FlowstoneError):
        await writing
    await converge(sim, NAMES)
    await catch_up(sim, archiver, "b")
    await archiver.stop()
    replica_set.members = ["b", "a", "c"]
    assert (await stop_and_compare(replica_set)).violations == []
    return archiver, FinalHistory([read_all(name, sim.storage(name)) for name in names(replica_set)])


async def catch_up(sim: Simulation, archiver: Archiver, name: str) -> None:
    await sim.until(lambda: archiver.position >= sim.node(name)._instance.vclock.without_zero())


@pytest.mark.parametrize(("upstream", "has_row"), [("a", True), ("b", False)])
@simulated()
async def test_unreplicated_row_of_a_deposed_leader_is_not_delivered(
    sim: Simulation, upstream: str, has_row: bool
) -> None:
    """`a` rolled it back; `b` had decided before it arrived, and wrote a NOP in its place."""
    archiver, history = await overtake(sim, await form(sim), upstream)
    (alone,) = history.withdrawn
    log = read_log(archiver.name, sim.storage(archiver.name))
    assert [not record.is_nop for position, _, record in log.positions() if position == alone] == [has_row]
    assert archiver.check(history) == []


@simulated()
async def test_archive_that_switches_to_a_deposed_leader_does_not_deliver_its_unreplicated_row(sim: Simulation) -> None:
    """The archive has the PROMOTE from `b` already when `a`, which lacks it, sends the row."""
    replica_set = await form(sim)
    client = await sim.client("a")
    await served_node.create_space(client, SYNCHRONOUS, "sync", FIELDS, options={"is_sync": True})
    archiver = Archiver(replica_set, Random(1))
    await archiver.start("b")
    await catch_up(sim, archiver, "a")
    sim.isolate("a")
    writing = sim.loop.create_task(sim.on("a", sim.node("a").space("sync").replace((2, 2, "alone"))))
    await sim.sleep(1)
    await sim.on("b", sim.node("b").promote())
    await catch_up(sim, archiver, "b")
    await archiver.stop()
    sim.heal()
    with pytest.raises(FlowstoneError):
        await writing
    await sim.on("b", sim.node("b").space("sync").replace((3, 3, "kept")))
    await converge(sim, NAMES)
    await archiver.start("a")
    await catch_up(sim, archiver, "b")
    await archiver.stop()
    replica_set.members = ["b", "a", "c"]
    assert (await stop_and_compare(replica_set)).violations == []
    history = FinalHistory([read_all(name, sim.storage(name)) for name in names(replica_set)])
    assert len(history.withdrawn) == 1
    assert archiver.check(history) == []


def _keep(tracker: SettledTracker[Any], lsn: int) -> None:
    tracker._confirm(lsn + 1_000_000)


@simulated()
async def test_rolled_back_row_in_the_log_is_found(sim: Simulation) -> None:
    archiver, history = await overtake(sim, await form(sim), "a")
    (alone,) = history.withdrawn
    with patch.object(SettledTracker, "_withdraw", _keep):
        assert archiver.check(history) == [f"archive1, by its log, delivers [{alone}], which were rolled back"]


@simulated()
async def test_rolled_back_row_in_the_index_is_found(sim: Simulation) -> None:
    with patch.object(SettledTracker, "_withdraw", _keep):
        archiver, history = await overtake(sim, await form(sim), "a")
    (alone,) = history.withdrawn
    assert archiver.check(history) == [f"archive1, by its index, delivers [{alone}], which were rolled back"]


@simulated()
async def test_missing_row_is_found(sim: Simulation) -> None:
    archiver, history = await overtake(sim, await form(sim), "b")
    with patch.object(SettledTracker, "_confirm", lambda tracker, lsn: None):
        (found,) = archiver.check(history)
    assert found.startswith("archive1, by its log, does not deliver [(")
