"""One timer for a moving deadline: it fires at the deadline, and rarely before."""

from __future__ import annotations

from flowstone.node.alarm import Alarm
from tests.simulation.simulation import Simulation, simulated


@simulated(seeds=range(1))
async def test_alarm_fires_at_the_first_deadline_and_can_be_reset(sim: Simulation) -> None:
    clock = sim.outside.clock
    rings: list[float] = []
    began = clock.monotonic()
    alarm = Alarm(clock, lambda: rings.append(clock.monotonic() - began))
    alarm.set(None)
    alarm.set(began + 5)
    alarm.set(began + 9)  # moved back: the alarm fires early, and its owner checks again
    await clock.sleep(6)
    assert [round(ring) for ring in rings] == [5]
    alarm.set(began + 9)
    alarm.set(began + 7)
    await clock.sleep(5)
    assert [round(ring) for ring in rings] == [5, 7]
    alarm.set(began + 20)
    alarm.cancel()
    await clock.sleep(20)
    assert len(rings) == 2
