"""Orphans: members that cannot reach enough of their peers, and members that have lost their own rows."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.iproto import errors
from tests.scenarios.simulated_members import files, held, insert, make_space, reconfigure, uris
from tests.simulation.cluster import all_follow_all, converge, start_set, vclock
from tests.simulation.disk import Loss
from tests.simulation.simulation import Simulation, simulated

NOWHERE = ("first:secret@nowhere:3301", "first:secret@neverland:3301")


@pytest.mark.parametrize("quorum", [1, 2, None])
@simulated()
async def test_unreachable_addresses_make_the_node_an_orphan(sim: Simulation, quorum: int | None) -> None:
    """E4: the addresses are set at run time or at startup; the node is an orphan until they are removed."""
    await sim.start("a", dialect="2.6", replication_connect_timeout=1, replication_connect_quorum=quorum)
    await make_space(sim, "a")
    await reconfigure(sim, "a", replication=list(NOWHERE))
    info = sim.node("a").info()
    assert (info["status"], info["ro"]) == ("orphan", True)
    with pytest.raises(errors.Readonly):
        await insert(sim, "a", 1)
    await sim.restart("a", replication=list(NOWHERE))
    assert sim.node("a").info()["status"] == "orphan"
    await reconfigure(sim, "a", replication=[])
    assert sim.node("a").info()["status"] == "running"
    await insert(sim, "a", 1)


@simulated()
async def test_quorum_of_zero_runs_at_once(sim: Simulation) -> None:
    """E4: neither a change nor a start waits for unreachable peers."""
    await sim.start("a", dialect="2.6", replication_connect_timeout=20, replication_connect_quorum=0)
    await make_space(sim, "a")
    before = sim.now
    await reconfigure(sim, "a", replication=list(NOWHERE))
    assert sim.node("a").info()["status"] == "running"
    await insert(sim, "a", 1)
    await sim.restart("a", replication=list(NOWHERE))
    assert sim.node("a").info()["status"] == "running"
    assert sim.now - before < 5


@simulated()
async def test_orphan_recovers_when_its_quorum_is_lowered(sim: Simulation) -> None:
    """E4: the orphan leaves the mode without a restart."""
    await sim.start("a", dialect="2.6", replication_connect_timeout=1)
    await make_space(sim, "a")
    await reconfigure(sim, "a", replication=list(NOWHERE))
    assert sim.node("a").info()["status"] == "orphan"
    await reconfigure(sim, "a", replication_connect_quorum=0)
    assert sim.node("a").info()["status"] == "running"
    await insert(sim, "a", 1)


def log_size(sim: Simulation, name: str) -> int:
    return sum(len(sim.storage(name).names[path].data) for path in files(sim, name, ".xlog"))


@pytest.mark.parametrize("dialect", ["2.6", "2.11"])
@simulated(seeds=range(3))
async def test_member_that_lost_the_end_of_its_log_recovers_its_own_rows(sim: Simulation, dialect: str) -> None:
    """E6: the member requests its own rows, is read-only until it has them, and continues after them."""
    options: dict[str, Any] = {"dialect": dialect, "replication_connect_timeout": 5}
    await start_set(sim, "ab", **options)
    await make_space(sim, "b")
    await sim.until(lambda: all_follow_all(sim, "ab"))
    for key in range(20):
        await insert(sim, "b", key)
    await converge(sim, "ab")
    position, size = vclock(sim, "b"), log_size(sim, "b")
    sim.crash("b", Loss.UNSYNCED)
    assert log_size(sim, "b") < size
    await sim.restart("b")
    await sim.until(lambda: not sim.node("b").info()["ro"])
    assert vclock(sim, "b") == position, "the member accepts writes before it has its rows"
    assert len(held(sim, "b")) == 20
    await insert(sim, "b", 100)
    await sim.until(lambda: 100 in held(sim, "a"))
    await converge(sim, "ab")


def test_unreachable_addresses_do_not_exist_in_a_simulation() -> None:
    """The addresses above do not exist in a simulation."""
    assert not set(NOWHERE) & set(uris(Simulation(0), "a", "b"))
