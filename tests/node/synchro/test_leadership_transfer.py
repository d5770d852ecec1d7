"""A leader that is stopped lets another member lead first; in virtual time, with processes in tests/interop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from flowstone.errors import FlowstoneError
from tests.simulation.cluster import NAMES, all_follow_all, converge, start_set
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_elections import DEATH, elect, election, make_space, rows, running, write

FIVE = ("a", "b", "c", "d", "e")


class Load:
    """Writes increasing keys to whichever member accepts them, and measures the longest time without a write."""

    def __init__(self, sim: Simulation, names: Sequence[str]) -> None:
        self._sim = sim
        self._names = names
        self.written: list[int] = []
        self.times: list[float] = [sim.now]
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            for name in self._names:
                if not (self._sim.is_running(name) and self._sim.is_ready(name)):
                    continue
                key = len(self.times)
                try:
                    await asyncio.wait_for(write(self._sim, name, key), 1)
                except (FlowstoneError, TimeoutError):
                    continue
                self.written.append(key)
                self.times.append(self._sim.now)
            await self._sim.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def gap(self) -> float:
        return max(after - before for before, after in pairwise(self.times))


@pytest.mark.parametrize(
    ("names", "is_sync"),
    [
        (NAMES, True),
        (NAMES, False),
        pytest.param(FIVE, True, marks=pytest.mark.full_scale(reason="takes seconds of processor time")),
    ],
)
@simulated(seeds=range(5))
async def test_rolling_restart_has_no_gap_and_loses_nothing(
    sim: Simulation, names: Sequence[str], is_sync: bool
) -> None:
    await start_set(sim, names, election_mode="candidate")
    await make_space(sim, await elect(sim, names), is_sync=is_sync)
    await sim.until(lambda: all_follow_all(sim, names))
    load = Load(sim, names)
    for _ in names:
        await sim.sleep(0.1)
        leader = await elect(sim, names)  # every stop is that of a leader
        await sim.stop(leader)
        await sim.restart(leader)
        await sim.until(lambda: all_follow_all(sim, names))
    await load.stop()
    await converge(sim, names)
    found = {key for (key,) in await rows(sim, await elect(sim, names))}
    assert set(load.written) <= found
    # Of five candidates that stand at once, several may divide the votes; then they stand again.
    assert load.gap() < (0.1 if names == NAMES else 5)


@simulated(seeds=range(3))
async def test_pending_transaction_of_a_stopping_leader_is_decided_first(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    await make_space(sim, leader)
    await sim.until(lambda: all_follow_all(sim))
    pending = [asyncio.ensure_future(write(sim, leader, key)) for key in range(10)]
    await asyncio.sleep(0)
    await sim.stop(leader)
    await asyncio.gather(*pending)  # none is unknown, none is rolled back
    assert sorted(key for (key,) in await rows(sim, await elect(sim))) == list(range(10))


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"election_mode": "manual"}, 0.1), ({"election_mode": "candidate", "election_transfer_timeout": 0}, 0.1)],
)
@simulated(seeds=range(2))
async def test_stop_transfers_nothing_when_an_operator_decides(
    sim: Simulation, options: dict[str, Any], seconds: float
) -> None:
    await start_set(sim, **options)
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    before, term = sim.now, election(sim, leader)["term"]
    await sim.stop(leader)
    assert sim.now - before < seconds
    await sim.sleep(1)
    assert {election(sim, name)["term"] for name in running(sim, NAMES)} == {term}


@simulated(seeds=range(2))
async def test_stop_does_not_wait_for_members_that_cannot_elect_a_leader(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    await sim.until(lambda: all_follow_all(sim))
    first, second = (name for name in NAMES if name != leader)
    await sim.stop(first)
    before = sim.now
    await sim.stop(leader)
    assert sim.now - before < 0.1
    await sim.stop(second)


@simulated(seeds=range(2))
async def test_leader_stops_in_time_when_its_members_have_hung(sim: Simulation) -> None:
    await start_set(sim, election_mode="candidate")
    leader = await elect(sim)
    await make_space(sim, leader, is_sync=False)
    await sim.until(lambda: all_follow_all(sim))
    others = [name for name in NAMES if name != leader]
    for name in others:
        sim.freeze(name)
    await write(sim, leader, 1)
    before = sim.now
    await sim.stop(leader)
    assert 2 <= sim.now - before < 2.2
    for name in others:
        sim.thaw(name)
    assert await elect(sim, others, seconds=2 * DEATH) in others
