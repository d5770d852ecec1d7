"""The faults of a run, and the nemesis that injects several at a time.

A fault is a coroutine that injects the fault, waits, repairs it, and returns whether it took effect: that is measured
by its effect, not by the attempt. No fault voids the promises: no quorum below the majority, no promotion next to a
live master without elections, no damage to or removal of more members than a set can spare, no power loss if the log is
not synced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from tests.simulation import disk_faults, membership_faults, network_faults, process_faults
from tests.simulation.replica_set import ReplicaSet

Fault = Callable[[ReplicaSet, Random], Coroutine[Any, Any, bool]]

FAULTS: Final[dict[str, Fault]] = {
    fault.__name__: fault
    for fault in (
        process_faults.kill,
        process_faults.stop,
        process_faults.power_loss,
        process_faults.power_loss_of_all,
        process_faults.power_loss_in_election,
        process_faults.power_loss_at_confirm,
        process_faults.crash_in_disk_operation,
        process_faults.power_loss_in_recovery,
        process_faults.overtake,
        process_faults.pause,
        process_faults.clock_jump,
        network_faults.cut,
        network_faults.black_hole,
        network_faults.one_way,
        network_faults.partition,
        network_faults.bridge,
        network_faults.depose,
        network_faults.flapping,
        network_faults.packet_loss,
        network_faults.duplication,
        network_faults.delay,
        network_faults.clog,
        disk_faults.slow_disk,
        disk_faults.full_disk,
        disk_faults.full_for_long,
        disk_faults.failing_write,
        disk_faults.failing_sync,
        disk_faults.read_errors,
        disk_faults.bit_rot,
        membership_faults.quorum,
        membership_faults.promote,
        membership_faults.join,
        membership_faults.expel,
        membership_faults.checkpoint,
        membership_faults.schema,
    )
}

EXCLUSIVE: Final = ("bit_rot", "quorum", "join", "expel")
"""Faults that change the members or the quorum: one at a time."""

PACE_SECONDS: Final = (2.0, 5.5)
"""Seconds between the starts of two faults."""

OVERLAP_MAX: Final = 3

RECOVERY_SECONDS_MAX: Final = 10


class Nemesis:
    """Injects faults until it is stopped. `counts` has the faults that took effect, by kind."""

    def __init__(self, replica_set: ReplicaSet, rng: Random, kinds: tuple[str, ...]) -> None:
        self._replica_set = replica_set
        self._random = rng
        self._kinds = kinds
        self._under_way: dict[asyncio.Task[None], str] = {}
        self.counts: dict[str, int] = dict.fromkeys(kinds, 0)

    async def run(self, until: Callable[[], bool]) -> None:
        """Run until the last fault is repaired and all nodes are in sync. An exception of a fault is raised here."""
        try:
            while not until():
                self._begin()
                await self._replica_set.sim.sleep(self._random.uniform(*PACE_SECONDS))
                await self._let_recover()
                self._end()
            await asyncio.gather(*self._under_way)
            for name in (*self._replica_set.names, *self._replica_set.departed):
                await membership_faults.resume_replication(self._replica_set, name)
        finally:
            for task in self._under_way:
                task.cancel()

    async def _let_recover(self) -> None:
        """Wait: a set that never recovers would make further faults pointless."""
        for _ in range(RECOVERY_SECONDS_MAX):
            if self._replica_set.leader() is not None:
                return
            await self._replica_set.sim.sleep(1.0)

    def _begin(self) -> None:
        possible = self._possible()
        if possible and len(self._under_way) < OVERLAP_MAX:
            kind = self._random.choice(possible)
            rng = Random(self._random.getrandbits(64))
            self._under_way[asyncio.ensure_future(self._inject(kind, rng))] = kind

    def _possible(self) -> list[str]:
        is_changing = any(kind in EXCLUSIVE for kind in self._under_way.values())
        return [kind for kind in self._kinds if not is_changing or kind not in EXCLUSIVE]

    def _end(self) -> None:
        for task in [task for task in self._under_way if task.done()]:
            del self._under_way[task]
            task.result()

    async def _inject(self, kind: str, rng: Random) -> None:
        trace = self._replica_set.sim.trace
        trace.note("nemesis", kind)
        had_effect = await FAULTS[kind](self._replica_set, rng)
        trace.note("nemesis", f"{kind} is over{'' if had_effect else ', without effect'}")
        self.counts[kind] += had_effect
