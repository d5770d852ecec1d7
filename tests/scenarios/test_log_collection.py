"""Logs are kept as long as they are needed, and no longer."""

from __future__ import annotations

from itertools import count
from typing import Any

from flowstone.iproto.msgpack import unpack
from tests.interop import ledger
from tests.interop.cluster import Cluster
from tests.interop.compare import assert_converged
from tests.interop.member import Member, RealMember, by_id, eventually
from tests.interop.versions import fits
from tests.scenarios.simulated_members import files, held, insert, make_space, snapshot, uris
from tests.simulation.cluster import converge, downstream, vclock
from tests.simulation.simulation import Simulation, simulated


def consumers(master: RealMember) -> dict[str, dict[int, int]]:
    """Return the position of each replica in `_gc_consumers`."""
    rows = master.eval("return box.space._gc_consumers:select()") or ()
    return {row[0]: by_id(row[1]) for row in rows}


@fits(">=3.3")
def test_real_master_stores_the_position_of_a_node_across_a_restart(cluster: Cluster) -> None:
    """G5: the row of a node follows its acknowledgements, survives the master, and keeps logs while the node
    is down.
    """
    master = cluster.real("master", checkpoint_count=1, wal_cleanup_delay=0)
    ledger.define(master)
    ours = cluster.ours("ours", replication=[master.uri], read_only=True)
    ours.wait_follow(master)
    uuid = ours.uuid
    reached = ours.vclock()[1]
    numbers = count(1)

    def is_acknowledged() -> bool:
        # It is persisted when a whole log has been read and acknowledged.
        master.call("interop.transaction", ledger.transaction(next(numbers)))
        master.snapshot()
        return consumers(master)[uuid].get(1, 0) > reached

    eventually("the row of the node follows it", is_acknowledged)
    ours.stop()
    _write_and_checkpoint(master, 1000)
    before = consumers(master)[uuid]
    master.restart()
    assert consumers(master)[uuid] == before
    for number in (2000, 3000):
        _write_and_checkpoint(master, number)
    ours.start()
    ours.wait_follow(master)
    assert_converged(master, ours)
    assert "rebootstrap" not in ours.log()
    names = [unpack(raw)[2] for raw in ours.tuples(280)]
    assert "_gc_consumers" in names, "the node knows the space, whose rows are the master's own"


@fits(">=3.3")
def test_real_master_forgets_a_node_whose_row_is_deleted(cluster: Cluster) -> None:
    """G5: with the row in `_cluster`, the one in `_gc_consumers` is deleted; the node is told and does not return."""
    master = cluster.real("master")
    ledger.define(master)
    ours = cluster.ours("ours", replication=[master.uri], read_only=True)
    ours.wait_follow(master)
    assert ours.uuid in consumers(master)
    uuid = ours.uuid
    ours.stop()
    master.client.delete(320, 2)
    assert uuid not in consumers(master)


def _write_and_checkpoint(master: Member, first: int) -> None:
    for number in range(first, first + 5):
        master.call("interop.transaction", ledger.transaction(number))
    master.snapshot()


@simulated(seeds=range(2))
async def test_restarted_node_of_dialect_2_11_keeps_its_logs_for_members_that_have_not_returned(
    sim: Simulation,
) -> None:
    """G5: the node does not persist consumers; after a start it deletes no log until all members have returned, or for
    hours.
    """
    options: dict[str, Any] = {"checkpoint_count": 1, "wal_max_size": 2000}
    await sim.start("a", **options)
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    await converge(sim, "ab")
    sim.kill("b")
    await sim.restart("a")
    oldest = files(sim, "a", ".xlog")[0]
    for key in range(60):
        await insert(sim, "a", key)
        if key % 20 == 0:
            await snapshot(sim, "a")
    await sim.sleep(600)
    assert files(sim, "a", ".xlog")[0] == oldest
    await sim.restart("b")
    await converge(sim, "ab")
    assert not [line for line in sim.trace.lines if "rebootstrap" in line]
    await sim.until(lambda: downstream(sim, "a", "b")["vclock"] == vclock(sim, "a"))
    await snapshot(sim, "a")
    await sim.until(lambda: files(sim, "a", ".xlog")[0] > oldest)


@simulated(seeds=range(2))
async def test_local_rows_and_checkpoints_of_a_master_make_no_gap(sim: Simulation) -> None:
    """G6: file names contain all components, and a replica knows all but component 0."""
    await sim.start("a", wal_max_size=1000)
    await make_space(sim, "a")
    await make_space(sim, "a", "own", is_local=True)
    await sim.start("b", replication=uris(sim, "a"))
    await converge(sim, "ab")
    await sim.stop("b")
    for key in range(30):
        await insert(sim, "a", key, space="own")
        if key % 7 == 0:
            await insert(sim, "a", key)
            await snapshot(sim, "a")
    await sim.restart("a")
    await sim.restart("b")
    await converge(sim, "ab")
    assert sorted(held(sim, "b")) == [0, 7, 14, 21, 28]
    assert not [line for line in sim.trace.lines if "Missing .xlog" in line or "rebootstrap" in line]
