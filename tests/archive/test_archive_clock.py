"""Interval snapshots continue when the wall clock of the archive's machine jumps."""

from __future__ import annotations

import pytest

from flowstone.archive import events as events
from flowstone.archive.archive import Archive
from flowstone.outside import Outside
from tests.simulation.followers import ArchiveProcess
from tests.simulation.simulation import Simulation, simulated

INTERVAL = 10.0


class OnDone:
    """Count the snapshots of an archive."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.count = 0

    async def start(self, outside: Outside) -> ArchiveProcess:
        uri = self._sim.uri("a")
        archive = Archive(uri, "/archive", snapshot_interval=INTERVAL, on_event=self._hear, outside=outside)
        return ArchiveProcess(archive)

    def _hear(self, event: events.ArchiveEvent) -> None:
        self.count += isinstance(event, events.Snapshotted)


@pytest.mark.parametrize("has_restarted", [False, True])
@pytest.mark.parametrize("jump", [1e6, 7.0, -7.0, -1e6])
@simulated()
async def test_clock_jump_and_return_does_not_stop_snapshots(sim: Simulation, jump: float, has_restarted: bool) -> None:
    await sim.start("a")
    sim.build("archive")
    told = OnDone(sim)
    await sim.launch("archive", told.start)
    await sim.sleep(3 * INTERVAL)
    sim.machine("archive").wall_skew += jump
    await sim.sleep(2 * INTERVAL)
    sim.machine("archive").wall_skew -= jump
    if has_restarted:
        await sim.stop("archive")
        await sim.launch("archive", told.start)
    told.count = 0
    await sim.sleep(10 * INTERVAL)
    assert told.count == pytest.approx(10, abs=2)
    await sim.stop("archive")
