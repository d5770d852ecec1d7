"""Rows that a replica cannot apply because of duplicate keys, with and without `replication_skip_conflict`."""

from __future__ import annotations

import pytest

from flowstone.iproto.constants import RequestType
from tests.scenarios.simulated_members import held, insert, make_space, reconfigure, rows_of, uris
from tests.simulation.cluster import follows, upstream, vclock
from tests.simulation.simulation import Simulation, simulated

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
FOUND = "Duplicate key exists in unique index"


async def conflict(sim: Simulation, dialect: str, *keys: int) -> int:
    """Write key 1 on both, then `keys` on the master in one transaction; return the master's earlier position."""
    await sim.start("a", dialect=dialect)
    await make_space(sim, "a")
    await sim.start("b", replication=uris(sim, "a"))
    await sim.until(lambda: follows(sim, "b", "a"))
    await insert(sim, "b", 1)
    before = vclock(sim, "a")[1]
    await insert(sim, "a", *keys)
    await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    return before


@DIALECTS
@simulated()
async def test_duplicate_key_stops_a_replica_permanently(sim: Simulation, dialect: str) -> None:
    """F1: its vclock does not change, a restart does not help, no further rows of the master are applied, and
    the reason is shown.
    """
    before = await conflict(sim, dialect, 1)
    await insert(sim, "a", 2)
    for _ in range(2):
        assert FOUND in upstream(sim, "b", "a")["message"]
        assert vclock(sim, "b")[1] == before
        assert held(sim, "b") == {1: "b"}
        await sim.restart("b", replication_sync_timeout=1)
        await sim.until(lambda: upstream(sim, "b", "a").get("status") == "stopped")
    stopped = [line for line in sim.trace.lines if "is stopped" in line and FOUND in line]
    assert len(stopped) == 3, "once per attempt"


@DIALECTS
@simulated()
async def test_skipped_conflict_is_a_nop_in_the_log(sim: Simulation, dialect: str) -> None:
    """F1: the NOP has the master's LSN, so that the vclock advances; the replica's own row is kept, also after a
    restart.
    """
    before = await conflict(sim, dialect, 1)
    await insert(sim, "a", 2)
    await reconfigure(sim, "b", replication_skip_conflict=True)
    await reconfigure(sim, "b", replication=uris(sim, "a"))
    await sim.until(lambda: vclock(sim, "b")[1] == vclock(sim, "a")[1])
    assert held(sim, "b") == {1: "b", 2: "a"}
    logged = [(row.lsn, RequestType(row.type).name) for row in rows_of(sim, "b", 1, before)]
    assert logged == [(before + 1, "NOP"), (before + 2, "INSERT")]
    await sim.restart("b", replication_skip_conflict=False)
    await sim.until(lambda: follows(sim, "b", "a"))
    assert held(sim, "b") == {1: "b", 2: "a"}


@DIALECTS
@simulated()
async def test_only_the_conflicting_rows_of_a_transaction_are_skipped(sim: Simulation, dialect: str) -> None:
    """F2: the other rows are applied, in one transaction with the same LSNs; followers of the replica receive the same
    rows.
    """
    before = await conflict(sim, dialect, 5, 1, 6)
    await sim.start("c", replication=uris(sim, "a", "b", "c"), replication_anon=True, read_only=True)
    assert held(sim, "b") == {1: "b"}
    await reconfigure(sim, "b", replication_skip_conflict=True)
    await reconfigure(sim, "b", replication=uris(sim, "a"))
    await sim.until(lambda: vclock(sim, "b")[1] == vclock(sim, "a")[1])
    assert held(sim, "b") == {1: "b", 5: "a", 6: "a"}
    rows = rows_of(sim, "b", 1, before)
    assert [RequestType(row.type).name for row in rows[:3]] == ["INSERT", "NOP", "INSERT"]
    assert {row.tsn for row in rows[:3]} == {before + 1}
    assert [row.is_commit for row in rows[:3]] == [False, False, True]
    await sim.start("d", replication=uris(sim, "b"), replication_anon=True, read_only=True)
    assert held(sim, "d") == held(sim, "b")
